"""What commands say about themselves arrives as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from rich.text import Text

from lotformer.cli.main import app


def texts(command: Any, name: str) -> Iterator[tuple[str, str]]:
    yield name, command.help or ""
    for option in command.params:
        yield f"{name} {option.opts[0]}", getattr(option, "help", None) or ""
    for inner, sub in getattr(command, "commands", {}).items():
        yield from texts(sub, f"{name} {inner}")


def test_no_bracket_is_taken_for_markup():
    shown = list(texts(typer.main.get_command(app), "lotformer"))
    assert len(shown) > 100
    for place, text in shown:
        assert Text.from_markup(text).plain == text, place
