"""The paper's Figure 1: two clouds of points, a pivot measure between them, and the couplings it mediates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lotformer.ops import Coupling, coupling
from lotformer.ops.problem import Solver

from ..results import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKS = (2, 3, 4, 5, 10)
SHARP, SMOOTH = 0.01, 1.0
REACH = 1.6  # half the width of the drawn square
QUERY_COLOUR, KEY_COLOUR, PIVOT_COLOUR = "#c8362f", "#2f8f4e", "#1c1c1c"


@dataclass(frozen=True)
class CouplingRow:
    """The numbers of one panel of the figure."""

    eps: float
    rank: int
    transport_cost: float
    residual: float
    sinkhorn_residual: float  # of the paper's five sweeps on the same points


@dataclass(frozen=True)
class Scene:
    """Queries and keys `(n, 2)`, the learned pivots of each rank, and the exact coupling of each panel."""

    queries: Tensor
    keys: Tensor
    pivots: dict[int, Tensor]
    couplings: dict[tuple[float, int], Coupling]
    rows: list[CouplingRow]


def make_scene(points: int = 24, steps: int = 60, seed: int = 0) -> Scene:
    """Draw the clouds, learn pivots that keep the glued transport cheap, and couple exactly through them."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.rand(points, generator=generator, dtype=torch.float64) * torch.pi
    noise = 0.12 * torch.randn(2, points, 2, generator=generator, dtype=torch.float64)
    arc = torch.stack([angles.cos(), angles.sin()], -1)
    queries = arc + noise[0] + torch.tensor([-0.6, 0.2])
    keys = -arc + noise[1] + torch.tensor([0.6, -0.2])
    scene = Scene(queries, keys, {}, {}, [])
    for rank in RANKS:
        pivots = _learn_pivots(queries, keys, rank, steps, generator)
        scene.pivots[rank] = pivots
        for eps in (SHARP, SMOOTH):
            plan = _couple(queries, keys, pivots, eps)
            sweeps = _couple(queries, keys, pivots, eps, "sinkhorn")
            scene.couplings[eps, rank] = plan
            scene.rows.append(
                CouplingRow(
                    eps,
                    rank,
                    _cost(plan, queries, keys).item(),
                    plan.residual().max().item(),
                    sweeps.residual().max().item(),
                )
            )
    return scene


def _couple(queries: Tensor, keys: Tensor, pivots: Tensor, eps: float, solver: Solver = "newton") -> Coupling:
    log_masses = torch.zeros(1, pivots.shape[0], dtype=pivots.dtype).log_softmax(-1)
    return coupling(queries[None, None], keys[None, None], pivots[None], log_masses, eps=eps, scale=1.0, solver=solver)


def _cost(plan: Coupling, queries: Tensor, keys: Tensor) -> Tensor:
    return (plan.dense()[0, 0] * torch.cdist(queries, keys).square()).sum() / len(queries)


def _learn_pivots(queries: Tensor, keys: Tensor, rank: int, steps: int, generator: torch.Generator) -> Tensor:
    everything = torch.cat([queries, keys])
    start = everything[torch.randperm(len(everything), generator=generator)[:rank]]
    pivots = (0.5 * start).requires_grad_()
    optimizer = torch.optim.Adam([pivots], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        _cost(_couple(queries, keys, pivots, eps=0.1), queries, keys).backward()
        optimizer.step()
        with torch.no_grad():
            pivots.clamp_(-REACH, REACH)  # keeps the picture in its frame
    return pivots.detach()


def draw(scene: Scene, folder: Path) -> list[Path]:
    """Render the scene as `coupling.png` and `coupling.svg` in `folder`."""
    plt = figures.pyplot()
    figure = plt.figure(figsize=(18, 4.2), layout="constrained")
    left, *blocks = figure.subfigures(1, 3, width_ratios=[0.95, 2.5, 2.5], wspace=0.02, squeeze=False)[0]
    top, bottom = left.subplots(2, 1)
    _draw_points(top, scene, 5)
    top.set_title("(a) queries, keys and pivots", fontsize=12)
    _draw_mediated(bottom, scene, SHARP, 5)
    bottom.set_title("(b) two plans through the pivots", fontsize=12)
    for block, eps, label in zip(blocks, (SHARP, SMOOTH), ("(c) sharp", "(d) smooth"), strict=True):
        axes = block.subplots(2, len(RANKS))
        for column, rank in enumerate(RANKS):
            _draw_mediated(axes[0, column], scene, eps, rank)
            _draw_glued(axes[1, column], scene, eps, rank)
            axes[0, column].set_title(f"r = {rank}", fontsize=11)
        axes[0, 0].set_ylabel("through the pivots", fontsize=10)
        axes[1, 0].set_ylabel("glued: query to key", fontsize=10)
        block.suptitle(f"{label}, ε = {eps:g}", fontsize=12)
    handles, labels = left.axes[0].get_legend_handles_labels()
    left.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=10)

    return figures.save(figure, folder / "coupling", dpi=130)


def _draw_points(ax: Axes, scene: Scene, rank: int) -> None:
    for points, colour, marker, size, label in (
        (scene.queries, QUERY_COLOUR, "o", 14, "queries"),
        (scene.keys, KEY_COLOUR, "s", 13, "keys"),
        (scene.pivots[rank], PIVOT_COLOUR, "^", 34, "pivots"),
    ):
        x, y = points.T
        ax.scatter(x, y, c=colour, marker=marker, s=size, label=label, zorder=3, linewidths=0)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set(aspect="equal", xlim=(-REACH - 0.1, REACH + 0.1), ylim=(-REACH - 0.1, REACH + 0.1))
    for spine in ax.spines.values():
        spine.set_color("#d9d9d9")


def _draw_mediated(ax: Axes, scene: Scene, eps: float, rank: int) -> None:
    plan = scene.couplings[eps, rank]
    pivots = scene.pivots[rank]
    _draw_edges(ax, scene.queries, pivots, plan.query_clusters()[0, 0], QUERY_COLOUR)
    _draw_edges(ax, scene.keys, pivots, plan.key_clusters()[0, 0], KEY_COLOUR)
    _draw_points(ax, scene, rank)


def _draw_glued(ax: Axes, scene: Scene, eps: float, rank: int) -> None:
    _draw_edges(ax, scene.queries, scene.keys, scene.couplings[eps, rank].dense()[0, 0], "#4a6fa5")
    _draw_points(ax, scene, rank)


def _draw_edges(ax: Axes, starts: Tensor, ends: Tensor, mass: Tensor, colour: str) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    share = mass / mass.sum(-1, keepdim=True)  # of what the starting point sends
    segments = torch.stack([starts[:, None].expand(-1, len(ends), -1), ends.expand(len(starts), -1, -1)], -2)
    visible = share > 0.01
    colours = [(*to_rgb(colour), alpha) for alpha in (0.75 * share[visible]).clamp(0.03, 0.75).tolist()]
    ax.add_collection(LineCollection(list(segments[visible].numpy()), colors=colours, linewidths=0.9, zorder=1))
