"""`python -m specresearch.tune drafter=eagle objective=tokens_per_second`: the fastest chain or tree on this machine.

One recording (acceptance at every place, the target's pass by size, drafting by depth), a search with the cost model of
specresearch.replay, real runs of the best three in turn with plain decoding. It prints a table and a command, and writes a
preset. Exit status: 0; 1 for an error; 130 after Ctrl-C: what is done is kept, `resume=DIR` goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from specresearch import cli, commands, console, overrides
from specresearch.baseline import plain_of
from specresearch.build import build, make, settings_of
from specresearch.conversations import Settings
from specresearch.decode import Parts
from specresearch.fit import name_of
from specresearch.overrides import CONF
from specresearch.provenance import provenance
from specresearch.run import Run
from specresearch.tuning import measure, preset, servers
from specresearch.tuning.choose import CLOSE, OBJECTIVES, Choice, best, measured, predicted, trees
from specresearch.tuning.measure import Probe
from specresearch.tuning.preset import OWN, Asked
from specresearch.turns import take_turns
from specresearch.types import UserError
from specresearch.whatif.answer import Recording

SHOWN = 8  # rows of the table
PLAIN = "plain"
UNASKED = (
    dict.fromkeys(("baseline", "check", "trace"), "sets it itself")
    | dict.fromkeys(("tracker", "report", "log", "profile"), "has none")
    | {"experiment": "takes no presets, but writes one"}
)
UNSTEADY = 1.5  # of the slowest block's pass to the fastest's


@hydra.main(config_path=CONF, config_name="tune", version_base="1.3")
@cli.guarded("tune")
def job(cfg: DictConfig) -> None:
    at = HydraConfig.get()
    folder = Path(at.runtime.output_dir)
    given = [text for text in at.overrides.task if text.partition("=")[0] not in OWN]
    try:
        asked = Asked(dict(at.runtime.choices), given + commands.searched(at.overrides.hydra), list(at.searchpath))
        tune(overrides.frozen(cfg, folder), folder, asked)
    except KeyboardInterrupt:
        console.note(f"interrupted: go on with  {commands.go_on(folder, 'specresearch.tune')}")
        raise


def tune(cfg: DictConfig, folder: Path, asked: Asked) -> Choice:
    """All stages; what an earlier try left in `folder` is used -> the chosen tree. Raises UserError."""
    check(cfg)
    config = run_config(cfg)
    parts = build(OmegaConf.create(config))
    if parts.drafter.law is not None:
        raise UserError(
            f"drafter={asked.choices['drafter']} cannot be asked what it would draft elsewhere, so no trees can be compared: "
            "use ngram, eagle, medusa or small_lm"
        )
    settings = settings_of(OmegaConf.create(config))
    questions = make(cfg, "prompts")[: cfg.limit]
    found = search(parts, questions, settings, config, folder)
    top = best(found, cfg.objective, cfg.confirm)
    runs = confirmation(parts, questions, settings, top, folder)
    try:
        take_turns(runs)
    finally:
        top = confirmed(top, runs)
        keep(folder, found, top, parts)
        show(found, top, cfg.objective)
    say_verdicts(runs)
    say_unsteady(runs[PLAIN])
    chosen = best([one for one in top if one.ran_speedup], cfg.objective, 1)[0]
    conclude(cfg, chosen, found, parts, asked)
    console.out.print(f"[bold]written to[/]  {folder}/  tuned.json, recorded/, confirmed/")
    return chosen


def check(cfg: DictConfig) -> None:
    if cfg.objective not in OBJECTIVES:
        raise UserError(f"objective={cfg.objective} is unknown: {overrides.near(str(cfg.objective), OBJECTIVES)}")
    if type(cfg.confirm) is not int or cfg.confirm < 1:
        raise UserError(f"confirm={cfg.confirm}: use a whole number of at least 1")
    if cfg.temperature > 0:
        raise UserError(
            f"temperature={cfg.temperature}: which tree is fastest is told from plain decoding's answers: use temperature=0 "
            "(and compare a few by  python -m specresearch -m)"
        )
    check_trees(cfg)


def check_trees(cfg: DictConfig) -> None:
    for key in ("depth", "topk", "size"):
        if type(cfg[key]) is not int or cfg[key] < 1:
            raise UserError(f"{key}={cfg[key]}: use a whole number of at least 1")
    if cfg.size < cfg.depth + 1:
        less = f", or depth={cfg.size - 1}" if cfg.size > 1 else ""
        raise UserError(
            f"size={cfg.size} cannot hold depth={cfg.depth} levels and the root: use size={cfg.depth + 1} or more{less}"
        )
    verifier = make(cfg, "verifier")
    if verifier.chain_only or "point" not in verifier.laws or "pruned_after_reveal" not in verifier.growths:
        raise UserError(
            f"verifier={name_of(verifier)} cannot verify all the trees that are searched, at temperature 0: use "
            "verifier=rejection"
        )
    if cfg.drafter.get("vocab") == "text":
        raise UserError(
            "drafter.vocab=text drafts one chain, that cannot be asked what it would draft elsewhere, so no trees can be "
            "compared: use drafter.vocab=intersection"
        )


def run_config(cfg: DictConfig) -> dict[str, Any]:
    """Of the recording: conf/config.yaml's, with the largest tree and a dense trace."""
    tree = {**yaml.safe_load((Path(CONF) / "tree" / "dynamic.yaml").read_text()), "temperature": 0}
    tree |= {key: cfg[key] for key in ("depth", "topk", "size")}
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    kept = {key: value for key, value in values.items() if key not in OWN}
    extra = {"baseline": True, "check": True, "profile": False, "log": None, "trace": {"dense": True}}
    return kept | extra | {"tree": tree}


