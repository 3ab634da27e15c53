"""Waits for a module of another library, without importing it.

`import lotformer` must stay cheap and must not import other libraries, yet some of them need something of ours when
they are imported, in whatever order that happens. They have no entry points, so Python's import system is the only
place to wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[], None]


def when_imported(name: str, *, before: Action | None = None, after: Action | None = None) -> None:
    """Act once, just before the module of this name is executed, or just after; it must not be imported yet.

    Whoever only looks for it, with `importlib.util.find_spec`, changes nothing.
    """
    if not any(isinstance(finder, _Waiting) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting(name, before, after))


class _Waiting(MetaPathFinder):
    def __init__(self, name: str, before: Action | None, after: Action | None) -> None:
        self.name, self.before, self.after = name, before, after

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Waiting) else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ActingLoader(spec.loader, self)
                return spec
        return None


class _ActingLoader(Loader):
    def __init__(self, loader: Loader, waiting: _Waiting) -> None:
        self._loader, self._waiting = loader, waiting

    def __getattr__(self, name: str) -> object:  # get_data, get_source, … of the real loader
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if self._waiting.before is not None:
            self._waiting.before()
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if self._waiting in sys.meta_path:
            sys.meta_path.remove(self._waiting)
        if self._waiting.after is not None:
            self._waiting.after()
