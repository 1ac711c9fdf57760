"""Our decoding beside transformers' and two other libraries': same weights, same prompts, same machine, in one run.

    pip install --no-deps flashspec==0.3.1 economize==0.3.2          # or '.[peers]'; without them their rows say so
    python experiments/peers.py tune=true out=runs/peers              # each row's setting, on other prompts; may be left out
    python experiments/peers.py out=runs/peers [rows=hf,plain,eagle] [limit=14] [max_new_tokens=64] [repeats=1] [overrides ...]
    python experiments/peers.py memory=true out=runs/peers            # peak memory, a fresh process for each row

A FOLDER that was begun is gone on with, or only read if it is complete: lines.jsonl has a line for each (prompt, row).
Overrides (`target.weights=null`, `eagle_tuned:tree.depth=3`) are of our command line; `NAME:key=value` holds for one row.

**What is equal for all.** The target: the adapter's weights to the bit (its matrices are rounded to half precision once;
everyone computes in float32 with them), in a model of each library's own that no adapter has touched (`peer/engines.py`). The
prompts: token ids of the built-in ones, 7k of them hold k of each kind. Greedy, the same end tokens, the same budget, one row.
Drafters that can be ours are ours: the draft models are our distilled small LM, on its own draft vocabulary, and Medusa's
heads are ours; what needs weights that nobody has for this target is a row that says so. Every row's setting is found in the
same way: `tune=true` tries a few on seven prompts, one of each kind, that the table does not hold, and keeps the fastest;
without it each row has its library's default. (All rows, 14 prompts and 64 tokens take about 20 minutes on two cores.)

**How it is measured.** Prompt by prompt, every row in turn, in an order that rotates, after a warm-up of its own on the first
prompt. The clock runs from token ids to token ids, prompt included; tokens/s are generated tokens over these seconds for
every row. `repeats` asks all again and takes each answer's median. A ratio is of sums, with a 95% interval of the bootstrap
over prompts, which are paired (from five on); a goal is judged by the ratio itself, so look at its interval. Accepted length:
tokens after the first over passes of the target after the first, bonus included; passes are counted outside the libraries
where they call the model, else by their own log.

**The floor.** A pass must read the weights once: the bytes as the row holds them (ours half precision, the others' float32 or
bfloat16), over the read bandwidth, which is measured in the same run, before each prompt: a sum over 256 MB of float32 on the
run's own threads, the best of five; the median over prompts. "Time / floor" is a row's seconds a token in such passes, prompt
included: plain decoding cannot get below 1, drafting can. The goal for plain decoding leaves the prompt out, on both sides of
the quotient, and lays the step beside what it must read: the weights, and K and V of the context so far.

**Peak memory** (`memory=true`) is that of a process of the row's own while it answers the longest prompt, everything in it
counted; what loading takes is forgotten before, where the system can. **Equal to plain** compares token by token with our plain
decoding. Where answers part, the largest distance of the two tokens' logits at such a place is given: rounding in another
order explains distances about 1e-4, and bfloat16 is another model.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from peer.aside import batches, differences, pass_times, weights, where
from peer.engines import ENGINES
from peer.machine import cache_bytes
from peer.plain_models import Models, configuration, own
from peer.race import Prompt, Racer, take_turns
from peer.standing import Standing, tables

from specresearch import cli, console
from specresearch.build import make
from specresearch.provenance import peak_memory, reset_peak_memory
from specresearch.results import read_lines
from specresearch.types import UserError

OPTIONS = {
    "out": "",
    "rows": "",
    "limit": "",
    "max_new_tokens": "64",
    "repeats": "1",
    "memory": "",
    "tune": "",
    "one": "",
}
PROMPTS, TUNED_ON, TUNED_TOKENS = 14, 7, 24


@dataclass(frozen=True)
class Plan:
    folder: Path
    rows: list[str]
    limit: int | None  # prompts of the table; None: 14, or as many as there are
    budget: int
    repeats: int
    given: list[str]  # overrides of our own command line
    memory: bool = False
    tune: bool = False
    one: str = ""  # the row whose memory this process measures


def plan_of(arguments: Sequence[str]) -> Plan:
    pairs = [a.partition("=")[::2] for a in arguments]
    said = OPTIONS | {key: value for key, value in pairs if key in OPTIONS}
    given = [a for a, (key, _) in zip(arguments, pairs) if key not in OPTIONS]
    rows = said["rows"].split(",") if said["rows"] else list(ENGINES)
    if unknown := [row for row in [*rows, said["one"]] if row and row not in ENGINES]:
        raise UserError(f"rows={','.join(unknown)} is unknown: use some of {', '.join(ENGINES)}")
    numbers = {key: said[key] for key in ("limit", "max_new_tokens", "repeats") if said[key] or key != "limit"}
    if wrong := [f"{key}={number}" for key, number in numbers.items() if not number.isdigit() or not int(number)]:
        raise UserError(f"{wrong[0]}: use a whole number of at least 1")
    limit, budget, repeats = (
        int(numbers[key]) if key in numbers else None for key in ("limit", "max_new_tokens", "repeats")
    )
    folder = Path(said["out"] or f"runs/peers/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    return Plan(
        folder,
        rows,
        limit,
        budget or 1,
        repeats or 1,
        given,
        said["memory"] == "true",
        said["tune"] == "true",
        said["one"],
    )


# -- around it -------------------------------------------------------------------------------------------------------------


def prompts_of(models: Models, plan: Plan) -> tuple[list[Prompt], list[Prompt]]:
    """The table's, and those that settings are found on: the last ones, which the table must not hold."""
    questions = make(configuration(own("", models.given)), "prompts")
    most = max(len(questions) - TUNED_ON, 1)
    count = min(PROMPTS, most) if plan.limit is None else plan.limit
    if count > most:
        raise UserError(f"limit={count}: use at most {most}, the others are for tune=true")
    asked = [
        Prompt(q.id, q.kind, models.target.chat([{"role": "user", "content": q.turns[0]}]))
        for q in [*questions[:count], *questions[most:]]
    ]
    return asked[:count], asked[count:]


