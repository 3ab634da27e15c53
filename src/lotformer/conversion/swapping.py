"""Mechanisms into a model and out again, in place: what `convert`, `revert`, loading and saving have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from .. import attention
from ..attention import Attention
from . import hosts
from .hosts.grids import Grids
from .hosts.sites import Record, Site, converted, install, record_of, uninstall
from .recipe import Recipe

Located = tuple[str, Site]
"""A site with the name of its host."""


def build(recipe: Recipe, site: Site) -> Attention:
    """The mechanism of a recipe, fresh, for one site."""
    made = attention.build(recipe.mechanism, head_dim=site.head_dim, num_heads=site.num_heads, **dict(recipe.options))
    if made.is_causal:
        option = attention.entry(recipe.mechanism).causal_only
        raise ValueError(
            f"{recipe.mechanism!r} with {option} only looks back: it cannot replace bidirectional attention."
        )
    return made


def build_on_meta(recipe: Recipe, sites: Sequence[Located]) -> dict[str, Attention]:
    """The mechanisms of a recipe by the name of their site: shapes without memory, however large they claim to be."""
    with torch.device("meta"):
        return {site.name: build(recipe, site) for _, site in sites}


def put_in(model: nn.Module, recipe: Recipe, sites: Sequence[Located]) -> dict[str, Attention]:
    """Give every site its mechanism; all are built before the first one is placed. Returns them by name."""
    mechanisms = {site.name: build(recipe, site) for _, site in sites}
    grids = Grids(model)
    for host, site in sites:
        mechanism = mechanisms[site.name]
        install(site.module, mechanism, Record(host, recipe, grids.of(site.name, mechanism)))
    _tell_hosts(model, [(host, site.module) for host, site in sites], lambda host: host.attach)
    return mechanisms


def take_out(model: nn.Module, layers: Collection[str] | None = None) -> None:
    """Take the mechanisms of the named layers, or all, away: they attend by softmax again, bit for bit as before."""
    found = [
        (record.host, module)
        for name, module in converted(model)
        if (record := record_of(module)) is not None and (layers is None or name in layers)
    ]
    for _, module in found:
        record = uninstall(module)
        if record.grid is not None:
            record.grid.dismiss()
    _tell_hosts(model, found, lambda host: host.detach)


def _tell_hosts(
    model: nn.Module,
    modules: list[tuple[str, nn.Module]],
    what: Callable[[hosts.Host], Callable[[nn.Module, list[nn.Module]], None]],
) -> None:
    for name, host in hosts.present().items():
        mine = [module for owner, module in modules if owner == name]
        if mine:
            what(host)(model, mine)
