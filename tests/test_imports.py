"""`import lotformer` is cheap, shows what it offers, and changes nothing in other libraries."""

from __future__ import annotations

import subprocess
import sys

import lotformer

CHECK = """
import sys, torch
before = set(vars(torch.ops))
import lotformer
for name in ("transformers", "timm", "torchvision", "lotformer.conversion"):
    assert name not in sys.modules, name
assert "torchvision" not in set(vars(torch.ops)) - before
try:
    torch.ops.torchvision.nms
except AttributeError:
    pass
else:
    raise AssertionError("operators of another library were registered")
assert {"calibrate", "convert", "finetune", "revert"} <= set(dir(lotformer))
"""


def test_importing_imports_and_registers_nothing_of_others():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_everything_that_is_offered_exists_and_shows():
    for name in lotformer.__all__:
        assert hasattr(lotformer, name)
        assert name in dir(lotformer)


def test_timm_can_be_imported_after_it():
    """Also where torchvision was looked for before, as transformers does, and beside a build that does not fit."""
    code = (
        "import lotformer, importlib.util\nassert importlib.util.find_spec('torchvision')\nimport timm, torchvision.ops"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
