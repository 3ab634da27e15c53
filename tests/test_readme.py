"""What README and docs show is there: Python runs, commands and options exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import timm
import typer

from lotformer.cli import app

ROOT = Path(__file__).parent.parent
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", *DOCS]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)


def test_the_python_of_the_readme_runs_and_reaches_what_it_says():
    scope: dict[str, Any] = {"timm": timm}
    shown = blocks("README.md", "python")
    for block in shown:
        exec(compile(block, "README.md", "exec"), scope)
    assert len(shown) == 2
    assert scope["y"].shape == (2, 197, 192)
    assert scope["plan"].residual().max() < 1e-5
    assert type(scope["vit"].blocks[0].attn) is scope["lotformer"].LOTAttention


def commands(page: str) -> list[str]:
    """Every command line of ours: in blocks, and in backticks where it goes beyond a name."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    lines += re.findall(r"`(lotformer [^`]+)`", text(page).replace("\n", " "))
    found = (re.search(r"(?:^|-m )lotformer (.+)", line.split("#")[0]) for line in lines)
    return [match.group(1).strip() for match in found if match is not None]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page):
    for line in commands(page):
        command: Any = typer.main.get_command(app)
        words = [word for word in shlex.split(re.sub(r"[\[\]|…]", " ", line)) if word]
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        whole = not hasattr(command, "commands") or not words or words[0].startswith("-")
        assert whole, f"{page}: lotformer {line}"
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= known, f"{page}: lotformer {line}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text(page)):
        if not target.startswith("http"):
            assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_commands_are_found():
    assert "convert MODEL --out DIR" in commands("README.md")
    assert "bench runtime --against sdpa [--backward]" in commands("README.md")
