"""The tables of experiments/peers.py, from its files alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from swept import markdown

from specresearch.comparison.bootstrap import UNKNOWN, Bootstrap, Estimate, Quotient

COPYING = ("rag", "code_edit")  # kinds whose answers copy from the prompt
BOOTSTRAP = Bootstrap(count=2000, confidence=0.95, seed=0)


@dataclass(frozen=True)
class Standing:
    rows: dict[str, str]  # name and what it is
    held: dict[str, str]  # how it holds the weights
    lines: list[dict[str, Any]] = field(repr=False)
    about: dict[str, Any] = field(repr=False)
    memory: dict[str, int]

    @cached_property
    def times(self) -> dict[str, dict[Any, tuple[int, float]]]:
        """Tokens and seconds of every answer, the median of its repeats, by row and prompt."""
        found: dict[str, dict[Any, list[tuple[int, float]]]] = {}
        for x in self.lines:
            if "tokens" in x:
                found.setdefault(x["row"], {}).setdefault(x["id"], []).append((x["tokens"], x["seconds"]))
        return {
            row: {id: (own[0][0], statistics.median(s for _, s in own)) for id, own in each.items()}
            for row, each in found.items()
        }

    @cached_property
    def kinds(self) -> dict[str, list[Any]]:
        """Prompts by kind."""
        found: dict[str, list[Any]] = {}
        for x in self.lines:
            if "kind" in x and x["id"] not in found.setdefault(x["kind"], []):
                found[x["kind"]].append(x["id"])
        return found

    @property
    def bandwidth(self) -> float:
        return statistics.median(x["rate"] for x in self.lines if x["row"] == "bandwidth")

    def has(self, row: str) -> bool:
        return row in self.times

    def against(self, row: str, other: str, ids: Sequence[Any] | None = None) -> Estimate:
        """How many times as many tokens per second as another row, on the prompts that both answered."""
        if not (self.has(row) and self.has(other)):
            return UNKNOWN
        both = [id for id in self.times[row] if id in self.times[other] and (ids is None or id in ids)]
        return BOOTSTRAP.estimate(self._rate(row, both) / self._rate(other, both))

    def _rate(self, row: str, ids: Sequence[Any]) -> Quotient:
        tokens, seconds = np.array([self.times[row][id] for id in ids], dtype=float).reshape(-1, 2).T
        return Quotient(tokens[None], seconds[None])

    def pooled(self, row: str, ids: Sequence[Any] | None = None) -> float:
        own = [own for id, own in self.times[row].items() if ids is None or id in ids]
        return sum(t for t, _ in own) / sum(s for _, s in own) if own else 0.0

    def median(self, row: str) -> float:
        return statistics.median(tokens / seconds for tokens, seconds in self.times[row].values())

    def accepted(self, row: str) -> float | None:
        own = [x for x in self.lines if x["row"] == row]
        passes = sum(x["passes"] - 1 for x in own)
        return sum(x["tokens"] - 1 for x in own) / passes if passes else None

    def floor(self, row: str) -> float:
        """Seconds a token, in passes over the weights at the speed of memory."""
        least = self.about["weights"][self.held[row]] / self.bandwidth
        return 1 / self.pooled(row) / least

    def step_over_floor(self, row: str) -> float | None:
        """The time of plain decoding's steps, prompts left out, in passes over the weights and the context so far."""
        own = [x for x in self.lines if x["row"] == row and "time" in x]
        seconds = sum(x["seconds"] - x["time"]["prefill"] for x in own)
        weights, token = self.about["weights"][self.held[row]], self.about["token_bytes"]
        read = sum((x["passes"] - 1) * (weights + token * (x["prompt_tokens"] + x["tokens"] / 2)) for x in own)
        return seconds * self.bandwidth / read if read else None

    def equal(self, row: str) -> str:
        answers = {r: {x["id"]: x["output_ids"] for x in self.lines if x["row"] == r} for r in (row, "plain")}
        both = [id for id in answers[row] if id in answers["plain"]]
        same = sum(answers[row][id] == answers["plain"][id] for id in both)
        gap = self.about.get("apart", {}).get(row)
        return (
            "-" if not both else f"{same} of {len(both)}" + (f", {gap:.1g} apart" if same < len(both) and gap else "")
        )


def interval(found: Estimate) -> str:
    if found.value is None:
        return "-"
    return f"{found.value:.2f}" + (f" [{found.low:.2f}, {found.high:.2f}]" if found.low is not None else "")


def tables(s: Standing) -> str:
    return "\n\n".join([race(s), by_kind(s), goals(s), notes(s)])


def race(s: Standing) -> str:
    heads = ["row", "tokens/s", "/ generate", "accepted length", "time / floor", "peak memory", "equal to plain"]
    return markdown(heads, [cells(s, row) for row in s.rows])


def cells(s: Standing, row: str) -> list[str]:
    if not s.has(row):
        return [s.rows[row], f"cannot: {s.about.get('faults', {}).get(row) or 'not asked yet'}", *"-----"]
    accepted, memory = s.accepted(row), s.memory.get(row)
    return [
        s.rows[row],
        f"{s.median(row):.1f}",
        interval(s.against(row, "hf")),
        f"{accepted:.2f}" if accepted else "-",
        f"{s.floor(row):.2f}",
        f"{memory / 2**20:.0f} MiB" if memory else "-",
        s.equal(row),
    ]


