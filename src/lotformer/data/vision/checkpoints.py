"""Checkpoints of timm's models on disk: a folder in timm's layout, or a file of weights with the model's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ... import _torchvision


@dataclass(frozen=True)
class TimmCheckpoint:
    """A model with its weights, and what `timm.create_model(name, **arguments)` builds it from."""

    model: nn.Module
    name: str
    arguments: dict[str, Any]


def is_timm_folder(source: str | Path) -> bool:
    """Whether a folder is laid out as `timm.models.save_for_hf` does: a config.json that names an architecture."""
    path = Path(source) / "config.json"
    try:
        return "architecture" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def open_timm(source: Path, name: str | None = None, image_size: int | None = None) -> TimmCheckpoint:
    """The model in a folder of timm's, or the model `name` with the weights in a file.

    A file without a classifier gives a model without one. `image_size` changes the size that a model is built for;
    timm then interpolates positions.

    Raises:
        FileNotFoundError: there is nothing. ValueError: timm knows no such model, or the weights are of another one.
    """
    _torchvision.prepare()
    import timm

    arguments: dict[str, Any] = {} if image_size is None else {"img_size": image_size}
    if is_timm_folder(source):
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        arguments = {**(config.get("model_args") or {}), **arguments}
        if "num_classes" in config:
            arguments["num_classes"] = config["num_classes"]
        name = config["architecture"]
    elif not source.is_file():
        raise FileNotFoundError(f"{source} is neither a file of weights nor a folder of timm's with a config.json.")
    elif name is None:
        raise ValueError(f"{source} is a file of weights: give the name of its model in timm, --timm NAME.")
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name}*")[:3])
        raise ValueError(f"timm knows no model {name!r}{f'; there are {near}' if near else ''}.")
    weights = _weights(source)
    if "num_classes" not in arguments:
        head = weights.get(f"{_classifier(name)}.weight")
        arguments["num_classes"] = 0 if head is None else head.shape[0]
    # timm's own way for files: old names and other sizes of positions are translated, what is missing is an error
    overlay = {"file": _file(source), "num_classes": arguments["num_classes"], "hf_hub_id": None, "custom_load": False}
    try:
        model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
    except (RuntimeError, KeyError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"{source} does not hold the weights of {name}: {reason}") from error
    return TimmCheckpoint(model.eval(), name, arguments)


def _classifier(name: str) -> str:
    from timm.models import get_pretrained_cfg

    known = get_pretrained_cfg(name, allow_unregistered=True)
    named = "head" if known is None else known.classifier or "head"
    return named if isinstance(named, str) else named[0]


def _file(source: Path) -> str:
    if source.is_file():
        return str(source)
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (source / name).is_file():
            return str(source / name)
    raise FileNotFoundError(f"{source} holds no weights: expected model.safetensors or pytorch_model.bin.")


def _weights(source: Path) -> Mapping[str, Tensor]:
    from timm.models import load_state_dict

    path = _file(source)
    try:
        return load_state_dict(path, weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as weights: {str(error).splitlines()[0]}") from error
