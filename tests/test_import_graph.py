"""Imports point one way: from the command line down to the operator, never up and never sideways."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "lotformer"

LAYERS = (
    {"ops"},
    {"nn"},
    {"attention"},
    {"layers"},
    {"models", "data", "training"},
    {"conversion", "results"},
    {"bench", "experiments", "demo"},
    {"cli"},
    {"__main__"},
)
HELPERS = {
    "_settings": "frozen settings from Python, TOML or a command line; imports nothing of ours, serves every layer",
    "_files": "whole files or none; imports nothing of ours, serves every layer",
    "_reading": "files as what they claim to be, or one clear error; imports nothing of ours, serves every layer",
    "_extras": "which extra brings which package; imports nothing of ours, serves every layer",
    "_import_hook": "waits for a module of another library; imports nothing of ours",
    "_torchvision": "makes a mismatched torchvision importable; imports nothing of ours",
    "_transformers_hook": "loads converted checkpoints with transformers, so it may import conversion",
}
MAY_LOOK_UP = {"_transformers_hook"}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names} | dict.fromkeys(HELPERS, -1)


def arrows(root: Path) -> Iterator[tuple[str, str, str]]:
    """Every import of one part of the package by another, inside functions too: (from, to, where)."""
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).with_suffix("").parts
        if place == ("__init__",):
            continue  # the package itself hands out what is below it
        package = ["lotformer", *place[:-1]]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for target in _targets(node, package):
                if target != place[0]:
                    yield place[0], target, f"{path.relative_to(root)}:{node.lineno}"


def _targets(node: ast.AST, package: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name.split(".") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        module = [*base, *(node.module.split(".") if node.module else [])]
        names = [[*module, alias.name] for alias in node.names] if len(module) == 1 else [module]
    else:
        return []
    # `from lotformer import __version__` names no part
    return [name[1] for name in names if name[0] == "lotformer" and len(name) > 1 and not name[1].startswith("__")]


def wrong(root: Path) -> list[str]:
    found = []
    for source, target, where in arrows(root):
        if source in MAY_LOOK_UP:
            continue
        if target not in LEVEL or source not in LEVEL:
            found.append(f"{where}: {source} → {target} is in no layer: add it to LAYERS, or explain it in HELPERS")
        elif LEVEL[target] >= LEVEL[source]:
            found.append(f"{where}: {source} → {target} points {'up' if LEVEL[target] > LEVEL[source] else 'sideways'}")
    return found


def test_no_arrow_points_up_or_sideways():
    assert wrong(PACKAGE) == []


def test_every_part_has_its_place():
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    unknown = parts - set(LEVEL) - {"__init__"}
    assert not unknown, "add it to LAYERS, or explain it in HELPERS"


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        ("ops/a.py", "from ..nn import x", "ops → nn points up"),
        ("ops/cpu/a.py", "def f():\n    from ...data import x", "ops → data points up"),
        ("data/a.py", "from .. import training", "data → training points sideways"),
        ("bench/a.py", "import lotformer.demo.run", "bench → demo points sideways"),
        ("cli/a.py", "from lotformer.novel import x", "cli → novel is in no layer"),
    ],
)
def test_a_wrong_arrow_is_seen(tmp_path, path, code, expected):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(code)
    (message,) = wrong(tmp_path)
    assert expected in message


def test_right_arrows_pass(tmp_path):
    (tmp_path / "cli").mkdir()
    lines = ["from .. import __version__, ops", "from . import b", "from ..demo.run import x", "import torch"]
    (tmp_path / "cli" / "a.py").write_text("\n".join(lines))
    assert wrong(tmp_path) == []
