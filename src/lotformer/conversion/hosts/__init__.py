"""The libraries whose models can be converted, and what each must be able to do."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Protocol, cast

from torch import nn

from ...attention.unformed import Projections
from .sites import Site, Skipped


class Host(Protocol):
    """How the attention of one library is found, and how it is made to run its mechanisms or softmax again."""

    @staticmethod
    def find(model: nn.Module) -> list[Site | Skipped]:
        """Every attention module of the library in a model."""

    @staticmethod
    def attach(model: nn.Module, modules: list[nn.Module]) -> None:
        """Called when the given modules of the model have their mechanisms."""

    @staticmethod
    def detach(model: nn.Module, modules: list[nn.Module]) -> None:
        """Called when the mechanisms of the given modules are gone; undoes `attach` exactly."""

    @staticmethod
    def projections(module: nn.Module, num_heads: int, head_dim: int) -> Projections | str:
        """How an attention module forms its queries and keys, or why that is no linear map of its input.

        The factor of the scores that the host would apply, over `D^-1/2`, is in the queries.
        """

    @staticmethod
    def drop_projections(module: nn.Module) -> None:
        """Let a module hand its input to the mechanism in place of queries and keys."""


_MODULES = {
    "huggingface": "transformers",
    "timm_vit": "timm",
    "diffusers_unet": "diffusers",
    "torch_mha": "torch",
}


def present() -> dict[str, Host]:
    """The hosts whose library is loaded: a model of a library that is not cannot exist."""
    return {
        name: cast(Host, import_module(f".{name}", __package__))
        for name, library in _MODULES.items()
        if library in sys.modules
    }


def find(model: nn.Module, explicit: frozenset[str] = frozenset()) -> list[tuple[str, Site | Skipped]]:
    """Every attention module of a model with the name of its host.

    Inside another library's model a `MultiheadAttention` is usually a pooling head: it counts only where it is named.
    """
    found: list[tuple[str, Site | Skipped]] = []
    for host_name, host in present().items():
        own = host.find(model)
        if host_name == "torch_mha" and any(isinstance(item, Site) for _, item in found):
            reason = "a MultiheadAttention inside another library's model; name it to convert it"
            own = [
                Skipped(item.name, item.module, reason)
                if isinstance(item, Site) and item.name not in explicit
                else item
                for item in own
            ]
        found += [(host_name, item) for item in own]
    return found
