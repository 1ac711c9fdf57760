"""A comparison in the forms in which it is read: on the console, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from specresearch.comparison.bootstrap import FEWEST, Estimate
from specresearch.comparison.rows import Comparison, Row
from specresearch.console import VERDICT_STYLE, number

SIGN = "*"
GAP = 2  # between columns on the console


@dataclass(frozen=True)
class Sheet:
    """A table with its explanations."""

    header: list[str]
    rows: list[list[str]]
    words: int  # so many columns, the first ones, hold words; the others numbers
    notes: list[str]

    @property
    def width(self) -> int:
        """Characters of its widest line on the console."""
        return sum(max(map(len, column)) + GAP for column in zip(self.header, *self.rows))


def sheets(found: Comparison) -> list[Sheet]:
    """The runs by themselves; and, where there are several, against the reference."""
    return [_alone(found)] + ([_paired(found)] if len(found.rows) > 1 else [])


def _alone(found: Comparison) -> Sheet:
    own = any(row.predicted for row in found.rows)
    header = ["run", *found.keys, "verdict", "answers", "accepted length", "tokens/s", "speedup"]
    rows = []
    for i, row in enumerate(found.rows, 1):
        numbers = [str(row.answers), interval(row.length), number(row.tokens_per_second, 1), interval(row.speedup)]
        rows.append([str(i), *row.labels, verdict(row), *numbers, *([number(row.predicted)] if own else [])])
    notes = [*_spread(found), _speedups(own)] if any(row.speedup.value for row in found.rows) else _spread(found)
    if found.questions >= FEWEST and any(row.speedup.value and row.speedup.low is None for row in found.rows):
        notes.append(f"No interval where fewer than {FEWEST} blocks of questions were timed in both modes.")
    if any(row.run.summary["config"]["temperature"] > 0 for row in found.rows):
        notes.append("Answers were sampled: the runs answered the same questions with other texts.")
    if any(row.verdict == "lossy" for row in found.rows):
        notes.append("LOSSY: the output does not follow the target's law, by up to the TV that is given.")
    if any(row.verdict == "simulated" for row in found.rows):
        notes.append("SIMULATED: accepted lengths were dictated, they say nothing about a drafter.")
    return Sheet(header + (["predicted"] if own else []), rows, len(found.keys) + 2, notes)


def _spread(found: Comparison) -> list[str]:
    if found.questions < FEWEST:
        return [f"No intervals: {found.questions} questions are too few ({FEWEST} are needed)."]
    boot = found.boot
    return [
        f"In brackets: {100 * boot.confidence:.4g}% confidence intervals, from {boot.count} bootstrap resamplings of the "
        f"{found.questions} questions."
    ]


def _speedups(predicted: bool) -> str:
    return (
        "Speedup: over each run's own plain decoding, which took turns with it, since jobs at other times meet other load; "
        "its intervals resample blocks of questions decoded together."
    ) + (" Predicted: from the counted steps and measured costs." if predicted else "")


def _paired(found: Comparison) -> Sheet:
    header = ["run", *found.keys, "accepted length, ratio", "speedup, ratio"]
    rows = []
    for i, row in enumerate(found.rows):
        ratios = [_marked(found, row.length_ratio), _marked(found, row.speed_ratio) + (" raw" if row.raw else "")]
        rows.append([str(i + 1), *row.labels, *(["reference", ""] if i == found.reference else ratios)])
    notes = [f"Ratios to run {found.reference + 1}, both runs resampled together."]
    if found.tests:
        notes.append(
            f"{SIGN} a ratio other than 1: p < {1 - found.boot.confidence:.2g} after Holm's correction for {found.tests} "
            "comparisons."
        )
    if any(row.raw for row in found.rows):
        notes.append(
            "raw: of tokens/s, since a run has no plain decoding to be measured by; the machine's load is part of it, so no "
            "interval is given."
        )
    return Sheet(header, rows, len(found.keys) + 1, notes)


def _marked(found: Comparison, ratio: Estimate) -> str:
    return interval(ratio) + (SIGN if found.significant(ratio) else "")


def interval(x: Estimate) -> str:
    return number(x.value) + (f" [{number(x.low)}, {number(x.high)}]" if x.low is not None else "")


def verdict(row: Row) -> str:
    bound = f" (TV ≤ {row.tv_bound:g})" if row.tv_bound is not None else ""
    return row.verdict.upper() + bound if row.verdict in ("lossy", "violation", "simulated") else row.verdict


def on_console(sheet: Sheet, without: int = 0) -> Table:
    """`without`: so many columns behind the first are left out."""
    table = Table(box=None, padding=(0, GAP, 0, 0))
    kept = [i for i in range(len(sheet.header)) if not 1 <= i <= without]
    for i in kept:
        table.add_column(Text(sheet.header[i]), justify="left" if i < sheet.words else "right")
    for row in sheet.rows:
        table.add_row(*(Text(row[i], style=VERDICT_STYLE.get(row[i].lower(), "")) for i in kept))
    return table


# -- exports ---------------------------------------------------------------------------------------------------------------


def as_csv(found: Comparison) -> str:
    """One line a run, one number a cell; an empty cell = not known. The p-values are corrected."""
    out = io.StringIO()
    records = [_record(found, i) for i in range(len(found.rows))]
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _record(found: Comparison, i: int) -> dict[str, object]:
    row = found.rows[i]
    record: dict[str, object] = {"run": i + 1, "folder": row.run.folder, "reference": i == found.reference}
    record |= {key: value for key, value in zip(found.keys, row.labels) if key != "folder"}
    record |= {"verdict": row.verdict, "tv_bound": row.tv_bound, "questions": found.questions, "answers": row.answers}
    record |= _spelled("accepted_length", row.length) | {"tokens_per_second": row.tokens_per_second}
    record |= _spelled("speedup", row.speedup) | {"predicted_speedup": row.predicted}
    record |= _spelled("accepted_length_ratio", row.length_ratio, True)
    return record | _spelled("speed_ratio", row.speed_ratio, True) | {"speed_ratio_is_raw": row.raw}


def _spelled(name: str, x: Estimate, p: bool = False) -> dict[str, float | None]:
    cells = {name if key == "value" else f"{name}_{key}": value for key, value in asdict(x).items()}
    return cells if p else {key: value for key, value in cells.items() if not key.endswith("_p")}


MARKDOWN = str.maketrans({sign: "\\" + sign for sign in "\\|*`<_"})
LATEX = str.maketrans(
    {sign: "\\" + sign for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": "$<$", ">": "$>$", "|": "$|$", "≤": r"$\le$", '"': "''"}
)


def as_markdown(found: Comparison) -> str:
    return "\n\n".join(_markdown(sheet) for sheet in sheets(found)) + "\n"


def _markdown(sheet: Sheet) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.translate(MARKDOWN) for cell in cells) + " |"

    rule = "|" + "".join("---|" if i < sheet.words else "---:|" for i in range(len(sheet.header)))
    notes = " ".join(sheet.notes).translate(MARKDOWN)
    return "\n".join([line(sheet.header), rule, *map(line, sheet.rows), "", notes])


def as_latex(found: Comparison) -> str:
    r"""Needs \usepackage{booktabs} alone; the explanations are the caption."""
    return "\n".join(["% \\usepackage{booktabs}", *(_latex(sheet) for sheet in sheets(found))])


def _latex(sheet: Sheet) -> str:
    def line(cells: list[str]) -> str:
        return "    " + " & ".join(cell.translate(LATEX) for cell in cells) + r" \\"

    columns = "l" * sheet.words + "r" * (len(sheet.header) - sheet.words)
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{' '.join(sheet.notes).translate(LATEX)}}}",
            f"  \\begin{{tabular}}{{{columns}}}",
            r"    \toprule",
            line(sheet.header),
            r"    \midrule",
            *map(line, sheet.rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


EXPORTS: Mapping[str, Callable[[Comparison], str]] = {"csv": as_csv, "markdown": as_markdown, "latex": as_latex}
SUFFIXES = {".csv": "csv", ".md": "markdown", ".tex": "latex"}
