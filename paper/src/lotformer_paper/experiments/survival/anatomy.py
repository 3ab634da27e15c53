"""Heads of a vision transformer, and their approximation by matrices of low rank.

For every head: where its patches look (at themselves, beside them, at special tokens). For every layer: the relative
error of its projected output if its softmax matrices are replaced by their best approximations of rank r (SVD: nothing
else of rank r is nearer to the matrix), and the same if special tokens and a window of patches are read exactly and
rank r has to carry the rest. For the model: how these errors add up on the way to the embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lotformer import conversion
from lotformer.attention import Attention, Inputs
from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.conversion.hosts.sites import substituted
from lotformer.nn.depthwise import square_grid
from lotformer.settings import setting

from ...results import figures
from ...results.cells import Origin, Record
from ..engine import Cells, Experiment, Job, described
from .protocol import ProtocolSettings
from .vision import Images, VisionSettings, VisionTask, Weights, read_images

_CELL = "anatomy"


@dataclass(frozen=True)
class AnatomySettings(VisionSettings):
    """The model, the images and the layers."""

    images: int = setting(4, "Images to look at, one of each class.", at_least=1)
    ranks: tuple[int, ...] = setting((16, 32, 64, 128), "Ranks to approximate with.")
    window: int = setting(5, "Width of the window of patches that is read exactly.", at_least=1)


@dataclass(frozen=True)
class Head:
    """Mean weights of a head's patches. `column`: the tallest column sum of its matrix, mean over images."""

    itself: float
    beside: float
    special: float
    distance: float
    column: float


@dataclass(frozen=True)
class Layer:
    """A layer: its heads, and the relative output error at each rank, of everything and of what near keys leave."""

    name: str
    heads: tuple[Head, ...]
    error: dict[str, float]
    error_of_rest: dict[str, float]


@dataclass(frozen=True)
class Growth:
    """Relative error of the hidden states before each layer, and the cosine of the embedding, at one rank."""

    rank: int
    near: bool
    hidden: tuple[float, ...]
    cosine: float


@dataclass(frozen=True)
class Anatomy:
    layers: tuple[Layer, ...]
    growth: tuple[Growth, ...]
    window: int


_Near = Callable[[int, tuple[int, int] | None], Tensor]
"""From the number of tokens and their grid to what a token reads exactly."""


class _Approximate(Attention):
    """Softmax attention by the best matrix of rank r, with near keys exact or not; it shows its matrices to `look`."""

    def __init__(
        self,
        mechanism: Attention,
        rank: int | None,
        near: _Near | None,
        look: Callable[[Tensor, Tensor, tuple[int, int] | None], None] | None = None,
    ) -> None:
        super().__init__(mechanism.head_dim, mechanism.num_heads)
        self.rank, self.near, self.look = rank, near, look

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, _, _, grid = inputs
        matrix = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        if self.look is not None:
            self.look(matrix, v, grid)
        if self.rank is not None:
            matrix = _truncated(matrix, self.rank, None if self.near is None else self.near(q.shape[2], grid))
        return matrix @ v


def look(task: VisionTask, settings: AnatomySettings, listen: Listener) -> Anatomy:
    """Run the images through the model and its approximations."""
    layers: list[Layer] = []
    model = task.load().eval()
    images = read_images([files[0] for files in task.pictures.classes[: settings.images]], settings.size)
    report = conversion.convert(model, "softmax")
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    names = [layer.name for layer in report.converted]

    def near(tokens: int, grid: tuple[int, int] | None) -> Tensor:
        return near_keys(tokens, prefix, square_grid(tokens - prefix, grid), settings.window)

    def watch(name: str, mechanism: Attention) -> Attention:
        projection = model.get_submodule(name).get_submodule("proj")
        assert isinstance(projection, nn.Linear)

        def describe(matrix: Tensor, v: Tensor, grid: tuple[int, int] | None) -> None:
            listen("looking at heads", len(layers), len(names))
            layers.append(_layer(name, matrix, v, projection.weight, prefix, grid, settings, near))

        return _Approximate(mechanism, None, None, describe)

    with torch.no_grad():
        with substituted(model, watch):
            target, states = _run(model, names, images)
        growth: list[Growth] = []
        for rank in settings.ranks[:2]:
            for exact in (False, True):
                listen("following errors", len(growth), 2 * len(settings.ranks[:2]))
                with substituted(model, _approximation(rank, near if exact else None)):
                    output, own = _run(model, names, images)
                hidden = tuple(
                    float((a - b).square().sum() / b.square().sum()) for a, b in zip(own, states, strict=True)
                )
                cosine = float(torch.cosine_similarity(output, target, dim=-1).mean())
                growth.append(Growth(rank, exact, hidden, cosine))
    return Anatomy(tuple(layers), tuple(growth), settings.window)


