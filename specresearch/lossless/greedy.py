"""Is the output the target's own at temperature 0? Equality first; where ids part, rounding is told apart from faults.

A verify pass has more rows than a one-token pass, hence another order of summation, hence logits that differ in the last
digits. Where the two best tokens are closer than that noise, either is a right answer. Everything else is a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specresearch.grammar.rows import masks
from specresearch.rng import CounterRng
from specresearch.sampling import Sampler, forbid
from specresearch.types import Step, Target, Tree, Verdict

Line = dict[str, Any]
FORBIDDEN = 1e9  # written for the gap to a token that the grammar forbids, which is infinite


@dataclass(frozen=True)
class Noise:
    """Differences between passes of different width, by the model's own forward: none of our code takes part."""

    gap: float  # largest shift of the gap between the two best tokens
    logit: float  # largest shift of any logit
    positions: int


class GreedyJudge:
    """Judges answers of one run. It uses the target's cache, so nothing may be in flight."""

    def __init__(self, target: Target, sampler: Sampler, *, exact_replay: bool, tree_size: int):
        self.target, self.sampler, self.tree_size = target, sampler, tree_size
        # A batch of another size is another order of summation: then a replayed pass may differ by the noise.
        self.exact_replay = exact_replay
        self.noise: Noise | None = None
        self.allow: Tensor | None = None  # [n, ceil(V/32)], of the answer being judged

    def compare(self, line: Line, baseline_ids: list[int] | None) -> Line:
        """-> {equal, near_ties, violations} for one answer; `baseline_ids` None = judge every token by teacher forcing."""
        ids = line["output_ids"]
        if baseline_ids == ids:
            return {"equal": True, "near_ties": [], "violations": []}
        pairs = enumerate(zip(ids, baseline_ids or []))
        common = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(baseline_ids or [])))
        if baseline_ids is not None and common in (len(ids), len(baseline_ids)):
            fault = f"one answer ends after {common} tokens and the other goes on"
            return {"equal": False, "near_ties": [], "violations": [self._entry(line, common, fault)]}
        return self._teacher_force(line, common, equal_if_clean=baseline_ids is None)

    @torch.inference_mode()
    def _teacher_force(self, line: Line, start: int, equal_if_clean: bool) -> Line:
        """Feed the answer token by token from `start` on; judge each place where the one-token path prefers another."""
        known = line["prompt_ids"] + line["output_ids"][:start]
        self.allow = masks(self.sampler.grammar, line["output_ids"])
        near: list[Line] = []
        bad: list[Line] = []
        self.target.reserve(1, len(line["prompt_ids"]) + len(line["output_ids"]), self.tree_size)
        for position, logits in self._one_token(known, line["output_ids"][start:]):
            at = start + position
            emitted = line["output_ids"][at]
            if int(self._allowed(logits, at).argmax()) != emitted:
                entry = self._judge(line, at, emitted, logits)
                (near if entry["verdict"] in ("tie", "near_tie") else bad).append(entry)
                known_now = line["prompt_ids"] + line["output_ids"][:at]
                self._prefill(known_now)  # the judge used the cache
        return {"equal": equal_if_clean and not near and not bad, "near_ties": near, "violations": bad}

    def _allowed(self, logits: Tensor, at: int) -> Tensor:
        """What the grammar leaves of logits [V] at output token `at`."""
        return logits if self.allow is None else forbid(logits, self.allow[at])

    def _one_token(self, known: list[int], rest: list[int]) -> Any:
        """Yields (i, processed logits [V] for rest[i]) by the plain path; the first of an answer comes from the prefill.
        The grammar is not applied yet: errors are measured on all of V."""
        logits = self._prefill(known)
        for i, token in enumerate(rest):
            yield i, logits
            logits = self._pass(known + rest[:i], token, Tree.of_root)[0]

    def _prefill(self, known: list[int]) -> Tensor:
        device = self.target.device
        tokens, length = torch.tensor([known], device=device), torch.tensor([len(known)], device=device)
        logits, _ = self.target.extend([0], tokens, length, ())
        return self.sampler.process(logits[:, None], tokens, length)[0, 0]

    def _pass(self, cached: list[int], root: int, grow: Callable[[Step], Tree]) -> Tensor:
        """One pass behind `cached` tokens -> processed logits [N, V]; the root is then committed."""
        device = self.target.device
        one = torch.ones(1, dtype=torch.long, device=device)
        tokens = torch.tensor([[*cached, root]], device=device)
        step = Step(
            one * root, one, one * len(cached), one.bool(), one, tokens, CounterRng(one, one), extent=len(cached)
        )
        tree = grow(step)
        output = self.target.forward(step, tree, ())
        probs = self.sampler.probs(output.logits, step, tree)
        path = torch.full((1, tree.levels + 1), -1, device=device)
        path[:, 0] = 0
        self.target.commit(step, Verdict(path, one, one * root))
        return self.sampler.process(output.logits, step.tokens, step.length + 1, probs.path)[0]

    def _judge(self, line: Line, at: int, emitted: int, one: Tensor) -> Line:
        noise = self.noise = self.noise or calibrate(self.target, line)
        verify = self._replay(line, at)
        reference = self._reference(line, at)
        error = max(float((x - reference).abs().max()) for x in (one, verify))
        one, verify = (self._allowed(x, at) for x in (one, verify))
        (a, gap_one), (b, gap_verify) = _top2(one), _top2(verify)
        replay_slack = 0.0 if self.exact_replay else 2 * noise.gap
        if float(verify.max() - verify[emitted]) > replay_slack:
            verdict = "verifier_bug"
        elif error > 4 * noise.logit:
            verdict = "forward_bug"
        elif a.keys() == b.keys() and max(gap_one, gap_verify) <= 2 * noise.gap:
            verdict = "tie" if min(gap_one, gap_verify) == 0 else "near_tie"
        else:
            verdict = "bug"
        entry = self._entry(line, at, verdict)
        return entry | {
            **{"emitted": emitted, "one_token_top2": a, "verify_top2": b, "one_token_gap": gap_one},
            **{"verify_gap": gap_verify, "gap_noise": noise.gap, "logit_noise": noise.logit},
            **{"logit_error": error, "cached": len(line["prompt_ids"]) + at - 1, "dtype": str(self.target.dtype)},
        }

    def _entry(self, line: Line, at: int, verdict: str) -> Line:
        return {"id": line["id"], "turn": line["turn"], "position": at, "verdict": verdict}

    def _replay(self, line: Line, at: int) -> Tensor:
        """Logits of the pass that emitted output token `at`, made again from the trace."""
        if at == 0:
            return self._prefill(line["prompt_ids"])
        done = 1  # output tokens before the step
        for step in line["steps"]:
            if done + step["emitted"] > at:
                break
            done += step["emitted"]
        cached = line["prompt_ids"] + line["output_ids"][: done - 1]
        self._prefill(cached)
        return self._pass(cached, line["output_ids"][done - 1], lambda s: _tree(s, step))[step["path"][at - done]]

    def _reference(self, line: Line, at: int) -> Tensor:
        known = line["prompt_ids"] + line["output_ids"][:at]
        logits = self.target.reference(known, [len(known) - 1])
        device = self.target.device
        tokens, length = torch.tensor([known], device=device), torch.tensor([len(known)], device=device)
        return self.sampler.process(logits[None], tokens, length)[0, 0]