# -- stages ----------------------------------------------------------------------------------------------------------------


def search(
    parts: Parts, questions: Sequence[Any], settings: Settings, config: dict[str, Any], folder: Path
) -> list[Choice]:
    """Record, measure drafting, and tell what every tree is worth. Each is kept for the next try as soon as it is there."""
    place, largest = folder / "recorded", parts.policy
    place.mkdir(exist_ok=True)
    kept = place / "probes.json"
    if not kept.exists():
        with console.progress() as bar:
            task = bar.add_task("recording", total=len(questions), note="")
            run = Run(
                parts, questions, settings, place, True, lambda _, lines, __: bar.update(task, completed=len(lines))
            )
            measure.record(run, config, cli.save)
        probes = measure.probe(parts, questions, settings, largest)  # type: ignore[arg-type]
        kept.write_text(json.dumps([asdict(one) for one in probes]), encoding="utf-8")
    probes = [Probe(**one) for one in json.loads(kept.read_text(encoding="utf-8"))]
    own: Recording = measure.recorded(place, largest)  # type: ignore[arg-type]
    prices = measure.prices(own, probes)
    if prices is None:
        raise UserError("nothing was drafted, so there is nothing to choose: raise limit or max_new_tokens")
    console.out.print(f"costs: {prices.source}", style="dim", markup=False)
    with console.progress() as bar:
        note = f"{len(list(trees(largest)))} trees"  # type: ignore[arg-type]
        task = bar.add_task("searching", total=len(own.lines), note=note)
        plain = measure.plain_seconds(own, probes, prices)
        return predicted(own, prices, plain, lambda: bar.update(task, advance=1))


def confirmation(
    parts: Parts, questions: Sequence[Any], settings: Settings, top: Sequence[Choice], folder: Path
) -> dict[str, Run]:
    """A run for each of the best and one of plain decoding, on one target and one drafter."""
    settings = replace(settings, baseline=False, trace={"dense": False})
    variants = {PLAIN: plain_of(parts)} | {one.name: replace(parts, policy=measure.dynamic(one.tree)) for one in top}
    runs = {}
    for name, own in variants.items():
        place = folder / "confirmed" / name
        place.mkdir(parents=True, exist_ok=True)
        runs[name] = Run(own, questions, settings, place, True, lambda *_: None)
    slots = max(run.slots for run in runs.values())
    parts.drafter.reserve(settings.batch_size, max(run.capacity for run in runs.values()), slots)
    return runs


def confirmed(top: Sequence[Choice], runs: Mapping[str, Run]) -> list[Choice]:
    plain = runs[PLAIN].summary()["tokens_per_second"] if runs[PLAIN].blocks else None
    return [measured(one, runs[one.name], plain) if plain and runs[one.name].blocks else one for one in top]


def keep(folder: Path, found: Sequence[Choice], top: Sequence[Choice], parts: Parts) -> None:
    content = {"confirmed": [one.as_dict() for one in top], "predicted": [one.as_dict() for one in found]}
    cli.save(folder / "tuned.json", content | {"provenance": provenance(parts.target)})


# -- what is said ----------------------------------------------------------------------------------------------------------


