"""The main job: answer the questions with and without speculation, measure both, check one against the other."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specresearch.baseline import Answers, interleaved, plain_of
from specresearch.conversations import Conversations, Settings, required_capacity
from specresearch.decode import Decoder, Emission, Parts, Turn
from specresearch.grammar.rows import standing
from specresearch.lossless.blackbox import BlackBox
from specresearch.lossless.greedy import GreedyJudge, verdict_of
from specresearch.lossless.reference import Reference, judge
from specresearch.lossless.whitebox import Log, WhiteBox, findings
from specresearch.metrics import Block, Line, from_drafts, summarise
from specresearch.prompts import Question
from specresearch.recording import Recorder, check_recordable
from specresearch.results import append_lines, read_finished, read_lines, with_answers, write_lines
from specresearch.speed import predicted_speedup
from specresearch.trees.optimal import sizes_to_measure
from specresearch.types import Grammar, UserError

WARM_UP_TOKENS = 8


class Run:
    """Blocks of questions, each answered in every mode, in alternating order. What a block needs is kept on disk."""

    def __init__(
        self,
        parts: Parts,
        questions: Sequence[Question],
        settings: Settings,
        folder: Path,
        resume: bool,
        on_turn: Callable[[Line, list[Line], list[Block]], None],
        on_tokens: Callable[[Emission], None] | None = None,
        answers: Answers | None = None,
        rank: int = 0,
    ):
        self.parts, self.settings, self.folder = parts, settings, folder
        self.on_turn, self.on_tokens, self.rank = on_turn, on_tokens, rank
        # A block that breaks off is redone, so that batches are composed as in an uninterrupted run: keep blocks small.
        size = settings.batch_size if settings.batch_size == 1 else 2 * settings.batch_size
        self.questions = [questions[i : i + size] for i in range(0, len(questions), size)]
        self.answers = answers  # plain ones, of other jobs of a sweep
        self.timed = set(range(len(self.questions))) if answers is None else interleaved(self.questions)
        self.origin = digest(questions, settings, parts.sampler.grammar)
        self.lines, self.blocks = read_finished(folder) if resume else ([], [])
        if any(block["origin"] != self.origin for block in self.blocks):
            raise UserError(
                f"prompts or settings have changed since {folder} was begun: put them back, or start a new run"
            )
        write_lines(folder / "trace.jsonl", self.lines)
        write_lines(folder / "blocks.jsonl", self.blocks)
        done = sum(block["dense"]["answers"] for block in self.blocks if "dense" in block)
        if settings.trace.get("dense"):
            write_lines(folder / "dense.jsonl", read_lines(folder / "dense.jsonl")[:done] if done else [])
        self.fresh: list[Line] = []  # answers of the block in progress
        self.unfinished = 0  # such answers when the run broke off
        self.capacity = capacity = required_capacity(parts.target, questions, settings)
        slots = max(parts.policy.asked, parts.policy.size)
        self.tree_size = max(slots, 64)  # the checks replay passes in the same cache
        self.reserve = lambda: parts.target.reserve(settings.batch_size, capacity, self.tree_size)
        self.reserve()
        parts.drafter.reserve(settings.batch_size, capacity, slots)
        decoder = {"batch": settings.batch_size, "capacity": capacity, "seed": settings.seed}
        self.log = Log()  # of the white box, if it is wanted
        logged = replace(parts, verifier=WhiteBox(parts.verifier, self.log)) if settings.log else parts
        self.speculative = Decoder(logged, **decoder, decode=parts.target.text, stop=settings.stop)
        self.plain = Decoder(plain_of(parts), **decoder, decode=parts.target.text, stop=settings.stop)
        self.slots = slots
        self.recorder = Recorder(parts.policy) if settings.trace.get("dense") else None
        if self.recorder is not None:
            check_recordable(parts.drafter, parts.policy)
            walked = replace(parts, policy=self.recorder)
            self.dense = Decoder(walked, **decoder | {"batch": 1}, decode=parts.target.text, stop=settings.stop)
        exact = settings.batch_size == 1
        self.judge = GreedyJudge(parts.target, parts.sampler, exact_replay=exact, tree_size=self.tree_size)
        self.reference = Reference(parts.target, parts.sampler)
        self.box = BlackBox()  # evidence of all finished blocks, above temperature 0
        for block in self.blocks:
            self._pool(block)

    def todo(self) -> list[int]:
        """The blocks that are left."""
        done = {block["block"] for block in self.blocks}
        return [index for index in range(len(self.questions)) if index not in done]

    def execute(self, todo: Sequence[int] | None = None) -> None:
        """Answer what is left, or those of its blocks that are named."""
        for _ in self.by_block(todo):
            pass

    def reload(self) -> None:
        """Take over what other processes have added to the run's files."""
        self.lines, self.blocks = read_finished(self.folder)
        self.box, self.unfinished = BlackBox(), 0
        for block in self.blocks:
            self._pool(block)

    def by_block(self, todo: Sequence[int] | None = None) -> Iterator[Block]:
        """Answer what is left, block by block, so that several runs can take turns.

        On Ctrl-C or an error, the finished answers of the block are saved before it goes on its way.
        """
        todo = self.todo() if todo is None else todo
        if todo:
            self.reserve()  # another run may have needed the target's cache meanwhile
            self._warm_up(self.questions[todo[0]][0])
        for index in todo:
            try:
                self._block(index)
            except BaseException:
                append_lines(self.folder / "trace.jsonl", self.fresh)
                self.unfinished = len(self.fresh)
                raise
            yield self.blocks[-1]

    def _warm_up(self, question: Question) -> None:
        short = replace(self.settings, max_new_tokens=WARM_UP_TOKENS)
        plain = [self.plain] if self.settings.baseline or self.parts.drafter.simulated else []
        for decoder in (*plain, self.speculative):
            first = replace(question, turns=question.turns[:1])
            for emission in decoder.run(Conversations(self.parts.target, [first], short, self.capacity)):
                self._foretell([emission.turn.line()] if emission.done else [])

    def _block(self, index: int) -> None:
        questions, self.fresh = self.questions[index], []
        self.reserve()
        block: Block = {"block": index, "origin": self.origin, "kinds": sorted({q.kind for q in questions})}
        known = self._known(index)
        plain: list[Line] = known or []
        forward = sum("baseline" in done for done in self.blocks) % 2 == 0
        modes = self._modes(index, known is not None)
        if self.parts.drafter.simulated:  # which has to know the plain answers
            modes, forward = sorted(modes, key=lambda mode: mode != "baseline"), True
            plain = plain if known or "baseline" in modes else self._decode(questions, speculative=False)[1]
            self._foretell(plain)
        for mode in modes if forward else reversed(modes):
            if mode == "hf":
                block["hf"] = self._hf(questions)
            else:
                times, lines = self._decode(questions, mode == "speculative")
                if (
                    mode == "speculative" or index in self.timed
                ):  # in a sweep, all jobs compare times on the same blocks
                    block[mode] = times
                if mode == "baseline":
                    plain = lines
                    self._foretell(plain)
        if self.settings.check and self.parts.sampler.temperature == 0:
            block["check"] = self._check(plain)
        elif self.settings.check and not self.parts.verifier.lossy:
            block["evidence"] = judge(self.reference, self.fresh, BlackBox()).state()
            self._pool(block)
        if self.recorder is not None:
            block["dense"] = self._dense(questions, self.recorder)
        block |= {"answers": len(self.fresh), "rank": self.rank}
        append_lines(self.folder / "trace.jsonl", self.fresh)
        append_lines(self.folder / "blocks.jsonl", [block])
        self.lines, self.fresh = self.lines + self.fresh, []
        self.blocks.append(block)

    def _foretell(self, plain: Sequence[Line]) -> None:
        """A drafter that dictates its accepted lengths is told what plain decoding answers."""
        if self.parts.drafter.simulated:
            for line in plain:
                self.parts.drafter.foretell(line["prompt_ids"], line["output_ids"])

    def _known(self, index: int) -> list[Line] | None:
        """The plain answers of a block, where another job made them and this one need not time them."""
        if self.answers is None or not self.settings.baseline or index in self.timed:
            return None
        return self.answers.recall(self._jobs(self.questions[index]))

    def _modes(self, index: int, known: bool) -> list[str]:
        plain = [] if known or not self.settings.baseline else ["baseline"]
        outside = ["hf"] if self.settings.baseline == "hf" and index in self.timed else []
        return ["speculative", *plain, *outside]

    def _jobs(self, questions: Sequence[Question]) -> Conversations:
        return Conversations(self.parts.target, questions, self.settings, self.capacity)

    def _decode(self, questions: Sequence[Question], speculative: bool) -> tuple[Block, list[Line]]:
        decoder = self.speculative if speculative else self.plain
        jobs = self._jobs(questions)
        mark = {"simulated": True} if speculative and self.parts.drafter.simulated else {}
        lines: list[Line] = []
        budgets: dict[tuple[Any, int], int] = {}
        decoder.clock.reset()
        masked = decoder.grammar.seconds if decoder.grammar is not None else 0.0
        passes, began = decoder.passes, time.perf_counter()
        shown = 0.0  # time spent on showing progress, which is not decoding
        for emission in decoder.run(jobs):
            if emission.done:
                jobs.answered(emission.turn)
                lines.append(emission.turn.line() | mark)
                budgets[emission.turn.job.id, emission.turn.job.turn] = emission.turn.job.budget
            if speculative:
                at = time.perf_counter()
                self._show(emission, lines)
                shown += time.perf_counter() - at
        seconds = time.perf_counter() - began - shown
        order = {q.id: i for i, q in enumerate(questions)}
        lines.sort(key=lambda line: (order[line["id"]], line["turn"]))
        if speculative:
            self.fresh = lines
        elif self.answers is not None:
            self.answers.keep(lines, budgets)
        tokens = sum(len(line["output_ids"]) for line in lines)
        block: Block = {"tokens": tokens, "seconds": seconds, "target_passes": decoder.passes - passes}
        # Spec-Bench counts plain decoding's tokens so: from the text, less one an answer for a BOS.
        block["retokenised"] = sum(len(self.parts.target.encode(line["text"].strip())) - 1 for line in lines)
        if decoder.grammar is not None:
            block["mask_seconds"] = decoder.grammar.seconds - masked
        return block | {"time": dict(decoder.clock.seconds), "skipped": jobs.skipped}, lines

    def _dense(self, questions: Sequence[Question], recorder: Recorder) -> Block:
        """Walk the answers once more, plainly, and ask the drafter at every place. It counts in no number of the run."""
        began, settings, drafter = time.perf_counter(), self.settings, self.parts.drafter
        jobs = Conversations(self.parts.target, questions, settings, self.capacity)
        drafter.reserve(1, self.capacity, recorder.asked)
        lines: list[Line] = []
        drafts: list[dict[str, Any]] = []
        for emission in self.dense.run(jobs):
            if emission.turn.steps:
                drafts.append(recorder.take())
            if emission.done:
                jobs.answered(emission.turn)
                lines.append({k: v for k, v in emission.turn.line().items() if k != "steps"} | {"drafts": drafts})
                drafts = []
        drafter.reserve(settings.batch_size, self.capacity, self.slots)
        append_lines(self.folder / "dense.jsonl", lines)
        return {"answers": len(lines), "seconds": time.perf_counter() - began}

    def _show(self, emission: Emission, lines: list[Line]) -> None:
        self.fresh = lines  # should the user interrupt now
        if self.on_tokens is not None:
            self.on_tokens(emission)
        if emission.done:
            self.on_turn(lines[-1], self.lines + lines, self.blocks)

    def _hf(self, questions: Sequence[Question]) -> Block:
        target, tokens, seconds = self.parts.target, 0, 0.0
        jobs = self._jobs(questions)
        for job in jobs:  # one by one, as `generate` is mostly called
            began = time.perf_counter()
            ids = target.generate(job.prompt_ids, job.budget, self.parts.sampler, self.settings.stop)
            seconds += time.perf_counter() - began
            tokens += len(ids)
            jobs.answered(Turn(job, ids, target.text(ids)))
        return {"tokens": tokens, "seconds": seconds}

    def _pool(self, block: Block) -> None:
        if "evidence" in block:
            self.box.merge(BlackBox().load(block["evidence"]))

    def _check(self, plain: list[Line]) -> list[Line]:
        """Compare each answer with plain decoding's; where an earlier turn parted, the prompts differ and it stands alone."""
        baseline = {(line["id"], line["turn"]): line for line in plain}
        results = []
        for line in self.fresh:
            other = baseline.get((line["id"], line["turn"]))
            same = other is not None and other["prompt_ids"] == line["prompt_ids"]
            found = self.judge.compare(line, other["output_ids"] if same and other else None)
            results.append({"id": line["id"], "turn": line["turn"]} | found)
        return results

    def summary(self) -> dict[str, Any]:
        """Everything measured so far, all of it from the lines and the blocks."""
        found = self._lossless()
        if how := self.parts.drafter.simulated:
            found |= {"judged": found["verdict"], "reason": how}
            found["verdict"] = found["verdict"] if found["verdict"] == "violation" else "simulated"
        if self.settings.log:
            claims = findings(self.log)
            found["white_box"] = [claim.as_dict() for claim in claims]
            if any(claim.verdict == "violation" for claim in claims) and found["verdict"] != "lossy":
                found["verdict"] = "violation"
        mark: dict[str, Any] = {"simulated": how} if how else {}
        summary = mark | summarise(self.lines, self.blocks) | {"lossless": found}
        if (grammar := self.parts.sampler.grammar) is not None:
            summary["grammar"] = standings(grammar, self.lines, self.blocks)
            if summary["grammar"]["off"]:
                found["verdict"] = "violation"
        return summary

    def costs(self) -> dict[str, Any]:
        """Seconds of target passes by their number of nodes, up to this run's largest, and the speedup that follows.

        To be called when all is answered: what is in the cache is lost.
        """
        largest = max((len(step["tokens"]) for line in self.lines for step in line["steps"]), default=1)
        sizes = sizes_to_measure(self.settings.batch_size * largest)
        costs = {"target": {str(nodes): self.parts.target.seconds(nodes) for nodes in sizes}}
        return {"costs": costs, "predicted_speedup": predicted_speedup(with_answers(self.blocks, self.lines), costs)}

    def _lossless(self) -> dict[str, Any]:
        drafted = from_drafts(self.lines)
        if lossy := self.parts.verifier.lossy:
            bound = self.parts.verifier.tv_bound
            return {"kind": "none", "verdict": "lossy", "reason": lossy, "tv_bound": bound}
        if not self.settings.check:
            return {"kind": "none", "verdict": "not_checked" if drafted else "not_exercised", "reason": "check=false"}
        if self.parts.sampler.temperature > 0:
            report = self.box.report()
            says = f"{report.says}; {drafted:,} tokens from steps with drafts"
            found: str = "not_exercised" if report.verdict == "consistent" and not drafted else report.verdict
            return {"kind": "black_box", **report.as_dict(), "verdict": found, "from_drafts": drafted, "reason": says}
        results = [result for block in self.blocks for result in block.get("check", [])]
        evidence = {
            "answers": len(results),
            "equal": sum(result["equal"] for result in results),
            "reference": "plain decoding"
            if self.settings.baseline or self.parts.drafter.simulated
            else "teacher forcing",
            "near_ties": [entry for result in results for entry in result["near_ties"]],
            "violations": [entry for result in results for entry in result["violations"]],
        }
        verdict = verdict_of(results, drafted) if results else "not_checked"
        return {"kind": "greedy_equality", "verdict": verdict} | evidence


def digest(questions: Sequence[Question], settings: Settings, grammar: Grammar | None) -> str:
    """Tells whether a resumed run still is the same one. A grammar's file can change behind its name."""
    parts = (questions, settings) if grammar is None else (questions, settings, grammar.origin)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def standings(grammar: Grammar, lines: Sequence[Line], blocks: Sequence[Block]) -> dict[str, Any]:
    """How many answers are complete, cut or off the grammar, and the host's seconds for masks, drafting's included."""
    found = [standing(grammar, line["output_ids"]) for line in lines]
    seconds = sum(block["speculative"].get("mask_seconds", 0.0) for block in blocks)
    counts = {name: found.count(name) for name in ("complete", "cut", "off")}
    return {"kind": grammar.kind, "draft": grammar.draft, **counts, "mask_seconds": seconds}
