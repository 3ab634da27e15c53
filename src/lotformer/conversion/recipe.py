"""How a conversion is written down, and how a model is converted again from what was written."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import hosts
from .api import convert, revert
from .hosts.sites import Site, converted, record_of, require_converted

IMPLEMENTATION = "lot"


def recipe(model: nn.Module) -> dict[str, Any]:
    """Mechanism, options and layer names of a converted model, as plain data: `apply` makes the same architecture."""
    found = require_converted(model)
    record = record_of(found[0][1])
    assert record is not None
    return {"mechanism": record.mechanism, "options": dict(record.options), "layers": [name for name, _ in found]}


def apply(model: nn.Module, written: dict[str, Any]) -> None:
    """Convert a model as its recipe says. The mechanisms are fresh: load their weights afterwards."""
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in written["options"].items()
    }
    convert(model, written["mechanism"], layers=written["layers"], **options)


def restore(model: Any) -> None:
    """Convert a Hugging Face model under construction if its config asks for it.

    The request is a recipe in the config (a saved conversion) or `attn_implementation="lot"`. Called at the end of
    every constructor, the inner ones first: an outer model converts anew what its inner ones have converted, so
    that its records and names are its own.
    """
    written = getattr(model.config, "lotformer", None)
    if model.config._attn_implementation == IMPLEMENTATION:
        # softmax layers that share this config (decoders) need an implementation that exists for them
        model.config._attn_implementation = None
        model.config._attn_implementation = model.get_correct_attn_implementation(None)
        if written is None:
            written = {"mechanism": "lot", "options": {}, "layers": None}
            model.config.lotformer = written
    if written is None:
        return
    if converted(model):
        revert(model)
        model.config.lotformer = written
    sites = [item.name for host in hosts.present().values() for item in host.find(model) if isinstance(item, Site)]
    layers = written["layers"]
    if layers is not None:
        layers = [name for name in sites if any(name == end or name.endswith(f".{end}") for end in layers)]
        if not layers:
            return  # a part of the model that holds none of the converted layers
    elif not sites and (getattr(model.config, "is_encoder_decoder", False) or _has_cross_attention(model.config)):
        return  # the decoder of an encoder–decoder
    apply(model, {**written, "layers": layers})


def _has_cross_attention(config: Any) -> bool:
    return bool(getattr(config, "add_cross_attention", False))
