"""The hosts that are asked, in one order: yours first, then ours."""

from __future__ import annotations

import sys
import warnings
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from torch import nn

from .base import Host
from .sites import Site, Skipped

GROUP = "lotformer.hosts"
"""The group of entry points by which an installed package offers its host. The name of the entry point is the library
that it serves, which has to be imported before the host is, its value the class: `toylib = "toylib_lot:Toy"`."""

_OURS = (
    ("transformers", "huggingface", "HuggingFace"),
    ("timm", "timm_vit", "Timm"),
    ("diffusers", "diffusers_unet", "Diffusers"),
    ("torch", "torch_mha", "Torch"),
)
"""Library, module, which is called as the host is, and class."""

_registered: dict[str, Host] = {}


def register_host(host: Host) -> None:
    """Let `lotformer.convert` find the attention modules of another library; see `Host`.

    Converted models remember the name of their host: whoever loads or reverts one has to register it, too.

    Raises:
        TypeError: `host` is not an instance of `Host`.
        ValueError: the name is taken.
    """
    if not isinstance(host, Host):
        hint = f": register an instance, {host.__name__}()." if isinstance(host, type) else "."
        raise TypeError(f"expected an instance of lotformer.conversion.Host, got {host!r}{hint}")
    if not isinstance(getattr(host, "name", None), str) or not host.name:
        raise TypeError(f"{type(host).__name__} has no name: set the attribute `name`.")
    if host.name in _registered or any(host.name == module for _, module, _ in _OURS):
        raise ValueError(
            f"a host is called {host.name!r} already: choose another name, or unregister_host({host.name!r}) first."
        )
    _registered[host.name] = host


def unregister_host(name: str) -> None:
    """Take a host away that was registered.

    Raises:
        ValueError: none of this name was.
    """
    if name not in _registered:
        raise ValueError(f"no host {name!r} was registered. Registered: {', '.join(_registered) or 'none'}.")
    del _registered[name]


def present() -> list[Host]:
    """The hosts, in the order in which they are asked.

    1. Those that were registered, as they were.
    2. Those of installed packages (entry points), by name, if their library is loaded.
    3. Ours: transformers, timm, diffusers, and last PyTorch, whose modules the others build on; if their library is
       loaded: a model of one that is not cannot exist.

    Whoever lists a module first decides about it.
    """
    installed = [offer.host for offer in _offers() if offer.library in sys.modules]
    offered = [host for host in installed if host is not None and host.name not in _registered]
    ours = [_ours(module, kind) for library, module, kind in _OURS if library in sys.modules]
    return [*_registered.values(), *offered, *ours]


def named(name: str) -> Host:
    """The host of this name.

    Raises:
        ValueError: none is present.
    """
    hosts = present()
    for host in hosts:
        if host.name == name:
            return host
    raise ValueError(
        f"the model was converted by the host {name!r}, which is not registered here: import the package that brings "
        f"it, or call lotformer.conversion.register_host. Present: {', '.join(host.name for host in hosts)}."
    )


def find(model: nn.Module, explicit: frozenset[str] = frozenset()) -> list[tuple[str, Site | Skipped]]:
    """Every attention module of a model with the name of its host.

    Inside another library's model a `MultiheadAttention` is usually a pooling head: it counts only where it is named.
    """
    found: list[tuple[str, Site | Skipped]] = []
    listed: set[int] = set()
    for host in present():
        inside = host.inside_others if any(isinstance(item, Site) for _, item in found) else None
        for item in host.find(model):
            if id(item.module) in listed:
                continue
            if inside is not None and isinstance(item, Site) and item.name not in explicit:
                item = Skipped(item.name, item.module, inside)
            found.append((host.name, item))
        listed.update(id(item.module) for _, item in found)
    return found


class _Offer:
    """The host of an installed package, imported when its library is there; one that is broken is left out."""

    def __init__(self, point: EntryPoint) -> None:
        self.library, self._point = point.name, point

    @cached_property
    def host(self) -> Host | None:
        try:
            made = self._point.load()()
            if not isinstance(made, Host):
                raise TypeError(f"expected a subclass of lotformer.conversion.Host, got {type(made).__name__}")
        except Exception as error:  # whatever another package does wrong, other models are converted
            warnings.warn(f"the host {self._point.value} for {self.library} is left out: {error}", stacklevel=2)
            return None
        return made


@cache
def _offers() -> list[_Offer]:
    return sorted(map(_Offer, entry_points(group=GROUP)), key=lambda offer: offer.library)


@cache
def _ours(module: str, kind: str) -> Host:
    host: Host = getattr(import_module(f".{module}", __package__), kind)()
    return host
