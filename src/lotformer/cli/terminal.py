"""Shared by commands: progress, tables that fit, one clear error instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.table
import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..extras import reason
from .tables import Table

Listener = Callable[[str, int, int], None]
"""Called with what is being done, how far it is, and how far it will go."""


def command_line() -> str:
    """The command as typed, without the path of the program."""
    return " ".join(["lotformer", *sys.argv[1:]])


@contextmanager
def one_clear_error(console: Console, what: str, *extras: str) -> Iterator[None]:
    """End the command with exit code 1 and `what` with the reason; bugs keep their traceback.

    `extras` are those of the package that the command needs: named if something of theirs is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        _fail(console, what, error, reason(error, *extras))
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        _fail(console, what, error)
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # derives from Exception alone; not imported for its name
            raise
        _fail(console, what, error)


def _fail(console: Console, what: str, error: Exception, why: str | None = None) -> None:
    # what was typed, and what other libraries say, is text and not markup
    console.print(f"{what}: {why or error}", markup=False, highlight=False, style="red", soft_wrap=True)
    raise typer.Exit(1) from error


@contextmanager
def progress_bar(console: Console) -> Iterator[Listener]:
    """A bar that says what is being done; it is gone afterwards."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=None)
        yield lambda what, now, total: progress.update(bar, description=what, completed=now, total=total)


def say(console: Console, text: str) -> None:
    """Text as it is: no markup, and paths are not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_table(console: Console, table: Table) -> None:
    """Print a table; one that is too wide comes in parts that each begin with its first column."""
    gap = 1 if _fits(console, table, 1) else 0
    rest = list(range(1, len(table.columns)))
    if table.title:
        console.print(table.title, markup=False, highlight=False, style="italic")
    while rest:
        taken = 1
        while taken < len(rest) and _fits(console, _columns(table, [0, *rest[: taken + 1]]), gap):
            taken += 1
        console.print(_rich(_columns(table, [0, *rest[:taken]]), gap))
        console.print()
        rest = rest[taken:]


def _columns(table: Table, chosen: list[int]) -> Table:
    rows = tuple(tuple(row[index] for index in chosen) for row in table.rows)
    left = sum(index < table.left for index in chosen)
    return Table("", tuple(table.columns[index] for index in chosen), rows, left)


def _fits(console: Console, table: Table, gap: int) -> bool:
    unlimited = console.options.update(max_width=10_000)
    return Measurement.get(console, unlimited, _rich(table, gap)).maximum <= console.width


def _rich(table: Table, gap: int) -> rich.table.Table:
    made = rich.table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    for index, column in enumerate(table.columns):
        made.add_column(
            Text(column), justify="left" if index < table.left else "right", overflow="fold", vertical="bottom"
        )
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made
