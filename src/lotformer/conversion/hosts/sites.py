"""The places inside a model where attention happens, independent of the library the model comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ...attention import Attention
from ...attention.config import LOTConfig
from ...attention.host_masks import key_mask_from
from ...attention.lot import LOT
from ...nn.grids import GridSource
from ..recipe import Recipe, TokenKind

MECHANISM = "mechanism"
"""Name of the sub-module that a converted attention module gains; its parameters appear under it in state dicts."""

_RECORD = "_lotformer_conversion"


@dataclass(frozen=True)
class Site:
    """A bidirectional self-attention module that can be converted."""

    name: str
    module: nn.Module
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class Skipped:
    """An attention module that stays as it is, and why."""

    name: str
    module: nn.Module
    reason: str


@dataclass(frozen=True)
class Record:
    """The record kept by a converted module, by which the conversion can be described and undone.

    `tokens` is what reached it as far as could be told when it was converted, `grids` tells the grid of patches where
    its mechanism needs one.
    """

    host: str
    recipe: Recipe
    tokens: TokenKind | None
    grids: GridSource | None = None


def record_of(module: nn.Module) -> Record | None:
    """The record of a converted module, None for any other."""
    return module.__dict__.get(_RECORD)


def install(module: nn.Module, mechanism: Attention, record: Record) -> None:
    """Give a module its mechanism, in the precision and on the device of the module."""
    like = next(p for p in module.parameters() if p.is_floating_point())
    setattr(module, MECHANISM, mechanism.to(device=like.device, dtype=like.dtype).train(module.training))
    remember(module, record)


def remember(module: nn.Module, record: Record) -> None:
    """Replace the record of a converted module."""
    module.__dict__[_RECORD] = record


def uninstall(module: nn.Module) -> Record:
    """Take mechanism and record away; returns the record."""
    delattr(module, MECHANISM)
    return module.__dict__.pop(_RECORD)


def converted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of the converted attention in a model, in the model's order."""
    return [(name, module) for name, module in model.named_modules() if record_of(module) is not None]


def require_converted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """`converted`, or an error if there is nothing."""
    found = converted(model)
    if not found:
        raise ValueError(f"{type(model).__name__} holds no converted attention: call `lotformer.convert(model)` first.")
    return found


def mechanism_of(module: nn.Module) -> Attention:
    """The mechanism of a converted module, the one in use if PEFT wraps it (`modules_to_save=["mechanism"]`)."""
    mechanism = getattr(module, MECHANISM)
    if not isinstance(mechanism, Attention):
        active = [] if mechanism.disable_adapters else mechanism.active_adapters
        mechanism = mechanism.modules_to_save[active[0]] if active else mechanism.original_module
        assert isinstance(mechanism, Attention)
    return mechanism


def mix(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Run the mechanism of a converted module the way its host would have run softmax attention.

    Args:
        q: `(B, H, N, D)`. k, v: `(B, H or fewer, N, D)`; fewer heads are repeated (grouped-query attention).
        mask: as in `key_mask_from`. scale: the host's factor of the scores, `D^-1/2` by default.
    """
    batch, heads, queries, dim = q.shape
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    record = record_of(module)
    factor = relative_scale(scale, dim)
    if factor != 1 and not (record is not None and record.recipe.folded):  # else it is in the weights
        q = q * factor
    key_mask = key_mask_from(mask, batch, queries, k.shape[2])
    grid = None if record is None or record.grids is None else record.grids.of(queries)
    mechanism = getattr(module, MECHANISM)  # called as it is: a wrapper around it has its reasons
    return mechanism(q, k, v, key_mask, key_mask if queries == k.shape[2] else None, grid=grid)


def relative_scale(scale: float | None, head_dim: int) -> float:
    """A host's factor of the scores over the one that mechanisms apply, `D^-1/2`."""
    usual = head_dim**-0.5
    return 1.0 if scale is None or abs(scale - usual) <= 1e-6 * usual else scale / usual


def is_folded(module: nn.Module) -> bool:
    """True if a module is converted and folded: it forms values alone."""
    record = record_of(module)
    return record is not None and record.recipe.folded


def require_unfolded(model: nn.Module, what: str) -> None:
    """Refuse models whose queries and keys are gone."""
    for name, module in converted(model):
        if is_folded(module):
            raise ValueError(
                f"{name} is folded for inference, which has no queries and keys any more: {what} the model before "
                "`lotformer.fold`."
            )


@contextmanager
def transporting(model: nn.Module) -> Iterator[None]:
    """While inside, LOT reads inputs of every length itself, also those that it otherwise leaves to softmax.

    What is learned or said of a conversion is learned and said of LOT, not of the softmax that short inputs get.
    """
    switched = [(m, m.config.softmax_up_to) for m in model.modules() if isinstance(m, LOT) and m.config.softmax_up_to]
    try:
        for mechanism, _ in switched:
            mechanism.config = replace(mechanism.config, softmax_up_to=0)
        yield
    finally:
        for mechanism, tokens in switched:
            mechanism.config = replace(mechanism.config, softmax_up_to=tokens)


def softmax_up_to(model: nn.Module) -> int:
    """The length up to which every converted layer of a model reads by softmax, as the original does."""
    return min((getattr(mechanism_of(m), "config", LOTConfig()).softmax_up_to for _, m in converted(model)), default=0)


@contextmanager
def substituted(model: nn.Module, make: Callable[[str, Attention], Attention]) -> Iterator[None]:
    """While inside, every mechanism of the model is the one `make(name, mechanism)` returns."""
    originals = [(module, getattr(module, MECHANISM)) for _, module in require_converted(model)]
    try:
        for name, module in converted(model):
            setattr(module, MECHANISM, make(name, mechanism_of(module)))
        yield
    finally:
        for module, mechanism in originals:
            setattr(module, MECHANISM, mechanism)


def recipe(model: nn.Module) -> Recipe:
    """The recipe of a converted model.

    Raises:
        ValueError: the model is not converted, or its parts were converted with different settings.
    """
    found = require_converted(model)
    records = [record for _, module in found if (record := record_of(module)) is not None]
    first = records[0].recipe
    for (name, _), record in zip(found, records, strict=True):
        if replace(record.recipe, layers=first.layers) != first:
            raise ValueError(
                f"{found[0][0]} and {name} were converted with different settings, which one recipe cannot hold: "
                "save the parts separately."
            )
    return replace(first, layers=tuple(name for name, _ in found))
