"""Defaults of a conversion: what suits the tokens that reach a layer, beside what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..attention.config import IMAGE_WINDOW, TEXT_WINDOW, LOTConfig, without_part
from ..attention.config_parts import lacks
from ..nn.windows import WindowKind
from .hosts.tokens import special_tokens, tokens_before
from .measuring.break_even import break_even
from .recipe import Recipe, TokenKind
from .schema import takes
from .swapping import Located

DEFAULTS: dict[str, Any] = {"rank": None, "eps": 0.1, "key_masses": "query-aware", "balance": "keys", "pivots": None}
"""Options of the mechanism that `convert` names itself; None depends on the mechanism and on the tokens."""

RANK = 32

LOT_DEFAULTS: dict[str, Any] = {"solver": "newton", "tol": 1e-5, "pivot_init": "small"}
"""Options of LOT in conversions beside rank, ε and masses: exact couplings, and pivots that start near uniform."""

FOUND: dict[str, Any] = {"eps": 1.0, "key_masses": "uniform", "balance": "none"}
"""Options of LOT in conversions with pivots found in the sample, unless others are asked for: scores are softmax's."""

SOUND: dict[str, Any] = {"rank": 64, "window_size": 33, "content": 2}
"""Options for speech encoders, whose heads read by content as much as by position."""

WINDOW_SIZES: dict[TokenKind, int] = {"text": TEXT_WINDOW, "image": IMAGE_WINDOW, "sound": TEXT_WINDOW}
"""Default widths of the window, in tokens along a text or sound and in patches a side."""

_WINDOWS: dict[TokenKind, WindowKind] = {"text": "1d", "image": "2d", "sound": "1d"}


def default_recipe(model: nn.Module, sites: Sequence[Located], options: Mapping[str, Any]) -> Recipe:
    """The recipe of `convert(model, **options)` for these sites.

    Raises:
        ValueError: LOT does not take one of the options.
    """
    Recipe("lot", settled("lot", DEFAULTS, options))  # what does not exist is said by the name it was given
    settings = settled("lot", for_sound(model, "lot", sites, DEFAULTS, options), options)
    near, towers = near_parts(model, "lot", sites, settings)
    recipe = Recipe("lot", {**near, **settings}, towers=towers)
    require_parts("lot", options, recipe)
    return recipe


