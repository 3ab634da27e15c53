"""The Long Range Arena as a task of the loop, and its table: small generated sets, real runs."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch

from lotformer.attention.lot import LOT
from lotformer.training.run import train
from lotformer_paper.data.longrange.listops import ListOps
from lotformer_paper.data.longrange.pathfinder import Pathfinder
from lotformer_paper.data.longrange.prepare import prepare
from lotformer_paper.data.longrange.retrieval import PaperPairs
from lotformer_paper.experiments import engine
from lotformer_paper.experiments.longrange import search, table
from lotformer_paper.experiments.longrange.settings import settings_for
from lotformer_paper.experiments.longrange.table import ArenaSettings
from lotformer_paper.experiments.longrange.task import LongRange
from support.training_run import learn_longrange, side_by_side

SMALL_LISTOPS = ListOps(shortest=5, longest=40, sizes={"train": 64, "dev": 16, "test": 16})


@pytest.fixture(scope="module")
def listops(tmp_path_factory):
    return prepare(SMALL_LISTOPS, tmp_path_factory.mktemp("sets"), workers=1)


def run_settings(**chosen):
    base = {"task": "listops", "steps": 12, "batch_size": 8, "save_every": 5, "warmup_steps": 1}
    return settings_for(**{**base, **chosen})


def weights(task: LongRange) -> dict[str, torch.Tensor]:
    assert task.model is not None
    return {name: tensor.clone() for name, tensor in task.model.state_dict().items()}


@pytest.mark.parametrize("attention", ["lot", "softmax"])
def test_thirty_steps_overfit_a_batch(attention, tmp_path):
    sets = prepare(ListOps(shortest=5, longest=40, sizes={"train": 8, "dev": 8, "test": 8}), tmp_path, workers=1)
    settings = run_settings(steps=30, attention=attention, lr=1e-2, dropout=0.0)
    task = LongRange(settings, sets)
    report = train(task, tmp_path / "run")
    assert report.losses[0] > 2
    assert report.losses[-1] < 0.02
    assert task.count_right(task.model.eval(), "train")["accuracy"] == (8, 8)


class Stop(Exception):
    pass


class StopAt:
    """A listener that breaks a run off, as a crash would."""

    def __init__(self, step):
        self.step = step

    def started(self, step, steps): ...
    def evaluated(self, step, metrics): ...
    def ended(self): ...

    def stepped(self, progress):
        if progress.step == self.step:
            raise Stop


def test_a_resumed_run_ends_as_an_uninterrupted_one(listops, tmp_path):
    whole = LongRange(run_settings(), listops)
    train(whole, tmp_path / "whole")
    first, second = LongRange(run_settings(), listops), LongRange(run_settings(), listops)
    with pytest.raises(Stop):
        train(first, tmp_path / "cut", listeners=[StopAt(8)])
    report = train(second, tmp_path / "cut", resume=True)
    assert report.steps == 12
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(second)[name]), name


def test_two_processes_learn_what_one_learns(listops, tmp_path):
    settings = {"task": "listops", "steps": 6, "batch_size": 8, "warmup_steps": 1, "dropout": 0.0}
    learn_longrange(listops.folder, tmp_path / "one", settings)
    side_by_side(2, learn_longrange, listops.folder, tmp_path / "two", settings)
    one, two = (json.loads((tmp_path / name / "losses.json").read_text()) for name in ("one", "two"))
    assert len(one) == 6
    assert two == pytest.approx(one, rel=1e-4)


def test_documents_are_compared_in_pairs(tmp_path):
    rows = "".join(f"{i % 2}\tA\tB\ttext {i}\tother text {i % 2}\n" for i in range(16))
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text(rows)
    sets = prepare(PaperPairs(tmp_path), tmp_path / "sets", workers=1)
    report = train(LongRange(run_settings(task="retrieval", steps=2), sets), tmp_path / "run")
    assert report.steps == 2


def test_another_set_is_refused_by_the_checkpoint(listops, tmp_path):
    train(LongRange(run_settings(steps=2), listops), tmp_path / "run")
    other = prepare(dataclasses.replace(SMALL_LISTOPS, seed=1), tmp_path, workers=1)
    with pytest.raises(ValueError, match="data"):
        train(LongRange(run_settings(steps=2), other), tmp_path / "run", resume=True)


def test_residuals_are_lots_alone(listops):
    for attention, layers in (("lot", 2), ("softmax", 0)):
        task = LongRange(run_settings(attention=attention), listops)
        found = task.residuals(task.build_model().eval())
        assert len(found) == layers
        assert all(value >= 0 for value in found)


def test_exact_couplings_have_no_residual(listops):
    task = LongRange(run_settings(attention_options=("solver=newton", "eps=1.0")), listops)
    assert max(task.residuals(task.build_model().eval())) < 1e-3


@pytest.mark.parametrize(
    ("row", "balance", "solver"),
    [
        ("lot", "both", "sinkhorn"),
        ("lot-exact", "both", "newton"),
        ("lot-semibalanced", "keys", "sinkhorn"),
        ("lot-unbalanced+dwc", "none", "sinkhorn"),
    ],
)
def test_rows_of_lot_differ_in_what_they_impose(listops, row, balance, solver):
    settings = ArenaSettings(tasks=("listops",), rows=(row,)).run("listops", row, 0)
    task = LongRange(settings, listops)
    model = task.build_model().eval()
    lots = [module for module in model.modules() if isinstance(module, LOT)]
    assert {(lot.config.balance, lot.config.solver.name) for lot in lots} == {(balance, solver)}
    assert settings.local_mixing == row.endswith("+dwc")
    if balance == "none":
        assert max(task.residuals(model)) > 1e-2  # columns are uneven, and told as such


@pytest.fixture
def small_sets(monkeypatch, tmp_path):
    """The experiment's own path to its sets, which are small ones here."""
    small = {
        "listops": SMALL_LISTOPS,
        "pathfinder": Pathfinder(sizes={"train": 4, "dev": 2, "test": 2}),
    }
    monkeypatch.setattr(
        "lotformer_paper.experiments.longrange.task.source", lambda task, folder, **options: small[task]
    )
    return tmp_path


