"""The command line: `python -m specresearch drafter=ngram tree.topk=4`; `-m` sweeps.

Exit status: 0, 1 for an error, 2 where a check found a violation, 130 after Ctrl-C.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specresearch import console, overrides, spec_bench
from specresearch.build import Streamer, build, make, settings_of
from specresearch.metrics import NUMBERS
from specresearch.overrides import CONF
from specresearch.provenance import peak_memory, provenance
from specresearch.report import write
from specresearch.results import Results, write_pieces
from specresearch.run import Run
from specresearch.types import UserError

OK, ERROR, VIOLATION, INTERRUPTED = 0, 1, 2, 130
statuses: set[int] = set()  # of the jobs of this process
TRACEBACKS = "SPECRESEARCH_TRACEBACK" in os.environ
os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions reach us, who put them in one line
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def guarded(command: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[DictConfig], Any]]:
    """A job whose mistakes are said in one line and noted in `statuses`: other jobs of a sweep survive its failure."""

    def wrap(job: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
        @functools.wraps(job)
        def inner(cfg: DictConfig) -> Any:
            try:
                return job(cfg)
            except (UserError, OmegaConfBaseException, OSError) as error:
                statuses.add(report(error, command))

        return inner

    return wrap


@hydra.main(config_path=CONF, config_name="config", version_base="1.3")
@guarded("config")
def job(cfg: DictConfig) -> float | None:
    """One run: decode, check, save. Returns the objective for sweepers, if one is named."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    resumed = cfg.resume is not None
    cfg = overrides.frozen(cfg, folder)
    summary, interrupted = decode(cfg, folder, resumed)
    if interrupted:
        raise KeyboardInterrupt
    statuses.add(VIOLATION if summary["lossless"]["verdict"] == "violation" else OK)
    return summary[cfg.objective] if cfg.objective else None


def decode(cfg: DictConfig, folder: Path, resumed: bool) -> tuple[dict[str, Any], bool]:
    settings = settings_of(cfg)
    if cfg.objective is not None and cfg.objective not in NUMBERS:
        raise UserError(
            f"objective={cfg.objective} is no number of summary.json: {overrides.near(cfg.objective, NUMBERS)}"
        )
    if not isinstance(cfg.get("report", False), bool):
        raise UserError(f"report={cfg.report}: use true or false")
    questions = make(cfg, "prompts")[: settings.limit]
    parts = build(cfg)
    tracker = make(cfg, "tracker")
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    hydra_cfg = HydraConfig.get()
    choices: dict[str, Any] = hydra_cfg.runtime.choices
    sweep = Path(hydra_cfg.sweep.dir).name if hydra_cfg.mode == RunMode.MULTIRUN else None
    tags = [choices[group] for group in ("drafter", "tree", "verifier", "target")]
    tracker.start(config, folder, group=sweep, tags=tags)
    streaming = choices["prompts"] == "text"
    interrupted = False
    with console.progress() as bar:
        task = bar.add_task("decoding", total=sum(len(q.turns) for q in questions), note="")

        def on_turn(line: dict[str, Any], lines: list[Any], blocks: list[Any]) -> None:
            emitted = [step["emitted"] for step in line["steps"]]
            length = sum(emitted) / len(emitted) if emitted else None
            steps = sum(len(each["steps"]) for each in lines)
            pooled = sum(len(each["output_ids"]) - 1 for each in lines) / steps if steps else None
            bar.update(task, completed=len(lines), note=f"accepted length {console.number(pooled)}")
            if length is not None:
                numbers = {"accept/answer_length": length, "accept/running_length": pooled or 0.0}
                if measured.box.curve:  # of the blocks before
                    numbers["lossless/log10_e"] = measured.box.curve[-1][1]
                tracker.log(numbers, step=len(lines))

        streamer = Streamer(parts.target)

        def on_tokens(emission: Any) -> None:
            for piece in streamer.feed(emission.tokens, emission.turn.text if emission.done else None):
                console.out.print(piece.text, style="green" if piece.drafted else "yellow", end="", markup=False)
            if emission.done:
                console.out.print()

        if streaming:
            bar.stop()
            console.out.print("[green]drafted and accepted[/], [yellow]the target's own (bonus)[/]\n")
        measured = Run(parts, questions, settings, folder, resumed, on_turn, on_tokens if streaming else None)
        bar.update(task, completed=len(measured.lines))
        costs: dict[str, Any] = {"costs": None, "predicted_speedup": None}
        try:
            with profiler(settings.profile, folder):
                measured.execute()
            costs = measured.costs() if settings.baseline else costs
        except KeyboardInterrupt:
            interrupted = True
        except Exception:
            tracker.finish({})
            raise
    summary = measured.summary() | costs | {"peak_memory_bytes": peak_memory(parts.target.device), "config": config}
    summary |= {"provenance": provenance(parts.target), "interrupted": interrupted}
    if choices["prompts"] == "spec_bench":
        summary["spec_bench"] = spec_bench.measure(measured.lines, measured.blocks)
    for block in measured.blocks:
        for reason in block["speculative"]["skipped"]:
            print(f"warning: skipped: {reason}", file=sys.stderr)
    pieces = write_pieces(folder, measured.lines, parts.target.text)
    save(folder / "summary.json", summary)
    if cfg.get("report"):
        write_report(Results(folder, summary, measured.lines, measured.blocks, pieces))
    console.show(summary, folder, tracker.finish(summary))
    if interrupted:
        left = (
            f"{measured.unfinished} answers of a broken-off block, in the trace only, will be redone; "
            if measured.unfinished
            else ""
        )
        print(f"interrupted: {left}go on with  python -m specresearch resume={folder}", file=sys.stderr)
    return summary, interrupted


