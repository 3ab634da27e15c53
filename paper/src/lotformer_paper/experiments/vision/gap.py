"""The gap of the paper's proposition, LrOT ≤ LOT, on trained heads.

LOT couples queries and keys by way of pivots that do not see them; low-rank optimal transport (LrOT) looks for the best
coupling of the same rank for these very queries and keys. Both have the cost `C = −q kᵀ D^-1/2` and uniform masses:

    objective(Γ) = ⟨C, Γ⟩ − ε H(Γ),   H(Γ) = −Σ Γ log Γ

LrOT is solved by mirror descent, which ends in a local minimum and regularises the factors in place of Γ: what it
finds bounds the true value from above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from lotformer.attention.lot import LOT
from lotformer.attention.lowrank_ot import LowRankOT
from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.data.vision.sources import open_images
from lotformer.data.vision.transforms import evaluation_transform
from lotformer.settings import Settings, setting
from lotformer.vision.build import load_trained
from lotformer.vision.evaluation import Transformed
from lotformer.vision.task import normalisation

from ...results.cells import Origin, Record
from ...results.report import largest
from ...results.sources import files_source
from ..engine import Cells, Experiment, Job, alike, described
from .ablation import Images, images_folder, images_source


@dataclass(frozen=True)
class GapSettings(Settings):
    """On what it is measured, and how long low-rank transport may descend."""

    images: int = setting(8, "Validation images, spread over the set.", at_least=1)
    outer_steps: int = setting(100, "Steps of mirror descent.", at_least=1)
    inner_steps: int = setting(50, "Projections in each of them.", at_least=1)


@dataclass(frozen=True)
class Layer:
    """One layer, mean over its heads and the images.

    Attributes:
        independent, lot, lowrank, lowest: ⟨C, Γ⟩ of the product of the masses, of LOT, of LrOT at the ε of LOT, and of
            LrOT at ε = 0.
        lot_objective, lowrank_objective: the same less ε H(Γ), of LOT and of LrOT at its ε.
        holds, holds_at_zero: shares of heads and images in which LrOT is not above LOT: the objectives at the ε of LOT,
            and the costs alone, of LrOT at ε = 0.
        lot_residual, lowrank_residual: worst relative deviation of a column sum.
    """

    name: str
    rank: int
    eps: float
    independent: float
    lot: float
    lowrank: float
    lowest: float
    lot_objective: float
    lowrank_objective: float
    holds: float
    holds_at_zero: float
    lot_residual: float
    lowrank_residual: float


@dataclass(frozen=True)
class Cell:
    """One trained model."""

    model: str
    images: int
    layers: tuple[Layer, ...]


Trained = Annotated[Path, typer.Option(help="The best.pt of a vision model with LOT attention.")]


def plan(settings: GapSettings, listen: Listener, checkpoint: Trained, data: Images = None) -> Iterator[Job]:
    """A job for the checkpoint."""
    if not checkpoint.is_file():
        raise FileNotFoundError(f"there is no checkpoint {checkpoint}: expected the best.pt of a vision run.")
    folder, name = images_folder(data), checkpoint.parent.name
    sources = {"weights": files_source(name, [checkpoint]), "images": images_source(folder)}

    def make(cells: Cells) -> None:
        trained = load_trained(checkpoint)
        told = trained.settings
        shown = Transformed(
            open_images("", folder, told.val_split), evaluation_transform(told.size, told.crop, **normalisation(told))
        )
        count = min(settings.images, len(shown))
        pixels = torch.stack([shown[i * len(shown) // count][0] for i in range(count)])
        found = layers(trained.model, pixels, settings, lambda now, total: listen(name, now, total))
        cells.finish(name, Cell(name, count, tuple(found)))

    yield Job({name: Origin(described(settings), sources)}, make)


@torch.no_grad()
def layers(
    model: nn.Module, pixels: Tensor, settings: GapSettings, listen: Any = lambda now, total: None
) -> list[Layer]:
    """What every LOT layer of a model does on these images, beside low-rank transport.

    Raises:
        ValueError: there is none, or one couples other than all tokens after the prefix with uniform masses.
    """
    mechanisms = {name: module for name, module in model.named_modules() if isinstance(module, LOT)}
    if not mechanisms:
        raise ValueError(f"{type(model).__name__} holds no LOT attention: give the best.pt of a model that does.")
    for name, lot in mechanisms.items():
        c = lot.config
        if c.balance != "both" or c.window is not None or c.key_masses != "uniform":
            raise ValueError(f"{name} must couple all tokens with uniform masses, as low-rank transport does.")
    calls: dict[str, tuple[Any, dict[str, Any]]] = {}

    def note(name: str) -> Any:
        return lambda module, args, words: calls.update({name: (args, words)})

    hooks = [lot.register_forward_pre_hook(note(name), with_kwargs=True) for name, lot in mechanisms.items()]
    model.eval()(pixels)
    for hook in hooks:
        hook.remove()
    made = []
    for done, (name, (args, words)) in enumerate(calls.items()):
        listen(done, len(calls))
        q, k = args[:2]
        made.append(_layer(name, mechanisms[name], q, k, words.get("grid"), settings))
    return made


def _layer(name: str, lot: LOT, q: Tensor, k: Tensor, grid: Any, settings: GapSettings) -> Layer:
    coupling = lot.coupling(q, k, grid=grid)
    q, k = (x[:, :, lot.prefix_tokens :].double() for x in (q, k))
    eps, n = float(torch.as_tensor(lot.eps).mean()), q.shape[2]
    cost = -(q @ k.mT) * lot.head_dim**-0.5
    plan = coupling.dense().double() / n
    rank = min(coupling.query_plan.shape[3], n)
    words = {"rank": rank, "outer_steps": settings.outer_steps, "inner_steps": settings.inner_steps}
    solved, lowest = (_lowrank(lot, q, k, eps=e, **words) for e in (eps, 0.0))
    ours, theirs = (_transport(cost, one) - eps * _entropy(one) for one in (plan, solved))
    linear, least = _transport(cost, plan), _transport(cost, lowest)
    return Layer(
        name=name,
        rank=rank,
        eps=eps,
        independent=float(cost.mean()),
        lot=float(linear.mean()),
        lowrank=float(_transport(cost, solved).mean()),
        lowest=float(least.mean()),
        lot_objective=float(ours.mean()),
        lowrank_objective=float(theirs.mean()),
        holds=float((theirs <= ours).double().mean()),
        holds_at_zero=float((least <= linear).double().mean()),
        lot_residual=_residual(plan),
        lowrank_residual=_residual(solved),
    )


def _lowrank(lot: LOT, q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """The plan `(B, H, N, N)` of low-rank transport; its entries sum to one."""
    query_plan, key_plan = LowRankOT(lot.head_dim, lot.num_heads, **options).factors(q, k)
    return query_plan @ key_plan.mT / q.shape[2]


def _transport(cost: Tensor, plan: Tensor) -> Tensor:
    return (cost * plan).sum((-2, -1))


def _entropy(plan: Tensor) -> Tensor:
    return torch.special.entr(plan).sum((-2, -1))


def _residual(plan: Tensor) -> float:
    return float((plan.sum(-2) * plan.shape[-1] - 1).abs().max())


def _tables(records: list[Record]) -> list[Table]:
    columns = (
        "layer", "r", "ε", "independent", "LOT", "LrOT", "LrOT,\nε = 0", "LOT\nreaches", "LOT,\nobjective",
        "LrOT,\nobjective", "LrOT ≤ LOT", "at ε = 0", "residual\nLOT", "residual\nLrOT",
    )  # fmt: skip
    return [
        Table(
            f"⟨C, Γ⟩ on {record.cell.images} images: {record.cell.model}",
            columns,
            tuple(
                (
                    layer.name,
                    str(layer.rank),
                    f"{layer.eps:g}",
                    *(f"{x:.3f}" for x in (layer.independent, layer.lot, layer.lowrank, layer.lowest)),
                    _reached(layer),
                    *(f"{x:.4f}" for x in (layer.lot_objective, layer.lowrank_objective)),
                    f"{100 * layer.holds:.0f} %",
                    f"{100 * layer.holds_at_zero:.0f} %",
                    largest([layer.lot_residual]),
                    largest([layer.lowrank_residual]),
                )
                for layer in record.cell.layers
            ),
        )
        for record in records
    ]


def _reached(layer: Layer) -> str:
    """Of the way from the product of the masses to the lowest cost that was found."""
    whole = layer.independent - layer.lowest
    share = (layer.independent - layer.lot) / whole if whole > 0 else math.nan
    return f"{100 * share:.0f} %" if math.isfinite(share) else "–"


def _notes(records: list[Record]) -> list[str]:
    s = records[0].origin.settings
    return [
        "C = −q kᵀ D^-1/2, lower is better; means over heads and images, patches only, uniform masses. LrOT is "
        f"low-rank transport at the rank of LOT: {s['outer_steps']} steps of mirror descent with {s['inner_steps']} "
        "projections each, at the ε of LOT and at 0. It finds a local minimum, with the entropy of its factors for "
        "that of Γ.",
        "LOT reaches: the part of the way from the product of the masses to LrOT at ε = 0. Objective: less ε "
        "times the entropy of Γ. LrOT ≤ LOT: the share of heads and images in the order of the proposition, "
        "objectives at the ε of LOT and costs at ε = 0. The plan of LOT is among those that LrOT chooses "
        "from, so that less than 100 % tells of the descent and its other entropy, and refutes nothing; but "
        "where the residual of LOT is large, its plan is no coupling.",
        *alike(records, lambda record: f"{record.provenance.where()}."),
    ]


EXPERIMENT = Experiment(
    name="transport-gap",
    about="How far the couplings of trained LOT heads are from low-rank optimal transport: LrOT ≤ LOT.",
    settings=GapSettings,
    cell=Cell,
    plan=plan,
    tables=_tables,
    notes=_notes,
    extras=("train",),
)
