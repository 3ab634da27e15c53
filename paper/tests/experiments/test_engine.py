"""The engine: a declaration is all that an experiment needs, and a folder says itself what it holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.settings import Settings, setting
from lotformer_paper.cli import experiment as command_line
from lotformer_paper.experiments import engine, registry
from lotformer_paper.experiments.engine import Cells, Experiment, Job
from lotformer_paper.experiments.registry import EXPERIMENTS
from lotformer_paper.results.cells import Origin

ROWS = ("one", "two")
STAGES = ("first", "second")


@dataclass(frozen=True)
class CountSettings(Settings):
    """How far to count."""

    steps: int = setting(3, "Steps of a stage.", at_least=1)
    seeds: tuple[int, ...] = setting((0,), "Runs of each row.")


@dataclass(frozen=True)
class Count:
    row: str
    stage: str
    seed: int
    counted: int


def plan(
    settings: CountSettings, listen: Listener, rows: Annotated[str | None, typer.Option(help="Rows to count.")] = None
) -> Iterator[Job]:
    asked = engine.names_among(rows, ROWS)
    origin = Origin(engine.described(settings, "seeds"), {})
    for seed in settings.seeds:
        for row in ROWS:
            names = [f"{row}/seed{seed}/{stage}" for stage in STAGES]
            yield Job(dict.fromkeys(names, origin), partial(count, settings, row, seed, listen), seed, row in asked)


def count(settings: CountSettings, row: str, seed: int, listen: Listener, cells: Cells) -> None:
    for stage in STAGES:
        name = f"{row}/seed{seed}/{stage}"
        if cells.find(name) is not None:
            continue
        kept = cells.begin(name)
        done = int(kept.read_text()) if kept.exists() else 0
        while done < settings.steps:
            listen(name, done, settings.steps)
            done += 1
            kept.write_text(str(done))
        cells.finish(name, Count(row, stage, seed, done), {"steps": done})


COUNTING = Experiment(
    name="counting",
    about="Count as far as it is told.",
    settings=CountSettings,
    cell=Count,
    plan=plan,
    tables=lambda records: [Table("Counted", ("cell", "steps"), tuple(
        (f"{r.cell.row}, {r.cell.stage}", str(r.cell.counted)) for r in records))],
    notes=lambda records: engine.alike(records, lambda r: f"{r.provenance.budget['steps']} steps."),
)  # fmt: skip


@pytest.fixture
def counting(monkeypatch):
    """The experiment in the registry, as a line in it would put it there."""
    monkeypatch.setitem(registry.EXPERIMENTS, COUNTING.name, COUNTING)


def note(told: list[str]) -> Listener:
    return lambda what, now, total: told.append(f"{what}:{now}")


class TestRunning:
    def test_rows_seeds_and_stages_are_walked_in_the_order_of_the_plan(self, tmp_path):
        cells = engine.run(COUNTING, CountSettings(seeds=(0, 4)), tmp_path)
        assert [(cell.seed, cell.row, cell.stage) for cell in cells] == [
            (seed, row, stage) for seed in (0, 4) for row in ROWS for stage in STAGES
        ]
        stored = json.loads((tmp_path / "two/seed4/second.json").read_text())
        assert (stored["experiment"], stored["format"]) == ("counting", 1)
        assert (stored["provenance"]["seed"], stored["provenance"]["budget"]) == (4, {"steps": 3})

    def test_finished_cells_are_not_made_again(self, tmp_path):
        first = engine.run(COUNTING, CountSettings(), tmp_path)
        told: list[str] = []
        assert engine.run(COUNTING, CountSettings(), tmp_path, note(told)) == first
        assert told == []

    def test_an_interrupted_run_goes_on_at_the_step_where_it_stopped(self, tmp_path):
        def interrupt(what: str, now: int, total: int) -> None:
            if (what, now) == ("one/seed0/second", 2):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.run(COUNTING, CountSettings(), tmp_path, interrupt)
        told: list[str] = []
        engine.run(COUNTING, CountSettings(), tmp_path, note(told), rows="one")
        assert told == ["one/seed0/second:2"]
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".json"]

    def test_cells_of_other_settings_are_refused_before_anything_is_made(self, tmp_path):
        """Those of the last job, and those that nobody asked for: they share the table."""
        engine.run(COUNTING, CountSettings(), tmp_path, rows="two")
        told: list[str] = []
        with pytest.raises(ValueError, match=r"two/seed0 holds cells made from something else .*steps 3 instead of 5"):
            engine.run(COUNTING, CountSettings(steps=5), tmp_path, note(told), rows="one")
        assert told == []

    def test_only_what_is_asked_for_is_made_and_returned(self, tmp_path):
        cells = engine.run(COUNTING, CountSettings(), tmp_path, rows="two")
        assert {cell.row for cell in cells} == {"two"}
        assert not (tmp_path / "one").exists()

    def test_a_job_that_leaves_a_cell_out_is_an_error(self, tmp_path):
        lazy = dataclasses.replace(COUNTING, plan=lambda *_: [Job({"missing": Origin({}, {})}, lambda cells: None)])
        with pytest.raises(RuntimeError, match="counting has not made missing"):
            engine.run(lazy, CountSettings(), tmp_path)

    def test_a_place_that_cannot_be_written_is_found_out_before_the_plan(self, tmp_path):
        (tmp_path / "file").write_text("")
        never = dataclasses.replace(COUNTING, plan=lambda *_: pytest.fail("planned"))
        with pytest.raises(OSError, match="cannot write to"):
            engine.run(never, CountSettings(), tmp_path / "file" / "out")

    def test_an_experiment_of_one_process_refuses_to_be_many(self, tmp_path, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="counting runs in one process: start it without torchrun"):
            engine.run(COUNTING, CountSettings(), tmp_path)
        assert not list(tmp_path.iterdir())


class TestRendering:
    def test_is_by_the_name_that_the_cells_carry(self, counting, tmp_path):
        engine.run(COUNTING, CountSettings(), tmp_path, command="lotformer experiment counting", rows="two")
        engine.run(COUNTING, CountSettings(), tmp_path, command="lotformer experiment counting --seeds 0")
        report = engine.render(tmp_path)
        assert report.commands == ("lotformer experiment counting --seeds 0", "lotformer experiment counting")
        assert report.tables[0].rows == tuple((f"{row}, {stage}", "3") for row in ROWS for stage in STAGES)
        assert report.notes == ("3 steps.",)

    def test_a_folder_of_two_experiments_is_refused_with_both_names(self, counting, tmp_path):
        """Wherever the odd cell lies: every cell is asked, not the first."""
        engine.run(COUNTING, CountSettings(), tmp_path)
        last = tmp_path / "two/seed0/second.json"
        last.write_text(last.read_text().replace('"counting"', '"lra"'))
        with pytest.raises(ValueError, match="results of counting and lra"):
            engine.render(tmp_path)
        with pytest.raises(ValueError, match="holds cells of lra where counting was expected"):
            engine.report(COUNTING, tmp_path)

    def test_cells_of_a_name_that_is_not_known_are_refused_with_it(self, tmp_path):
        engine.run(COUNTING, CountSettings(), tmp_path)
        with pytest.raises(ValueError, match=r"cells of 'counting'; this version knows .*glue"):
            engine.render(tmp_path)

    def test_other_json_is_no_cell_and_a_damaged_one_is_named(self, counting, tmp_path):
        with pytest.raises(ValueError, match="it holds no result: expected JSON files that name their experiment"):
            engine.render(tmp_path)
        engine.run(COUNTING, CountSettings(), tmp_path)
        (tmp_path / "config.json").write_text('{"experiment": "of somebody else", "model_type": "bert"}')
        (tmp_path / "list.json").write_text("[1]")
        assert len(engine.render(tmp_path).tables[0].rows) == 4
        (tmp_path / "one/seed0/first.json").write_text('{"experiment": ')
        with pytest.raises(ValueError, match=r"one/seed0/first\.json"):
            engine.render(tmp_path)

    def test_a_cell_with_other_fields_is_named(self, counting, tmp_path):
        engine.run(COUNTING, CountSettings(), tmp_path)
        path = tmp_path / "one/seed0/first.json"
        path.write_text(path.read_text().replace('"counted"', '"told"'))
        with pytest.raises(ValueError, match=r"first\.json is not a result of this version"):
            engine.render(tmp_path)


class TestCommands:
    def test_a_declaration_is_a_command_with_its_settings_and_inputs(self, counting, tmp_path):
        made = typer.Typer()
        made.command()(command_line.command(COUNTING))
        result = CliRunner().invoke(made, ["--steps", "2", "--rows", "one", "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert "| one, second | 2 |" in (tmp_path / "table.md").read_text()
        said = CliRunner().invoke(made, ["--help"], env={"COLUMNS": "200"}).output
        for word in ("Count as far as it is told.", "--steps", "Rows to count.", "out/counting"):
            assert word in said

    @pytest.mark.parametrize("name", EXPERIMENTS)
    def test_every_experiment_has_one_that_explains_itself(self, name):
        said = CliRunner().invoke(app, ["experiment", name, "--help"], env={"COLUMNS": "300"})
        assert said.exit_code == 0
        assert EXPERIMENTS[name].about in said.output
        assert str(Path("out") / name) in said.output
