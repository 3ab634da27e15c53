"""A vision transformer: classes are told by a few images each, in the space of its embeddings.

Images of a class in the order of their names: the first ones make its prototype, or vote for it, and the others are
scored. What is learned from are images of the first kind, without labels and of other classes if there are some; never
one that is scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from lotformer import conversion
from lotformer.cli.terminal import Listener
from lotformer.conversion.recipe import TokenKind
from lotformer.data.images import open_image
from lotformer.data.vision.transforms import evaluation_transform
from lotformer.settings import setting

from ...results.sources import Source, files_source, folder_source
from ..engine import Job
from ..inputs import Variants
from .protocol import EVERYTHING, ProtocolSettings, jobs, survival

Weights = Annotated[Path, typer.Option(help="safetensors file with the weights of the model.")]
Images = Annotated[Path, typer.Option(help="Folder with a folder of images for each class.")]

_SUFFIXES = {".jpeg", ".jpg", ".png"}


@dataclass(frozen=True)
class VisionSettings(ProtocolSettings):
    """A vision transformer of timm's and a folder of images by class."""

    model: str = setting("vit_small_patch14_dinov2", "Name of the model in timm.")
    size: int = setting(224, "Pixels a side.", at_least=14)
    classes: int = setting(1000, "Classes to tell apart: the first ones.", at_least=2)
    per_class: int = setting(EVERYTHING, "Images of a class to use: the first ones.", at_least=2)
    prototypes: int = setting(3, "Images of a class that make its prototype.", at_least=1)
    neighbours: int = setting(0, "How many of them vote; 0: the nearest mean decides.", at_least=0)
    learned_size: int = setting(0, "Pixels a side of images to learn from; 0 for `size`.", at_least=0)


class Pictures:
    """Files of images by class, in the order of names; numbers are ordered as numbers."""

    def __init__(self, folder: Path, per_class: int) -> None:
        places = sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda p: (len(p.name), p.name))
        found = [sorted(f for f in place.iterdir() if f.suffix.lower() in _SUFFIXES) for place in places]
        self.classes = [files[:per_class] for files in found]
        if not self.classes or not all(self.classes):
            raise ValueError(f"{folder} should hold a folder of images for each class.")


