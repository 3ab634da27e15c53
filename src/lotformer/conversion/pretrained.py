"""Saved conversions load with transformers' own `from_pretrained`, and everything that holds one saves it.

This is the one place where lotformer extends another library's class. transformers' own ways do not suffice:

- A model type of our own, or `auto_map`, is read by the `Auto…` classes alone: `BertModel.from_pretrained` ignores it.
- A quantizer runs between building a model and loading its weights, but a model has room for one only (a converted
  model could no longer be loaded in 8 bits), a sub-model's is not read, `from_config` runs none, and where lotformer
  is missing transformers warns and goes on.

So four methods of `PreTrainedModel` do a little more than before, and only for models that are converted or whose
config asks for it: `post_init`, the end of every constructor, builds the mechanisms; `_load_pretrained_model` compares
them with the files it is given; `_initialize_weights` gives those that no checkpoint holds their first values;
`save_pretrained` writes the recipe, whichever part was converted, and the function it calls the checksums of tensors.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention import Attention
from . import hosts
from .api import choose
from .defaults import default_recipe
from .hosts import configs
from .hosts.dispatch import register
from .hosts.grids import supply_grids
from .hosts.sites import MECHANISM, Site, converted, is_folded, record_of
from .hosts.tokens import tokens_before
from .pretrained_files import expect_fresh, require_complete, require_fitting_files, seal_saved_files, sealing
from .recipe import Recipe
from .swapping import Located, put_in, remove

_NEW = rf"(^|\.){MECHANISM}\."
"""Names of what a conversion adds, as transformers looks for them."""


def install() -> None:
    """Register our attention with transformers and extend `PreTrainedModel`. Safe to call twice."""
    register()
    if hasattr(PreTrainedModel.post_init, "_lotformer"):
        return
    # `from_pretrained` gives a config those of its arguments that configs have
    setattr(PreTrainedConfig, configs.OPTIONS, None)
    post_init, initialize = PreTrainedModel.post_init, PreTrainedModel._initialize_weights
    save, load = PreTrainedModel.save_pretrained, PreTrainedModel._load_pretrained_model

    @functools.wraps(post_init)
    def post_init_then_convert(self: PreTrainedModel) -> None:
        post_init(self)
        restore(self)

    @functools.wraps(initialize)
    def initialize_mechanisms_too(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not is_folded(module):  # which lacks weights that its model would fill; what it has is filled part by part
            initialize(self, module, *args, **kwargs)
        if isinstance(module, Attention) and not all(
            getattr(p, "_is_hf_initialized", False) for p in module.parameters()
        ):
            for part in module.modules():
                if callable(reset := getattr(part, "reset_parameters", None)):
                    reset()

    @functools.wraps(save)
    def settle_then_save(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if converted(self) or configs.is_inscribed(self.config):
            configs.settle(self)
            with sealing():
                return save(self, *args, **kwargs)
        return save(self, *args, **kwargs)

    @functools.wraps(load)
    def compare_then_load(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(load).bind(*args, **kwargs).arguments
        model: PreTrainedModel = given["model"]
        if not (converted(model) or hasattr(model.config, configs.RECIPE)):
            return load(*args, **kwargs)
        quantized = getattr(given.get("load_config"), "is_quantized", False)
        require_fitting_files(model, given.get("checkpoint_files") or (), any_dtype=quantized)
        result = load(*args, **kwargs)
        require_complete(model, result[0])
        return result

    # replacing methods of another library's class is the point here, and what mypy warns of
    post_init_then_convert._lotformer = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init_then_convert  # type: ignore[method-assign]
    PreTrainedModel._initialize_weights = initialize_mechanisms_too  # type: ignore[method-assign]
    PreTrainedModel.save_pretrained = settle_then_save  # type: ignore[method-assign]
    PreTrainedModel._load_pretrained_model = staticmethod(compare_then_load)  # type: ignore[method-assign]
    seal_saved_files()


def restore(model: PreTrainedModel) -> None:
    """Convert a model under construction if its config asks for it; no weights yet, and nothing runs.

    The request is a recipe in the config (a saved conversion) or `attn_implementation="lot"`. Called at the end of
    every constructor, the inner ones first: what an inner model has converted, an outer one finds done.
    """
    config: Any = model.config
    written, asked = getattr(config, configs.RECIPE, None), config._attn_implementation
    options = getattr(config, configs.OPTIONS, None)
    if options is not None:
        _require_options(options, written, asked)
    if written is None:
        if asked != configs.IMPLEMENTATION:
            return
        sites = _every_site(model)
        recipe = default_recipe(model, sites, options or {})
        # a plain checkpoint cannot hold them: no report of missing weights
        model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), _NEW}
        expect_fresh(model)
    else:
        recipe = _read(model, written)
        if asked not in (configs.IMPLEMENTATION, configs.SAVED) and not configs.is_inscribed(config):
            raise ValueError(
                f"attn_implementation={asked!r} was asked for, but this checkpoint is converted to "
                f"{recipe.mechanism!r}. Load it without `attn_implementation`; `lotformer.revert(model)` then gives "
                "softmax back."
            )
        found = hosts.find(model, frozenset(recipe.layers))
        sites = [(host, item) for host, item in found if isinstance(item, Site) and recipe.names(item.name)]
    _forget_other_choices(model, recipe, sites)
    fresh = [(host, site) for host, site in sites if record_of(site.module) is None]
    if fresh:
        try:
            put_in(model, recipe, fresh)
        except ValueError as error:
            raise ValueError(f"{_place(model)}: {error}") from error
    elif converted(model):
        supply_grids(model)
        configs.settle(model)


def _require_options(options: object, written: object, asked: str | None) -> None:
    name = configs.OPTIONS
    if not isinstance(options, dict):
        raise ValueError(f'{name} must be a table of options, e.g. {name}={{"rank": 64}}, got {options!r}.')
    if written is not None:
        raise ValueError(f"{name} was given, but this checkpoint is converted already: load it without.")
    if asked != configs.IMPLEMENTATION:
        raise ValueError(
            f"{name} says how a plain checkpoint is converted: expected attn_implementation="
            f"{configs.IMPLEMENTATION!r} beside it, got {asked!r}."
        )


def _forget_other_choices(model: PreTrainedModel, recipe: Recipe, sites: list[Located]) -> None:
    """Undo the choices of a part that was built without knowing its surroundings: patches, a tower."""
    for _, site in sites:
        record = record_of(site.module)
        if record is None:
            continue
        chosen, now = record.recipe.options_for(record.tokens), recipe.options_for(tokens_before(model, site.name))
        if chosen != now or (record.recipe.mechanism, record.recipe.towers) != (recipe.mechanism, recipe.towers):
            remove(model, [site.module])


def _read(model: PreTrainedModel, written: object) -> Recipe:
    try:
        return Recipe.from_dict(written)
    except ValueError as error:
        raise ValueError(f"{_place(model)}: {error}") from error


def _place(model: PreTrainedModel) -> str:
    config: Any = model.config
    return f"the key {configs.RECIPE!r} in the config of {config.name_or_path or type(config).__name__}"


def _every_site(model: PreTrainedModel) -> list[Located]:
    config: Any = model.config
    found = hosts.find(model)
    is_part = config.is_encoder_decoder or getattr(config, "add_cross_attention", False) or config.base_config_key
    if is_part and not any(isinstance(item, Site) for _, item in found):
        return []  # the decoder of an encoder–decoder, the text half of CLIP: the other half may have some
    return choose(model, found, None)[0]


install()
