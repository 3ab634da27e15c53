"""The published results: each folder renders to the table that stands in it, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer_paper.cli.render import report_of
from lotformer_paper.experiments.registry import EXPERIMENTS

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


TABLES = dict(
    enumerate(
        ("imagenet", "lra", "vision-ladder", "glue", "translation", "sinkhorn-ablation", "rank-ablation"), start=1
    )
)
"""The experiments by their numbers in the paper; 8 and 9 print settings, 10 is a benchmark."""


def test_a_table_of_the_paper_is_claimed_by_one_experiment_and_the_page_knows_it():
    claims = {name: re.match(r"Table (\d+): ", experiment.about) for name, experiment in EXPERIMENTS.items()}
    assert {int(claim[1]): name for name, claim in claims.items() if claim} == TABLES
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| Table (\d+) \|.*\| `experiment ([^`]+)` \|", page, re.MULTILINE)
    assert {int(number): name for number, name in told} == TABLES
    assert len([claim for claim in claims.values() if claim]) == len(TABLES)


def test_every_command_on_the_page_exists():
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    for command in re.findall(r"\| `((?:experiment|bench|figures) [^`]+)` \|", page):
        assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0, command
