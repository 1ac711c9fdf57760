"""What a replay prints: one tree in detail, or a table of several, how well each is known, and the best one's command."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from specresearch import console
from specresearch.types import UserError
from specresearch.whatif.answer import BOUNDED, ESTIMATE, EXACT, EXPECTED, Answer, Recording
from specresearch.whatif.candidates import Tree, as_text, command
from specresearch.whatif.price import Prices

SHOWN = 12  # rows of a search
Found = Sequence[tuple[Tree, Answer]]
MEANING = {
    EXACT: "exact: the trace holds what every step needs; true up to rounding of the drafter's numbers",
    BOUNDED: "bounded: some trees ask what the run did not; those steps go on as the known ones do, or as the bounds say",
    ESTIMATE: "estimate: an ordinary trace tells of the places where its steps began; trace.dense=true makes it exact",
    EXPECTED: "expected: the text was sampled; a run's mean scatters about this number",
}


def show(own: Recording, found: Found, prices: Prices | None, objective: str, ranked: bool) -> None:
    """`ranked`: a search, whose best are shown; else all, in the order in which they were asked for."""
    summary = own.run.summary
    console.out.print(
        f"[bold]{own.run.folder}[/]  {'dense trace' if own.dense else 'ordinary trace'}, {len(own.lines)} answers"
    )
    measured = f"{console.number(summary['mean_accepted_length'])} tokens per target pass"
    speed = f"{console.number(summary['tokens_per_second'], 1)} tokens/s, {console.number(summary['speedup'], 2, 'x')}"
    console.out.print(
        f"measured there   {measured}, {speed}   {as_text(own.run.summary['config']['tree'])}\n", markup=False
    )
    shown = sorted(found, key=lambda one: -rounded(getattr(one[1], objective)))[:SHOWN] if ranked else found
    if len(shown) == 1:
        details(*shown[0])
    else:
        console.wide().print(table(shown))
    console.out.print(caption([answer for _, answer in found], prices, summary["config"]["batch_size"]), markup=False)
    if len(shown) > 1:
        change, _ = best_of(found, objective)
        console.out.print(f"\nbest of {len(found)} by {objective}, in a run of its own:", markup=False)
        console.out.print(f"  {command(own, change)}", markup=False)


def details(change: Tree, answer: Answer) -> None:
    length = f"{console.number(answer.mean_accepted_length, 3)} tokens per target pass   {how_well(answer)}"
    histogram = console.bars({k: n for k, n in answer.histogram.items() if n > 0})
    kinds = "   ".join(f"{kind} {console.number(own)}" for kind, own in answer.by_kind.items())
    speed = f"{console.number(answer.tokens_per_second, 1)} tokens/s   speedup {console.number(answer.speedup, 2, 'x')}"
    rows = {"tree": as_text(change) or "the run's own", "accepted length": length, "its histogram": histogram}
    grid = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in (rows | {"by kind": kinds, "predicted speed": speed}).items():
        grid.add_row(Text(label, style="bold"), Text(value))
    console.out.print(grid)


def table(found: Found) -> Table:
    keys = list(dict.fromkeys(key for change, _ in found for key in change))
    out = Table(box=None, padding=(0, 2, 0, 0))
    for heading in (*keys, "accepted length", "tokens/s", "speedup", "known"):
        out.add_column(heading, justify="left" if heading == "known" else "right")
    for change, answer in found:
        numbers = (console.number(answer.mean_accepted_length, 3), console.number(answer.tokens_per_second, 1))
        cells = [str(change.get(key, "")) for key in keys]
        out.add_row(*cells, *numbers, console.number(answer.speedup, 2, "x"), how_well(answer))
    return out


def how_well(answer: Answer) -> str:
    if answer.kind in (EXACT, EXPECTED):
        return answer.kind
    bounds = f"between {console.number(answer.lowest)} and {console.number(answer.highest)}"
    return f"{answer.kind}: {answer.unknown or 0:.0%} of the steps unknown, {bounds}"


def caption(found: Sequence[Answer], prices: Prices | None, batch: int) -> str:
    lines = [MEANING[kind] for kind in MEANING if kind in {answer.kind for answer in found}]
    if ties := max(answer.ties for answer in found):
        lines.append(f"at {ties} places the drafter ranked two tokens equal; a run may order them otherwise")
    lines.append(
        f"costs: {prices.source}; drafting in proportion to tree.depth" if prices else "costs: none were measured"
    )
    if prices and batch > 1:
        lines.append(
            f"batch_size={batch}: rows that share passes end at different times, so speeds are rougher than for one row"
        )
    return "\n".join(lines)


def best_of(found: Found, objective: str) -> tuple[Tree, Answer]:
    if all(getattr(answer, objective) is None for _, answer in found):
        raise UserError(f"the run has no clock to tell {objective} by: use objective=mean_accepted_length")
    return max(found, key=lambda one: rounded(getattr(one[1], objective)))


def rounded(value: float | None) -> float:
    """So that of equal trees the first counts, which is the smallest."""
    return float(f"{value or 0.0:.9g}")
