"""Registers `attn_implementation="lot"` with transformers, without importing transformers.

`import lotformer` must stay cheap, yet `AutoModel.from_pretrained(path, attn_implementation="lot")` should work
after it. If transformers is loaded already, registration happens at once; otherwise a finder waits for
`transformers.modeling_utils`, lets the usual finders load it, registers, and retires.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_AWAITED = "transformers.modeling_utils"


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:  # get_data, get_source, … of the real loader
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
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
    # registering is the last thing the module does when it is imported; if it is being imported right now, and that
    # is what loaded transformers, it will still come to it
    with suppress(ImportError):  # a transformers without the interface must stay importable; `convert` will say so
        import_module(f"{__package__}.conversion.hosts.huggingface")


def install() -> None:
    """Register now if transformers is loaded, else as soon as it is."""
    if _AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())
