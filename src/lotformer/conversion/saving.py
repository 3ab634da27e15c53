"""Save and load converted models that have no `save_pretrained` of their own: timm's and plain PyTorch ones.

A file holds the whole state dict (safetensors) and, as metadata, the recipe of the conversion. Hugging Face models
need none of this: `save_pretrained` and `from_pretrained` carry both.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from .hosts.sites import converted
from .recipe import apply, recipe

_KEY = "lotformer"


def save(model: nn.Module, path: str | Path) -> None:
    """Write a converted model's weights and recipe to one safetensors file."""
    from safetensors.torch import save_model

    written = recipe(model)
    save_model(model, str(path), metadata={_KEY: json.dumps(written)})


def load(model: nn.Module, path: str | Path) -> None:
    """Convert a freshly built model as the file says, in place, and load its weights: outputs are bit-for-bit the same.

    Raises:
        ValueError: the file cannot be read, is no saved conversion, or does not fit the model.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_model

    if converted(model):
        raise ValueError(f"{type(model).__name__} is already converted: load into a freshly built model.")
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file.")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}.") from error
    if _KEY not in metadata:
        raise ValueError(f"{path} holds weights but no conversion: it was not written by `lotformer.conversion.save`.")
    apply(model, json.loads(metadata[_KEY]))
    try:
        load_model(model, str(path))
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} do not fit {type(model).__name__}: {error}") from error
