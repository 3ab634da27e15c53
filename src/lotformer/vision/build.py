"""From settings to a model, and from the checkpoint of a run back to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..training import checkpoints
from .settings import VisionSettings, options


def build(settings: VisionSettings) -> nn.Module:
    """The model that settings describe, with fresh weights.

    Raises:
        ValueError: timm knows no such model, or the model does not take these options.
    """
    from .. import models  # noqa: F401  registers lotformer's own

    # isort: split
    import timm

    if not timm.is_model(settings.model):
        near = timm.list_models(f"*{settings.model}*")[:3] or timm.list_models("lot_*")
        raise ValueError(f"timm knows no model {settings.model!r}; there are {', '.join(near)}.")
    arguments: dict[str, Any] = {"num_classes": settings.num_classes, "drop_path_rate": settings.drop_path}
    if settings.attention is not None:  # only lotformer's models know these two
        arguments["attention"] = settings.attention
    if settings.attention_args:
        arguments["attention_options"] = options(settings.attention_args)
    arguments |= options(settings.model_args)
    try:
        return timm.create_model(settings.model, img_size=settings.size, **arguments)
    except TypeError as error:
        if "img_size" not in str(error):
            raise ValueError(f"{settings.model} cannot be built with {arguments}: {error}.") from error
    return timm.create_model(settings.model, **arguments)  # convolutional models take any size


@dataclass(frozen=True)
class Trained:
    """A model ready to evaluate, and how it came to be."""

    model: nn.Module
    settings: VisionSettings
    step: int
    metrics: dict[str, float]


def load_trained(path: Path) -> Trained:
    """The model in the `best.pt` of a run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is something else, or its weights do not fit the model that it describes.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}: expected the best.pt of `lotformer train vision`.")
    try:
        content = checkpoints.read(path)
    except ValueError as error:
        raise ValueError(f"{error} Expected was the best.pt of `lotformer train vision`.") from error
    try:
        if content["belongs_to"]["task"] != "vision":
            raise KeyError("task")
        plain, state = content["belongs_to"]["settings"], content["state"]
        weights, step, metrics = state["weights"], state["step"], state["metrics"]
    except Exception as error:
        raise ValueError(f"{path} is not the best.pt of `lotformer train vision`.") from error
    settings = VisionSettings(**plain)
    model = build(settings)
    load_weights(model, weights, str(path))
    return Trained(model.eval(), settings, step, metrics)


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
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
    model.load_state_dict(dict(weights))