class VisionTask:
    """timm's model from a safetensors file, judged by prototypes."""

    tokens: TokenKind = "image"

    def __init__(self, checkpoint: Path, folder: Path, settings: VisionSettings) -> None:
        self.checkpoint, self.folder, self.settings = checkpoint, folder, settings
        self.pictures = Pictures(folder, settings.per_class)
        if settings.classes > len(self.pictures.classes):
            raise ValueError(f"{folder} holds {len(self.pictures.classes)} classes, not {settings.classes}.")
        if settings.neighbours > settings.prototypes * settings.classes:
            images = f"{settings.prototypes} images of {settings.classes} classes"
            raise ValueError(f"{images} are fewer than {settings.neighbours} neighbours.")
        self.reference: Tensor | None = None

    def sources(self) -> dict[str, Source]:
        """The weights and every image."""
        files = [file for place in self.pictures.classes for file in place]
        weights = files_source(self.checkpoint.name, [self.checkpoint])
        return {"checkpoint": weights, "data": folder_source(self.folder, files)}

    def load(self, place: Path | None = None) -> nn.Module:
        import timm
        from safetensors.torch import load_file

        options: dict[str, Any] = {"num_classes": 0, "dynamic_img_size": True}
        model: nn.Module = timm.create_model(self.settings.model, **options)
        if place is None:
            model.load_state_dict(load_file(str(self.checkpoint)))
        else:
            conversion.load(model, place.with_suffix(".safetensors"))
        return model

    def save(self, model: nn.Module, place: Path) -> None:
        conversion.save(model, place.with_suffix(".safetensors"))

    def body(self, model: nn.Module) -> nn.Module:
        return model

    def batches(self, count: int) -> list[Tensor]:
        size = self.settings.learned_size or self.settings.size
        return list(read_images(self.learned_from(count), size).split(self.settings.batch_size))

    def test_batches(self) -> list[Tensor]:
        return [read_images([files[-1] for files in self._scored[:4]], self.settings.size)]

    def learned_from(self, count: int) -> list[Path]:
        """One prototype image a class, spread over the classes that are not scored; over all if all are."""
        others = self.pictures.classes[self.settings.classes :] or self.pictures.classes
        prototypes = [files[: self.settings.prototypes] for files in others]
        pool = [files[i] for i in range(self.settings.prototypes) for files in prototypes if i < len(files)]
        count = min(count, len(pool))
        spread = pool[: len(others)] if count <= len(others) else pool
        return [spread[i * len(spread) // count] for i in range(count)]

    @property
    def _scored(self) -> list[list[Path]]:
        return self.pictures.classes[: self.settings.classes]

    @torch.no_grad()
    def scores(self, model: nn.Module, listen: Listener) -> dict[str, float]:
        if min(map(len, self._scored)) <= self.settings.prototypes:
            raise ValueError(f"A class has no image to score beside its {self.settings.prototypes} prototypes.")
        files = [file for place in self._scored for file in place]
        labels = torch.tensor([label for label, place in enumerate(self._scored) for _ in place])
        first = torch.tensor([i < self.settings.prototypes for place in self._scored for i in range(len(place))])
        found = []
        for start in range(0, len(files), 16):
            listen("scoring", start, len(files))
            with self.settings.products():
                made = model(read_images(files[start : start + 16], self.settings.size))
            found.append(nn.functional.normalize(made.float(), dim=-1))
        embeddings = torch.cat(found)
        self.reference = embeddings if self.reference is None else self.reference
        cosine = (embeddings * self.reference).sum(-1).mean()
        if self.settings.neighbours:
            accuracy = neighbour_accuracy(embeddings, labels, first, self.settings.neighbours)
        else:
            accuracy = prototype_accuracy(embeddings, labels, first)
        return {"top-1": accuracy, "cosine": float(cosine)}


def read_images(files: Sequence[Path], size: int) -> Tensor:
    transform = _transform(size)
    return torch.stack([transform(open_image(file)) for file in files])


@cache
def _transform(size: int) -> Any:
    return evaluation_transform((size, size), 1.0)


def prototype_accuracy(embeddings: Tensor, labels: Tensor, first: Tensor) -> float:
    """Share of the unit embeddings outside `first` that are nearest to the mean of those of their class inside it."""
    prototypes = torch.stack([embeddings[first & (labels == label)].mean(0) for label in labels.unique()])
    guessed = (embeddings[~first] @ nn.functional.normalize(prototypes, dim=-1).T).argmax(-1)
    return float((labels.unique()[guessed] == labels[~first]).float().mean())


def neighbour_accuracy(embeddings: Tensor, labels: Tensor, first: Tensor, count: int) -> float:
    """Share of those outside `first` whose class most of the nearest `count` inside it have; of equals the smallest."""
    nearest = (embeddings[~first] @ embeddings[first].T).topk(count, dim=-1).indices
    guessed = labels[first][nearest].mode(-1).values
    return float((guessed == labels[~first]).float().mean())


def plan(
    settings: VisionSettings,
    listen: Listener,
    checkpoint: Weights,
    images: Images,
    variants: Variants = "lot-32, lot-64, lot-128, lot-transport-alone, lot-uniform",
) -> Iterator[Job]:
    task = VisionTask(checkpoint, images, settings)
    return jobs(task, task.sources(), settings, variants, listen)


EXPERIMENT = survival(
    name="survival-vision",
    about="A vision transformer: accuracy by prototypes before and after its attention is converted, without labels.",
    settings=VisionSettings,
    plan=plan,
    title="top-1 by a few images a class (% of softmax); mean cosine with the original's embeddings",
    relative=("top-1",),
)
