"""The paper's motivation: accuracy when patches are missing, beside how evenly each mechanism reads them.

Measured on the weights that `vision-ladder` leaves behind; nothing is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lotformer.attention.base import Attention
from lotformer.attention.diagnose import attention_matrix, is_matrix
from lotformer.cli.tables import Table, mean_and_deviation
from lotformer.data.vision.sources import open_images
from lotformer.data.vision.transforms import evaluation_transform
from lotformer.settings import Settings, setting
from lotformer.vision.build import Trained, load_trained
from lotformer.vision.evaluation import Transformed, evaluate, evaluation_loader
from lotformer.vision.task import normalisation

from ...results.cells import Listener
from ...results.plain import read
from ...results.provenance import Provenance, provenance
from ...results.report import Report
from .ladder import TITLES

NAME = "robustness"


@dataclass(frozen=True)
class RobustnessSettings(Settings):
    """What is measured on every model."""

    drop: tuple[float, ...] = setting((0.25, 0.5, 0.75), "Shares of the patches to blank.")
    sample: int = setting(16, "Images whose attention matrices are looked at.", at_least=1)


@dataclass(frozen=True)
class Evenness:
    """How the patches are read, mean over blocks, heads and images.

    Attributes:
        deviation: standard deviation of the column sums, relative to their mean: 0 where all patches are read alike.
        heaviest: largest column sum, relative to the mean.
        entropy: of the rows of the patches, in nats.
    """

    deviation: float
    heaviest: float
    entropy: float


@dataclass(frozen=True)
class Measured:
    """One trained model. `top1` is by the share of blank patches; `evenness` is None if attention is no matrix."""

    row: str
    seed: int
    images: int
    tokens: int
    top1: dict[str, float]
    evenness: Evenness | None


@dataclass(frozen=True)
class RobustnessResult:
    experiment: str
    provenance: Provenance
    settings: RobustnessSettings
    models: tuple[Measured, ...]


def run(
    ladder: Path,
    data: Path,
    settings: RobustnessSettings,
    listen: Listener = lambda what, now, total: None,
    command: str = "",
) -> RobustnessResult:
    """Measure every model that the ladder has trained.

    Raises:
        FileNotFoundError: there is none.
    """
    found = {
        (row, int(path.parent.name.rpartition("-seed")[2])): path
        for row in TITLES
        for path in sorted(ladder.glob(f"runs/{row}-seed*/best.pt"))
    }
    if not found:
        raise FileNotFoundError(f"{ladder} holds no runs/<row>-seed<n>/best.pt: run `experiment vision-ladder` first.")
    models = []
    for done, ((row, seed), path) in enumerate(found.items()):
        listen(f"{row}, seed {seed}", done, len(found))
        models.append(_measured(row, seed, load_trained(path), data, settings))
    source = provenance(command, threads=torch.get_num_threads(), seed=0)
    return RobustnessResult(NAME, source, settings, tuple(models))


def _measured(row: str, seed: int, trained: Trained, data: Path, settings: RobustnessSettings) -> Measured:
    told = trained.settings
    images = open_images("", data, told.val_split)
    shown = Transformed(images, evaluation_transform(told.size, told.crop, **normalisation(told)))
    patches: Any = trained.model.patch_embed
    judged = evaluate(trained.model, evaluation_loader(shown), drop=settings.drop, patch_size=patches.patch_size[0])
    chosen = [i * len(shown) // settings.sample for i in range(min(settings.sample, len(shown)))]
    return Measured(
        row=row,
        seed=seed,
        images=judged.images,
        tokens=patches.num_patches,
        top1={"0": judged.top1, **judged.dropped},
        evenness=evenness(trained.model, torch.stack([shown[index][0] for index in chosen])),
    )


@torch.no_grad()
def evenness(model: nn.Module, pixels: Tensor) -> Evenness | None:
    """How evenly the patches of these images `(B, 3, H, W)` are read in all blocks of a ViT of `lotformer.models`.

    Rows and columns are those of the patches, without special tokens and without a convolution beside the attention.
    """
    from lotformer.models.slot import PrefixedAttention

    vit: Any = model.eval()
    mechanisms: list[Attention] = [block.attn.mechanism for block in vit.blocks]
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [part.register_forward_pre_hook(lambda _, args: seen.append(args[:2])) for part in mechanisms]
    try:
        vit(pixels)
    finally:
        for handle in handles:
            handle.remove()
    matrices = []
    for mechanism, (q, k) in zip(mechanisms, seen, strict=True):
        if isinstance(mechanism, PrefixedAttention):
            mechanism, special = mechanism.inner, mechanism.prefix_tokens
            q, k = q[:, :, special:], k[:, :, special:]
        mechanism = _without_convolution(mechanism)
        if not is_matrix(mechanism):
            return None
        patches = vit.patch_embed.num_patches
        matrices.append(attention_matrix(mechanism, q, k)[:, :, -patches:, -patches:].abs())
    a = torch.stack(matrices)
    columns = a.sum(-2)
    columns = columns / columns.mean(-1, keepdim=True)
    rows = a / a.sum(-1, keepdim=True)
    return Evenness(
        deviation=columns.std(-1, correction=0).mean().item(),
        heaviest=columns.amax(-1).mean().item(),
        entropy=torch.special.entr(rows).sum(-1).mean().item(),
    )


def _without_convolution(mechanism: Attention) -> Attention:
    """The same attention on the same parameters."""
    made = copy.copy(mechanism)
    made._modules = {name: None if name == "local" else part for name, part in mechanism._modules.items()}
    return made


def render(folder: Path) -> Report:
    result = read(RobustnessResult, folder / "result.json")
    by_row: Mapping[str, list[Measured]] = {
        row: made for row in TITLES if (made := [model for model in result.models if model.row == row])
    }
    shares = list(result.models[0].top1)
    heads = tuple("none" if share == "0" else f"{100 * float(share):g} %" for share in shares)
    columns = ("attention", *heads, "seeds", "column\ndeviation", "heaviest\ncolumn", "entropy")
    rows = []
    for row, made in by_row.items():
        even = [model.evenness for model in made if model.evenness is not None]
        figures = [[getattr(e, name) for e in even] for name in ("deviation", "heaviest", "entropy")]
        rows.append(
            (
                TITLES[row],
                *(mean_and_deviation([model.top1[share] for model in made], 100) for share in shares),
                str(len(made)),
                *(f"{sum(values) / len(values):.2f}" if values else "–" for values in figures),
            )
        )
    first = result.models[0]
    notes = (
        f"Top-1 on {first.images} images by the share of patches that are blanked, the same for every row; models and "
        "names of rows are those of `lotformer experiment vision-ladder`.",
        f"Column deviation and heaviest column are of the column sums among {first.tokens} patches, relative to their "
        f"mean; entropy is that of a row, at most {torch.tensor(float(first.tokens)).log().item():.2f} nats; mean over "
        f"blocks, heads and {result.settings.sample} images, without the convolution. A dash: the attention is not one "
        "matrix per head.",
        f"{result.provenance.where()}.",
    )
    return Report((result.provenance.command,), (Table("Accuracy without patches", columns, tuple(rows)),), notes)
