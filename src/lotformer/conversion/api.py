"""`convert` and `revert`: swap the attention of a trained model, in place, and take it back."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from ..attention.config import LOTConfig
from ..data.batches import Batch
from ..nn.key_masses import KeyMassKind
from ..nn.pivot_pooling import PivotKind
from ..ops.problem import Balance
from . import hosts
from .defaults import DEFAULTS, UNASKED, for_sound, near_parts, require_parts, settled, with_break_even, without_window
from .hosts import positions
from .hosts.sites import Site, Skipped, converted, require_unfolded, transporting
from .learning.objectives import fresh_errors
from .measuring import probe as probing
from .measuring.report import ConversionReport, Layer
from .recipe import Recipe
from .swapping import Located, put_in, take_out


def convert(
    model: nn.Module,
    mechanism: str = "lot",
    *,
    rank: int | None = None,
    eps: float = 0.1,
    key_masses: KeyMassKind = "query-aware",
    balance: Balance = "keys",
    pivots: PivotKind | None = None,
    layers: Sequence[str] | Literal["auto"] | None = None,
    budget: int | None = None,
    probe: Batch | None = None,
    max_positions: int | None = None,
    config: LOTConfig | None = None,
    **options: Any,
) -> ConversionReport:
    """Replace softmax by another mechanism in every bidirectional self-attention of the model, in place.

    Projections, embeddings and everything else stay bitwise as they are; each converted attention module gains one
    sub-module, `mechanism`, with the new parameters. Follow with `calibrate`: a fresh mechanism knows nothing yet,
    unless its pivots are found.

    Args:
        model: a Hugging Face encoder or encoder–decoder (encoder half), a timm vision transformer, or any module
            that holds `nn.MultiheadAttention`.
        mechanism: a name of `lotformer.attention.names()`.
        rank: number of pivots, 32 by default and 64 for sound; for other mechanisms, their `rank` if they have one.
        eps, key_masses, balance: of LOT. "uniform" key masses make the matrix doubly stochastic; window and prefix
            are off then unless you set them. "query-aware" masses (the default) let columns sum to a learned mass,
            which the attention sinks of trained models need. `balance="keys"` (the default) imposes these column sums
            and leaves the queries free, "both" also imposes the pivots' masses, as the paper does, "none" imposes
            nothing (`lot_attention`).
        pivots: "input-aware" ones learn where to look among the keys of a sample (the default), "fixed" ones are a
            little faster. "found" ones are centres of groups of these keys and need no training: the default for
            sound, with 64 of them, a window of 33 tokens and keys by content. They read as softmax does, without
            learned masses or sums to impose; with `key_masses="uniform"` or `balance="both"` they are doubly
            stochastic.
        config: LOT's options as one `LOTConfig`, in place of all others, for example
            `replace(LOTConfig.for_text(), rank=64)`; nothing is filled in for the model then.
        layers: names of the attention modules to convert (as `model.named_modules()` gives them); None for all.
            "auto" leaves softmax in the `budget` layers where the fresh mechanism is furthest from it on `probe`.
        probe: a batch to compare outputs on, before and after; made up from the model's config where possible.
        max_positions: tokens that a text encoder is to read, where that is more than it has learned positions for:
            its table of them is interpolated. Between the positions it knows it is less exact than on them.
        options: further keyword arguments of the mechanism. For LOT, `solver="newton"` is the default here. Vision
            transformers get `window="2d"`, 9 × 9 patches, and the `prefix_tokens` they have, Hugging Face's text
            and speech encoders `window="1d"`, 129 tokens: tokens read their neighbours and such special tokens by
            softmax, which trained models need more than anything else. Models of two towers get each where it belongs.
            `window=None, prefix_tokens=0` is transport alone. Where it is not known what the tokens are, there is no
            window; a warning and the report name such layers. Layers with a window read inputs by softmax that are so
            short that it is faster; up to which length is measured on this machine unless `softmax_up_to` says.

    Returns:
        What was converted, what was left alone and why.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the model is converted already (revert it first), holds nothing to convert, the mechanism is
            unknown or refuses its options, a name in `layers` is not a convertible attention module, or there are no
            learned positions to interpolate.
    """
    _require_module(model)
    if (layers == "auto") != (budget is not None):
        raise ValueError(
            'layers="auto" and budget, the number of layers that keep softmax, belong together: '
            f"got layers={layers!r} and budget={budget!r}."
        )
    named = {"rank": rank, "eps": eps, "key_masses": key_masses, "balance": balance, "pivots": pivots}
    if config is not None:
        _require_alone(mechanism, config, named, options)
        options, named = config.to_options(), {}
    if layers == "auto":
        return _convert_all_but(model, mechanism, budget, probe, max_positions=max_positions, **named, **options)
    if isinstance(layers, str):
        raise ValueError(f"layers must be a list of names, got {layers!r}: write layers=[{layers!r}].")
    recipe = Recipe(mechanism, settled(mechanism, named, options), () if layers is None else tuple(layers))
    if converted(model):
        raise ValueError(f"{type(model).__name__} is already converted: call `lotformer.revert(model)` first.")
    found = hosts.find(model, explicit=frozenset(layers or ()))
    sites, skipped = choose(model, found, layers)
    settings = settled(mechanism, for_sound(model, mechanism, sites, named, options), options)
    near, towers = near_parts(model, mechanism, sites, settings)
    recipe = replace(recipe, options={**near, **settings}, towers=towers)
    require_parts(mechanism, options, recipe)
    recipe = with_break_even(model, recipe, sites, settings)
    if max_positions is not None:
        recipe = replace(recipe, positions=positions.plan(model, max_positions))

    inputs = probe if probe is not None else probing.sample_inputs(model)
    before = probing.output(model, inputs, made_up=probe is None)
    mechanisms = put_in(model, recipe, sites)
    chosen = (near, *towers.values())
    # not asked for: it must work, too
    ours = before is not None and "window" not in settings and any(part.get("window") == "2d" for part in chosen)
    try:
        with transporting(model):
            after = probing.output(model, inputs, made_up=probe is None and not ours)
    except Exception as error:  # the user's batch must work, or nothing has happened
        take_out(model)
        if ours:
            raise ValueError(
                f"{type(model).__name__} cannot run with a window over its patches: {error} If its tokens are not "
                "patches with special tokens before them, give `window=None, prefix_tokens=0`."
            ) from error
        raise

    alone = without_window(model, recipe, sites, settings)
    rows = {
        site.name: Layer(site.name, _kind(site), True, alone.get(site.name, ""), _count(mechanisms[site.name]))
        for _, site in sites
    }
    rows |= {skip.name: Layer(skip.name, _kind(skip), False, skip.reason) for skip in skipped}
    order = [item.name for _, item in found]
    report = ConversionReport(
        model=type(model).__name__,
        mechanism=mechanism,
        options=dict(recipe.options),
        layers=tuple(rows[name] for name in order),
        probe=probing.difference(before, after),
        towers={tokens: dict(own) for tokens, own in recipe.towers.items()},
        positions=recipe.positions,
        longest=positions.learned_positions(model),
        unasked=tuple(name for name, why in alone.items() if why.startswith(UNASKED)),
    )
    if report.unasked:
        warnings.warn(f"{report.model}: {report.advice}", stacklevel=2)
    return report


def _convert_all_but(
    model: nn.Module, mechanism: str, budget: int | None, probe: Batch | None, **options: Any
) -> ConversionReport:
    """Convert everything, see where that costs most, and start again without those layers."""
    if not isinstance(budget, int) or budget < 0:
        raise ValueError(f"budget must be a number of layers, 0 or more, got {budget!r}.")
    if probe is None:
        raise ValueError('layers="auto" looks at what the layers do: give a batch of real inputs, `probe=`.')
    report = convert(model, mechanism, probe=probe, **options)
    try:
        with transporting(model):
            errors = fresh_errors(model, probe)
    finally:
        take_out(model)
    if errors is None:
        raise ValueError(
            'layers="auto" looks at what the layers do: the inputs of `probe` are within the window, where all of them '
            "do what they did. Give longer ones."
        )
    if budget >= len(errors):
        raise ValueError(f"budget must leave something to convert: the model has {len(errors)} layers, got {budget}.")
    kept = sorted(errors, key=errors.__getitem__, reverse=True)[:budget]
    chosen = [layer.name for layer in report.converted if layer.name not in kept]
    return convert(model, mechanism, layers=chosen, probe=probe, **options)


def revert(model: nn.Module, layers: Sequence[str] | None = None) -> None:
    """Give the model its original attention back, exactly; the mechanisms and what they learned are dropped.

    Weights outside the mechanisms are not touched: what fine-tuning changed stays changed. A table of positions that
    `max_positions` stretched is as it was before, bit for bit, once no layer is converted any more.

    Args:
        layers: names of converted attention modules to revert, the others stay converted; None for all.
    """
    _require_module(model)
    known = [name for name, _ in converted(model)]
    if not known:
        raise ValueError(f"{type(model).__name__} is not converted: there is nothing to revert.")
    require_unfolded(model, "revert")
    if isinstance(layers, str):
        raise ValueError(f"layers must be a list of names, got {layers!r}: write layers=[{layers!r}].")
    for name in layers or ():
        if name not in known:
            raise ValueError(f"no converted attention module is called {name!r}. Converted: {', '.join(known)}.")
    take_out(model, layers)


def _require_alone(mechanism: str, config: object, named: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse anything beside a configuration that would contradict it."""
    if not isinstance(config, LOTConfig):
        raise TypeError(f"config must be a LOTConfig, got {type(config).__name__}: LOTConfig.from_options(…).")
    if mechanism != "lot":
        raise ValueError(f"config=… describes LOT, but the mechanism is {mechanism!r}: give its options by name.")
    others = [name for name, default in DEFAULTS.items() if named[name] != default] + list(options)
    if others:
        raise ValueError(f"config=… holds every option of LOT: put {', '.join(others)} into it.")