def by_kind(s: Standing) -> str:
    def value(row: str, ids: Sequence[Any] | None) -> str:
        found = s.against(row, "hf", ids).value
        return "-" if found is None else f"{found:.2f}"

    rows = [[s.rows[r], *(value(r, ids) for ids in s.kinds.values()), value(r, None)] for r in s.rows if s.has(r)]
    return markdown(["tokens/s, generate = 1", *s.kinds, "pooled"], rows)


# -- goals -----------------------------------------------------------------------------------------------------------------


def goals(s: Standing) -> str:
    """What is missing is said, too: a goal without its rows has no figure."""
    found = [*speed(s), *steps(s), *drafting(s)]
    return markdown(["goal", "figure", "met"], [[name, figure, met] for name, figure, met in found])


Goal = tuple[str, str, str]


def goal(name: str, value: float | None, least: float, said: str | None = None, most: bool = False) -> Goal:
    if value is None:
        return name, "-", "not measured"
    return name, said or f"{value:.2f}", "yes" if (value <= least if most else value >= least) else "no"


def best(s: Standing, rows: Sequence[str], ids: Sequence[Any] | None = None) -> str | None:
    return max((r for r in rows if s.has(r) and s.pooled(r, ids)), key=lambda r: s.pooled(r, ids), default=None)


def speed(s: Standing) -> list[Goal]:
    base = best(s, ["hf", "hf_bf16"])
    found = s.against("plain", base) if base else UNKNOWN
    floor = s.step_over_floor("plain") if s.has("plain") else None
    named = f"plain / transformers' generate, best dtype of each ({s.rows[base] if base else '-'})"
    return [
        goal(f"{named}: 1.6", found.value, 1.6, interval(found)),
        goal(f"{named}: 1.8", found.value, 1.8, interval(found)),
        goal("plain, a step / the floor of its dtype, prompts left out: at most 2", floor, 2.0, most=True),
    ]


def steps(s: Standing) -> list[Goal]:
    passes, batch = s.about.get("passes"), s.about.get("batch")
    wide = passes["32"] / passes["1"] if passes else None
    gain = statistics.median(batch["eagle"]) / statistics.median(batch["plain"]) if batch else None
    said = (
        f"{statistics.median(batch['eagle']):.1f} / {statistics.median(batch['plain']):.1f} tokens/s" if batch else None
    )
    shares = {row: outside(s, row) for row in ("eagle", "eagle_tuned", "ngram")}
    each = [
        goal(
            f"{row}: outside the target's and the drafter's passes, at most 5% of a step",
            x,
            0.05,
            f"{x:.1%}" if x else "",
            True,
        )
        for row, x in shares.items()
    ]
    return [
        goal("a pass of 32 nodes / of 1: at most 1.35", wide, 1.35, most=True),
        *each,
        goal("batch 8 with eagle / batch 8 plain: above 1", gain, 1.0, said),
    ]


def outside(s: Standing, row: str) -> float | None:
    """Share of the steps' time that neither the target nor the drafter takes; prompts left out."""
    own = [x for x in s.lines if x["row"] == row and "time" in x]
    steps = sum(x["seconds"] - x["time"]["prefill"] for x in own)
    return 1 - sum(x["time"]["target"] + x["time"]["draft"] for x in own) / steps if steps else None


def drafting(s: Standing) -> list[Goal]:
    out: list[Goal] = []
    base, helped = best(s, ["hf", "hf_bf16"]), best(s, ["hf_lookup", "hf_assisted"])
    for row in ("eagle", "eagle_tuned"):
        for least, other, said in ((2.5, base, "transformers' generate"), (1.5, helped, "its best assisted mode")):
            found = s.against(row, other) if other else UNKNOWN
            out.append(goal(f"{s.rows.get(row, row)} / {said}: {least}", found.value, least, interval(found)))
        for library in ("flashspec", "economize"):
            out += ahead(s, row, library)
    copying = [id for kind in COPYING for id in s.kinds.get(kind, [])]
    found = s.against("ngram", "hf_lookup", copying)
    out.append(goal("ngram / transformers' prompt lookup, copying prompts: 1.2", found.value, 1.2, interval(found)))
    return out


def ahead(s: Standing, row: str, library: str) -> list[Goal]:
    """The kind of prompt where the best of the library's rows comes nearest, or is ahead."""
    worst: tuple[float, str] | None = None
    for kind, ids in s.kinds.items():
        other = best(s, [r for r in s.rows if r.startswith(library)], ids)
        value = s.against(row, other, ids).value if other else None
        if other and value is not None and (worst is None or value < worst[0]):
            worst = value, f"{value:.2f} on {kind} ({s.rows[other]})"
    name = f"{s.rows.get(row, row)} / the best of {library} on every kind: above 1"
    return [goal(name, worst[0] if worst else None, 1.0, worst[1] if worst else None)]


def notes(s: Standing) -> str:
    answered = {id for row in s.times.values() for id in row}
    held = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in s.about["weights"].items())
    failed = [f"{row}: {fault}" for row, fault in s.about.get("faults", {}).items() if fault and s.has(row)]
    tuned = [f"{row} {setting}" for row, setting in s.about["settings"].items() if setting and s.has(row)]
    return "\n".join(
        [
            f"- {len(answered)} prompts of {len(s.kinds)} kinds, at most {s.about['max_new_tokens']} tokens each; overrides: "
            f"{' '.join(s.about['overrides']) or 'none'}",
            f"- memory is read at {s.bandwidth / 1e9:.1f} GB/s; a pass reads {held}",
            f"- settings: {'; '.join(tuned) or 'all default'}",
            *(["- failed on some prompts: " + "; ".join(failed)] if failed else []),
            f"- {s.about['where']}",
        ]
    )
