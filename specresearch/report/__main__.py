"""`python -m specresearch.report RUN_DIR... | SWEEP_DIR [out=FILE]`: the report again, from the folders alone.

One run: its report, into its folder. Several: their comparison, into report.html of the sweep's or the working folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specresearch import console
from specresearch.report import comparison_report, run_report
from specresearch.results import find
from specresearch.types import UserError

USAGE = "python -m specresearch.report RUN_DIR... | SWEEP_DIR [out=FILE]"


def main(arguments: Sequence[str]) -> int:
    """-> the exit status"""
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0
    try:
        folders, out = _parsed(arguments)
        found = find(folders)
        page = run_report(found[0]) if len(found) == 1 else comparison_report(found)
        path = out or (Path(folders[0]) if len(folders) == 1 else Path()) / "report.html"
        path.write_text(page, encoding="utf-8")
    except UserError as error:
        return console.fail(str(error))
    except OSError as error:
        return console.fail(f"{error.filename or 'a file'} cannot be written or read: {error.strerror or error}")
    except KeyboardInterrupt:
        return 130
    print(f"{path}  {len(page.encode()) / 1e6:.2f} MB")
    return 0


def _parsed(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    folders = [a for a in arguments if "=" not in a or Path(a).is_dir()]
    keys = dict(a.split("=", 1) for a in arguments if a not in folders)
    for key in keys:
        if key != "out":
            raise UserError(f"there is no key {key}, only out=FILE: {USAGE}")
    if flags := [a for a in folders if a.startswith("-")]:
        raise UserError(f"{flags[0]} is no flag of this command: {USAGE}")
    if not folders:
        raise UserError(f"no run is given: {USAGE}")
    if keys.get("out") == "":
        raise UserError("out= names no file: out=report.html")
    return folders, Path(keys["out"]) if "out" in keys else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