def _require_module(model: object) -> None:
    if isinstance(model, str):
        raise TypeError(
            f"expected a model, got the name {model!r}: load it first, e.g. AutoModel.from_pretrained({model!r})."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model (torch.nn.Module), got {type(model).__name__}.")


def choose(
    model: nn.Module, found: list[tuple[str, Site | Skipped]], layers: Sequence[str] | None
) -> tuple[list[Located], list[Skipped]]:
    """The sites to convert and what stays as it is; `layers` names the sites, None takes all."""
    skipped = [item for _, item in found if isinstance(item, Skipped)]
    sites = [(host, item) for host, item in found if isinstance(item, Site)]
    if layers is not None:
        known, reasons = {site.name for _, site in sites}, {skip.name: skip.reason for skip in skipped}
        for name in layers:
            if name in reasons:
                raise ValueError(f"layer {name!r} cannot be converted: {reasons[name]}.")
            if name not in known:
                raise ValueError(f"no attention module is called {name!r}. Convertible: {', '.join(sorted(known))}.")
        left_out = [site for _, site in sites if site.name not in layers]
        skipped += [Skipped(site.name, site.module, "not among the chosen layers") for site in left_out]
        sites = [(host, site) for host, site in sites if site.name in layers]
    if not sites:
        raise ValueError(f"nothing to convert in {type(model).__name__}: {_why_nothing(skipped)}")
    return sites, skipped


def _why_nothing(skipped: list[Skipped]) -> str:
    if not skipped:
        return (
            "it holds no attention module of a known kind (Hugging Face attention that dispatches through "
            "AttentionInterface, timm.layers.Attention, torch.nn.MultiheadAttention)."
        )
    reasons = Counter(f"{_kind(skip)}: {skip.reason}" for skip in skipped)
    return "; ".join(f"{count} × {reason}" for reason, count in reasons.items()) + "."


def _kind(item: Site | Skipped) -> str:
    return type(item.module).__name__.removeprefix("Converted")


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
