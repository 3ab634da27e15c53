"""The published results: each folder renders to the table that stands in it, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lotformer_paper.cli.render import report_of

ROOT = Path(__file__).parents[3]
NUMBERS = sorted(path for path in (ROOT / "results").iterdir() if path.is_dir() and any(path.rglob("*.json")))


@pytest.mark.parametrize("folder", NUMBERS, ids=lambda folder: folder.name)
def test_the_table_is_the_one_that_the_numbers_give(folder):
    report = report_of(folder)
    assert (folder / "table.md").read_text(encoding="utf-8") == report.markdown() + "\n"
    assert report.commands
    assert all(command.startswith("lotformer ") for command in report.commands)
    if report.draw is not None:
        assert {path.suffix for path in folder.iterdir()} >= {".png", ".svg"}


@pytest.mark.parametrize(
    "page", ["README.md", "results/README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http", "mailto")):
            assert ((ROOT / page).parent / target).exists(), target
