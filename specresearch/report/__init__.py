"""A run, or several side by side, as one HTML file that needs neither network nor model: pure functions of the results."""

from pathlib import Path

from specresearch.report.of_run import run_report
from specresearch.report.of_several import comparison_report
from specresearch.results import Results

__all__ = ["comparison_report", "run_report", "write"]


def write(results: Results) -> Path:
    """Write report.html into the run's folder."""
    path = results.folder / "report.html"
    path.write_text(run_report(results), encoding="utf-8")
    return path
