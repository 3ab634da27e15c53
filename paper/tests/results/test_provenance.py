"""A result says where it comes from, and only what is known."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from importlib import metadata

import pytest

import lotformer
from lotformer_paper.results import plain
from lotformer_paper.results import provenance as module
from lotformer_paper.results.plain import read
from lotformer_paper.results.provenance import PACKAGES, Provenance, provenance


def test_versions_are_those_of_what_is_installed():
    found = provenance("lotformer x", threads=1, seed=3).versions
    assert found["lotformer"] == lotformer.__version__
    assert found["torch"] == metadata.version("torch")
    installed = {distribution.metadata["Name"].lower().replace("_", "-") for distribution in metadata.distributions()}
    assert set(found) - {"python", "lotformer"} == {name for name in PACKAGES if name in installed}


def test_a_missing_package_is_left_out_instead_of_failing(monkeypatch):
    known = metadata.version

    def version(name: str) -> str:
        if name == "transformers":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)
    assert "transformers" not in provenance("", threads=1, seed=0).versions


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_code_and_of_no_other_repository(tmp_path, monkeypatch):
    here = tmp_path / "lotformer" / "results" / "provenance.py"
    here.parent.mkdir(parents=True)
    shutil.copy(module.__file__, here)
    monkeypatch.setattr(module, "__file__", str(here))
    monkeypatch.setattr(lotformer, "__file__", str(here))  # the product lies in the same repository

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert module.commit() is None, "there is no repository"
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "something else")
    assert module.commit() is None, "the repository does not hold the package"
    git("add", "-A")
    git("commit", "-q", "-m", "the package")
    assert module.commit() == git("rev-parse", "HEAD")
    here.write_text("changed")
    assert module.commit() == git("rev-parse", "HEAD") + "-dirty"


def test_it_survives_a_trip_through_json(tmp_path):
    made = provenance("lotformer x", threads=2, seed=1, budget={"steps": 7})
    plain.write(made, tmp_path / "p.json")
    assert read(Provenance, tmp_path / "p.json") == made


def test_what_was_not_recorded_is_said():
    made = provenance("lotformer x", threads=1, seed=0)
    assert "1 thread;" in made.where()
    assert f"lotformer {lotformer.__version__}" in made.where()
    unknown = dataclasses.replace(made, cpu=None, cores=None, versions={"torch": "2.13.0"}, commit=None, note="copied")
    assert unknown.where() == "machine not recorded; torch 2.13.0; copied"


def test_a_result_of_another_format_is_refused(tmp_path):
    path = tmp_path / "p.json"
    plain.write(provenance("lotformer x", threads=1, seed=0), path)
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match=r"p\.json.*format 2, this version reads 1"):
        read(Provenance, path)
