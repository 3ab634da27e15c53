"""`convert` and `revert`: swap the attention of a trained model, in place, and take it back."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .. import attention
from ..attention import Attention
from ..data.batches import Batch
from ..nn.key_masses import KeyMassKind
from . import hosts
from .hosts.sites import Record, Site, Skipped, converted
from .measuring import probe as probing
from .measuring.report import ConversionReport, Layer

LOT_DEFAULTS: dict[str, Any] = {"solver": "newton", "tol": 1e-5, "pivot_init": "small"}
"""What converting asks of LOT beside rank, ε and masses: exact couplings, and pivots that start near uniform."""


def convert(
    model: nn.Module,
    mechanism: str = "lot",
    *,
    rank: int = 32,
    eps: float = 0.1,
    key_masses: KeyMassKind = "query-aware",
    layers: Sequence[str] | None = None,
    probe: Batch | None = None,
    **options: Any,
) -> ConversionReport:
    """Replace softmax by another mechanism in every bidirectional self-attention of the model, in place.

    Projections, embeddings and everything else stay bitwise as they are; each converted attention module gains one
    sub-module, `mechanism`, with the new parameters. Follow with `calibrate`: a fresh mechanism knows nothing yet.

    Args:
        model: a Hugging Face encoder or encoder–decoder (encoder half), a timm vision transformer, or any module
            that holds `nn.MultiheadAttention`.
        mechanism: a name of `lotformer.attention.names()`.
        rank: number of pivots; for other mechanisms, their `rank` if they have one. eps, key_masses: of LOT. Uniform
            key masses are strictly doubly stochastic; "query-aware" masses (the default) let columns sum to
            `N ×` a learned mass, which the attention sinks of trained models need.
        layers: names of the attention modules to convert (as `model.named_modules()` gives them); None for all.
        probe: a batch to compare outputs on, before and after; made up from the model's config where possible.
        options: further keyword arguments of the mechanism. For LOT, `solver="newton"` is the default here, and
            `pivots="input-aware"` recovers more where tokens have to be matched, as in pairs of sentences.

    Returns:
        What was converted, what was left alone and why.

    Raises:
        ValueError: the model is converted already (revert it first), holds nothing to convert, the mechanism is
            unknown or refuses its options, or a name in `layers` is not a convertible attention module.
    """
    entry = attention.entry(mechanism)
    if converted(model):
        raise ValueError(f"{type(model).__name__} is already converted: call `lotformer.revert(model)` first.")
    settings = _settings(entry.build, rank=rank, eps=eps, key_masses=key_masses, options=options)
    found = _find(model, explicit=set(layers or ()))
    sites, skipped = _choose(model, found, layers)
    mechanisms = {site.name: _build(mechanism, site, settings) for _, site in sites}

    inputs = probe if probe is not None else probing.sample_inputs(model)
    before = probing.output(model, inputs)
    for host_name, host in hosts.present().items():
        mine = [site for owner, site in sites if owner == host_name]
        if mine:
            host.attach(model, mine, lambda site: mechanisms[site.name], Record(host_name, mechanism, dict(settings)))
    _write_recipe(model, mechanism, settings, layers)
    try:
        after = probing.output(model, inputs)
    except Exception:
        if probe is not None:  # the user's batch must work, or nothing has happened
            revert(model)
            raise
        after = None  # a made-up batch need not suit every mechanism

    rows = {site.name: Layer(site.name, _kind(site), True, "", _count(mechanisms[site.name])) for _, site in sites}
    rows |= {skip.name: Layer(skip.name, _kind(skip), False, skip.reason) for skip in skipped}
    order = [item.name for _, item in found]
    return ConversionReport(
        model=type(model).__name__,
        mechanism=mechanism,
        options=settings,
        layers=tuple(rows[name] for name in order),
        probe=probing.difference(before, after),
    )


def revert(model: nn.Module) -> None:
    """Give the model its original attention back, exactly; the mechanisms and what they learned are dropped.

    Weights outside the mechanisms are not touched: what fine-tuning changed stays changed.
    """
    if not converted(model):
        raise ValueError(f"{type(model).__name__} is not converted: there is nothing to revert.")
    for host in hosts.present().values():
        host.detach(model)
    _erase_recipe(model)


def _settings(build: Any, *, rank: int, eps: float, key_masses: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """LOT gets our own arguments; others what was given, with `rank` where they know one."""
    accepted = inspect.signature(build).parameters
    defaults = inspect.signature(convert).parameters
    if "key_masses" in accepted:
        return {"rank": rank, "eps": eps, "key_masses": key_masses, **LOT_DEFAULTS, **options}
    settings = dict(options)
    if "rank" in accepted:
        settings.setdefault("rank", rank)
    for name, value in (("rank", rank), ("eps", eps), ("key_masses", key_masses)):
        if value != defaults[name].default:
            settings.setdefault(name, value)
    return settings


def _build(mechanism: str, site: Site, settings: dict[str, Any]) -> Attention:
    try:
        made = attention.build(mechanism, head_dim=site.head_dim, num_heads=site.num_heads, **settings)
    except TypeError as error:
        raise ValueError(f"{mechanism!r} does not take these options: {error}") from error
    if made.is_causal:
        option = attention.entry(mechanism).causal_only
        raise ValueError(f"{mechanism!r} with {option} only looks back: it cannot replace bidirectional attention.")
    return made


def _find(model: nn.Module, explicit: set[str]) -> list[tuple[str, Site | Skipped]]:
    found: list[tuple[str, Site | Skipped]] = []
    for host_name, host in hosts.present().items():
        own = host.find(model)
        if host_name == "torch_mha" and any(isinstance(item, Site) for _, item in found):
            # inside another library's model a MultiheadAttention is usually a pooling head
            own = [
                item
                if item.name in explicit or isinstance(item, Skipped)
                else Skipped(
                    item.name, item.module, "a MultiheadAttention inside another library's model; name it to convert it"
                )
                for item in own
            ]
        found += [(host_name, item) for item in own]
    return found


def _choose(
    model: nn.Module, found: list[tuple[str, Site | Skipped]], layers: Sequence[str] | None
) -> tuple[list[tuple[str, Site]], list[Skipped]]:
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


def _write_recipe(model: nn.Module, mechanism: str, settings: dict[str, Any], layers: Sequence[str] | None) -> None:
    if hasattr(model, "base_model_prefix") and hasattr(model, "config"):  # a Hugging Face model saves its config
        prefix = f"{model.base_model_prefix}."
        names = None if layers is None else [name.removeprefix(prefix) for name in layers]
        config: Any = model.config
        config.lotformer = {"mechanism": mechanism, "options": dict(settings), "layers": names}


def _erase_recipe(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    if "lotformer" in getattr(config, "__dict__", {}):
        del config.lotformer