def write_report(results: Results) -> None:
    """A fault in drawing never loses a run that is saved already."""
    try:
        write(results)
    except Exception as error:
        again = f"python -m specresearch.report {results.folder}"
        print(f"warning: report.html was not written ({type(error).__name__}: {error}); try  {again}", file=sys.stderr)


def save(path: Path, summary: dict[str, Any]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)


class profiler:
    """`profile=true`: a torch profiler trace in the run's folder, and the ten largest items on the console."""

    def __init__(self, wanted: bool, folder: Path):
        self.wanted, self.folder = wanted, folder

    def __enter__(self) -> None:
        if self.wanted:
            import torch

            self.inner = torch.profiler.profile()
            self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.wanted:
            self.inner.__exit__(*error)
            self.inner.export_chrome_trace(str(self.folder / "profile.json"))
            device = "cuda" if "cuda" in str(self.inner.activities).lower() else "cpu"
            print(
                self.inner.key_averages().table(
                    sort_by=f"self_{device}_time_total", row_limit=10, max_name_column_width=40
                )
            )


def main() -> None:
    """Entry point of `python -m specresearch` and of the console script."""
    run(job)


def run(job: Callable[[], Any], command: str = "config") -> NoReturn:
    """Do a command's job and leave with its exit status. A group is named by where it stands in the configuration."""
    statuses.clear()
    moved = {place: f"{folder}@{place}" for place, folder in overrides.groups(command).items() if place != folder}
    try:
        given = (argument.partition("=") for argument in overrides.prepare(sys.argv[1:], command))
        sys.argv[1:] = [f"{moved.get(key, key)}{equals}{value}" for key, equals, value in given]
        job()
    except KeyboardInterrupt:
        statuses.add(INTERRUPTED)
    except SystemExit as exit:  # argparse's own errors leave with 2, which means a violation here
        statuses.add(ERROR if exit.code else OK)
    except Exception as error:
        statuses.add(report(error, command))
    sys.exit(next((s for s in (INTERRUPTED, ERROR, VIOLATION) if s in statuses), OK))


def report(error: Exception, command: str = "config") -> int:
    """Mistakes of the user in one line; what is a fault of the program keeps its traceback."""
    if TRACEBACKS or not isinstance(error, UserError | HydraException | OmegaConfBaseException | OSError):
        traceback.print_exception(error)
        return ERROR
    if isinstance(error, UserError):
        return console.fail(str(error))
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # a missing option is both
        return console.fail(f"{error.filename or 'a file'} cannot be written or read: {error.strerror or error}")
    return console.fail(overrides.explain(error, command))
