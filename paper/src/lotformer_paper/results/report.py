"""Rendering of stored results: `table.md` with the commands that made it, and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lotformer.cli.tables import Table
from lotformer.files import write_text

from . import figures


@dataclass(frozen=True)
class Report:
    """Tables with the commands that made them and notes below. `draw` writes figures and returns the files."""

    commands: tuple[str, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    draw: Callable[[Path], list[Path]] | None = None

    def markdown(self) -> str:
        """Everything but the figures, as one page."""
        parts = ["\n".join(f"`{command}`" + "  " * (command != self.commands[-1]) for command in self.commands)]
        parts += [table.markdown() for table in self.tables]
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts)

    def write(self, folder: Path) -> list[Path]:
        """Write `table.md` and, where matplotlib is installed, the figures; returns the files."""
        page = folder / "table.md"
        write_text(self.markdown() + "\n", page)
        drawn = self.draw(folder) if self.draw is not None and figures.can_draw() else []
        return [page, *drawn]


def largest(values: Iterable[float | None], digits: int = 0) -> str:
    """The largest of those that were measured, e.g. of residuals; a dash if none was."""
    worst = max((value for value in values if value is not None), default=None)
    return "–" if worst is None else f"{worst:.{digits}e}"