def tune(plan: Plan, models: Models, prompts: Sequence[Prompt]) -> None:
    """The fastest setting of every row -> settings.json"""
    tried = {f"{name}@{i}": (name, s) for name in plan.rows for i, s in enumerate(ENGINES[name].settings)}
    tried = {label: each for label, each in tried.items() if len(ENGINES[each[0]].settings) > 1}
    racers = {label: Racer(name, setting, models) for label, (name, setting) in tried.items()}
    path = plan.folder / "tuning.jsonl"
    take_turns(racers, prompts, 1, min(plan.budget, TUNED_TOKENS), path)
    rates: dict[str, float] = {}
    for label in tried:
        done = [x for x in read_lines(path) if x["row"] == label]
        if len(done) == len(prompts):
            rates[label] = sum(x["tokens"] for x in done) / sum(x["seconds"] for x in done)
    chosen = read_json(plan.folder / "settings.json")
    print("| row | setting | tokens/s |\n|---|---|---:|")
    for label, (name, setting) in tried.items():
        rate = f"{rates[label]:.1f}" if label in rates else racers[label].fault
        best = max((x for x in rates if tried[x][0] == name), key=rates.__getitem__, default=None)
        print(f"| {name} | {json.dumps(setting)} | {rate}{' *' if label == best else ''} |")
        if label == best:
            chosen[name] = dict(setting)
    write_json(plan.folder / "settings.json", chosen)


