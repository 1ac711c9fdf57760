"""`python -m specresearch.certify`: is the output the target's own? Five layers of evidence, and what each cannot see.

Exit status: 0, 1 for an error, 2 where a layer found a violation, 130 after Ctrl-C; `resume=DIR` goes on after that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.progress import Progress
from rich.table import Table

from specresearch import audited, cli, commands, console, options, overrides
from specresearch.build import build, grammar_of, make, sampler_of
from specresearch.conversations import Settings
from specresearch.decode import Parts
from specresearch.lossless.blackbox import BlackBox, plan
from specresearch.lossless.exact import EXACT, certify, shapes_for
from specresearch.lossless.forward import check_forward
from specresearch.lossless.greedy import TokensJudge
from specresearch.lossless.grid import grid
from specresearch.lossless.reference import Reference, judge, of_lines
from specresearch.lossless.whitebox import Log, WhiteBox, findings, verdict_of
from specresearch.metrics import Line, from_drafts
from specresearch.overrides import CONF, one_line
from specresearch.prompts import Question
from specresearch.provenance import provenance
from specresearch.results import append_lines, read_lines, write_lines
from specresearch.sampling import Sampler
from specresearch.types import Target, TreePolicy, UserError, Verifier

LAYERS = {
    "l0": "exact: every outcome of the rule",
    "l1": "kernels: the same in float32, as they run",
    "l2": "white box: drafts and coins of a run",
    "l3": "black box: emitted tokens",
    "l4": "forward: tree passes",
}
ENGINES = ("own", "hf", "tokens")
BAD = ("biased", "violation", "fault")
OPEN = ("lossy", "not_checked", "not_exercised")  # nothing wrong was found, and nothing shown
SAVE_SECONDS = 10.0
COUNTER_EXAMPLES = 3  # printed; all are in the file
SEQUENCES = 4  # of the forward check
Found = dict[str, Any]  # what a layer found: {verdict, says, ...evidence}


@hydra.main(config_path=CONF, config_name="certify", version_base="1.3")
@cli.guarded("certify")
def job(cfg: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    resumed = cfg.resume is not None
    cfg = overrides.frozen(cfg, folder)
    if cfg.plan.tv is not None:
        print(planned(**cfg.plan))
        return
    layers = chosen_layers(cfg)
    tracker = make(cfg, "tracker")
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    tracker.start(config, folder, group=None, tags=["certify", cfg.engine])
    found: dict[str, Found] = {}
    place, target = None, None
    try:
        with console.progress() as bar:
            rules = chosen_rules(cfg)
            if "l0" in layers:
                found["l0"] = exact(rules, bar)
            if "l1" in layers:
                found["l1"] = kernels(rules, bar)
            if {"l2", "l3", "l4"} & {*layers}:
                audit = Audit(cfg, layers, folder, resumed)
                target = audit.target
                found |= audit.execute(bar, lambda values, step: tracker.log(values, step=step))
    except KeyboardInterrupt:
        console.note(f"interrupted: go on with  {commands.go_on(folder, 'specresearch.certify')}")
        raise
    finally:
        place = tracker.finish({"lossless": {name: _short(layer) for name, layer in found.items()}})
    verdict = next((v for v in (*BAD, *OPEN) if v in {f["verdict"] for f in found.values()}), "passed")
    where = provenance(target) if target is not None else {}
    cli.save(folder / "certificate.json", {"verdict": verdict, "layers": found, "config": config, "provenance": where})
    show(found)
    console.out.print(f"[bold]written to[/]  {folder}/  certificate.json")
    if place:
        console.out.print(place, markup=False)
    cli.statuses.add(cli.VIOLATION if verdict in BAD else cli.OK)


def _short(layer: Found) -> Found:
    return {key: value for key, value in layer.items() if isinstance(value, str | int | float)}


def planned(tv: float, alpha: float, power: float) -> str:
    tokens = plan(tv, alpha, power)
    return (
        f"{tokens:,} sampled tokens show a bias of TV {tv:g} with probability {power:g}, and a right engine is called biased "
        f"with probability {alpha:g} at most"
    )


def chosen_layers(cfg: DictConfig) -> list[str]:
    if cfg.engine not in ENGINES:
        raise UserError(f"engine={cfg.engine} is unknown: {overrides.near(cfg.engine, ENGINES)}")
    default = ["l0", "l1", "l3", "l4"] if cfg.engine == "own" else ["l3"]
    given = cfg.layers if cfg.layers is not None else default
    layers = list(given) if OmegaConf.is_list(given) or isinstance(given, list) else [given]
    if odd := [layer for layer in layers if layer not in LAYERS]:
        raise UserError(f"layers={odd[0]} is unknown: use some of [{','.join(LAYERS)}]")
    if cfg.engine != "own" and (odd := sorted({*layers} - {"l3"})):
        raise UserError(f"layers={odd[0]} looks into our own loop, and engine={cfg.engine}: use layers=[l3]")
    if not layers:
        raise UserError(f"layers=[] leaves nothing to do: use some of [{','.join(LAYERS)}]")
    return sorted({*layers})


def chosen_rules(cfg: DictConfig) -> list[Verifier]:
    """The chosen verifier first, then the others of the project."""
    if cfg.rules not in ("all", "chosen"):
        raise UserError(f"rules={cfg.rules} is unknown: use all or chosen")
    make(cfg, "kernels")
    first = make(cfg, "verifier")
    others = options.verifiers().values() if cfg.rules == "all" else ()
    return [first, *(rule for rule in others if type(rule) is not type(first))]


# -- the rules: layers 0 and 1 ---------------------------------------------------------------------------------------------


def exact(rules: Sequence[Verifier], bar: Progress) -> Found:
    work = [(rule, name, policy) for rule in rules for name, policy in shapes_for(rule).items()]
    task = bar.add_task("l0 exact", total=len(work), note="")
    rows = []
    for rule, name, policy in work:
        one = _tried(certify, rule, policy, name)
        rows.append(asdict(one) | {"verdict": one.verdict})
        bar.update(task, advance=1, note=f"{one.rule} on {name}")
    lossless = [row for row in rows if row["verdict"] != "lossy"]
    worst = max((row["worst"] for row in lossless), default=0.0)
    cells = min((row["cells"] for row in rows), default=0)
    says = f"{_counted(lossless)}, {sum(r['outcomes'] for r in rows):,} outcomes, worst TV {worst:.1g}"
    says += f", all {cells} cells of p/q seen" if rows and cells == rows[0]["all_cells"] else f", {cells} cells of p/q"
    return {"verdict": _worst_of(rows, "exact"), "says": says, "bound": EXACT, "rows": rows}


def kernels(rules: Sequence[Verifier], bar: Progress) -> Found:
    work = [(rule, name, policy) for rule in rules for name, policy in shapes_for(rule).items()]
    task = bar.add_task("l1 kernels", total=len(work), note="")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for rule, name, policy in work:
        one = _tried(grid, rule, policy, name, device=device)
        rows.append(asdict(one) | {"verdict": one.verdict})
        bar.update(task, advance=1, note=f"{one.rule} on {name}")
    lossless = [row for row in rows if row["verdict"] != "lossy"]
    worst = max((row["worst"] for row in lossless), default=0.0)
    bound = rows[0]["resolution"] if rows else 0.0
    says = f"{_counted(lossless)}, {rows[0]['kernels'] if rows else '-'} kernels in float32, worst TV {worst:.2g} "
    return {"verdict": _worst_of(rows, "agrees"), "says": f"{says}(the net shows {bound:g})", "rows": rows}


def _tried(layer: Callable[..., Any], rule: Verifier, policy: TreePolicy, shape: str, **more: Any) -> Any:
    try:
        return layer(rule, policy, shape, **more)
    except Exception as fault:  # a rule of the user's own may raise anything
        raise UserError(
            f"verifier {type(rule).__name__} fails on a tree ({shape}): {type(fault).__name__}: {one_line(fault)}"
        ) from fault


def _counted(rows: Sequence[Found]) -> str:
    rules = len({row["rule"] for row in rows})
    return f"{rules} rule{'s' if rules != 1 else ''} on {len({row['shape'] for row in rows})} kinds of trees"


def _worst_of(rows: Sequence[Found], good: str) -> str:
    """Lossy only if no rule claims to be lossless, not_checked if no rule declares a tree that it may be used with."""
    verdicts = {row["verdict"] for row in rows}
    return next((verdict for verdict in ("biased", good, "lossy") if verdict in verdicts), "not_checked")


# -- the tokens: layers 2 to 4 ---------------------------------------------------------------------------------------------


class Audit:
    """Emitted tokens, judged as they come. Every answer is in trace.jsonl and the evidence in evidence.json."""

    def __init__(self, cfg: DictConfig, layers: Sequence[str], folder: Path, resumed: bool):
        if type(cfg.tokens) is not int or cfg.tokens < 1:
            raise UserError(f"tokens={cfg.tokens}: use a whole number of at least 1")
        self.cfg, self.layers, self.folder, self.log = cfg, layers, folder, Log()
        self.parts: Parts | None = None
        self.box = BlackBox(cfg.alpha, cfg.tolerance)
        self.given = of_lines(cfg.path) if cfg.engine == "tokens" and cfg.path else None
        if cfg.engine == "tokens" and self.given is None:
            raise UserError("engine=tokens needs path=FILE, JSON lines with prompt_ids and output_ids")
        warn_of_repeats(self.given or [])
        self.settings = Settings(cfg.seed, cfg.limit, cfg.max_new_tokens, cfg.batch_size, [], False, False, False)
        self.questions: list[Question] = [] if self.given else make(cfg, "prompts")[: cfg.limit]
        self.target, self.sampler = self._made()
        self.greedy = TokensJudge(self.target, self.sampler)
        self.lines = read_lines(folder / "trace.jsonl") if resumed else []
        self.judged = 0
        if resumed and (folder / "evidence.json").exists():
            state = json.loads((folder / "evidence.json").read_text(encoding="utf-8"))
            self.judged, self.box = state["judged"], self.box.load(state["box"])
            self.log.load(state["log"])
        write_lines(folder / "trace.jsonl", self.lines)

    def _made(self) -> tuple[Target, Sampler]:
        if self.cfg.engine != "own":
            source, target = grammar_of(self.cfg), make(self.cfg, "target")
            return target, sampler_of(self.cfg, None if source is None else source.compile(target))
        parts = build(self.cfg)
        if parts.drafter.simulated:
            raise UserError(
                "drafter=simulated drafts the target's own tokens, which certifies nothing: use a drafter that drafts"
            )
        if "l2" in self.layers:
            parts = replace(parts, verifier=WhiteBox(parts.verifier, self.log))
        self.parts = parts
        return parts.target, parts.sampler

    def execute(self, bar: Progress, log: Callable[[dict[str, float], int], None]) -> dict[str, Found]:
        found: dict[str, Found] = {}
        if {"l2", "l3"} & {*self.layers}:
            self._collect(bar, log)
        if "l2" in self.layers:
            found["l2"] = self._white_box()
        if "l3" in self.layers:
            found["l3"] = self._equality() if self.sampler.temperature == 0 else self._black_box()
        if "l4" in self.layers:
            found["l4"] = self._forward(bar)
        return found

    def _collect(self, bar: Progress, log: Callable[[dict[str, float], int], None]) -> None:
        """Let the engine answer, and judge, until there are enough tokens or the evidence is plain."""
        task = bar.add_task("tokens", total=self.cfg.tokens, note="")
        reference = Reference(self.target, self.sampler, self.cfg.context, draft=self._witness())
        count, saved = 0, time.monotonic()
        for number, line in enumerate(self._answers()):
            if "l3" in self.layers and number >= self.judged:
                if self.sampler.temperature == 0:
                    self.greedy.add(line)
                else:
                    judge(reference, [line], self.box)
                    self.judged = number + 1
                    log({"lossless/log10_e": self.box.curve[-1][1]}, self.box.tokens)
            count += len(line["output_ids"])
            note = f"log10 E {self.box.curve[-1][1]:.2f}" if self.box.curve else ""
            bar.update(task, completed=min(count, self.cfg.tokens), note=note)
            if time.monotonic() - saved > SAVE_SECONDS:
                self._save()
                saved = time.monotonic()
            if count >= self.cfg.tokens or self.box.verdict == "violation":
                break
        self._save()

    def _witness(self) -> Target | None:
        """A draft model of the target's vocabulary: it knows best where a faulty rule would push the output."""
        drafter = self.parts.drafter if self.parts is not None else None
        model, reduced = getattr(drafter, "model", None), getattr(drafter, "vocabulary", None) is not None
        whole = isinstance(model, Target) and model.vocab_size == self.target.vocab_size and not reduced
        return model if whole else None

    def _save(self) -> None:
        state = {"judged": self.judged, "box": self.box.state(), "log": self.log.state()}
        cli.save(self.folder / "evidence.json", state)

    def _answers(self) -> Iterator[Line]:
        """Those of an interrupted try, then new ones; a round that was broken off is asked again with another seed."""
        yield from self.lines
        if self.given is not None:
            yield from self.given[len(self.lines) :]
            return
        turns = max(1, sum(len(q.turns) for q in self.questions))
        first = -(-len(self.lines) // turns)
        fresh = self._engine(first)
        for line in fresh:
            append_lines(self.folder / "trace.jsonl", [line])
            self.lines.append(line)
            yield line

    def _engine(self, first: int) -> Iterator[Line]:
        if self.parts is not None:
            return audited.own(self.parts, self.questions, self.settings, first)
        engine = audited.Generation(self.target, self.cfg.assistant)
        return engine.answers(self.questions, self.settings, self.sampler, first)

    def _white_box(self) -> Found:
        found = findings(self.log)
        parts = [f"{f.name} {f.verdict if f.kind == 'tested' else f.kind}" for f in found]
        return {"verdict": verdict_of(found), "says": ", ".join(parts), "rows": [f.as_dict() for f in found]}

    def _black_box(self) -> Found:
        report, says = self.box.report(), ""
        found: Found = {**report.as_dict(), "curve": self.box.curve}
        if self.parts is not None:
            made = found["from_drafts"] = from_drafts(self.lines)
            says = f"; {made:,} tokens from steps with drafts"
            if lossy := self.parts.verifier.lossy:
                found |= {"verdict": "lossy", "tv_bound": self.parts.verifier.tv_bound}
                says += f"; lossy by its declaration: {lossy}"
            elif not made and report.verdict == "consistent":
                found["verdict"] = "not_exercised"
        return {**found, "says": report.says + says}

    def _equality(self) -> Found:
        own = self.greedy
        says = f"{own.tokens:,} tokens, {len(own.near_ties)} near-ties, {len(own.violations)} violations"
        return {"verdict": own.verdict, "says": says, "near_ties": own.near_ties, "violations": own.violations}

    def _forward(self, bar: Progress) -> Found:
        bar.add_task("l4 forward", total=None, note="")
        known = [line["prompt_ids"] + line["output_ids"] for line in self.lines[:SEQUENCES]]
        known = known or [
            self.target.chat([{"role": "user", "content": q.turns[0]}]) for q in self.questions[:SEQUENCES]
        ]
        one = check_forward(self.target, known)
        says = (
            f"logits of tree passes differ by {one.error:.2g}, the model's own passes by {one.noise:.2g} ({one.dtype})"
        )
        if self.target.dtype in (torch.bfloat16, torch.float16):
            says += "; a fault as small as this noise hides: check in float32 (target.dtype=float32)"
        return {"says": says, **one.as_dict()}


def warn_of_repeats(lines: Sequence[Line]) -> None:
    """A cached answer, or a second one from the same seed, is no second draw, and the evidence would count it twice."""
    seen = {(*line["prompt_ids"], -1, *line["output_ids"]) for line in lines}
    if len(seen) < len(lines):
        console.note(
            f"warning: {len(lines) - len(seen)} of {len(lines)} answers repeat another one to the same prompt: if the server "
            "cached them or used one seed, they are no evidence of their own, and the verdict is wrong: leave them out"
        )


def show(found: dict[str, Found]) -> None:
    """The tables of the rules, then one line a layer."""
    for name in ("l0", "l1"):
        if name in found:
            rule_table(name, found[name]["rows"])
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, layer in found.items():
        style = (
            "bold red" if layer["verdict"] in BAD else "bold yellow" if layer["verdict"] == "lossy" else "bold green"
        )
        verdict = layer["verdict"].upper() if layer["verdict"] in (*BAD, "lossy") else layer["verdict"]
        table.add_row(f"{name.upper()} {LAYERS[name]}", f"[{style}]{verdict}[/]", layer["says"])
    console.wide().print(table)


def rule_table(name: str, rows: Sequence[Found]) -> None:
    table = Table(title=f"{name.upper()} {LAYERS[name]}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    exact = name == "l0"
    for heading in ("rule", "law", "growth", "shape", "cells" if exact else "kernels", "worst TV", ""):
        table.add_column(heading, justify="right" if heading in ("cells", "worst TV") else "left")
    for row in rows:
        seen = f"{row['cells']}/{row['all_cells']}" if exact else row["kernels"]
        table.add_row(
            *(row[key] for key in ("rule", "law", "growth", "shape")), seen, f"{row['worst']:.1e}", row["verdict"]
        )
    console.wide().print(table)
    for row in [row for row in rows if exact and row["verdict"] == "biased"][:COUNTER_EXAMPLES]:
        text = f"counter-example, {row['rule']} on {row['shape']}: {row['counter_example']}"
        console.out.print(text, markup=False)
    console.out.print()


def main() -> None:
    """Entry point of `python -m specresearch.certify`."""
    cli.run(job, "certify")


if __name__ == "__main__":
    main()