class TokensJudge:
    """Judges answers of any engine at temperature 0 by their tokens alone: each must be the target's best, up to rounding.

    The logits are those of the model's own whole-sequence forward: no tree, no cache, no position of ours takes part.
    """

    def __init__(self, target: Target, sampler: Sampler):
        self.target, self.sampler = target, sampler
        self.noise: Noise | None = None
        self.tokens = 0
        self.near_ties: list[Line] = []
        self.violations: list[Line] = []

    @property
    def verdict(self) -> str:
        return "violation" if self.violations else "near_tie" if self.near_ties else "lossless"

    @torch.inference_mode()
    def add(self, line: Line) -> None:
        first = len(line["prompt_ids"])
        ids = torch.tensor([*line["prompt_ids"], *line["output_ids"]], device=self.target.device)
        places = torch.arange(first - 1, len(ids) - 1, device=ids.device)
        logits = self.target.plain(ids[None, :-1], places)[0]
        allow = masks(self.sampler.grammar, line["output_ids"])
        history = ids.expand(len(places), -1)
        logits = self.sampler.process(
            logits[:, None], history, places + 1, allow=None if allow is None else allow[:, None]
        )[:, 0].double()
        short = (logits.amax(-1) - logits.gather(1, ids[first:, None])[:, 0]).clamp(max=FORBIDDEN)
        self.tokens += len(places)
        for at in short.nonzero()[:, 0].tolist():
            noise = self.noise = self.noise or calibrate(self.target, line)
            entry = {"id": line["id"], "turn": line["turn"], "position": at, "emitted": int(ids[first + at])}
            entry |= {"best": int(logits[at].argmax()), "gap": float(short[at]), "gap_noise": noise.gap}
            (self.near_ties if entry["gap"] <= 2 * noise.gap else self.violations).append(entry)


def calibrate(target: Target, line: Line, positions: int = 64) -> Noise:
    """One-token against whole-sequence logits of the same tokens, both by the model's own forward."""
    ids = line["prompt_ids"] + line["output_ids"]
    places = list(range(max(len(ids) - positions, 0), len(ids)))
    one, whole = (target.reference(ids, places, one_by_one).double() for one_by_one in (True, False))
    top = one.topk(2, -1).indices
    gaps = [x.gather(1, top) @ x.new_tensor([1.0, -1.0]) for x in (one, whole)]
    return Noise(float((gaps[0] - gaps[1]).abs().max()), float((one - whole).abs().max()), len(places))


def _top2(logits: Tensor) -> tuple[dict[int, float], float]:
    values, ids = logits.double().clamp(min=-FORBIDDEN).topk(2)
    return {int(i): round(float(v), 6) for i, v in zip(ids, values)}, float(values[0] - values[1])


def _tree(step: Step, record: Line) -> Tree:
    """A recorded tree, put back on the device."""
    device = step.root.device
    parent, tokens = (torch.tensor([record[key]], device=device) for key in ("parent", "tokens"))
    depth = torch.zeros_like(parent)
    for node in range(1, parent.shape[1]):
        depth[0, node] = depth[0, int(parent[0, node])] + 1
    valid = tokens >= 0
    score = torch.zeros(parent.shape, device=device)
    return Tree(tokens.clamp(min=0), parent, depth, valid, score, "point", "static", int(depth.max()))


def verdict_of(results: list[Line], drafted: int) -> str:
    if any(result["violations"] for result in results):
        return "violation"
    if not drafted:
        return "not_exercised"
    return "near_tie" if any(result["near_ties"] for result in results) else "lossless"
