"""Save and load converted models that have no `save_pretrained` of their own: timm's and plain PyTorch ones.

A file holds the whole state dict (safetensors) and, as metadata, the recipe of the conversion and the checksums of all
tensors. Hugging Face models need none of this: `save_pretrained` and `from_pretrained` carry both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.checkpoint_files import module_folders
from ..extras import needed_for
from ..files import new_file
from . import hosts
from .api import choose
from .hosts.sites import MECHANISM, converted, recipe
from .recipe import Recipe
from .sealing import require_undamaged, sealed
from .swapping import Located, Snapshot, build_on_meta, put_in, take_out

_KEY = "lotformer"


def save(model: nn.Module, path: str | Path) -> None:
    """Write a converted model's weights and recipe to one safetensors file.

    Raises:
        OSError: it cannot be written (disk full, folder read-only); an older file is as it was.
    """
    with needed_for("a conversion cannot be saved"):
        from safetensors import SafetensorError
        from safetensors.torch import save_model

    metadata = sealed(model.state_dict(), {_KEY: recipe(model).to_json()})
    try:
        with new_file(Path(path)) as draft:
            save_model(model, str(draft), metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}.") from error


def is_saved(folder: Path) -> bool:
    """True if a folder holds a converted model, saved by `save_pretrained` or as the model.safetensors of `save`."""
    from safetensors import SafetensorError, safe_open

    place = folder / module_folders(folder)[0]
    try:
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        if isinstance(config, dict) and _KEY in config:
            return True
    except (OSError, ValueError, RecursionError):
        pass  # plain models have none, others no such key
    try:
        with safe_open(str(place / "model.safetensors"), framework="pt") as file:
            return _KEY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def load(model: nn.Module, path: str | Path) -> None:
    """Convert a freshly built model as the file says, in place, and load its weights: outputs are bit-for-bit the same.

    The file is compared with the model, and with its checksums, before anything is allocated or changed: if it does not
    fit, the model stays as it is.

    Raises:
        ValueError: the file cannot be read, is damaged, is no saved conversion, or does not fit the model.
    """
    with needed_for("a conversion cannot be loaded"):
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_file

    if converted(model):
        raise ValueError(f"{type(model).__name__} is already converted: load into a freshly built model.")
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file.")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
        state = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}.") from error
    if _KEY not in metadata:
        raise ValueError(f"{path} holds weights but no conversion: it was not written by `lotformer.conversion.save`.")
    require_undamaged(path, metadata, state, state.__getitem__)
    try:
        written = Recipe.from_json(metadata[_KEY])
        sites, _ = choose(model, hosts.find(model, frozenset(written.layers)), written.layers)
        _require_fit(model, written, sites, state)
    except ValueError as error:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {error}") from error
    before = Snapshot(site.module for _, site in sites)
    try:
        put_in(model, written, sites)
        model.load_state_dict(state, strict=False)  # tied weights are written once; nothing else is missing
    except BaseException:
        take_out(model)
        before.restore()
        raise


def _require_fit(model: nn.Module, written: Recipe, sites: list[Located], found: dict[str, Tensor]) -> None:
    """Every tensor of the converted model is in the file, in its shape and of its kind, and nothing else is."""
    mechanisms = build_on_meta(model, written, sites)
    state: dict[str, Tensor] = model.state_dict()
    if written.folded:
        state = _without_projections(model, sites)
    expected = dict(state)
    for site, mechanism in mechanisms.items():
        for name, tensor in mechanism.state_dict().items():
            expected[".".join(filter(None, (site, MECHANISM, name)))] = tensor
    for name, tensor in found.items():
        if name not in expected:
            raise ValueError(f"the file holds {name}, the converted model does not.")
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)} in the file, {tuple(expected[name].shape)} in the "
                "converted model."
            )
        if not same_kind(tensor.dtype, expected[name].dtype):
            raise ValueError(f"{name} is {tensor.dtype} in the file, {expected[name].dtype} in the converted model.")
    kept: dict[int, str] = {}
    for name in found.keys() & state.keys():
        first = kept.setdefault(state[name].data_ptr(), name)
        if state[name].numel() and not torch.equal(found[first], found[name]):
            raise ValueError(f"{first} and {name} are one tensor in the model, but two in the file.")
    for name in expected.keys() - found.keys():
        if name not in state or state[name].data_ptr() not in kept:  # tied weights are written once
            raise ValueError(f"the file does not hold {name}, which the converted model needs.")


def same_kind(here: torch.dtype, there: torch.dtype) -> bool:
    """True if one dtype may be loaded as another: floats of any width, otherwise only the same."""
    return here == there or (here.is_floating_point and there.is_floating_point)


def _without_projections(model: nn.Module, sites: list[Located]) -> dict[str, Any]:
    """The state dict of the model as it would be with queries and keys folded away."""
    before = Snapshot(site.module for _, site in sites)
    try:
        for host, site in sites:
            hosts.named(host).drop_projections(site.module)
        return model.state_dict()
    finally:
        before.restore()
