"""The command line: `python -m specresearch drafter=ngram tree.topk=4`; `-m` sweeps.

Exit status: 0, 1 for an error, 2 where a check found a violation, 130 after Ctrl-C.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specresearch import commands, console, overrides, parallel, shards, spec_bench, sweeps
from specresearch.baseline import Answers
from specresearch.build import SAMPLING, Shared, build, make, settings_of
from specresearch.conversations import Settings
from specresearch.decode import Parts
from specresearch.metrics import NUMBERS, joint_rate
from specresearch.overrides import CONF
from specresearch.provenance import peak_memory, provenance, reset_peak_memory
from specresearch.report import write
from specresearch.results import Results, write_pieces
from specresearch.run import Run
from specresearch.types import UserError
from specresearch.watch import Watch

OK, ERROR, VIOLATION, INTERRUPTED = 0, 1, 2, 130
statuses: set[int] = set()  # of the jobs of this process
swept: list[tuple[Path, float]] = []  # the sweep that this process started: its folder, and when it began
shared = Shared()  # what the jobs of this process have in common
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
            except Exception as error:
                lone = HydraConfig.get().mode != RunMode.MULTIRUN
                if lone and not isinstance(error, UserError | OmegaConfBaseException | OSError):
                    raise
                statuses.add(report(error, command))

        return inner

    return wrap


class Sweeping(Callback):
    """Tells `run` in which folder a sweep is being made (`hydra.callbacks` in conf/config.yaml)."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        swept.append((Path(config.hydra.sweep.dir), time.time()))


@hydra.main(config_path=CONF, config_name="config", version_base="1.3")
@guarded("config")
def job(cfg: DictConfig) -> float | None:
    """One run: decode, check, save. Returns the objective for sweepers, if one is named."""
    at = HydraConfig.get()
    folder = Path(at.runtime.output_dir)
    if at.mode != RunMode.MULTIRUN:
        return single(cfg, folder)
    sweep = Path(at.runtime.cwd) / at.sweep.dir
    done = None
    if cfg.resume is not None:
        done, folder = earlier(cfg, folder, sweep, first=int(folder.name) - int(at.job.num))
    given = " ".join(text for text in at.overrides.task if not text.startswith("resume="))
    console.out.print(f"\njob {folder.name}  {given}", style="bold", markup=False)
    if done is not None:
        console.out.print("done before with this configuration: skipped")
        return objective(cfg, done)
    (folder / sweeps.ERROR).unlink(missing_ok=True)
    clear()
    try:
        return single(cfg, folder, sweep)
    except Exception as error:
        (folder / sweeps.ERROR).write_text(sentence(error) or overrides.one_line(f"{type(error).__name__}: {error}"))
        raise


def clear() -> None:
    """What the job before held, in this process, goes before the next one is made; only the target stays.

    A function of this module: launchers send `job` to other processes by value, with copies of what it names.
    """
    shared.release()
    gc.collect()  # a run and what shows it hold each other
    reset_peak_memory()


def earlier(cfg: DictConfig, folder: Path, sweep: Path, first: int) -> tuple[dict[str, Any] | None, Path]:
    """A sweep that goes on (`cfg.resume`), its new jobs numbered from `first`: the summary of the job that was done before
    with this configuration, if there is one; and the folder to work in, the one of a job that was begun or this new one."""
    cfg.resume = None
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    found = sweeps.same(sweep, config, first)
    if found is None:
        return None, folder
    sweeps.discard(folder)
    cfg.resume = str(found.folder)
    return found.summary, found.folder


def single(cfg: DictConfig, folder: Path, sweep: Path | None = None) -> float | None:
    """Do a run in its folder, alone or as a job of a sweep."""
    resumed = cfg.resume is not None
    cfg = overrides.frozen(cfg, folder)
    summary, interrupted = decode(cfg, folder, resumed, sweep)
    if interrupted:
        raise KeyboardInterrupt
    statuses.add(VIOLATION if summary["lossless"]["verdict"] == "violation" else OK)
    return objective(cfg, summary)


def objective(cfg: DictConfig, summary: dict[str, Any]) -> float | None:
    return summary[cfg.objective] if cfg.objective else None


def plain_answers(cfg: DictConfig, parts: Parts, settings: Settings, sweep: Path | None) -> Answers | None:
    """Where the jobs of a sweep keep the answers of plain decoding; None for a lone run, which makes its own."""
    if sweep is None or not settings.baseline:
        return None
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    model = [values["target"], values["kernels"]]
    grammar = parts.sampler.grammar
    sampling = [*(values[name] for name in SAMPLING), *([grammar.origin] if grammar else [])]
    origin = [model, parts.target.fingerprint(), sampling, settings.seed, settings.stop, settings.batch_size]
    return Answers(sweep / "baseline", origin)


