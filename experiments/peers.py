"""Our decoding beside transformers' and two other libraries': same weights, same prompts, same machine, in one run.

    pip install --no-deps flashspec==0.3.1 economize==0.3.2          # or '.[peers]'; without them their rows say so
    python experiments/peers.py tune=true out=runs/peers              # each row's setting, on other prompts; may be left out
    python experiments/peers.py out=runs/peers [rows=hf,plain,eagle] [limit=14] [max_new_tokens=64] [repeats=1] [overrides ...]
    python experiments/peers.py memory=true out=runs/peers            # peak memory, a fresh process for each row

A FOLDER that was begun is gone on with, or only read if it is complete: lines.jsonl has a line for each (prompt, row).
Overrides (`target.threads=..`, `eagle_tuned:tree.depth=3`) are of our command line; `NAME:key=value` holds for one row.

**What is equal for all.** The target: the adapter's weights to the bit (its matrices are rounded to half precision once;
everyone computes in float32 with them), in a model of each library's own that no adapter has touched (`engines.py`). The
prompts: token ids of the built-in ones, 7k of them hold k of each kind. Greedy, the same end tokens, the same budget, one row.
Drafters that can be ours are ours: the draft models are our distilled small LM, on its own draft vocabulary, and Medusa's
heads are ours; what needs weights that nobody has for this target is a row that says so. Every row's setting is found in the
same way: `tune=true` tries a few on one prompt of each kind that the table does not hold, and keeps the fastest; without it
each row has its library's default.

**How it is measured.** Prompt by prompt, every row in turn, in an order that rotates, after a warm-up of its own on the first
prompt. The clock runs from token ids to token ids, prompt included; tokens/s are generated tokens over these seconds for
every row. `repeats` asks all again and takes each answer's median. A ratio is of sums, with a 95% interval of the bootstrap
over prompts, which are paired. Accepted length: tokens after the first over passes of the target after the first, bonus
included; passes are counted outside the libraries where they call the model, else by their own log.

**The floor.** A pass must read the weights once: the bytes as the row holds them (ours half precision, the others' float32 or
bfloat16), over the read bandwidth, which is measured in the same run, before each prompt: a sum over 256 MB of float32 on the
run's own threads, the best of five; the median over prompts. "Time / floor" is a row's seconds a token in such passes:
plain decoding cannot get below 1, drafting can.

**Peak memory** (`memory=true`) is that of a process of the row's own while it answers the longest prompt, everything in it
counted; what loading takes is forgotten before, where the system can. **Equal to plain** compares token by token with our plain
decoding. Where answers part, the largest distance of the two tokens' logits at such a place is given: rounding in another
order explains distances about 1e-4, and bfloat16 is another model.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from engines import ECONOMIZE, ENGINES, FLASHSPEC, Decode, Models, Setting, configuration, own, start
from machine import bandwidth, weight_bytes
from standing import Standing, tables

from specresearch import cli, console
from specresearch.build import make
from specresearch.decode import Decoder, Job
from specresearch.models.hf import one_line
from specresearch.provenance import peak_memory, provenance, reset_peak_memory
from specresearch.results import append_lines, read_lines
from specresearch.types import UserError

OPTIONS = {
    "out": "",
    "rows": "",
    "limit": "14",
    "max_new_tokens": "64",
    "repeats": "1",
    "memory": "",
    "tune": "",
    "one": "",
}
WARM_UP, TUNED_ON, TUNED_TOKENS, BATCH = 8, 7, 24, 8


@dataclass(frozen=True)
class Plan:
    folder: Path
    rows: list[str]
    limit: int
    budget: int
    repeats: int
    given: list[str]  # overrides of our own command line
    memory: bool = False
    tune: bool = False
    one: str = ""  # the row whose memory this process measures


@dataclass(frozen=True)
class Prompt:
    id: Any
    kind: str
    ids: list[int]


def plan_of(arguments: Sequence[str]) -> Plan:
    pairs = [a.partition("=")[::2] for a in arguments]
    said = OPTIONS | {key: value for key, value in pairs if key in OPTIONS}
    given = [a for a, (key, _) in zip(arguments, pairs) if key not in OPTIONS]
    rows = said["rows"].split(",") if said["rows"] else list(ENGINES)
    if unknown := [row for row in [*rows, said["one"]] if row and row not in ENGINES]:
        raise UserError(f"rows={','.join(unknown)} is unknown: use some of {', '.join(ENGINES)}")
    numbers = [said[key] for key in ("limit", "max_new_tokens", "repeats")]
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise UserError("limit, max_new_tokens and repeats are whole numbers of at least 1")
    folder = Path(said["out"] or f"runs/peers/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    return Plan(folder, rows, *map(int, numbers), given, said["memory"] == "true", said["tune"] == "true", said["one"])


# -- one answer after the other --------------------------------------------------------------------------------------------


class Racer:
    """A row, started when its turn comes for the first time. What goes wrong in it is its own affair, and is written down."""

    def __init__(self, name: str, setting: Setting, models: Models):
        self.name, self.setting, self.models = name, setting, models
        self.decode: Decode | None = None
        self.fault = ""

    def answer(self, prompt: Prompt, budget: int) -> dict[str, Any] | None:
        """None where it cannot: `fault` says why."""
        try:
            if self.fault:
                return None
            if self.decode is None:
                self.decode = start(self.name, self.models, self.setting)
                self.decode(prompt.ids, min(WARM_UP, budget))
            gc.collect()
            began = time.perf_counter()
            answer = self.decode(prompt.ids, budget)
            seconds = time.perf_counter() - began
        except Exception as error:  # other people's programs raise many kinds
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.fault = kind + one_line(error)
            return None
        done = {"tokens": len(answer.ids), "seconds": seconds, "passes": answer.passes, "output_ids": answer.ids}
        return done | ({"time": answer.time} if answer.time else {})


def take_turns(racers: Mapping[str, Racer], prompts: Sequence[Prompt], plan: Plan, path: Path) -> None:
    """Every prompt by every row, in an order that rotates; what `path` holds already is not asked again."""
    done = {(x["row"], x.get("id"), x.get("repeat")) for x in read_lines(path)}
    turns = [(repeat, prompt) for repeat in range(plan.repeats) for prompt in prompts]
    with console.progress() as bar:
        task = bar.add_task("decoding", total=len(turns) * len(racers), note="")
        for number, (repeat, prompt) in enumerate(turns):
            if ("bandwidth", prompt.id, repeat) not in done:
                rate = bandwidth(torch.device("cpu"))
                append_lines(path, [{"row": "bandwidth", "id": prompt.id, "repeat": repeat, "rate": rate}])
            at = number % len(racers)
            for row in [*racers][at:] + [*racers][:at]:
                place = {"row": row, "id": prompt.id, "kind": prompt.kind, "repeat": repeat}
                if (row, prompt.id, repeat) not in done and (found := racers[row].answer(prompt, plan.budget)):
                    append_lines(path, [place | {"prompt_tokens": len(prompt.ids)} | found])
                bar.update(task, advance=1, note=row)


# -- around it -------------------------------------------------------------------------------------------------------------


def prompts_of(models: Models, plan: Plan) -> tuple[list[Prompt], list[Prompt]]:
    """The table's, and those that settings are found on: the last ones, which the table must not hold."""
    questions = make(configuration(own("", models.given)), "prompts")
    most = len(questions) - TUNED_ON
    if plan.limit > most > 0:
        raise UserError(f"limit={plan.limit}: use at most {most}, the others are for tune=true")
    asked = [
        Prompt(q.id, q.kind, models.target.chat([{"role": "user", "content": q.turns[0]}]))
        for q in [*questions[: plan.limit], *questions[max(most, 0) :]]
    ]
    return asked[: plan.limit], asked[plan.limit :]


