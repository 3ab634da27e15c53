"""A vision transformer: classes are told by the mean of a few images each, in the space of its embeddings.

Images of a class in the order of their names: the first ones make its prototype, the others are scored. What is
learned from are prototype images, without labels and of other classes if there are some; never one that is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import _torchvision, conversion
from ..._settings import setting
from ...data.vision.transforms import evaluation_transform
from ...results.cells import Listener
from .protocol import Experiment, ProtocolSettings

EXPERIMENT = Experiment(
    "survival-vision", "top-1 by prototypes (% of softmax); mean cosine with the original's embeddings", ("top-1",)
)
NAME, render = EXPERIMENT.name, EXPERIMENT.render

_SUFFIXES = {".jpeg", ".jpg", ".png"}


@dataclass(frozen=True)
class VisionSettings(ProtocolSettings):
    """A vision transformer of timm's and a folder of images by class."""

    model: str = setting("vit_small_patch14_dinov2", "Name of the model in timm.")
    size: int = setting(224, "Pixels a side.", at_least=14)
    classes: int = setting(1000, "Classes to tell apart: the first ones.", at_least=2)
    prototypes: int = setting(3, "Images of a class that make its prototype.", at_least=1)


class Pictures:
    """Files of images by class, in the order of names; numbers are ordered as numbers."""

    def __init__(self, folder: Path) -> None:
        places = sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda p: (len(p.name), p.name))
        self.classes = [sorted(f for f in place.iterdir() if f.suffix.lower() in _SUFFIXES) for place in places]
        if not self.classes or not all(self.classes):
            raise ValueError(f"{folder} should hold a folder of images for each class.")


class VisionTask:
    """timm's model from a safetensors file, judged by prototypes."""

    def __init__(self, checkpoint: Path, folder: Path, settings: VisionSettings) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        self.pictures = Pictures(folder)
        if settings.classes > len(self.pictures.classes):
            raise ValueError(f"{folder} holds {len(self.pictures.classes)} classes, not {settings.classes}.")
        self.reference: Tensor | None = None

    def load(self, place: Path | None = None) -> nn.Module:
        _torchvision.prepare()
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

    def batches(self) -> list[Tensor]:
        return list(self._read(self.learned_from).split(self.settings.batch_size))

    def test_batches(self) -> list[Tensor]:
        return [self._read([files[-1] for files in self._scored[:4]])]

    @cached_property
    def learned_from(self) -> list[Path]:
        """One prototype image a class, spread over the classes that are not scored; over all if all are."""
        others = self.pictures.classes[self.settings.classes :] or self.pictures.classes
        prototypes = [files[: self.settings.prototypes] for files in others]
        pool = [files[i] for i in range(self.settings.prototypes) for files in prototypes if i < len(files)]
        count = min(self.settings.calibration_inputs, len(pool))
        spread = pool[: len(others)] if count <= len(others) else pool
        return [spread[i * len(spread) // count] for i in range(count)]

    @property
    def _scored(self) -> list[list[Path]]:
        return self.pictures.classes[: self.settings.classes]

    @torch.no_grad()
    def scores(self, model: nn.Module, listen: Listener) -> dict[str, float]:
        files = [file for place in self._scored for file in place]
        labels = torch.tensor([label for label, place in enumerate(self._scored) for _ in place])
        first = torch.tensor([i < self.settings.prototypes for place in self._scored for i in range(len(place))])
        found = []
        for start in range(0, len(files), 16):
            listen("scoring", start, len(files))
            with self.settings.products():
                made = model(self._read(files[start : start + 16]))
            found.append(nn.functional.normalize(made.float(), dim=-1))
        embeddings = torch.cat(found)
        self.reference = embeddings if self.reference is None else self.reference
        cosine = (embeddings * self.reference).sum(-1).mean()
        return {"top-1": prototype_accuracy(embeddings, labels, first), "cosine": float(cosine)}

    def _read(self, files: Sequence[Path]) -> Tensor:
        from PIL import Image

        return torch.stack([self._transform(Image.open(file).convert("RGB")) for file in files])

    @cached_property
    def _transform(self) -> Any:
        return evaluation_transform((self.settings.size, self.settings.size), 1.0)


def prototype_accuracy(embeddings: Tensor, labels: Tensor, first: Tensor) -> float:
    """Share of the unit embeddings outside `first` that are nearest to the mean of those of their class inside it."""
    prototypes = torch.stack([embeddings[first & (labels == label)].mean(0) for label in labels.unique()])
    guessed = (embeddings[~first] @ nn.functional.normalize(prototypes, dim=-1).T).argmax(-1)
    return float((labels.unique()[guessed] == labels[~first]).float().mean())
