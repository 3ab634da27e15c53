"""From settings to a model, and from a model to a file and back."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..._files import write_bytes
from .settings import VisionSettings, options


@dataclass(frozen=True)
class Architecture:
    """What timm needs to build the model, and the classes it tells apart."""

    name: str
    arguments: dict[str, Any]
    classes: list[str]
    image_size: tuple[int, int]


def architecture(settings: VisionSettings, classes: list[str]) -> Architecture:
    """The model that settings describe; what only lotformer's models take is given only where it was asked for."""
    arguments: dict[str, Any] = {"num_classes": len(classes), "drop_path_rate": settings.drop_path}
    if settings.attention is not None:
        arguments["attention"] = settings.attention
    if settings.attention_options:
        arguments["attention_options"] = options(settings.attention_options)
    arguments |= options(settings.model_options)
    return Architecture(settings.model, arguments, classes, settings.size)


def build(description: Architecture) -> nn.Module:
    """The untrained model.

    Raises:
        ValueError: timm knows no such model, or the model does not take these arguments.
    """
    from ... import models  # noqa: F401  registers lotformer's own

    # isort: split
    import timm

    name, arguments = description.name, description.arguments
    if not timm.is_model(name):
        near = timm.list_models(f"*{name}*")[:3] or timm.list_models("lot_*")
        raise ValueError(f"timm knows no model {name!r}; there are {', '.join(near)}.")
    sized = {**arguments, "img_size": description.image_size}
    try:
        return timm.create_model(name, **sized)
    except TypeError as error:
        if "img_size" not in str(error):
            raise ValueError(f"{name} cannot be built with {arguments}: {error}.") from error
    return timm.create_model(name, **arguments)  # convolutional models take any size


def save_model(path: Path, model: nn.Module, description: Architecture, note: dict[str, Any]) -> None:
    """Weights with all that is needed to build the model again; `note` is what a reader may want to know."""
    content = {"architecture": asdict(description), "weights": model.state_dict(), "note": note}
    file = io.BytesIO()
    torch.save(content, file)
    write_bytes(file.getvalue(), path)


def load_model(path: Path) -> tuple[nn.Module, Architecture, dict[str, Any]]:
    """The model in a file of `save_model`, ready to evaluate, with its description and note.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}: expected the best.pt of a training run.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        description = Architecture(**content["architecture"])
        weights, note = content["weights"], content["note"]
    except Exception as error:
        raise ValueError(f"{path} is not a model that `lotformer train vision` has saved.") from error
    model = build(description)
    load_weights(model, weights, str(path))
    return model.eval(), description, note


def load_weights(model: nn.Module, weights: dict[str, Any], source: str) -> None:
    """Weights into a model of the same architecture.

    Raises:
        ValueError: they are of another one, with the first names or shapes that differ.
    """
    own = model.state_dict()
    told = [f"{name} is missing" for name in own if name not in weights]
    told += [f"{name} is not expected" for name in weights if name not in own]
    told += [
        f"{name} is {list(weights[name].shape)} instead of {list(own[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if told:
        rest = f" and {len(told) - 3} more" if len(told) > 3 else ""
        raise ValueError(f"{source} holds weights of another architecture: {'; '.join(told[:3])}{rest}.")
    model.load_state_dict(weights)