def tune(plan: Plan, models: Models, prompts: Sequence[Prompt]) -> None:
    """The fastest setting of every row -> settings.json"""
    tried = {f"{name}@{i}": (name, s) for name in plan.rows for i, s in enumerate(ENGINES[name].settings)}
    tried = {label: each for label, each in tried.items() if len(ENGINES[each[0]].settings) > 1}
    racers = {label: Racer(name, setting, models) for label, (name, setting) in tried.items()}
    path = plan.folder / "tuning.jsonl"
    take_turns(racers, prompts, replace(plan, budget=min(plan.budget, TUNED_TOKENS), repeats=1), path)
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
    take_turns(racers, prompts, plan, plan.folder / "lines.jsonl")
    about["faults"] = about.get("faults", {}) | {name: racer.fault for name, racer in racers.items()}
    about |= {"where": where(models), "weights": weights(models), "prompts": len(prompts)}
    about["apart"] = differences(models, plan.folder, prompts)
    if "passes" not in about:
        about["passes"] = pass_times(models)
    if "batch" not in about and {"plain", "eagle"} <= set(plan.rows):
        about["batch"] = batches(models, settings, prompts, plan.budget)
    write_json(plan.folder / "about.json", about)


def weights(models: Models) -> dict[str, int]:
    """Bytes that a pass reads, by how they are held."""
    model = models.target.model
    return {"ours": weight_bytes(model), "float32": weight_bytes(model, 4), "bfloat16": weight_bytes(model, 2)}


