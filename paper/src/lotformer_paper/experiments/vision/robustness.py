"""The paper's motivation: accuracy when patches are missing, beside how evenly each mechanism reads them.

Measured on the weights that `vision-ladder` leaves behind; nothing is trained.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from lotformer.attention.base import Attention
from lotformer.attention.diagnose import attention_matrix, is_matrix
from lotformer.cli.tables import Table, mean_and_deviation
from lotformer.cli.terminal import Listener
from lotformer.data.vision.sources import open_images
from lotformer.data.vision.transforms import evaluation_transform
from lotformer.settings import Settings, setting
from lotformer.vision.build import Trained, load_trained
from lotformer.vision.evaluation import Transformed, evaluate, evaluation_loader
from lotformer.vision.task import normalisation

from ...results.cells import Origin, Record
from ...results.sources import files_source
from ..engine import Cells, Experiment, Job, alike, described
from .ablation import Images, by_row, images_folder, images_source
from .ladder import TITLES


@dataclass(frozen=True)
class RobustnessSettings(Settings):
    """Shares of dropped patches, and images."""

    drop: tuple[float, ...] = setting((0.25, 0.5, 0.75), "Shares of the patches to blank.")
    sample: int = setting(16, "Images whose attention matrices are looked at.", at_least=1)


@dataclass(frozen=True)
class Evenness:
    """Statistics of the attention that patches receive, mean over blocks, heads and images.

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


Ladder = Annotated[Path, typer.Option(help="Folder of `lotformer experiment vision-ladder`.")]


def plan(
    settings: RobustnessSettings, listen: Listener, ladder: Ladder = Path("out/vision-ladder"), data: Images = None
) -> list[Job]:
    """A job for every model that the ladder has trained.

    Raises:
        FileNotFoundError: there is none.
    """
    found = {path.parent.name: path for row in TITLES for path in sorted(ladder.glob(f"runs/{row}-seed*/best.pt"))}
    if not found:
        raise FileNotFoundError(f"{ladder} holds no runs/<row>-seed<n>/best.pt: run `experiment vision-ladder` first.")
    folder = images_folder(data)
    images = images_source(folder)

    def measure(name: str, done: int, cells: Cells) -> None:
        listen(name, done, len(found))
        row, _, seed = name.rpartition("-seed")
        cells.finish(name, _measured(row, int(seed), load_trained(found[name]), folder, settings))

    return [
        Job(
            {name: Origin(described(settings), {"weights": files_source(name, [path]), "images": images})},
            partial(measure, name, done),
        )
        for done, (name, path) in enumerate(found.items())
    ]


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
    """Evenness of the attention to the patches of `images (B, 3, H, W)`, over all blocks of one of our ViTs.

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


def _tables(records: list[Record]) -> list[Table]:
    shares = list(records[0].cell.top1)
    heads = tuple("none" if share == "0" else f"{100 * float(share):g} %" for share in shares)
    columns = ("attention", *heads, "seeds", "column\ndeviation", "heaviest\ncolumn", "entropy")
    rows = []
    for row, made in by_row(records).items():
        models: list[Measured] = [record.cell for record in made]
        even = [model.evenness for model in models if model.evenness is not None]
        figures = [[getattr(e, name) for e in even] for name in ("deviation", "heaviest", "entropy")]
        rows.append(
            (
                TITLES[row],
                *(mean_and_deviation([model.top1[share] for model in models], 100) for share in shares),
                str(len(models)),
                *(f"{sum(values) / len(values):.2f}" if values else "–" for values in figures),
            )
        )
    return [Table("Accuracy without patches", columns, tuple(rows))]


def _notes(records: list[Record]) -> list[str]:
    first, sample = records[0].cell, records[0].origin.settings["sample"]
    return [
        f"Top-1 on {first.images} images by the share of patches that are blanked, the same for every row; models and "
        "names of rows are those of `lotformer experiment vision-ladder`.",
        f"Column deviation and heaviest column are of the column sums among {first.tokens} patches, relative to their "
        f"mean; entropy is that of a row, at most {math.log(first.tokens):.2f} nats; mean over blocks, heads and "
        f"{sample} images, without the convolution. A dash: the attention is not one matrix per head.",
        *alike(records, lambda record: f"{record.provenance.where()}."),
    ]


EXPERIMENT = Experiment(
    name="robustness",
    about="Accuracy when patches are missing, and how evenly each mechanism reads them, of the ladder's models.",
    settings=RobustnessSettings,
    cell=Measured,
    plan=plan,
    arranged=lambda records: [record for row in TITLES for record in records if record.cell.row == row],
    tables=_tables,
    notes=_notes,
    extras=("train",),
)