def settled(mechanism: str, named: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """LOT gets our own arguments; others what was given, with `rank` where they know one."""
    if takes(mechanism, "key_masses"):
        if not named:  # a whole configuration
            return dict(options)
        named = {**named, "rank": RANK if named["rank"] is None else named["rank"]}
        if {**named, **options}.get("pivots") == "found":
            asked = {name: value for name, value in named.items() if name not in DEFAULTS or value != DEFAULTS[name]}
            asked |= options
            strict = {"balance": "both", "solver": "newton"} if asked.get("key_masses") == "uniform" else {}
            return {**FOUND, **strict, **asked}
        settings = {**named, **LOT_DEFAULTS, **options}
        if settings["pivots"] is None:
            settings["pivots"] = "input-aware"
        if settings["solver"] != LOT_DEFAULTS["solver"] and "tol" not in options:
            del settings["tol"]
        return settings
    settings = dict(options)
    if takes(mechanism, "rank"):
        settings.setdefault("rank", named["rank"] or RANK)
    for name, default in DEFAULTS.items():
        if named[name] != default:
            settings.setdefault(name, named[name])
    return settings


_Options = dict[str, Any]


def for_sound(
    model: nn.Module, mechanism: str, sites: Sequence[Located], named: _Options, options: Mapping[str, Any]
) -> _Options:
    """The named options with those that suit sound, where nothing but sound arrives and nobody has asked for others."""
    if not takes(mechanism, "key_masses") or not named:
        return named
    others = [name for name, default in DEFAULTS.items() if name != "rank" and named[name] != default]
    learned = [name for name in options if name in {"pivots", "pivot_init", "scale", "solver", "learn_eps", *DEFAULTS}]
    if others or learned or {tokens_before(model, site.name) for _, site in sites} != {"sound"}:
        return named
    answered = {*options, *(["window_size"] if options.get("window", "") is None else [])}
    answered |= {"rank"} if named["rank"] is not None else set()
    return {**named, "pivots": "found", **{name: value for name, value in SOUND.items() if name not in answered}}


def near_parts(
    model: nn.Module, mechanism: str, sites: Sequence[Located], settings: Mapping[str, Any]
) -> tuple[_Options, dict[TokenKind, _Options]]:
    """Default parts that LOT reads by softmax: special tokens, and a window of patches or along a text.

    Where layers differ in what reaches them, it is told by the kind of tokens, beside what was asked for.
    """
    if not takes(mechanism, "key_masses") or _is_strict(settings):
        return {}, {}
    found: dict[TokenKind | None, set[int]] = {}
    for _, site in sites:
        tokens = tokens_before(model, site.name)
        # a text may be padded on the left: no place in it is special
        found.setdefault(tokens, set()).add(special_tokens(model, site.name) if tokens == "image" else 0)
    windows = {tokens: _window(tokens, settings, *special) for tokens, special in found.items() if len(special) == 1}
    if len(found) == 1:
        return next(iter(windows.values()), {}), {}
    answered = {*settings, *(["window_size"] if settings.get("window", "") is None else [])}
    towers = {
        tokens: {name: value for name, value in near.items() if name not in answered}
        for tokens, near in windows.items()
        if tokens is not None
    }
    return {}, {tokens: near for tokens, near in towers.items() if near}


def _is_strict(settings: Mapping[str, Any]) -> bool:
    """True if a doubly stochastic matrix is asked for, beside which softmax reads nothing by default."""
    if settings["pivots"] == "found":
        return settings["balance"] == "both"
    return settings["key_masses"] == "uniform"


def _window(tokens: TokenKind | None, settings: Mapping[str, Any], special: int) -> _Options:
    """The window of the kind that was asked for, or that suits the tokens."""
    suited = None if tokens is None else _WINDOWS[tokens]
    kind: WindowKind | None = settings.get("window", suited)
    near: _Options = {}
    if kind is not None:
        like = tokens if tokens is not None and kind == suited else _SUITED[kind]
        near = {"window": kind, "window_size": WINDOW_SIZES[like]}
    return near if tokens is None else {**near, "prefix_tokens": special}


_SUITED: dict[WindowKind, TokenKind] = {"1d": "text", "2d": "image"}


def with_break_even(model: nn.Module, recipe: Recipe, sites: Sequence[Located], settings: Mapping[str, Any]) -> Recipe:
    """With the length up to which softmax is faster here, if nobody has said one.

    Where there is no window, transport alone was asked for, whatever the length.
    """
    if recipe.mechanism != "lot" or "softmax_up_to" in settings:
        return recipe
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    found: dict[TokenKind | None, int] = {}
    for _, site in sites:
        tokens = tokens_before(model, site.name)
        options = recipe.options_for(tokens)
        if options["window"] is not None:
            length = break_even(site.num_heads, site.head_dim, LOTConfig.from_options(**options), like)
            found[tokens] = max(length, found.get(tokens, 0))
    if len(found) == 1 and not recipe.towers:
        return replace(recipe, options={**recipe.options, "softmax_up_to": next(iter(found.values()))})
    own = {tokens: {**recipe.towers.get(tokens, {}), "softmax_up_to": n} for tokens, n in found.items() if tokens}
    return replace(recipe, towers={**recipe.towers, **own})


def require_parts(mechanism: str, options: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse an option whose part is in no layer, such as the width of a window where there is none."""
    if mechanism == "lot":
        idle = [without_part({**recipe.options_for(tokens), **options}) for tokens in (None, *recipe.towers)]
        for name in options:
            if all(name in missing for missing in idle):
                raise ValueError(lacks(name, options[name]))


UNASKED = "without a window: "


def without_window(
    model: nn.Module, recipe: Recipe, sites: Sequence[Located], settings: Mapping[str, Any]
) -> dict[str, str]:
    """Reasons why layers that could have a window have none, by the name of the layer."""
    if recipe.mechanism != "lot":
        return {}
    asked = "without a window, as asked for" if "window" in settings else None
    asked = asked or ("without a window, so that it is doubly stochastic" if _is_strict(settings) else None)
    found = {}
    for _, site in sites:
        tokens = tokens_before(model, site.name)
        if recipe.options_for(tokens).get("window") is None:
            why = "what its tokens are is not known" if tokens is None else f"no one window suits its {tokens}"
            found[site.name] = asked or f"{UNASKED}{why}"
    return found