def show(found: Sequence[Choice], top: Sequence[Choice], objective: str) -> None:
    """The best, those that ran first."""
    names = {one.name for one in top}
    rest = [one for one in best(found, objective, SHOWN) if one.name not in names]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("tree")
    for heading in (
        "depth",
        "topk",
        "size",
        "accepted length",
        "speedup",
        "ran: length",
        "speedup",
        "tokens/s",
        "off by",
    ):
        table.add_column(heading, justify="right")
    for one in [*best(top, objective, len(top)), *rest]:
        ran = [console.number(one.ran_length), console.number(one.ran_speedup, 2, "x")]
        ran += [console.number(one.ran_tokens_per_second, 1), "-" if one.gap is None else f"{one.gap:+.0%}"]
        cells = [str(value) for value in one.tree.values()]
        table.add_row(one.name, *cells, console.number(one.length), f"{one.speedup:.2f}x", *ran)
    console.wide().print(table)


def say_verdicts(runs: Mapping[str, Run]) -> None:
    """The runs were checked like any other."""
    verdicts = {name: run.summary()["lossless"]["verdict"] for name, run in runs.items() if name != PLAIN}
    console.out.print("losslessness: " + ", ".join(f"{name} {verdict}" for name, verdict in verdicts.items()))
    cli.statuses.add(cli.VIOLATION if "violation" in verdicts.values() else cli.OK)


def say_unsteady(plain: Run) -> None:
    """Plain decoding costs the same per pass in every block, or the machine had other work."""
    each = [block["speculative"] for block in plain.blocks if block["speculative"]["target_passes"]]
    passes = sorted(1e3 * one["time"]["target"] / one["target_passes"] for one in each)
    if passes and passes[-1] > UNSTEADY * passes[0]:
        console.out.print(
            f"the machine had other work: a pass of plain decoding took {passes[0]:.3g} to {passes[-1]:.3g} ms in these "
            "runs, so speeds and gaps are about that as well; try again on a quiet one",
            style="bold yellow",
        )


def conclude(
    cfg: DictConfig,
    chosen: Choice,
    found: Sequence[Choice],
    parts: Parts,
    asked: Asked,
) -> None:
    gap = chosen.gap or 0.0
    word = "within" if abs(gap) <= CLOSE else "NOT within"
    console.out.print(
        f"\n[bold]chosen[/]  {chosen.name}: predicted {chosen.speedup:.2f}x, measured {chosen.ran_speedup:.2f}x, {gap:+.1%}: "
        f"{word} {CLOSE:.0%} of the prediction"
    )
    if chosen.ran_speedup is not None and chosen.ran_speedup < 1:
        console.out.print("no tree that ran is faster than plain decoding here: use drafter=none", style="bold yellow")
    tree = [f"tree.{key}={value}" for key, value in chosen.tree.items()]
    console.out.print(f"  {commands.line([*asked.given, 'tree=dynamic', *tree])}", markup=False)
    path, taken = preset.write(cfg, chosen, asked.choices)
    console.out.print("[bold]preset[/]  ", end="")
    console.out.print(f"{path}" + (f"   ({taken.name} is of another search, and stays)" if taken else ""), markup=False)
    console.out.print(f"  {preset.command(path, asked.places)}", markup=False)
    drafter, keys = str(asked.choices["drafter"]), OmegaConf.to_container(cfg.drafter, resolve=True)
    version = 1 if parts.drafter.taps == ("norm",) else 3
    chain = best([one for one in found if one.topk == 1], cfg.objective, 1)[0]
    lines = {
        "SGLang": servers.sglang(drafter, keys, chosen.tree, version),  # type: ignore[arg-type]
        "vLLM": servers.vllm(drafter, keys, chain.depth, version),  # type: ignore[arg-type]
        "head": servers.export(drafter, keys, chosen.tree, getattr(parts.target, "name", ""), asked.given),  # type: ignore[arg-type]
    }
    for label, line in lines.items():
        if line:
            console.out.print(f"[bold]{label:<7}[/] ", end="")
            console.out.print(line, markup=False)


def willing() -> None:
    """Raises UserError for keys of a run that a search has not, with the reason."""
    for text in sys.argv[1:]:
        key = text.partition("=")[0].lstrip("+~").partition(".")[0]
        if key == "tree":
            raise UserError(
                f"{text}: tune searches chains and dynamic trees itself, up to depth=, topk= and size=: leave it out"
            )
        if key in UNASKED:
            raise UserError(f"{text}: tune {UNASKED[key]}: leave {key} out")
    job()


def main() -> None:
    """Entry point of `python -m specresearch.tune`."""
    cli.run(willing, "tune")


if __name__ == "__main__":
    main()
