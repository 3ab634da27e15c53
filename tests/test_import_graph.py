"""Imports point one way: from the command line down to the operator, never up and never sideways."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lotformer"
PAPER = ROOT / "paper" / "src" / "lotformer_paper"

LAYERS = (
    {"settings", "files", "reading", "extras", "machine"},  # import nothing of ours, serve every layer
    {"ops"},
    {"nn"},
    {"attention"},
    {"layers"},
    {"models", "data", "training"},
    {"conversion"},
    {"vision", "demo"},
    {"cli"},
    {"__main__"},
)
PAPER_LAYERS = ({"results", "data", "models"}, {"bench", "experiments"}, {"cli"})
HELPERS = {
    "_import_hook": "waits for a module of another library; imports nothing of ours",
    "_torchvision": "makes a mismatched torchvision importable; imports nothing of ours",
    "_transformers_hook": "loads converted checkpoints with transformers, so it may import conversion",
}
MAY_LOOK_UP = {"_transformers_hook"}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names} | dict.fromkeys(HELPERS, -1)
PAPER_LEVEL = {name: level for level, names in enumerate(PAPER_LAYERS) for name in names}


def arrows(root: Path) -> Iterator[tuple[str, str, str]]:
    """Every import of one part of the package by another, inside functions too: (from, to, where)."""
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).with_suffix("").parts
        if place == ("__init__",):
            continue  # the package itself hands out what is below it
        package = [root.name, *place[:-1]]
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
    return [name[1] for name in names if name[0] == package[0] and len(name) > 1 and not name[1].startswith("__")]


def wrong(root: Path, level: Mapping[str, int] = LEVEL) -> list[str]:
    found = []
    for source, target, where in arrows(root):
        if source in MAY_LOOK_UP:
            continue
        if target not in level or source not in level:
            found.append(f"{where}: {source} → {target} is in no layer: add it to LAYERS, or explain it in HELPERS")
        elif level[target] >= level[source]:
            found.append(f"{where}: {source} → {target} points {'up' if level[target] > level[source] else 'sideways'}")
    return found


def cycles(root: Path) -> list[str]:
    """Modules or folders of one folder that import each other, at every level: `from → to` for each arrow."""
    inside: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for source, target in _modules(root):
        shared = 0
        while shared < min(len(source), len(target)) and source[shared] == target[shared]:
            shared += 1
        if shared < min(len(source), len(target)):
            inside.setdefault(source[:shared], {}).setdefault(source[shared], set()).add(target[shared])
    found = []
    for folder, below in inside.items():
        for source in below:
            circle = sorted(target for target in below[source] if source in _reached(below, target))
            found += ["/".join((*folder, source)) + f" → {target}" for target in circle]
    return sorted(found)


def _reached(below: Mapping[str, set[str]], start: str) -> set[str]:
    reached, todo = set[str](), [start]
    while todo:
        for target in below.get(todo.pop(), ()):
            if target not in reached:
                reached.add(target)
                todo.append(target)
    return reached


def _modules(root: Path) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Every import of a module, or name in one, by another: their places below the root, inside functions too."""
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).with_suffix("").parts
        package, place = [root.name, *place[:-1]], place[:-1] if place[-1] == "__init__" else place
        if not place or place[0] in MAY_LOOK_UP:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                for alias in node.names:
                    target = [*base, *(node.module or "").split("."), alias.name]
                    target = [name for name in target if name]
                    if target[0] == root.name:
                        yield place, _module(root, target[1:])


def _module(root: Path, names: list[str]) -> tuple[str, ...]:
    while names and not (root.joinpath(*names).is_dir() or root.joinpath(*names).with_suffix(".py").is_file()):
        names = names[:-1]
    return tuple(names)


def drawn(root: Path, level: Mapping[str, int]) -> str:
    """The parts of a distribution from the bottom up: what each says it is, and what it imports."""
    imports: dict[str, set[str]] = {}
    for source, target, _ in arrows(root):
        imports.setdefault(source, set()).add(target)
    lines = ["| part | what it is | imports |", "|---|---|---|"]
    for part in sorted(level, key=lambda part: (level[part], part)):
        folder = root / part
        module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        told = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
        used = sorted(imports.get(part, ()), key=lambda name: (level[name], name))
        name = f"{part}/" if folder.is_dir() else f"{part}.py"
        lines.append(f"| `{name}` | {told.partition(chr(10) * 2)[0].replace(chr(10), ' ')} | {', '.join(used)} |")
    return "\n".join(lines)