def _approximation(rank: int, near: _Near | None) -> Callable[[str, Attention], Attention]:
    return lambda _, mechanism: _Approximate(mechanism, rank, near)


def near_keys(tokens: int, prefix: int, grid: tuple[int, int], window: int) -> Tensor:
    """Mask `(N, N)` of keys read exactly: the prefix and a window of patches; all of them for the prefix."""
    place = torch.arange(tokens - prefix)
    row, column = place // grid[1], place % grid[1]
    apart = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
    near = torch.ones(tokens, tokens, dtype=torch.bool)
    near[prefix:, prefix:] = apart <= window // 2
    return near


def plan(settings: AnatomySettings, listen: Listener, checkpoint: Weights, pictures: Images) -> list[Job]:
    """One cell."""
    task = VisionTask(checkpoint, pictures, settings)
    about_learning = (field.name for field in dataclasses.fields(ProtocolSettings))  # nothing is learned here

    def make(cells: Cells) -> None:
        cells.begin(_CELL)
        cells.finish(_CELL, look(task, settings, listen), {"images": settings.images})

    return [Job({_CELL: Origin(described(settings, *about_learning), task.sources())}, make)]


def _tables(records: list[Record]) -> list[Table]:
    """Layer by layer, and all layers at once."""
    seen: Anatomy = records[0].cell
    ranks = list(seen.layers[0].error)
    columns = ("layer", "itself", "beside it", "special\ntokens", "tallest\ncolumn", *(f"rank {r}" for r in ranks),
               *(f"rest,\nrank {r}" for r in ranks))  # fmt: skip
    rows = []
    for number, layer in enumerate(seen.layers):
        measured = ("itself", "beside", "special")
        mean = [sum(getattr(head, what) for head in layer.heads) / len(layer.heads) for what in measured]
        tallest = max(head.column for head in layer.heads)
        errors = [*layer.error.values(), *layer.error_of_rest.values()]
        rows.append((str(number), *(f"{x:.2f}" for x in mean), f"{tallest:.0f}", *(f"{x:.3f}" for x in errors)))
    first = Table(
        "Mean weights of the heads, the tallest column sum of a head, and the relative output error of the best "
        "matrices of rank r, for whole matrices and for the rest beside special tokens and "
        f"{seen.window} × {seen.window} patches",
        columns,
        tuple(rows),
    )
    grown = tuple(
        (f"rank {g.rank}{', near keys exact' if g.near else ''}", f"{g.hidden[-1]:.3f}", f"{g.cosine:.4f}")
        for g in seen.growth
    )
    columns = ("", "error of the hidden states before the last layer", "embedding cosine")
    return [first, Table("All layers at once", columns, grown)]


def _notes(records: list[Record]) -> list[str]:
    source = records[0].provenance
    return [f"{source.budget['images']} images; {source.where()}."]


