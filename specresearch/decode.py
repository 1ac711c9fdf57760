"""The loop: propose, target pass, verify, trim, commit, one read. It knows no concrete drafter, tree or verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specresearch.clock import Clock
from specresearch.grammar.rows import Rows
from specresearch.rng import CounterRng, row_key
from specresearch.sampling import Sampler
from specresearch.step_graph import StepGraphs
from specresearch.types import Drafter, Frontier, Kept, Step, Target, Tree, TreePolicy, UserError, Verdict, Verifier


@dataclass(frozen=True)
class Job:
    """One turn to answer."""

    id: int | str
    kind: str
    turn: int
    prompt_ids: list[int]
    budget: int


@dataclass
class Turn:
    """An answered turn: one line of the trace."""

    job: Job
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)

    def line(self) -> dict[str, Any]:
        job = self.job
        return {
            **{"id": job.id, "kind": job.kind, "turn": job.turn, "prompt_ids": job.prompt_ids},
            **{"output_ids": self.output_ids, "text": self.text, "finish": self.finish, "steps": self.steps},
        }


@dataclass(frozen=True)
class Emission:
    """What one row emitted in one step (or from its prefill); all tokens but the last are accepted drafts."""

    turn: Turn
    tokens: list[int]
    done: bool


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    target: Target
    drafter: Drafter
    policy: TreePolicy
    verifier: Verifier
    sampler: Sampler


@dataclass
class Standing:
    """What the loop knows of its rows; see `Step`."""

    root: Tensor
    length: Tensor
    budget: Tensor
    row_id: Tensor
    key: Tensor  # of each row's chance
    round: Tensor  # steps of the row's answer
    live: Tensor
    tokens: Tensor


class Work(NamedTuple):
    """What a step left on the device."""

    verdict: Verdict
    packed: Tensor  # [B, ...] all that is read of it
    widths: tuple[int, int, int]  # tokens emitted at most, path, tree


class Decoder:
    """Answers jobs in `batch` rows; a row that is done takes the next job. Tokens depend on the job, never on the batch."""

    def __init__(
        self,
        parts: Parts,
        *,
        batch: int,
        capacity: int,
        seed: int,
        decode: Callable[[list[int]], str],
        stop: Sequence[str],
    ):
        self.parts, self.batch, self.seed, self.decode, self.stop = parts, batch, seed, decode, list(stop)
        self.device = parts.target.device
        self.eos = torch.tensor(parts.target.eos, dtype=torch.long, device=self.device)
        self.clock = Clock(self.device)
        self.passes = 0
        self.capacity = capacity
        zeros = torch.zeros(6, batch, dtype=torch.long, device=self.device)
        history = torch.zeros(batch, capacity + parts.policy.depth + 2, dtype=torch.long, device=self.device)
        root, length, budget, row_id, key, number = zeros.unbind()
        self.rows = Standing(root, length, budget, row_id, key, number, zeros[0].bool(), history)
        self.turns: list[Turn | None] = [None] * batch
        grammar = parts.sampler.grammar
        self.grammar = None if grammar is None else Rows(grammar, batch, self.device)
        self.graphs = StepGraphs(self._work, self.clock, capacity - 1)  # an answer's last token is never cached

    @torch.inference_mode()
    def run(self, jobs: Iterator[Job]) -> Iterator[Emission]:
        """Answer all jobs. `jobs` is asked for the next one only when a row is free, so it may depend on earlier answers."""
        while True:
            yield from self._admit(jobs)
            if not any(self.turns):
                return
            yield from self._step()

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self) -> Iterator[Emission]:
        self.clock.mark("other")
        work = self.graphs(max(len(t.job.prompt_ids) + len(t.output_ids) - 1 for t in self.turns if t is not None))
        read = _read(work)
        seconds = self.clock.settle()
        self.parts.policy.observe(work.verdict, seconds)
        self.passes += 1
        yield from self._record(read, seconds)

    def _work(self, extent: int) -> Work:
        """All that the device does in a step; `extent` = the largest length, or more."""
        target, drafter, policy, verifier, sampler = self._parts()
        step, clock = self._view(extent), self.clock
        clock.mark("draft")
        tree = drafter.propose(step, policy, self.ask)
        masks = None if self.grammar is None else self.grammar.look(tree)
        clock.mark("target")
        output = target.forward(step, tree, drafter.taps)
        clock.mark("verify")
        tree = tree if masks is None else replace(tree, allow=masks())
        verdict = verifier.verify(tree, sampler.probs(output.logits, step, tree), step.rng)
        verdict, emitted = self._trim(step, tree, verdict)
        clock.mark("commit")
        target.commit(step, verdict)
        clock.mark("draft")
        drafter.commit(step, tree, verdict, output.features)
        clock.mark("other")
        self._advance(verdict, emitted)
        return _pack(tree, verdict, emitted)

    def _kept(self) -> Kept | None:
        target, drafter, policy, verifier, _ = self._parts()
        adapts = type(policy).observe is not TreePolicy.observe
        if adapts or self.grammar is not None or not (policy.on_device and verifier.on_device):
            return None
        theirs, drafters = target.kept(), drafter.kept()
        if theirs is None or drafters is None:
            return None
        return Kept((self.rows, *theirs.state, *drafters.state), theirs.fixed + drafters.fixed)

    def ask(self, frontier: Frontier) -> tuple[Tensor, Tensor | None]:
        _, drafter, policy, _, sampler = self._parts()
        logits, shape = drafter.expand(frontier), (*frontier.tokens.shape, self.parts.target.vocab_size)
        if logits.shape != shape:
            raise UserError(
                f"the drafter answered with logits {list(logits.shape)}, [B, W, V] = {list(shape)} is needed"
            )
        constrained = self.grammar is not None and self.grammar.grammar.draft
        allow = self.grammar.frontier(frontier) if self.grammar is not None and constrained else None
        return sampler.draft(logits, frontier, policy.temperature, allow)

    def _parts(self) -> tuple[Target, Drafter, TreePolicy, Verifier, Sampler]:
        p = self.parts
        return p.target, p.drafter, p.policy, p.verifier, p.sampler

    def _view(self, extent: int) -> Step:
        own = self.rows
        rng = CounterRng(own.key, own.round)
        return Step(own.root, own.row_id, own.length, own.live, own.budget, own.tokens, rng, extent)

    def _trim(self, step: Step, tree: Tree, verdict: Verdict) -> tuple[Verdict, Tensor]:
        """Cut at EOS and at the budget -> the verdict of what stays, and the emitted tokens [B, D+1], -1 padded."""
        place = torch.arange(verdict.path.shape[1], device=self.device)
        drafted = tree.tokens.gather(1, verdict.path.clamp(min=0))
        tokens = torch.cat([drafted[:, 1:], verdict.next_token[:, None]], 1)
        tokens = torch.where(place == verdict.length[:, None] - 1, verdict.next_token[:, None], tokens)
        stops = (tokens[..., None] == self.eos).any(-1)
        until_stop = torch.where(stops, place + 1, place.shape[0]).amin(1)
        length = torch.minimum(torch.minimum(verdict.length, until_stop), step.budget) * step.live
        kept = place < length[:, None]
        end = tokens.gather(1, (length - 1).clamp(min=0)[:, None])[:, 0]
        return Verdict(torch.where(kept, verdict.path, -1), length, end), torch.where(kept, tokens, -1)

    def _advance(self, verdict: Verdict, emitted: Tensor) -> None:
        own = self.rows
        place = own.length[:, None] + 1 + torch.arange(emitted.shape[1], device=self.device)
        keep = own.tokens.gather(1, place)
        own.tokens.scatter_(1, place, torch.where(emitted >= 0, emitted, keep))
        own.length += verdict.length
        own.budget -= verdict.length
        own.root = torch.where(own.live, verdict.next_token, own.root)
        own.round += own.live.long()

    def _record(self, read: list[dict[str, Any] | None], seconds: float) -> Iterator[Emission]:
        for row, record in enumerate(read):
            turn = self.turns[row]
            if turn is None or record is None:
                continue
            emitted = record.pop("tokens_emitted")
            if -1 in emitted or not emitted:
                raise UserError(self._no_law(len(turn.output_ids), turn.job))
            kept = self._append(row, turn, emitted)
            record["path"] = record["path"][: len(kept)]
            turn.steps.append({"emitted": len(kept), **record, "next_token": kept[-1], "ms": round(seconds * 1e3, 3)})
            yield self._emission(row, turn, kept)

    def _no_law(self, place: int, job: Job) -> str:
        where = f"the target's law is not a distribution at token {place} of question {job.id}"
        ends = "" if self.grammar is None else ", or a grammar that no token of the vocabulary goes on with there"
        return f"{where} (NaN logits{ends}): try target.dtype=float32, or look for a broken weight file"

    # -- rows --------------------------------------------------------------------------------------------------------

    def _admit(self, jobs: Iterator[Job]) -> Iterator[Emission]:
        """Fill free rows. Repeats, since a first token can already end its turn."""
        while free := [row for row, turn in enumerate(self.turns) if turn is None]:
            taken = [(row, job) for row, job in zip(free, jobs)]
            if not taken:
                return
            self.clock.mark("prefill")
            rows, batch = [row for row, _ in taken], [job for _, job in taken]
            first = self._prefill(rows, batch).tolist()
            self.graphs.follow(self._kept())
            self.clock.settle()
            for row, job, token in zip(rows, batch, first):
                if token < 0:
                    raise UserError(self._no_law(0, job))
                turn = self.turns[row] = Turn(job)
                yield self._emission(row, turn, self._append(row, turn, [token]))

    def _prefill(self, rows: list[int], jobs: list[Job]) -> Tensor:
        target, drafter, _, _, sampler = self._parts()
        length = torch.tensor([len(job.prompt_ids) for job in jobs], device=self.device)
        tokens = torch.zeros(len(rows), int(max(map(len, (j.prompt_ids for j in jobs)))), dtype=torch.long)
        for i, job in enumerate(jobs):
            tokens[i, : len(job.prompt_ids)] = torch.tensor(job.prompt_ids)
        tokens = tokens.to(self.device)
        keys = [row_key(self.seed, job.id, job.turn) for job in jobs]
        key = torch.tensor(keys, device=self.device)
        logits, features = target.extend(rows, tokens, length, drafter.taps)
        allow = None if self.grammar is None else self.grammar.start(rows)[:, None]
        p = sampler.warp(sampler.process(logits[:, None], tokens, length, allow=allow))[:, 0]
        first = CounterRng(key, torch.zeros_like(key)).pick(p)
        self.clock.mark("draft")
        drafter.extend(rows, tokens, length, features)
        self.clock.mark("prefill")
        own = self.rows
        own.tokens[rows, : tokens.shape[1]] = tokens
        own.tokens[rows, length] = first
        own.root[rows], own.length[rows], own.key[rows] = first, length, key
        own.budget[rows] = torch.tensor([job.budget - 1 for job in jobs], device=self.device)
        own.round[rows], own.live[rows] = 1, True
        own.row_id[rows] = torch.tensor([key % (1 << 31) for key in keys], device=self.device)
        return first

    def _append(self, row: int, turn: Turn, tokens: list[int]) -> list[int]:
        """Add tokens to the answer, cut at the token that completes a stop string -> those that stay."""
        if self.grammar is not None:
            self.grammar.advance(row, tokens)
        for count, token in enumerate(tokens, 1):
            turn.output_ids.append(token)
            if self.stop and (cut := self._stop_at(turn)) is not None:
                turn.text, turn.finish = cut, "stop"
                return tokens[:count]
        if turn.output_ids[-1] in self.parts.target.eos:
            turn.finish = "eos"
        elif len(turn.output_ids) >= turn.job.budget:
            turn.finish = "length"
        return tokens

    def _stop_at(self, turn: Turn) -> str | None:
        text = self.decode(turn.output_ids)
        found = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else None

    def _emission(self, row: int, turn: Turn, tokens: list[int]) -> Emission:
        done = bool(turn.finish)
        if done:
            if turn.finish != "stop":
                turn.text = self.decode(turn.output_ids)
            self.turns[row] = None
            self.rows.live[row] = False
            self.parts.drafter.release([row])
            if self.grammar is not None:
                self.grammar.release(row)
        return Emission(turn, tokens, done)


def _pack(tree: Tree, verdict: Verdict, emitted: Tensor) -> Work:
    """What was emitted, and the tree for the trace."""
    tokens = torch.where(tree.valid, tree.tokens, -1)
    score = tree.score.float().nan_to_num(neginf=-1e9).double().view(torch.long)
    packed = torch.cat([emitted, verdict.path, tokens, tree.parent, score, verdict.length[:, None]], 1)
    return Work(verdict, packed, (emitted.shape[1], verdict.path.shape[1], tokens.shape[1]))


def _read(work: Work) -> list[dict[str, Any] | None]:
    """The one device read of a step."""
    packed, (most, path, nodes) = work.packed.cpu(), work.widths
    widths = [most, path, nodes, nodes]
    records: list[dict[str, Any] | None] = []
    for row, scores in zip(packed.tolist(), packed[:, sum(widths) : -1].contiguous().view(torch.double).tolist()):
        parts, at = [], 0
        for width in widths:
            parts.append(row[at : at + width])
            at += width
        count = row[-1]
        records.append(
            {
                "tokens_emitted": parts[0][:count],
                "tokens": parts[2],
                "parent": parts[3],
                "score": [round(s, 4) if s > -1e8 else None for s in scores],
                "path": parts[1][:count],
            }
            if count
            else None
        )
    return records
