"""Mechanisms into a model and out again, in place: what `convert`, `revert`, loading and saving have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from .. import attention
from ..attention import Attention
from ..attention.folded import FoldedLOT, why_unfoldable
from ..attention.lot import LOT
from ..attention.unformed import Projections, why_too_coarse
from ..nn.grids import release
from . import hosts
from .hosts import positions
from .hosts.grids import supply_grids
from .hosts.sites import Record, Site, converted, install, mechanism_of, record_of, uninstall
from .hosts.tokens import tokens_before
from .recipe import Recipe, TokenKind

Located = tuple[str, Site]
"""A site with the name of its host."""


def build(recipe: Recipe, site: Site, tokens: TokenKind | None) -> Attention:
    """The mechanism of a recipe, fresh, for one site and the tokens that reach it."""
    options = recipe.options_for(tokens)
    made = attention.build(recipe.mechanism, head_dim=site.head_dim, num_heads=site.num_heads, **options)
    if made.is_causal:
        option = attention.entry(recipe.mechanism).causal_only
        raise ValueError(
            f"{recipe.mechanism!r} with {option} only looks back: it cannot replace bidirectional attention."
        )
    return made


def build_on_meta(model: nn.Module, recipe: Recipe, sites: Sequence[Located]) -> dict[str, Attention]:
    """The mechanisms of a recipe by the name of their site: shapes without memory, however large they claim to be."""
    with torch.device("meta"):
        made = {site.name: build(recipe, site, tokens_before(model, site.name)) for _, site in sites}
    if recipe.folded:
        return {site.name: _folded(host, site.module, made[site.name]) for host, site in sites}
    return made


def put_in(model: nn.Module, recipe: Recipe, sites: Sequence[Located]) -> dict[str, Attention]:
    """Give every site its mechanism; all are built before the first one is placed. Returns them by name."""
    tokens = {site.name: tokens_before(model, site.name) for _, site in sites}
    mechanisms = {site.name: build(recipe, site, tokens[site.name]) for _, site in sites}
    if recipe.positions is not None:
        positions.stretch(model, recipe.positions)
    unfolded = replace(recipe, folded=False)
    for host, site in sites:
        mechanism = mechanisms[site.name]
        install(site.module, mechanism, Record(host, unfolded, tokens[site.name]))
        if recipe.folded:
            fold_module(site.module)
    supply_grids(model)
    _attach(model, ((host, site.module) for host, site in sites))
    if recipe.positions is not None:
        positions.tell_configs(model, recipe.positions)  # which are the model's own now
    return mechanisms


def remove(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Take the mechanisms of some modules of a model away."""
    modules = list(modules)
    for module in modules:
        uninstall(module)
    release(model, modules)


def fold_module(module: nn.Module) -> None:
    """Turn one converted module into its inference form.

    Raises:
        ValueError: it cannot be, with the reason.
    """
    record, mechanism = record_of(module), mechanism_of(module)
    assert record is not None
    folded = _folded(record.host, module, mechanism)
    hosts.named(record.host).drop_projections(module)
    install(module, folded, replace(record, recipe=replace(record.recipe, folded=True)))


def foldable_projections(host: str, module: nn.Module, mechanism: nn.Module) -> Projections | str:
    """The projections of an attention module, or the reason why they cannot be folded."""
    reason = why_unfoldable(mechanism)
    if reason is not None:
        return reason
    assert isinstance(mechanism, LOT)
    found = hosts.named(host).projections(module, mechanism.num_heads, mechanism.head_dim)
    return found if isinstance(found, str) else why_too_coarse(found.weight.dtype) or found


def tell_hosts(model: nn.Module) -> None:
    """Let the hosts know that converted modules have changed."""
    found = [(record.host, module) for _, module in converted(model) if (record := record_of(module)) is not None]
    _attach(model, found)


def _folded(host: str, module: nn.Module, mechanism: Attention) -> FoldedLOT:
    found = foldable_projections(host, module, mechanism)
    if isinstance(found, str):
        raise ValueError(f"it cannot be folded: {found}.")
    assert isinstance(mechanism, LOT)
    weight, bias = found
    where = mechanism.pivots.logits.bias.device  # a mechanism that is only looked at has no memory
    return FoldedLOT.of(mechanism, Projections(weight.to(where), None if bias is None else bias.to(where)))


class Snapshot:
    """Parts and parameters of modules as they are now, to go back to."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._state = [(m, m.__dict__.copy(), dict(m._modules), dict(m._parameters)) for m in modules]

    def restore(self) -> None:
        for module, attributes, modules, parameters in self._state:
            module.__dict__.clear()
            module.__dict__.update(attributes, _modules=modules, _parameters=parameters)


def take_out(model: nn.Module, layers: Collection[str] | None = None) -> None:
    """Take the mechanisms of the named layers away, or all: there the model attends by softmax again, as before."""
    found = [
        (record.host, module)
        for name, module in converted(model)
        if (record := record_of(module)) is not None and (layers is None or name in layers)
    ]
    owners = _by_host(found)  # all of them are here, or nothing happens
    remove(model, [module for _, module in found])
    if not converted(model):
        positions.restore(model)
    for host, modules in owners.items():
        host.detach(model, modules)


def _attach(model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> None:
    for host, mine in _by_host(modules).items():
        host.attach(model, mine)


def _by_host(modules: Iterable[tuple[str, nn.Module]]) -> dict[hosts.Host, list[nn.Module]]:
    """Modules, given with the names of their hosts, by host.

    Raises:
        ValueError: a host is not present.
    """
    owners: dict[str, list[nn.Module]] = {}
    for name, module in modules:
        owners.setdefault(name, []).append(module)
    return {hosts.named(name): mine for name, mine in owners.items()}
