"""The list of options, and the matrix of what is lossless with what."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from specresearch import options
from specresearch.lossless.exact import shapes_for
from specresearch.overrides import CONF


@pytest.fixture(scope="module")
def printed() -> str:
    out = io.StringIO()
    assert options.main(Console(file=out, width=200)) == 0
    return out.getvalue()


def test_every_option_is_listed_with_a_description(printed):
    for group in options.GROUPS:
        for path in Path(CONF).glob(f"{group}/*.yaml"):
            (line,) = (line for line in printed.splitlines() if line.startswith(f"{group}={path.stem} "))
            assert len(line.split()) > 4, line
    assert all(len(line) <= 200 for line in printed.splitlines() if "=" in line.split(" ")[0])


def cells(printed: str) -> dict[tuple[str, str], dict[str, str]]:
    lines = printed[printed.index("lossless with") :].splitlines()[1:]
    names = lines[0].split()
    rows = [dict(zip(names, line.split())) for line in lines[1:] if len(line.split()) == len(names)]
    return {(row["tree"], row["draw"]): row for row in rows}


def test_the_matrix(printed):
    found = cells(printed)
    assert len(found) == 18
    row = found["static", "iid"]
    assert (row["rejection"], row["spectr"], row["traversal"], row["block"]) == ("yes", "yes", "-", "-")
    row = found["chain", "iid"]
    assert all(row[name] == "yes" for name in ("rejection", "block", "traversal", "spectr", "sample_and_match"))
    row = found["best_first", "iid"]
    assert (row["spectr"], row["rejection"], row["growth"]) == ("-", "yes", "predictable")
    row = found["dynamic", "without_replacement"]
    assert (row["law"], row["traversal"], row["target_only"], row["typical"]) == ("point", "-", "yes", "lossy")
    assert {row["greedy"] for row in found.values()} == {"T=0"}


def test_what_the_matrix_calls_lossless_is_what_is_proved():
    """For each law and growth with a "yes" there is a shape that the exact certificate enumerates."""
    for name, verifier in options.verifiers().items():
        proved = {(policy.law, policy.growth) for policy in shapes_for(verifier).values()}
        for tree, draw, policy in options.trees():
            if options.standing(verifier, policy) == "yes":
                assert (policy.law, policy.growth) in proved, (name, tree, draw)
