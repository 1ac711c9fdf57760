"""The table of faults by layer in specresearch/lossless/README.md says what the tests plant and see."""

from pathlib import Path

import test_forward
from mutants import MUTANTS
from test_whitebox import FAULTS

README = Path(__file__).parents[1] / "specresearch" / "lossless" / "README.md"
# Fault: its name among the mutants of l0, among the faults of l2 and l3, its test of l4.
TESTS = {
    "accept if u < sqrt(p/q)": ("square root of the ratio", "sqrt", None),
    "resample from p instead of the residual": ("resample from p", "resample", None),
    "argmax drafts with the softmax's q": ("argmax drafts with softmax q", "argmax drafts", None),
    "drafts cooler than the q that is claimed": ("temperature on q alone", "cool drafts", None),
    "bonus token from raw logits": ("bonus unwarped", "raw bonus", None),
    "sampled siblings re-ranked": ("siblings sorted by q", "re-ranked", None),
    "another temperature on p": ("temperature on p alone", "wrong p", None),
    "the coin is the uniform that drew the draft": (None, "shared chance", None),
    "one coin for all siblings": ("one coin for all siblings", None, None),
    "children drawn without replacement, judged iid": ("without replacement, judged iid", None, None),
    "duplicate siblings counted twice": ("duplicates counted twice", None, None),
    "unlikely drafts dropped after the draw": ("unlikely draft dropped", None, None),
    "accept if sample or ratio": ("sample or ratio", None, None),
    "block: residual of one token": ("block: residual of one token", None, None),
    "traversal: wrong ratio": ("traversal: wrong ratio", None, None),
    "K-SEQ: rho below the solution": ("K-SEQ: rho below the solution", None, None),
    "positions off by one": (None, None, "test_positions_off_by_one"),
    "a stale cache entry": (None, None, "test_a_stale_cache_entry"),
    "a mask that leaks a sibling": (None, None, "test_a_mask_that_leaks_a_sibling"),
    "rows that take each other's length": (None, None, "test_rows_of_one_batch_that_see_each_others_length"),
}


def rows() -> dict[str, list[str]]:
    text = README.read_text(encoding="utf-8").split("| fault |")[1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:] if "|" in line]
    return {fault: rest for fault, *rest in cells}


def test_every_row_is_what_a_test_shows():
    table = rows()
    assert table.keys() == TESTS.keys()
    for fault, (mutant, planted, forward) in TESTS.items():
        l0, l2, l3, l4 = table[fault]
        assert (l0 == "caught") == (mutant in MUTANTS), fault
        assert (l4 == "caught") == (forward is not None and hasattr(test_forward, forward)), fault
        if planted:
            _, _, claim, black = FAULTS[planted]
            assert l2 == (claim or "blind"), fault
            assert l3 == ("caught" if black else "weak"), fault
        else:
            assert l2 in ("-", "blind") and l3 == "-", fault


def test_no_fault_of_a_run_is_left_out():
    assert {planted for _, planted, _ in TESTS.values() if planted} == FAULTS.keys()
