"""What lies beside a trained head for people: the held-out curve as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def curve_table(curve: Sequence[Mapping[str, float]]) -> str:
    """Markdown: a row for each evaluation, against the tokens seen until then (repetitions counted)."""
    rows = [row for row in curve if row]
    steps = sorted({key for row in rows for key in row if key.startswith("held_out/top1_step_")})
    columns = ["held_out/walk", *steps, "held_out/top4_step_1"]
    names = ["tokens seen", "minutes", "accepted length, walked", *[f"top-1, step {i + 1}" for i in range(len(steps))]]
    lines = ["| " + " | ".join([*names, "top-4, step 1"]) + " |", "|" + "---:|" * (len(columns) + 2)]
    for row in rows:
        numbers = [f"{row[column]:.3f}" if column in row else "-" for column in columns]
        lines.append(f"| {row['tokens']:.0f} | {row['seconds'] / 60:.0f} | " + " | ".join(numbers) + " |")
    return "\n".join(lines) + "\n"
