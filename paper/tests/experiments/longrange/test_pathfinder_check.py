"""The check of Pathfinder: run once, rendered with its contact sheet."""

from __future__ import annotations

from lotformer_paper.experiments import engine
from lotformer_paper.experiments.longrange import pathfinder_check
from lotformer_paper.experiments.longrange.pathfinder_check import PathfinderSettings


def test_it_is_run_once_and_rendered(tmp_path):
    settings = PathfinderSettings(images=600)
    [cell] = engine.run(pathfinder_check.EXPERIMENT, settings, tmp_path, command="lotformer experiment pathfinder")
    assert cell.positive == 0.5
    assert engine.run(pathfinder_check.EXPERIMENT, settings, tmp_path) == [cell]
    report = engine.render(tmp_path)
    assert [row[0].split(":")[0] for row in report.tables[0].rows] == [
        "brightness", "length", "both", "distance between the dots",
    ]  # fmt: skip
    assert {path.name for path in report.draw(tmp_path)} == {"contact_sheet.png", "contact_sheet.svg"}
