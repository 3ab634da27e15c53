"""Kinds of tokens and special tokens of an attention module, as far as any host tells."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..recipe import TokenKind
from .registry import present


def special_tokens(model: nn.Module, name: str) -> int:
    """The number of special tokens ([CLS], distillation, registers) before the patches that reach a module.

    0 if it has none.
    """
    hosts = present()
    for _, enclosure in _enclosures(model, name):
        for host in hosts:
            told = host.special_tokens(enclosure)
            if told is not None:
                return told
    return 0


def tokens_before(model: nn.Module, name: str) -> TokenKind | None:
    """The kind of tokens that reach the module called `name`: words, sound, or patches on a grid; None if unknown."""
    if patches_before(model, name) is not None:
        return "image"
    hosts = present()
    for _, enclosure in _enclosures(model, name):
        for host in hosts:
            kind = host.input_kind(enclosure)
            if kind is not None:
                return kind if kind in ("text", "sound") else None
    return None


def patches_before(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """The module that cuts the patches for the module called `name`, and the name of the nearest module around both."""
    hosts = present()
    for outer, enclosure in _enclosures(model, name):
        for host in hosts:
            found = host.patches(enclosure)
            if found is not None:
                return outer, found
        if any(host.input_kind(enclosure) in ("text", "sound", "other") for host in hosts):
            return None  # another half of a model; patches further out are not its own
    return None


def _enclosures(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The enclosures of the module called `name`, the nearest first, the model itself last."""
    while name:
        name = name.rpartition(".")[0]
        yield name, model.get_submodule(name)