def decode(cfg: DictConfig, folder: Path, resumed: bool, sweep: Path | None) -> tuple[dict[str, Any], bool]:
    """-> the summary, and whether Ctrl-C ended it"""
    settings = settings_of(cfg)
    require_sense(cfg, settings)
    sharing = shards.sharing(cfg, settings, sweep)
    questions = make(cfg, "prompts")[: settings.limit]
    parts = build(cfg, shared=shared if sweep else None)
    tracker = make(cfg, "tracker")
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    choices: dict[str, Any] = HydraConfig.get().runtime.choices
    tags = [choices[group] for group in ("drafter", "tree", "verifier", "target")]
    tracker.start(config, folder, group=sweep.name if sweep else None, tags=tags)
    costs: dict[str, Any] = {"costs": None, "predicted_speedup": None}
    interrupted, measured = False, None
    turns = sum(len(question.turns) for question in questions)
    with Watch(tracker, turns, parts.target if choices["prompts"] == "text" else None, sharing) as watch:
        try:
            answers = plain_answers(cfg, parts, settings, sweep)
            if resumed:
                shards.recover(folder)
            shown = watch.tokens if watch.streamer else None
            measured = watch.run = Run(parts, questions, settings, folder, resumed, watch.turn, shown, answers)
            watch.completed(len(measured.lines))
            with profiler(settings.profile, folder):
                sharing.execute(measured, cfg) if sharing else measured.execute()
            costs = measured.costs() if settings.baseline else costs
        except KeyboardInterrupt:
            interrupted = True
            if measured is None:
                tracker.finish({})
                raise
        except Exception:
            tracker.finish({})
            if measured is not None and measured.lines and sweep is None:
                console.note(
                    f"finished answers are kept: when it is mended, go on with  {commands.go_on(folder, processes=processes())}"
                )
            raise
    summary = measured.summary() | costs | {"peak_memory_bytes": peak_memory(parts.target.device), "config": config}
    if sharing:
        summary["data_parallel"] = {"ranks": sharing.group.world, "tokens_per_second": joint_rate(measured.blocks)}
    if choices["prompts"] == "spec_bench":
        summary["spec_bench"] = spec_bench.measure(measured.lines, measured.blocks)
    summary |= {"provenance": provenance(parts.target), "interrupted": interrupted}
    leave(cfg, measured, summary, tracker)
    if interrupted and sweep is None:
        lost = f"{measured.unfinished} answers of a broken-off block, in the trace only, will be redone; "
        left = lost if measured.unfinished else ""
        print(f"interrupted: {left}go on with  {commands.go_on(folder, processes=processes())}", file=sys.stderr)
    return summary, interrupted


def processes() -> int:
    """That decode together."""
    group = parallel.current()
    return 1 if group is None else group.world


def require_sense(cfg: DictConfig, settings: Settings) -> None:
    """Raises UserError for root keys that ask for what there is not."""
    if cfg.objective is not None and cfg.objective not in NUMBERS:
        raise UserError(
            f"objective={cfg.objective} is no number of summary.json: {overrides.near(cfg.objective, NUMBERS)}"
        )
    if not isinstance(cfg.get("report", False), bool):
        raise UserError(f"report={cfg.report}: use true or false")
    if not settings.baseline and cfg.objective in ("speedup", "baseline_tokens_per_second"):
        raise UserError(f"objective={cfg.objective} needs plain decoding beside it: leave baseline=false out")


def leave(cfg: DictConfig, run: Run, summary: dict[str, Any], tracker: Any) -> None:
    """Write and show what a run found."""
    for reason in (reason for block in run.blocks for reason in block["speculative"]["skipped"]):
        print(f"warning: skipped: {reason}", file=sys.stderr)
    pieces = write_pieces(run.folder, run.lines, run.parts.target.text)
    save(run.folder / "summary.json", summary)
    if cfg.get("report"):
        write_report(Results(run.folder, summary, run.lines, run.blocks, pieces))
    console.show(summary, run.folder, tracker.finish(summary))


def write_report(results: Results) -> None:
    """A fault in drawing never loses a run that is saved already."""
    try:
        write(results)
    except Exception as error:
        again = shlex.join(["python", "-m", "specresearch.report", str(results.folder)])
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
    group = parallel.join()
    if group is not None and group.rank:
        group.follow()
    statuses.clear()
    swept.clear()
    asked = sys.argv[1:]
    moved = {place: f"{folder}@{place}" for place, folder in overrides.groups(command).items() if place != folder}
    try:
        if group is not None:
            shards.require_supported(asked, command, group)
        given = (argument.partition("=") for argument in overrides.prepare(sys.argv[1:], command))
        sys.argv[1:] = [f"{moved.get(key, key)}{equals}{value}" for key, equals, value in given]
        job()
    except KeyboardInterrupt:
        statuses.add(INTERRUPTED)
    except SystemExit as exit:  # argparse's own errors leave with 2, which means a violation here
        statuses.add(ERROR if exit.code else OK)
    except Exception as error:
        statuses.add(report(error, command))
    for folder, began in swept:
        finish_sweep(folder, began, asked)
    status = next((s for s in (INTERRUPTED, ERROR, VIOLATION) if s in statuses), OK)
    if group is not None:
        group.leave(status)
    sys.exit(status)


def finish_sweep(folder: Path, began: float, asked: list[str]) -> None:
    """The table across jobs, whichever process ran them; what failed; how to go on. What failed before this sweep was gone
    on with, and was not tried again, is shown and does not count."""
    found = sweeps.jobs(folder)
    if not found:
        return
    sweeps.save(folder, found)
    console.show_sweep(folder, found)
    statuses.update(ERROR for job in found if job.state != "done" and job.touched >= began - 1)
    statuses.update(VIOLATION for job in found if job.verdict == "violation")
    if statuses & {INTERRUPTED, ERROR}:
        kept = [a for a in asked if not a.startswith(("resume=", "hydra.sweep."))]
        again = shlex.join([*commands.start("specresearch", processes()), *kept, f"resume={folder}"])
        print(f"go on with  {again}", file=sys.stderr)


def report(error: Exception, command: str = "config") -> int:
    """Mistakes of the user in one line; what is a fault of the program keeps its traceback."""
    said = None if TRACEBACKS else sentence(error, command)
    if said is None:
        traceback.print_exception(error)
        return ERROR
    return console.fail(said)


def sentence(error: Exception, command: str = "config") -> str | None:
    """A mistake of the user in one line; None for a fault of the program."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # a missing option is both
        return f"{error.filename or 'a file'} cannot be written or read: {error.strerror or error}"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return overrides.explain(error, command)
    return None