def record(plan: Plan, models: Models, prompts: Sequence[Prompt]) -> None:
    """Answer what is left, then what is measured apart from the prompts."""
    tuned = read_json(plan.folder / "settings.json")
    settings = {name: tuned.get(name, ENGINES[name].settings[0]) for name in plan.rows}
    about = read_json(plan.folder / "about.json")
    wanted = {"max_new_tokens": plan.budget, "overrides": plan.given}
    before = about.get("settings", {})
    if any(about.get(key, value) != value for key, value in wanted.items()) or any(
        before.get(name, setting) != setting for name, setting in settings.items()
    ):
        raise UserError(f"settings have changed since {plan.folder} was begun: put them back, or start another folder")
    about |= wanted | {"settings": before | settings}
    write_json(plan.folder / "about.json", about)
    racers = {name: Racer(name, settings[name], models) for name in plan.rows}
    take_turns(racers, prompts, plan.repeats, plan.budget, plan.folder / "lines.jsonl")
    about["faults"] = about.get("faults", {}) | {name: racer.fault for name, racer in racers.items()}
    about |= {"where": where(models), "weights": weights(models), "prompts": len(prompts)}
    about["token_bytes"] = cache_bytes(models.target)
    about["apart"] = differences(models, plan.folder, prompts)
    if "passes" not in about:
        about["passes"] = pass_times(models)
    if "batch" not in about and {"plain", "eagle"} <= set(plan.rows):
        about["batch"] = batches(models, settings, prompts, plan.budget)
    write_json(plan.folder / "about.json", about)


# -- memory ----------------------------------------------------------------------------------------------------------------


def memory(plan: Plan, arguments: Sequence[str]) -> None:
    """A process for each row -> memory.json"""
    path = plan.folder / "memory.json"
    found = read_json(path)
    for row in plan.rows:
        if row not in found:
            command = [sys.executable, __file__, *(a for a in arguments if not a.startswith("memory=")), f"one={row}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == cli.OK:
                found[row] = int(done.stdout.split()[-1])
                write_json(path, found)


def one(plan: Plan, models: Models, prompts: Sequence[Prompt]) -> None:
    settings = read_json(plan.folder / "settings.json")
    longest = max(prompts, key=lambda p: len(p.ids))
    racer = Racer(plan.one, settings.get(plan.one, ENGINES[plan.one].settings[0]), models)
    racer.answer(replace(longest, ids=longest.ids[:16]), 2)
    if ENGINES[plan.one].library != "ours":
        models.forget()
    gc.collect()
    reset_peak_memory()
    if racer.answer(longest, plan.budget) is None:
        sys.exit(console.fail(racer.fault))
    print(peak_memory(torch.device("cpu")))


# -- files and the whole ---------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(content, indent=1), encoding="utf-8")
    scratch.replace(path)


def standing(plan: Plan) -> Standing:
    lines = [x for x in read_lines(plan.folder / "lines.jsonl") if x["row"] in (*plan.rows, "bandwidth")]
    rows = {name: f"{ENGINES[name].library}: {ENGINES[name].what}" for name in plan.rows}
    held = {n: "bfloat16" if ENGINES[n].dtype else "ours" if ENGINES[n].library == "ours" else "float32" for n in rows}
    return Standing(rows, held, lines, read_json(plan.folder / "about.json"), read_json(plan.folder / "memory.json"))


def main(arguments: Sequence[str]) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # the libraries' own, at every call
    try:
        plan = plan_of(arguments)
        plan.folder.mkdir(parents=True, exist_ok=True)
        if plan.memory:
            memory(plan, [*arguments, f"out={plan.folder}"])
        else:
            models = Models(plan.given)
            prompts, others = prompts_of(models, plan)
            if plan.one:
                return one(plan, models, prompts)
            (tune(plan, models, others) if plan.tune else record(plan, models, prompts))
        if plan.tune:
            return
        text = tables(standing(plan))
    except KeyboardInterrupt:
        print(f"interrupted: go on with  out={plan.folder}  and the same arguments", file=sys.stderr)
        sys.exit(cli.INTERRUPTED)
    except Exception as error:
        sys.exit(cli.report(error))
    print(f"\n{text}\n\nwritten to {plan.folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