def pass_times(models: Models) -> dict[str, float]:
    """Seconds of target passes, by nodes, in turns."""
    times: dict[int, list[float]] = {nodes: [] for nodes in (1, 8, 32)}
    for _ in range(3):
        for nodes in times:
            times[nodes].append(models.target.seconds(nodes))
    return {str(nodes): statistics.median(each) for nodes, each in times.items()}


def batches(
    models: Models, settings: Mapping[str, Any], prompts: Sequence[Prompt], budget: int
) -> dict[str, list[float]]:
    """Tokens per second of eight rows at a time, plainly and with EAGLE, three times in turns."""
    prompts = (list(prompts) * BATCH)[: 2 * BATCH]
    parts = {
        name: models.parts(f"drafter={drafter}", name=name) for name, drafter in (("plain", "none"), ("eagle", "eagle"))
    }
    capacity = 128 * -(-(max(len(p.ids) for p in prompts) + budget) // 128)
    rates: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(3):
        for name in [*parts][number % 2 :] + [*parts][: number % 2]:
            mine, slots = parts[name], max(parts[name].policy.asked, parts[name].policy.size)
            mine.target.reserve(BATCH, capacity, slots)
            mine.drafter.reserve(BATCH, capacity, slots)
            decoder = Decoder(mine, batch=BATCH, capacity=capacity, seed=0, decode=mine.target.text, stop=[])
            began = time.perf_counter()
            jobs = [Job(i, p.kind, 0, p.ids, budget) for i, p in enumerate(prompts)]
            tokens = sum(len(e.tokens) for e in decoder.run(iter(jobs)))
            rates[name].append(tokens / (time.perf_counter() - began))
    return rates


def differences(models: Models, folder: Path, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Where an answer first parts from plain decoding's: the largest distance of the two tokens' logits, by row."""
    answers: dict[str, dict[Any, list[int]]] = {}
    for x in read_lines(folder / "lines.jsonl"):
        if "output_ids" in x:
            answers.setdefault(x["row"], {}).setdefault(x["id"], x["output_ids"])
    apart: dict[str, float] = {}
    plain, asked = answers.get("plain", {}), {prompt.id: prompt.ids for prompt in prompts}
    for row, each in answers.items():
        for id, ids in each.items():
            if id in plain and id in asked and ids != plain[id]:
                apart[row] = max(apart.get(row, 0.0), distance(models.target, asked[id], ids, plain[id]))
    return apart


def distance(target: Any, prompt: list[int], one: list[int], other: list[int]) -> float:
    """Infinite where one answer goes on and the other ends."""
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)
    if at is None:
        return float("inf")
    known = torch.tensor([prompt + one[:at]], device=target.device)
    logits = target.plain(known, torch.tensor([known.shape[1] - 1], device=target.device))[0, 0]
    return float((logits[one[at]] - logits[other[at]]).abs())


def where(models: Models) -> str:
    source = provenance(models.target)
    device, versions = source["device"], source["versions"]
    others = ", ".join(f"{name} {installed(name)}" for name in (FLASHSPEC, ECONOMIZE))
    return (
        f"{source['time'][:10]}, {device['name']}, {device['threads']} threads, {device['dtype']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, {others}"
    )


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


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
