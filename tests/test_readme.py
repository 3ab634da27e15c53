"""What README and docs show is there: Python runs, commands and options exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from lotformer.cli.main import app
from support.small_models import SMALL

ROOT = Path(__file__).parent.parent
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", *DOCS]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)


SNIPPETS = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]
REACHED = {
    ("README.md", 0): "assert y.shape == (2, 197, 192)\nassert plan.residual().max() < 1e-5",
    ("README.md", 1): "assert type(vit.blocks[0].attn) is lotformer.LOTAttention",
    ("docs/conversion.md", 0): "assert not lotformer.conversion.hosts.sites.converted(model)",
}
READERS_OWN = {("docs/conversion.md", 0)}
"""Snippets that begin with the reader's checkpoint and batches."""


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: "-".join(map(str, snippet)))
def test_python_runs_as_typed(snippet, tmp_path):
    """In an interpreter of its own, where nothing is imported yet."""
    page, number = snippet
    given = ""
    if snippet in READERS_OWN:
        SMALL["bert"].build().save_pretrained(tmp_path / "path/to/an/encoder")
        torch.save([SMALL["bert"].batch() for _ in range(4)], tmp_path / "batches.pt")
        given = "import torch\nbatches = torch.load('batches.pt', weights_only=False)\n"
    code = given + blocks(page, "python")[number] + REACHED[snippet]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


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