MAPS = {"src/lotformer": (PACKAGE, LEVEL), "paper/src/lotformer_paper": (PAPER, PAPER_LEVEL)}


@pytest.mark.parametrize("folder", MAPS)
def test_the_map_in_contributing_is_the_one_that_the_imports_draw(folder):
    """`python tests/test_import_graph.py` draws it."""
    assert drawn(*MAPS[folder]) in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_nothing_below_the_first_level_goes_round_in_a_circle():
    assert cycles(PACKAGE) == []
    # cells carry the name of their experiment; a table takes the rates of a search, whose trials are its cells
    late = {
        ("experiments", "engine", "registry"),
        ("experiments/longrange", "search", "table"),
    }
    both = {f"{folder}/{a} → {b}" for folder, *pair in late for a, b in (pair, pair[::-1])}
    assert set(cycles(PAPER)) - both == set()


def test_a_circle_is_seen(tmp_path):
    root = tmp_path / "lotformer"
    for path, code in {
        "a/b/one.py": "from ..c import x",
        "a/b/__init__.py": "",
        "a/c.py": "def f():\n    from .b.two import y",
        "a/b/two.py": "from . import one",
        "a/d.py": "from .c import x",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(code)
    assert cycles(root) == ["a/b → c", "a/c → b"]


def test_no_arrow_points_up_or_sideways():
    assert wrong(PACKAGE) == []
    assert wrong(PAPER, PAPER_LEVEL) == []


@pytest.mark.parametrize(("root", "level"), [(PACKAGE, LEVEL), (PAPER, PAPER_LEVEL)], ids=["product", "paper"])
def test_every_part_has_its_place(root, level):
    parts = {path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    unknown = parts - set(level) - {"__init__"}
    assert not unknown, "add it to LAYERS, or explain it in HELPERS"


def test_the_product_knows_nothing_of_the_paper():
    found = [path for path in PACKAGE.rglob("*.py") if "import lotformer_paper" in (text := path.read_text("utf-8"))
             or "from lotformer_paper" in text.partition('"""')[2].partition('"""')[2]]  # fmt: skip
    assert found == []


def test_the_paper_uses_public_names_only():
    """Neither modules nor names of the product that begin with an underscore."""
    private = []
    for path in PAPER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("lotformer."):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                private += [f"{path.name}:{node.lineno} {name}" for name in names if name.startswith("_")]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "lotformer":
                private += [f"{path.name}:{node.lineno} {a.name}" for a in node.names
                            if a.name.startswith("_") and a.name != "__version__"]  # fmt: skip
    assert private == []


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        ("ops/a.py", "from ..nn import x", "ops → nn points up"),
        ("ops/cpu/a.py", "def f():\n    from ...data import x", "ops → data points up"),
        ("data/a.py", "from .. import training", "data → training points sideways"),
        ("vision/a.py", "import lotformer.demo.run", "vision → demo points sideways"),
        ("cli/a.py", "from lotformer.novel import x", "cli → novel is in no layer"),
    ],
)
def test_a_wrong_arrow_is_seen(tmp_path, path, code, expected):
    root = tmp_path / "lotformer"
    (root / path).parent.mkdir(parents=True)
    (root / path).write_text(code)
    (message,) = wrong(root)
    assert expected in message


def test_right_arrows_pass(tmp_path):
    root = tmp_path / "lotformer"
    (root / "cli").mkdir(parents=True)
    lines = ["from .. import __version__, ops", "from . import b", "from ..demo.run import x", "import torch"]
    (root / "cli" / "a.py").write_text("\n".join(lines))
    assert wrong(root) == []


if __name__ == "__main__":
    for folder, parts in MAPS.items():
        print(f"**`{folder}`**\n\n{drawn(*parts)}\n")
