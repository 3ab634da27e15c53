"""The libraries whose models can be converted, and what each must be able to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

from torch import nn

from ...attention import Attention
from .sites import Record, Site, Skipped


class Host(Protocol):
    """How the attention of one library is found, converted and restored."""

    @staticmethod
    def find(model: nn.Module) -> list[Site | Skipped]: ...

    @staticmethod
    def attach(model: nn.Module, sites: list[Site], build: Callable[[Site], Attention], record: Record) -> None: ...

    @staticmethod
    def detach(model: nn.Module) -> None: ...


_MODULES = {"huggingface": "transformers", "timm_vit": "timm", "torch_mha": "torch"}


def present() -> dict[str, Host]:
    """The hosts whose library is loaded: a model of a library that is not cannot exist."""
    return {
        name: cast(Host, import_module(f".{name}", __package__))
        for name, library in _MODULES.items()
        if library in sys.modules
    }
