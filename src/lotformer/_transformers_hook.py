"""Makes transformers know lotformer's attention, without importing transformers.

`import lotformer` must stay cheap and must not import transformers, yet `AutoModel.from_pretrained` of a converted
checkpoint has to work after it, in whatever order the two are imported. transformers has no entry points, so Python's
import system is the only place to wait: if transformers is loaded already, registration happens at once; otherwise a
finder waits for `transformers.modeling_utils`, lets the usual finders load it, registers, and retires.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from . import _torchvision

_AWAITED = "transformers.modeling_utils"
_NEEDING_TRANSFORMERS = ("pretrained", "hosts.huggingface", "hosts.configs")


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:  # get_data, get_source, … of the real loader
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        _torchvision.prepare()  # transformers imports torchvision where it is installed
        self._loader.exec_module(module)
        _register()


class _Waiting(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


def _register() -> None:
    if any(f"{__package__}.conversion.{name}" in sys.modules for name in _NEEDING_TRANSFORMERS):
        return  # one of ours is what loads transformers right now; registration follows when that is done
    try:
        import_module(f"{__package__}.conversion.pretrained")
    except ImportError as error:
        # a transformers without the interfaces must stay importable; `convert` will say what is missing
        if not (error.name or "").startswith("transformers"):
            raise


def install() -> None:
    """Register now if transformers is loaded, else as soon as it is."""
    if _AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())
