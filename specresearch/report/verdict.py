"""The losslessness verdict in words, and what it rests on. A lossy run or a violation is never said in passing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specresearch.console import number
from specresearch.report.figures import Table
from specresearch.report.subject import Subject

LOUD = ("violation", "lossy", "simulated")
TONE = {"lossless": "good", "consistent": "good", "violation": "bad", "lossy": "warn", "simulated": "warn"}
SAYS = {
    "lossless": "Every answer equals {reference}, token by token: {equal} of {answers}.",
    "near_tie": "{equal} of {answers} answers equal {reference}. The others part from it only where two tokens are closer "
    "than the measured rounding noise.",
    "violation": "The output is not the target's own.",
    "not_exercised": "No drafted token was verified, so nothing was put to the test.",
    "not_checked": "Nothing was checked.",
    "simulated": "Nothing here says how good a drafter is.",
}


@dataclass(frozen=True)
class Verdict:
    word: str  # capitals where it must not be missed
    tone: str  # good, bad, warn or plain
    says: str

    @property
    def loud(self) -> bool:
        return self.tone in ("bad", "warn")


def of(run: Subject) -> Verdict:
    found = run.summary["lossless"]
    name = found["verdict"]
    says = [SAYS[name].format(**{"reference": "", "equal": "", "answers": ""} | found)] if name in SAYS else []
    if name in ("violation", "simulated") and "equal" in found:
        says.append(f"{found['equal']} of {found['answers']} answers equal {found['reference']}.")
    if name == "lossy":
        says.append(f"This acceptance rule changes the law of the output: {found['reason']}.")
    elif found.get("reason"):
        says.append(_sentence(found["reason"]))
    if found.get("tv_bound") is not None:
        says.append(f"The law of one token shifts by a total variation of {found['tv_bound']:.3g} at most.")
    word = name.replace("_", " ")
    return Verdict(word.upper() if name in LOUD else word, TONE.get(name, "plain"), " ".join(says))


def _sentence(reason: str) -> str:
    return reason[:1].upper() + reason[1:].rstrip(".") + "."


def disputes(run: Subject) -> list[dict[str, Any]]:
    """Places where the answer and plain decoding part: the worst first, with both of the two best tokens."""
    found = run.summary["lossless"]
    entries = [*found.get("violations", ()), *found.get("near_ties", ())]
    return [
        {
            "verdict": entry["verdict"].replace("_", " "),
            "bad": entry in found.get("violations", ()),
            "where": f"question {entry['id']}, turn {entry['turn']}, token {entry['position']}",
            "emitted": _piece(run, entry.get("emitted")),
            "one": _top2(run, entry.get("one_token_top2")),
            "verify": _top2(run, entry.get("verify_top2")),
            "gaps": [number(entry.get(key), 6) for key in ("one_token_gap", "verify_gap")],
            "noise": "-" if "gap_noise" not in entry else f"{entry['gap_noise']:.2g}",
            "error": "-" if "logit_error" not in entry else f"{entry['logit_error']:.2g}",
        }
        for entry in entries
    ]


def _top2(run: Subject, pair: dict[str, float] | None) -> list[tuple[str, str]]:
    return [(_piece(run, int(token)), f"{logit:.4f}") for token, logit in (pair or {}).items()]


def _piece(run: Subject, token: int | None) -> str:
    return "-" if token is None else run.results.pieces.get(token) or f"⟨{token}⟩"


def tables(run: Subject) -> list[Table]:
    """The black box's scores and the white box's claims, where they were asked."""
    found = run.summary["lossless"]
    made = []
    if "scores" in found:
        made += [_black_box(found), _scores(found)]
    if claims := found.get("white_box"):
        rows = [
            (c["claim"], c["verdict"].replace("_", " "), f"{c['n']:,}", number(c["z"]), number(c["log10_e"]))
            for c in claims
        ]
        made.append(
            Table("White box: the run's own log, claim by claim", ("claim", "verdict", "n", "z", "log₁₀ E"), rows, (1,))
        )
    return made


def _black_box(found: dict[str, Any]) -> Table:
    least = "too few tokens to see any bias" if not found["resolution"] or found["resolution"] >= 1 else None
    rows = [
        ("tokens judged", f"{found['tokens']:,}"),
        ("tokens from steps with drafts", f"{found.get('from_drafts', 0):,}"),
        ("log₁₀ E at the end, and its largest", f"{found['log10_e']:.3f}, {found['log10_e_sup']:.3f}"),
        ("α; a violation is E ≥ 1/α", f"{found['alpha']:g}; {1 / found['alpha']:,.0f}"),
        ("smallest bias that would have been seen (TV, power 0.9)", least or f"{found['resolution']:.3g}"),
        ("p of the largest |z|", f"{found['p_value']:.3g}"),
        ("tokens of probability 0", f"{found['impossible']:,}"),
    ]
    return Table("Black box: the emitted tokens against the target's own law", ("", "value"), rows)


def _scores(found: dict[str, Any]) -> Table:
    rows = [
        (name, number(own["z"]), f"{own['bias']:+.4f}", f"{own['low']:+.4f} to {own['high']:+.4f}")
        for name, own in found["scores"].items()
    ]
    return Table("Black box: bias per token of each score", ("score", "z", "bias", "interval at 1 − α"), rows)
