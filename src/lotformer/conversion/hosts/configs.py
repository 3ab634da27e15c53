"""The configs of a Hugging Face model, as transformers' dispatch and config.json read its attention from them.

Every Hugging Face model that holds converted attention gets a copy of its config with two more keys, which
`save_pretrained` writes: the recipe, and `attn_implementation = "lotformer"`. transformers honours the second one when
it reads a config and refuses a name that nobody has registered, so that a converted checkpoint fails loudly where
lotformer is not imported. Copies, because decoders and other models may share the original.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from .sites import converted, recipe, record_of

IMPLEMENTATION = "lot"
"""The `attn_implementation` of converted layers, whichever mechanism sits inside; on loading, a request for LOT."""

SAVED = "lotformer"
"""The `attn_implementation` in the config.json of a converted model: the name of the package it needs."""

RECIPE = "lotformer"
"""The key of config.json that holds the recipe of the conversion."""

OPTIONS = "lot_options"
"""The argument of `from_pretrained` that says how a plain checkpoint is converted: arguments of `lotformer.convert`."""

_OURS = (IMPLEMENTATION, SAVED)
_SAVED_KEY = "attn_implementation"
_ORIGINAL = "_lotformer_config"
_GOVERNOR = "_lotformer_governor"


def settle(model: nn.Module) -> None:
    """Make the configs of a model and of all its parts agree with what is converted in it now.

    Attention modules have a copy of their own, which says "lot". Where every attention under a sub-model is converted,
    its config says "lot" too, and its layers get a mask of the keys instead of an N×N one. Everything else that shares
    a config keeps sharing one.

    Raises:
        ValueError: parts were converted with different settings, which one recipe cannot hold; nothing has changed.
    """
    recipes = {
        id(module): recipe(module).to_dict() for module, _ in _holders(model) if _is_model(module) and converted(module)
    }
    _put_back(model)
    touched = {id(c) for m, c in _holders(model) if converted(m)}
    if not touched:
        for _, config in _holders(model):
            _clean(config, model)
        return
    copies: dict[tuple[int, str], PreTrainedConfig] = {}
    for module, config in _holders(model):
        if id(config) not in touched and config._attn_implementation not in _OURS:
            continue
        role = _role(module)
        mine = copies.get((id(config), role))
        if mine is None:
            mine = copies[id(config), role] = copy.copy(config)
            _clean(mine, model)
            if role != "softmax":
                # the public setter would reach into sub-configs that unconverted parts share
                mine._attn_implementation_internal = IMPLEMENTATION
        module.__dict__[_ORIGINAL], module.__dict__["config"] = config, mine
        if id(module) in recipes and RECIPE not in mine.__dict__:
            # the outermost model that shares a config comes first, and its names are the ones written
            setattr(mine, RECIPE, recipes[id(module)])
            setattr(mine, _SAVED_KEY, SAVED)
        if role == "converted" and _is_model(module):
            for _, layer in converted(module):
                layer.__dict__[_GOVERNOR] = mine
    for mine in copies.values():
        for key in mine.sub_configs:
            part = id(getattr(mine, key, None))
            for role in ("converted", "softmax"):
                if (part, role) in copies:
                    setattr(mine, key, copies[part, role])
                    break


def implementation_of_the_model(layer: nn.Module) -> str | None:
    """The setting in the config of the fully converted model around a layer; "lot" unless somebody changed it."""
    governor = layer.__dict__.get(_GOVERNOR)
    return IMPLEMENTATION if governor is None else governor._attn_implementation


def dispatches(module: nn.Module) -> bool:
    """True if a module asks transformers' registry for its attention function."""
    return "ALL_ATTENTION_FUNCTIONS" in names_in_forward(module)


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """The names that the `forward` of a module refers to: what it calls, without calling it."""
    forward = inspect.unwrap(type(module).forward)
    return getattr(getattr(forward, "__code__", None), "co_names", ())


def is_inscribed(config: PreTrainedConfig) -> bool:
    """True for the config of a converted model in memory, False for one that has just been read."""
    return config.__dict__.get(_SAVED_KEY) == SAVED


def _holders(model: nn.Module) -> list[tuple[nn.Module, PreTrainedConfig]]:
    held = ((module, module.__dict__.get("config")) for module in model.modules())
    return [(module, config) for module, config in held if isinstance(config, PreTrainedConfig)]


def _role(module: nn.Module) -> str:
    if record_of(module) is not None:
        return "attention"
    inside = [m for m in module.modules() if dispatches(m)]
    return "converted" if inside and all(record_of(m) is not None for m in inside) else "softmax"


def _put_back(model: nn.Module) -> None:
    """Every module gets the config back that it was built with, and keeps what has been changed in our copy since."""
    bases = _Bases(model)
    for module, config in _holders(model):
        module.__dict__["config"] = bases.of(module.__dict__.pop(_ORIGINAL, config))
    for module in model.modules():
        governor = module.__dict__.pop(_GOVERNOR, None)
        if governor is not None and record_of(module) is None:
            # the model around a part that was reverted alone must make masks for softmax again
            governor._attn_implementation_internal = _softmax(model)


class _Bases:
    """The originals behind the copies in a model, with the changes that users made to the copies.

    An original is never changed, since other models may share it: one that differs from its copies has a successor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._successors: dict[int, PreTrainedConfig] = {}
        self._changes: dict[int, dict[str, Any]] = {}
        for module, mine in _holders(model):
            original = module.__dict__.get(_ORIGINAL)
            if original is not None:
                # the outermost module comes first: what it says holds
                self._changes[id(original)] = _difference(original, mine) | self._changes.get(id(original), {})

    def of(self, original: PreTrainedConfig) -> PreTrainedConfig:
        if id(original) not in self._successors:
            changes = dict(self._changes.get(id(original), {}))
            for key in original.sub_configs:
                part = getattr(original, key, None)
                if isinstance(part, PreTrainedConfig) and self.of(part) is not part:
                    changes[key] = self.of(part)
            successor = copy.copy(original) if changes else original
            successor.__dict__.update(changes)
            self._successors[id(original)] = successor
        return self._successors[id(original)]


def _difference(original: PreTrainedConfig, mine: PreTrainedConfig) -> dict[str, Any]:
    ours = {RECIPE, OPTIONS, _SAVED_KEY, *original.sub_configs}
    if not {original._attn_implementation, mine._attn_implementation}.isdisjoint(_OURS):
        ours.add("_attn_implementation_internal")
    return {
        key: value
        for key, value in mine.__dict__.items()
        if key not in ours and (key not in original.__dict__ or original.__dict__[key] != value)
    }


def _clean(config: Any, model: nn.Module) -> None:
    """Take away what is ours, and dispatch to softmax."""
    config.__dict__.pop(RECIPE, None)
    config.__dict__.pop(OPTIONS, None)
    config.__dict__.pop(_SAVED_KEY, None)
    if config._attn_implementation in _OURS:
        config._attn_implementation_internal = _softmax(model)


def _softmax(model: nn.Module) -> str:
    """The implementation that transformers would choose."""
    chooser: Any = next(filter(_is_model, model.modules()), None)
    return "eager" if chooser is None else chooser.get_correct_attn_implementation(None)


def _is_model(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)
