"""What is missing is named with what to type, in environments that really lack it."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from lotformer.extras import PACKAGES
from support.environments import SOURCE, environment, run

if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="links to installed packages need rights that not everybody has"
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """`pip install lotformer`, without extras."""
    return environment(tmp_path_factory.mktemp("environments") / "bare")


def test_the_table_is_that_of_the_package():
    declared = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, names in PACKAGES.items():
        assert {re.split("[>=]", line)[0] for line in declared[extra]} == set(names)


COMMANDS = {
    "train translation --data-dir FOLDER": (None, "text"),
    "train vision": ("timm", "train"),
    "demo": ("transformers", "demo"),
    "convert FOLDER --out y": ("transformers", "text"),
    "convert FILE --model deit_tiny_patch16_224 --out y": ("timm", "vision"),
    "translate FOLDER FILE": ("transformers", "text"),
    "experiment vision-ladder --data FOLDER": ("timm", "train"),
    "experiment translation --data-dir FOLDER": (None, "text"),
    "figures coupling": ("matplotlib", "figures"),
    "figures cls-maps --data FOLDER": (None, "vision,figures"),
    "bench encoder": ("transformers", "text"),
    "bench model": ("timm", "vision"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_the_extra_it_lacks(bare, tmp_path, command):
    package, extra = COMMANDS[command]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "file").write_text("a line of text")
    words = command.replace("FOLDER", str(tmp_path)).replace("FILE", str(tmp_path / "file")).split()
    done = run(bare, "-m", "lotformer", *words)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1, said
    assert f"pip install 'lotformer[{extra}]'" in said
    assert package is None or package in said


SNIPPETS = {
    "import lotformer.models": ("timm", "vision"),
    "from lotformer import conversion; conversion.save(MODEL, 'model.safetensors')": ("safetensors", "text"),
    "from lotformer import conversion; conversion.load(MODEL, 'model.safetensors')": ("safetensors", "text"),
}


@pytest.mark.parametrize("code", SNIPPETS)
def test_the_library_names_the_extra_it_lacks(bare, code):
    package, extra = SNIPPETS[code]
    model = "model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)"
    code = f"import torch, lotformer\n{model}\n" + code.replace("MODEL", "model")
    done = run(bare, "-c", code)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert package in last
    assert f"pip install 'lotformer[{extra}]'" in last


def test_what_needs_no_extra_runs_without(bare):
    code = "import torch, lotformer; lotformer.LOTAttention(dim=24, num_heads=3)(torch.randn(2, 9, 24))"
    assert run(bare, "-c", code).returncode == 0


def test_an_extra_brings_what_it_is_for(tmp_path):
    """Text models are converted, saved and loaded with `text` alone; training names what else it needs."""
    text = environment(tmp_path / "environment", "text")
    code = """
import lotformer, transformers
sizes = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20, vocab_size=60)
model = transformers.BertModel(transformers.BertConfig(**sizes))
lotformer.convert(model, rank=4)
model.save_pretrained("converted")
transformers.AutoModel.from_pretrained("converted")
lotformer.conversion.save(model, "model.safetensors")
"""
    done = run(text, "-c", code)
    assert done.returncode == 0, done.stderr
    done = run(text, "-m", "lotformer", "train", "vision")
    assert "pip install 'lotformer[train]'" in done.stdout


def test_doctor_prints_what_can_be_typed(bare):
    done = run(bare, "-m", "lotformer", "doctor")
    assert done.returncode == 0
    assert set(re.findall(r"pip install '(.*?)'", done.stdout)) == {f"lotformer[{extra}]" for extra in PACKAGES}


@pytest.fixture(scope="module")
def without_kernel(tmp_path_factory) -> Path:
    """The package as it is installed where there is no compiler."""
    folder = tmp_path_factory.mktemp("pure")
    shutil.copytree(SOURCE / "lotformer", folder / "lotformer", ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    return folder


def test_the_missing_kernel_is_told_from_a_mistake(bare, without_kernel):
    code = "import torch, lotformer; lotformer.LOTAttention(dim=24, num_heads=3)(torch.randn(2, 9, 24))"
    done = run(bare, "-c", code, source=without_kernel)
    assert done.returncode == 0
    (said,) = [line for line in done.stderr.splitlines() if "UserWarning" in line]
    assert "nothing was compiled when the package was installed" in said
    assert "C++ compiler" in said
    assert "circular" not in said
    assert "-e ." not in said
    assert "pip install --force-reinstall --no-deps --no-build-isolation ." in said
