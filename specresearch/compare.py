"""`python -m specresearch.compare RUN_DIR... | SWEEP_DIR [key=value...]`: runs side by side, with paired intervals.

    python -m specresearch.compare runs/sweep/TIME                             the jobs of a sweep, against the first
    python -m specresearch.compare runs/a runs/b against=2 out=table.tex       also .csv and .md

Nothing is run, no model is loaded. conf/compare.yaml lists the keys. Exit status: 0, or 1 for an error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from specresearch import cli, console, overrides
from specresearch.comparison.bootstrap import Bootstrap
from specresearch.comparison.conditions import questions, warnings
from specresearch.comparison.rows import Comparison, compare
from specresearch.comparison.sheets import EXPORTS, SUFFIXES, on_console, sheets
from specresearch.results import Results, find
from specresearch.sweeps import jobs
from specresearch.types import UserError

FEWEST_RESAMPLINGS = 100


def job(paths: Sequence[str], cfg: DictConfig) -> None:
    form, boot = chosen_format(cfg), bootstrap_of(cfg)
    runs = distinct(find(paths))
    allow = [*cfg.allow] if OmegaConf.is_list(cfg.allow) else [cfg.allow]
    shared = questions(runs, allow)
    for warning in [*left_out(paths), *warnings(runs, len(shared))]:
        console.note(f"warning: {warning}")
    found = compare(runs, shared, reference(cfg, runs), boot)
    if cfg.out is not None:
        Path(str(cfg.out)).write_text(EXPORTS[form](found), encoding="utf-8")
    if form != "table" and cfg.out is None:
        print(EXPORTS[form](found), end="")
    else:
        show(found)
    if cfg.out is not None:
        console.note(f"written to {cfg.out}")


def left_out(paths: Sequence[str]) -> list[str]:
    """The jobs of a sweep that have nothing to compare."""
    missing = [job for path in paths for job in jobs(Path(path)) if job.state != "done"]
    return [f"{job.folder} is left out: {job.reason}" for job in missing if not (job.folder / "summary.json").exists()]


def chosen_format(cfg: DictConfig) -> str:
    names = ("table", *EXPORTS)
    form = cfg.format or SUFFIXES.get(Path(str(cfg.out)).suffix, "table")
    if form not in names:
        raise UserError(f"format={form} is unknown: {overrides.near(str(form), names)}")
    if cfg.out is not None and form == "table":
        raise UserError(
            f"out={cfg.out} takes an export: end it in {', '.join(SUFFIXES)}, or say format=csv|markdown|latex"
        )
    return form


def bootstrap_of(cfg: DictConfig) -> Bootstrap:
    if type(cfg.bootstrap) is not int or cfg.bootstrap < FEWEST_RESAMPLINGS:
        raise UserError(f"bootstrap={cfg.bootstrap}: use a whole number of at least {FEWEST_RESAMPLINGS}, e.g. 10000")
    if type(cfg.confidence) is not float or not 0.5 <= cfg.confidence < 1:
        raise UserError(f"confidence={cfg.confidence}: use a share of at least 0.5 and below 1, e.g. 0.95")
    if type(cfg.seed) is not int or cfg.seed < 0:
        raise UserError(f"seed={cfg.seed}: use a whole number, 0 or more")
    return Bootstrap(cfg.bootstrap, cfg.confidence, cfg.seed)


def distinct(runs: Sequence[Results]) -> list[Results]:
    """A folder that is given twice counts once."""
    return list({run.folder.resolve(): run for run in runs}.values())


def reference(cfg: DictConfig, runs: Sequence[Results]) -> int:
    """The index of the run that `against` names."""
    given = cfg.against
    if type(given) is int and 1 <= given <= len(runs):
        return given - 1
    named = [i for i, run in enumerate(runs) if run.folder.resolve() == Path(str(given)).resolve()]
    if not named:
        raise UserError(
            f"against={given} is none of these runs: use a number from 1 to {len(runs)}, or one of their folders"
        )
    return named[0]


def show(found: Comparison) -> None:
    """Where the tables are too wide with what varies in columns of its own, that stands with the folders below them."""
    wide, made = console.wide(), sheets(found)
    aside = any(sheet.width > wide.width for sheet in made)
    for sheet in made:
        wide.print(on_console(sheet, len(found.keys) if aside else 0))
        wide.print("\n".join(sheet.notes), "\n", style="dim", markup=False)
    for i, row in enumerate(found.rows, 1):
        labels = [f"{key}={value}" for key, value in zip(found.keys, row.labels) if value] if aside else []
        console.out.print(f"run {i}  {'  '.join([*labels, str(row.run.folder)])}", markup=False)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Folders and overrides. A folder's name may hold "=": Hydra can name jobs so."""
    if flags := [a for a in arguments if a.startswith("-")]:
        raise UserError(f"specresearch.compare takes no {flags[0]}: give folders, then key=value")
    paths = [a for a in arguments if "=" not in a or Path(a).exists()]
    if not paths:
        raise UserError("no folder is given: python -m specresearch.compare RUN_DIR... | SWEEP_DIR [key=value...]")
    return paths, [a for a in arguments if a not in paths]


def main() -> None:
    """Entry point of `python -m specresearch.compare`."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__, (Path(overrides.CONF) / "compare.yaml").read_text(encoding="utf-8"), sep="\n")
        return
    try:
        paths, given = split(sys.argv[1:])
        with initialize_config_dir(overrides.CONF, version_base="1.3"):
            job(paths, compose("compare", given))
    except KeyboardInterrupt:
        sys.exit(cli.INTERRUPTED)
    except Exception as error:
        sys.exit(cli.report(error, "compare"))


if __name__ == "__main__":
    main()
