"""Reports on a screen and in their folder."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lotformer.cli.terminal import say, show_table

from ..results import figures
from ..results.report import Report


def publish(console: Console, report: Report, folder: Path) -> None:
    """Show a report, write it beside the numbers it was rendered from, and say where."""
    show(console, report)
    files = report.write(folder)
    say(console, f"Wrote {', '.join(map(str, files))}")
    if report.draw is not None and not figures.can_draw():
        say(console, f"No figure: {figures.MISSING}, then `lotformer render {folder}`.")


def show(console: Console, report: Report) -> None:
    """Tables and notes."""
    for table in report.tables:
        show_table(console, table)
    for note in report.notes:
        console.print(note, markup=False, highlight=False)