def _run(model: nn.Module, names: Sequence[str], images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The embedding, and what each attention layer received."""
    received: list[Tensor] = []
    hooks = [model.get_submodule(n).register_forward_pre_hook(lambda _, args: received.append(args[0])) for n in names]
    try:
        return model(images), received
    finally:
        for hook in hooks:
            hook.remove()


def _layer(
    name: str,
    matrix: Tensor,
    v: Tensor,
    weight: Tensor,
    prefix: int,
    grid: tuple[int, int] | None,
    settings: AnatomySettings,
    near: _Near,
) -> Layer:
    shape = square_grid(matrix.shape[-1] - prefix, grid)
    patches = matrix[:, :, prefix:, prefix:]
    place = torch.arange(patches.shape[-1])
    points = torch.stack([place // shape[1], place % shape[1]], -1).float()
    apart = torch.cdist(points, points)
    itself = patches.diagonal(dim1=-2, dim2=-1).mean((0, 2))
    within = (patches * near_keys(matrix.shape[-1], prefix, shape, 3)[prefix:, prefix:]).sum(-1).mean((0, 2))
    special = matrix[:, :, prefix:, :prefix].sum(-1).mean((0, 2))
    distance = ((patches * apart).sum(-1) / patches.sum(-1)).mean((0, 2))
    column = matrix.sum(2).amax(-1).mean(0)
    measures = zip(*(x.tolist() for x in (itself, within - itself, special, distance, column)), strict=True)
    exact = near(matrix.shape[-1], grid)

    def error(rank: int, near: Tensor | None) -> float:
        wrong, right = (
            (m @ v).transpose(1, 2).flatten(2) @ weight.mT for m in (_truncated(matrix, rank, near), matrix)
        )
        return float((wrong - right).square().sum() / right.square().sum())

    return Layer(
        name,
        tuple(Head(*values) for values in measures),
        {str(rank): error(rank, None) for rank in settings.ranks},
        {str(rank): error(rank, exact) for rank in settings.ranks},
    )


def _truncated(matrix: Tensor, rank: int, near: Tensor | None) -> Tensor:
    """The best approximation of rank r, of everything or of what is not near."""
    kept = torch.zeros_like(matrix) if near is None else matrix * near
    u, s, vh = torch.linalg.svd(matrix - kept)
    return kept + (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]


def _draw(records: list[Record], folder: Path) -> list[Path]:
    seen: Anatomy = records[0].cell
    plt = figures.pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(17, 3.8), layout="constrained")
    depth = range(len(seen.layers))
    for axis, title, value in (
        (axes[0], "weight on a patch itself and the 8 around", lambda head: head.itself + head.beside),
        (axes[1], "weight on special tokens", lambda head: head.special),
    ):
        grid = [sorted((value(head) for head in layer.heads), reverse=True) for layer in seen.layers]
        shown = axis.imshow(list(map(list, zip(*grid, strict=True))), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set(title=title, xlabel="layer", ylabel="heads, sorted", xticks=list(depth), yticks=[])
        figure.colorbar(shown, ax=axis)
    ranks = [rank for rank in seen.layers[0].error if int(rank) <= 64]
    for colour, label, what in (("C3", "rank", "error"), ("C0", "near keys exact, rest rank", "error_of_rest")):
        for shade, rank in zip((0.35, 0.65, 1.0), ranks, strict=False):
            errors = [getattr(layer, what)[rank] for layer in seen.layers]
            axes[2].plot(depth, errors, "o-", ms=3, c=colour, alpha=shade, label=f"{label} {rank}")
    axes[2].set(title="best output error of a layer", xlabel="layer", xticks=list(depth), ylim=(0, None))
    axes[2].legend(fontsize=7)
    for growth in sorted(seen.growth, key=lambda growth: growth.near):
        label = f"{'near keys exact, rest ' if growth.near else ''}rank {growth.rank}: cosine {growth.cosine:.3f}"
        shade = 1.0 if growth.rank == seen.growth[-1].rank else 0.5
        axes[3].plot(depth, growth.hidden, "o-", ms=3, c="C0" if growth.near else "C3", alpha=shade, label=label)
    tallest = max(value for growth in seen.growth for value in growth.hidden)
    axes[3].set(title="error that reaches a layer", xlabel="layer", xticks=list(depth), ylim=(0, 1.45 * tallest))
    axes[3].legend(fontsize=7, loc="upper left")
    return figures.save(figure, folder / "figure")


EXPERIMENT = Experiment(
    name="conversion-anatomy",
    about="What the heads of a vision transformer do, and what a matrix of low rank makes of it, layer by layer.",
    settings=AnatomySettings,
    cell=Anatomy,
    plan=plan,
    tables=_tables,
    notes=_notes,
    draw=_draw,
)