@pytest.fixture
def run(small_sets):
    """The experiment on the small sets."""
    return functools.partial(engine.run, table.EXPERIMENT, data_dir=small_sets)


def test_the_grid_is_filled_once_and_rendered(small_sets, run):
    settings = ArenaSettings(
        tasks=("listops", "pathfinder"), rows=("lot", "softmax+dwc"), seeds=(0, 1), steps=2, batch_size=4, evaluations=1
    )
    out = small_sets / "out"
    cells = run(settings, out, command="lotformer experiment lra")
    assert [(cell.task, cell.row, cell.seed) for cell in cells[:3]] == [
        ("listops", "lot", 0),
        ("listops", "lot", 1),
        ("listops", "softmax+dwc", 0),
    ]
    assert all((cell.residual is not None) == (cell.row == "lot") for cell in cells)
    assert run(settings, out) == cells
    report = engine.render(out)
    accuracies, printed, costs = report.tables
    assert accuracies.columns == ("Attention", "ListOps", "Pathfinder", "Average")
    assert [row[0] for row in accuracies.rows] == ["lot", "softmax+dwc"]
    assert all("±" in text for row in accuracies.rows for text in row[1:3])
    assert [row[:2] for row in printed.rows] == [("lot", "LOTFormer")]
    assert len(costs.rows) == 4
    assert sorted(path.suffix for path in report.draw(out)) == [".png", ".svg"]
    assert not list(out.rglob("*.run"))


def test_a_search_gives_every_row_its_best_rate_and_leaves_the_test_set_alone(small_sets, run, monkeypatch):
    looked_at = []
    count = LongRange.count_right

    def noted(self, model, split, *rest):
        looked_at.append(split)
        return count(self, model, split, *rest)

    monkeypatch.setattr(LongRange, "count_right", noted)
    budget = {"tasks": ("listops",), "rows": ("lot-masses", "softmax-pooled"), "steps": 2, "batch_size": 4}
    settings = search.SearchSettings(**budget, evaluations=1, rates=(1e-6, 1e-1))
    found = small_sets / "search"
    trials = engine.run(search.EXPERIMENT, settings, found, data_dir=small_sets)
    assert set(looked_at) == {"dev"}
    assert engine.run(search.EXPERIMENT, settings, found, data_dir=small_sets) == trials
    best = search.best_rates(found, "listops")
    for row in budget["rows"]:
        accuracies = {rate: t.accuracy for t, rate in zip(trials, (1e-6, 1e-1) * 2, strict=True) if t.row == row}
        assert accuracies[best[row]] == max(accuracies.values())
    [shown] = engine.render(found).tables
    assert [row[0] for row in shown.rows] == ["lot-masses", "softmax-pooled"]
    run(ArenaSettings(**budget, evaluations=1, searched=found), small_sets / "out")
    record = json.loads((small_sets / "out" / "listops" / "lot-masses-seed0.json").read_text())
    assert record["origin"]["settings"]["lr"] == best["lot-masses"]
    with pytest.raises(ValueError, match="no trial of softmax on listops"):
        run(ArenaSettings(**{**budget, "rows": ("softmax",)}, evaluations=1, searched=found), small_sets)


def test_cells_of_another_budget_are_refused(small_sets, run):
    settings = ArenaSettings(tasks=("listops",), rows=("lot",), steps=2, batch_size=4, evaluations=1)
    run(settings, small_sets / "out")
    with pytest.raises(ValueError, match="steps 2 instead of 3"):
        run(dataclasses.replace(settings, steps=3), small_sets / "out")


def test_an_interrupted_cell_goes_on(small_sets, run):
    settings = ArenaSettings(tasks=("listops",), rows=("lot",), steps=4, batch_size=4, evaluations=4)
    out = small_sets / "out"

    def interrupt(what, now, total):
        if "lot" in what and now == 3:
            raise Stop

    with pytest.raises(Stop):
        run(settings, out, interrupt)
    assert not (out / "listops" / "lot-seed0.json").exists()
    [cell] = run(settings, out)
    assert cell.steps == 4
    assert [point.step for point in cell.curve] == [1, 2, 3, 4]
    assert json.loads((out / "listops" / "lot-seed0.json").read_text())["experiment"] == "lra"


@pytest.mark.parametrize(
    ("wrong", "said"), [({"tasks": ("imgae",)}, "imgae"), ({"rows": ("sofmax",)}, "Did you mean 'softmax'")]
)
def test_unknown_names_are_refused_at_once(wrong, said):
    with pytest.raises(ValueError, match=said):
        ArenaSettings(**wrong)
