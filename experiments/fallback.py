"""What drafting costs where it never helps: `tree=auto` with drafts that are always wrong, against plain decoding.

    python experiments/fallback.py [drafters=eagle,medusa,small_lm,ngram] [repeats=2] [overrides ...]

Each drafter works as it does in a run, with its own weights and at its own cost, but its scores are moved on by one token, so
that what it proposes is something else than it thinks. Both modes answer the same questions and take turns step by step, so
that a slow second of the machine is both modes' (the answers are the same, so they may share a cache). Seconds per token, as
multiples of plain decoding's, by all clocks: nothing that a step does is left out, prompts are. The first question, while
drafts are found out, stands apart; the 95% interval is of the bootstrap over the other answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from peer.plain_models import Models, configuration, own
from swept import markdown
from torch import Tensor

from specresearch import cli, console
from specresearch.baseline import plain_of
from specresearch.build import make, settings_of
from specresearch.comparison.bootstrap import Bootstrap, Quotient
from specresearch.decode import Decoder, Emission, Job, Parts
from specresearch.provenance import provenance
from specresearch.types import Frontier, UserError

DRAFTERS = "eagle,medusa,small_lm,ngram"
AUTO, PLAIN = "auto", "plain"
HEAD = [
    "drafter",
    "first question",
    "the others",
    "95%",
    "steps with a draft",
    "accepted",
    "ms a step of plain decoding",
]


@dataclass
class Spent:
    """On one answer by one mode, its prompt left out."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    asked: int = 0  # steps in which something was proposed


Answer = dict[str, Spent]  # by mode


def mislead(parts: Parts) -> None:
    ask = parts.drafter.expand

    def wrong(frontier: Frontier) -> Tensor:
        return ask(frontier).roll(1, -1)

    parts.drafter.expand = wrong  # type: ignore[method-assign]


def decoders(parts: Parts, capacity: int) -> dict[str, Decoder]:
    slots = max(parts.policy.asked, parts.policy.size)
    parts.target.reserve(1, capacity, slots)
    parts.drafter.reserve(1, capacity, slots)
    options = {"batch": 1, "capacity": capacity, "seed": 0, "decode": lambda ids: "", "stop": []}
    return {AUTO: Decoder(parts, **options), PLAIN: Decoder(plain_of(parts), **options)}


def answer(modes: dict[str, Decoder], job: Job, first: str) -> Answer:
    """Both modes' steps in turn until both are done. Raises UserError where their answers differ."""
    spent, texts = {mode: Spent() for mode in modes}, {}
    runs = {mode: modes[mode].run(iter([job])) for mode in sorted(modes, key=lambda mode: mode != first)}
    for run in runs.values():
        next(run)  # the prompt
    while len(texts) < len(runs):
        for mode, run in runs.items():
            if mode not in texts and (emission := step(run, spent[mode])).done:
                texts[mode] = emission.turn.output_ids
    if texts[AUTO] != texts[PLAIN]:
        raise UserError(f"question {job.id} was answered differently: compare in float32, target.dtype=float32")
    return spent


def step(run: Iterator[Emission], spent: Spent) -> Emission:
    begun = time.perf_counter()
    emission = next(run)
    spent.seconds += time.perf_counter() - begun
    spent.tokens += len(emission.tokens)
    spent.steps += 1
    spent.asked += len(emission.turn.steps[-1]["tokens"]) > 1
    return emission


def race(models: Models, drafter: str, repeats: int) -> list[Answer]:
    chosen = ["tree=auto", f"drafter={drafter}"]
    parts = models.parts(*chosen, name=drafter)
    cfg = configuration([*chosen, *own(drafter, models.given)])
    settings = settings_of(cfg)
    questions = make(cfg, "prompts")[: settings.limit] * repeats
    prompts = [parts.target.chat([{"role": "user", "content": question.turns[0]}]) for question in questions]
    if len(prompts) < 2:
        raise UserError("one answer is too few, since the first one stands apart: use limit=2 or more, or repeats=2")
    mislead(parts)
    modes, found = decoders(parts, max(map(len, prompts)) + settings.max_new_tokens), []
    with console.progress() as bar:
        task = bar.add_task(drafter, total=len(prompts), note="")
        for i, prompt in enumerate(prompts):
            found.append(answer(modes, Job(i, "", 0, prompt, settings.max_new_tokens), (AUTO, PLAIN)[i % 2]))
            bar.update(task, advance=1)
    return found


def quotient(answers: Sequence[Answer]) -> Quotient:
    """Seconds a token with drafts over those without."""
    seconds, tokens = (
        {mode: np.array([[float(getattr(a[mode], name)) for a in answers]]) for mode in (AUTO, PLAIN)}
        for name in ("seconds", "tokens")
    )
    return Quotient(seconds[AUTO], tokens[AUTO]) / Quotient(seconds[PLAIN], tokens[PLAIN])


def row(drafter: str, answers: Sequence[Answer]) -> list[str]:
    boot = Bootstrap(10_000, 0.95, 0)
    first, others = (boot.estimate(quotient(some)) for some in (answers[:1], answers[1:]))
    own = [a[AUTO] for a in answers[1:]]
    steps, asked, tokens = (sum(getattr(x, name) for x in own) for name in ("steps", "asked", "tokens"))
    plain = sum(a[PLAIN].seconds for a in answers[1:]) / max(sum(a[PLAIN].steps for a in answers[1:]), 1)
    ends = [console.number(end, 3) for end in (others.low, others.high)]
    return [
        *(drafter, console.number(first.value, 3), console.number(others.value, 3), " to ".join(ends)),
        *(f"{asked} of {steps}", str(tokens - steps), f"{1e3 * plain:.1f}"),
    ]


def main(arguments: Sequence[str]) -> None:
    options = {"drafters": DRAFTERS, "repeats": "2"}
    pairs = [a.partition("=")[::2] for a in arguments]
    said = options | {key: value for key, value in pairs if key in options}
    models = Models([a for a, (key, _) in zip(arguments, pairs) if key not in options])
    rows, ended = [], cli.OK
    try:
        if not said["repeats"].isdecimal() or int(said["repeats"]) < 1:
            raise UserError(f"repeats={said['repeats']}: use a whole number of at least 1")
        if fixed := [a for a in models.given if a.split("=")[0] in ("drafter", "tree", "temperature")]:
            raise UserError(
                f"{fixed[0]}: this compares tree=auto with plain decoding at temperature 0; name drafters=..."
            )
        if "none" in said["drafters"].split(","):
            raise UserError("drafters=none proposes nothing, so there is nothing to compare: use drafters=eagle,ngram")
        for drafter in said["drafters"].split(","):
            rows.append(row(drafter, race(models, drafter, int(said["repeats"]))))
    except KeyboardInterrupt:
        print("interrupted: below are the drafters that were done", file=sys.stderr)
        ended = cli.INTERRUPTED
    except Exception as error:
        sys.exit(cli.report(error))
    if rows:
        print(f"\n{markdown(HEAD, rows)}\n\n{where(models)}")
    sys.exit(ended)


def where(models: Models) -> str:
    source = provenance(models.target)
    device, versions = source["device"], source["versions"]
    place = f"{source['time'][:10]}, {device['name']}, {device['threads']} threads, {device['dtype']}"
    return f"{place}, torch {versions['torch']}; overrides: {' '.join(models.given) or 'none'}"


if __name__ == "__main__":
    main(sys.argv[1:])
