"""Cells are reused only for what they were computed from."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import pytest

from lotformer_paper.results.cells import CellFolder, Origin
from lotformer_paper.results.sources import Source, checkpoint_source, files_source


@dataclass(frozen=True)
class Score:
    name: str
    values: dict[int, float]
    parts: tuple[int, ...] = ()


ORIGIN = Origin({"steps": 5, "lr": 0.1}, {"data": Source("glue/STS-B", "a" * 64)})


@pytest.fixture
def cells(tmp_path) -> CellFolder[Score]:
    return CellFolder(tmp_path / "task", Score, "test", "lotformer experiment test")


def test_a_finished_cell_comes_back_as_it_was(cells):
    score = Score("a", {3: 0.5}, (1, 2))
    assert cells.find("a", ORIGIN) is None
    checkpoint = cells.begin("a", ORIGIN)
    checkpoint.write_text("half")
    cells.finish("a", score, ORIGIN, {"steps": 4}, seed=9)
    assert cells.find("a", ORIGIN) == score
    record = cells.record("a")
    assert record is not None
    assert (record.cell, record.origin) == (score, ORIGIN)
    assert (record.provenance.budget, record.provenance.seed) == ({"steps": 4}, 9)
    assert record.provenance.command == "lotformer experiment test"
    assert [path.name for path in cells.folder.iterdir()] == ["a.json"]


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "begun"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Origin({"steps": 6, "lr": 0.1}, ORIGIN.sources), "steps 5 instead of 6"),
        (Origin({**ORIGIN.settings, "eps": 1.0}, ORIGIN.sources), "eps not recorded instead of 1.0"),
        (Origin(ORIGIN.settings, {"data": Source("glue/STS-B", "b" * 64)}), "data with other contents.*aaaaaaaa"),
        (Origin(ORIGIN.settings, {"checkpoint": Source("x", "b")}), "contents of its checkpoint were not recorded"),
    ],
    ids=["setting", "new setting", "contents", "no contents"],
)  # fmt: skip
def test_another_origin_is_refused_with_what_differs(cells, other, message, finished):
    if finished:
        cells.finish("a", Score("a", {}), ORIGIN, {}, seed=0)
    else:
        cells.begin("a", ORIGIN)
    with pytest.raises(ValueError, match=rf"made from something else .*{message}.*Choose another --out"):
        cells.find("a", other)


def test_another_name_for_the_same_contents_is_the_same(cells):
    cells.finish("a", Score("a", {}), ORIGIN, {}, seed=0)
    moved = dataclasses.replace(ORIGIN.sources["data"], name="elsewhere")
    assert cells.find("a", Origin(ORIGIN.settings, {"data": moved})) is not None


def test_what_is_no_cell_is_one_clear_error(cells):
    cells.folder.mkdir()
    (cells.folder / "a.json").write_text('{"cell": ')
    with pytest.raises(ValueError, match=r"a\.json is not a result of this version"):
        cells.find("a", ORIGIN)
    cells.finish("b", Score("b", {}), ORIGIN, {}, seed=0)
    stored = json.loads((cells.folder / "b.json").read_text())
    (cells.folder / "b.json").write_text(json.dumps({**stored, "experiment": "other"}))
    with pytest.raises(ValueError, match="is a cell of the experiment 'other'"):
        cells.find("b", ORIGIN)


def test_sources_are_told_apart_by_content_not_by_path(tmp_path):
    folders = [tmp_path / name / "x" / "model" for name in "abc"]
    for folder, weights in zip(folders, ("1", "1", "2"), strict=True):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(weights)
        (folder / "README.md").write_text(str(folder))
    first, second, third = map(checkpoint_source, folders)
    assert first == second
    assert first.name == third.name == "x/model"
    assert first.sha256 != third.sha256
    (folders[0] / "model.safetensors").rename(folders[0] / "other.safetensors")
    assert checkpoint_source(folders[0]).sha256 != second.sha256, "a name is content too"
    assert files_source("", []).sha256 != first.sha256
