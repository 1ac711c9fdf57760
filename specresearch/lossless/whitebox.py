"""The white box: do drafts, coins and residual draws of a run do what its p and q say? It sees what the loop sees.

It replays the rule in its own arithmetic from tree, p, q and verdict, one step at a time, and keeps scores alone. Each is
bounded and has mean 0 given the past if the rule holds, so bets on it are sound however the run went. It cannot see a
wrong p (a temperature forgotten on the target): it takes p as given. The black box does.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from specresearch.lossless.eprocess import Evidence
from specresearch.lossless.replay import Event, Replay
from specresearch.sampling import TreeProbs
from specresearch.types import Probs, Rng, Tree, Verdict, Verifier

CLAIMS = {
    "drafts": "draft tokens follow the q that is claimed",
    "coins": "children are accepted with the rule's probability",
    "residual": "a token after a rejection is possible and follows the residual",
    "bonus": "a token after a leaf follows p",
    "independence": "coins and residual draws do not depend on the draft's chance",
}
SCORES = {"drafts": 3, "coins": 1, "residual": 2, "bonus": 2, "independence": 2}


@dataclass(frozen=True)
class Finding:
    """One claim, tested. `not_covered`: nothing is known about this rule; `not_exercised`: it never came to it."""

    name: str
    claim: str
    kind: Literal["tested", "not_exercised", "not_covered"]
    verdict: Literal["consistent", "violation", "not_checked"]
    n: int = 0
    z: float | None = None
    p_value: float | None = None  # of this z alone, by the normal law
    log10_e: float = 0.0  # largest; the verdict's
    impossible: int = 0  # outcomes of probability 0: one is a proof

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Log:
    """What a run has shown so far."""

    evidence: dict[str, Evidence] = field(default_factory=lambda: {name: Evidence(k) for name, k in SCORES.items()})
    steps: int = 0
    uncovered: set[str] = field(default_factory=set)  # verifiers that could not be replayed

    def state(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        evidence = {name: own.state() for name, own in self.evidence.items()}
        return {"evidence": evidence, "steps": self.steps, "uncovered": sorted(self.uncovered)}

    def load(self, state: dict[str, Any]) -> None:
        for name, own in self.evidence.items():
            own.load(state["evidence"][name])
        self.steps, self.uncovered = state["steps"], set(state["uncovered"])

    def add(self, events: list[Event]) -> None:
        for name, evidence in self.evidence.items():
            own = [event for event in events if event.name == name]
            excess, variance = (
                torch.tensor([e.excess for e in own], dtype=torch.float64),
                torch.tensor([e.variance for e in own], dtype=torch.float64),
            )
            evidence.add(excess, variance, torch.tensor([e.impossible for e in own]))


class WhiteBox(Verifier):
    """A verifier that logs what another one decides; the decisions are the other's, unchanged."""

    on_device = False

    def __init__(self, verifier: Verifier, log: Log):
        self.verifier, self.log = verifier, log
        self.laws, self.growths, self.chain_only = verifier.laws, verifier.growths, verifier.chain_only
        self.greedy_only, self.replay = verifier.greedy_only, verifier.replay
        self.lossy, self.tv_bound = verifier.lossy, verifier.tv_bound

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        verdict = self.verifier.verify(tree, p, rng)
        if self.replay is None:
            self.log.uncovered.add(type(self.verifier).__name__)
            return verdict
        step = Replay(tree, p, verdict, point=self.replay == "given_tree" or tree.law == "point" or tree.q is None)
        # Rows that stand idle repeat their last step: they have no chance of their own.
        live = p.step.live.tolist() if isinstance(p, TreeProbs) else [True] * len(verdict.path)
        self.log.add([event for row, alive in enumerate(live) if alive for event in step.row(row)])
        self.log.steps += sum(live)
        return verdict


def findings(log: Log, alpha: float = 1e-3) -> list[Finding]:
    """Each claim's test. At most `alpha` of right runs have any violation among them."""
    if log.uncovered:
        return [Finding(name, claim, "not_covered", "not_checked") for name, claim in CLAIMS.items()]
    bar = math.log(len(CLAIMS) / alpha)
    found = []
    for name, claim in CLAIMS.items():
        own = log.evidence[name]
        if not own.count:
            found.append(Finding(name, claim, "not_exercised", "not_checked"))
            continue
        z, bad = own.z(), own.impossible > 0 or own.best >= bar
        p_value = None if z is None else math.erfc(abs(z) / math.sqrt(2))
        e = own.best / math.log(10)
        verdict: Literal["consistent", "violation"] = "violation" if bad else "consistent"
        found.append(Finding(name, claim, "tested", verdict, own.count, z, p_value, e, own.impossible))
    return found


def verdict_of(found: list[Finding]) -> str:
    verdicts = {finding.verdict for finding in found}
    return next((v for v in ("violation", "consistent") if v in verdicts), "not_checked")
