"""Everything that decides what a training run on images gives, and the recipes that say it for ImageNet."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ..settings import Settings, setting
from ..training.settings import TrainSettings

Recipe = Literal["deit", "paper", "none"]
"""Files in the folder `recipes`, and "none"."""


@dataclass(frozen=True)
class ImageSettings(Settings):
    """The images to evaluate on."""

    data: Path | None = setting(None, "Folder that holds train/ and val/ with one folder per class, or a tar file.")
    source: str = setting("", "timm's name of another source, e.g. torch/cifar10; --data is where it is.")
    val_split: str = setting("validation", "The split to evaluate on.")
    cache: bool = setting(False, "Decode all images once and keep them in memory; for small sets.")


@dataclass(frozen=True)
class VisionSettings(ImageSettings, TrainSettings):
    """A run of `lotformer train vision`. Without a recipe: plain training on random crops and flips."""

    recipe: Recipe = setting("deit", "Where to take what is not given from: DeiT's 300 epochs or the paper's 400.")
    model: str = setting("lot_vit_half", "A model of lotformer.models, or any other of timm's.")
    attention: str | None = setting(None, "Mechanism of lotformer's models; LOT if not given.")
    attention_args: tuple[str, ...] = setting((), "Arguments of the mechanism, e.g. rank=16.")
    model_args: tuple[str, ...] = setting((), "Further arguments of the model, e.g. depth=6.")
    drop_path: float = setting(0.0, "Stochastic depth of the last block.", at_least=0, at_most=1)
    num_classes: int | None = setting(None, "Classes; needed only where the source does not tell.", at_least=1)

    train_split: str = setting("train", "The split to train on.")
    image_size: tuple[int, ...] = setting((224,), "Side of the images in pixels, or height and width.", at_least=1)
    crop: float = setting(0.875, "Share of the resized image that the evaluated centre keeps.", at_least=0.1, at_most=1)
    mixup: float = setting(0.0, "α of mixup; 0 for none.", at_least=0)
    cutmix: float = setting(0.0, "α of cutmix; 0 for none.", at_least=0)
    crop_scale: tuple[float, ...] = setting((0.08, 1.0), "Range of the random crop's share of the image.", at_least=0)
    color_jitter: float = setting(0.0, "Strength of colour jitter, where there is no RandAugment.", at_least=0)
    randaugment: str = setting("", "timm's description of the policy; empty for none.")
    erasing: float = setting(0.0, "Probability of erasing a rectangle.", at_least=0, at_most=1)
    repeats: int = setting(1, "Differently augmented copies of an image in a row.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.image_size) not in (1, 2):
            raise ValueError(f"image_size must be one or two numbers, got {list(self.image_size)}.")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.image_size[0], self.image_size[-1]

    def described(self) -> dict[str, Any]:
        """Without where the images are and whether they are in memory: the contents say which they are."""
        return {name: value for name, value in super().described().items() if name not in ("data", "cache")}


def completed(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen settings, completed by the recipe, which never overrules chosen steps or epochs."""
    recipe = chosen.get("recipe", VisionSettings.recipe)
    if recipe == "none" or recipe not in get_args(Recipe):
        return dict(chosen)  # settings refuse an unknown one, and say which there are
    path = resources.files(__package__) / "recipes" / f"{recipe}.toml"
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    if "steps" in chosen:
        values = {name: value for name, value in values.items() if name not in ("epochs", "warmup_epochs")}
    elif "epochs" in chosen:
        values["warmup_epochs"] *= chosen["epochs"] / values["epochs"]
    return {**values, **chosen}


def options(texts: Sequence[str]) -> dict[str, Any]:
    """`("rank=16", "solver=newton")` as keyword arguments: literals of Python where they are, else strings."""
    made: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip().isidentifier():
            raise ValueError(f"an option is written name=value, got {text!r}.")
        try:
            made[name.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            made[name.strip()] = value.strip()
    return made
