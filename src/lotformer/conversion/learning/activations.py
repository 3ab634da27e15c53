"""The teacher's activations: what every attention layer saw when it was still softmax, kept in memory or on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...attention import Attention
from ...attention.lot import LOT
from ...attention.softmax import SoftmaxAttention
from ...data.batches import Batch, require_finite
from ...training.precision import widened
from ..calling import call
from ..hosts.sites import mechanism_of, require_converted, substituted

OnBatch = Callable[[int, int], None]
"""Called with (batches run, batches in all)."""


@dataclass(frozen=True)
class Attended:
    """The inputs of one layer on one batch, and softmax's output for them.

    Attributes:
        q, k, v: `(B, H, N, D)`. mask: of the keys, `(B, N)`, or None. grid: of the tokens where the host knows one.
        target: the output of softmax after the projection that follows, `(B, N, C)` in fp32 or wider.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    target: Tensor
    mask: Tensor | None = None
    grid: tuple[int, int] | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.target

    @property
    def length(self) -> int:
        """Tokens of the longest sample, from its first real one to its last."""
        tokens = self.k.shape[2]
        if self.mask is None:
            return tokens
        first, behind = (mask.int().argmax(-1) for mask in (self.mask, self.mask.flip(-1)))
        return int(((tokens - behind - first) * self.mask.any(-1)).max())

    def is_softmax_to(self, mechanism: Attention) -> bool:
        """True if the mechanism equals softmax here: every token has all keys in its window."""
        if not isinstance(mechanism, LOT) or mechanism.config.window is None:
            return False
        tokens = (
            self.length if mechanism.config.window.kind == "1d" else self.k.shape[2]
        )  # a grid has its size, padded or not
        return mechanism.is_softmax(tokens, self.grid)


def projected(out: Tensor, projection: Tensor | None) -> Tensor:
    """The output `(B, N, C)` of attention `(B, H, N, D)`, in fp32 or wider; concatenated heads without a projection."""
    side_by_side = widened(out).transpose(1, 2).flatten(2)
    return side_by_side if projection is None else side_by_side @ widened(projection).mT


def _moved(seen: Attended, device: torch.device) -> Attended:
    """The same on another device, contiguous: views into larger buffers would hold more than they must."""
    q, k, v, target = (x.to(device).contiguous() for x in seen.tensors)
    return Attended(q, k, v, target, None if seen.mask is None else seen.mask.to(device), seen.grid)


class _Recorder(SoftmaxAttention):
    """Softmax attention that notes what it was given, and what it made of it."""

    def __init__(self, mechanism: Attention, name: str, notes: dict[str, list[_Note]]) -> None:
        super().__init__(mechanism.head_dim, mechanism.num_heads)
        self.name = name
        self.notes = notes

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None,
                query_mask: Tensor | None = None, *, grid: tuple[int, int] | None = None) -> Tensor:  # fmt: skip
        out = super().forward(q, k, v, key_mask, query_mask)
        self.notes.setdefault(self.name, []).append(_Note(q, k, v, out, key_mask, grid))
        return out


class _Note(NamedTuple):
    """One run of one layer."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    mask: Tensor | None
    grid: tuple[int, int] | None


def _attended(runs: list[_Note], projection: Tensor | None) -> Attended:
    """One batch out of all runs of a layer: one that a model runs several times (ALBERT) has to serve all of them."""
    masks = [run.mask for run in runs if run.mask is not None]
    q, k, v, out = (torch.cat(of_runs) for of_runs in zip(*(run[:4] for run in runs), strict=True))
    # the host passes one mask, or none, to all runs of a layer
    mask = torch.cat(masks) if len(masks) == len(runs) else None
    grids = {run.grid for run in runs}
    if len(grids) > 1:
        raise ValueError(f"a layer saw the grids {grids} in one batch: give images of one shape in each batch.")
    return Attended(q, k, v, projected(out, projection), mask, runs[-1].grid)


class Activations:
    """The inputs of each converted layer, batch by batch, with softmax in place of its mechanism.

    The model runs on the batches with a `wanted` index, all by default; `cache[index]` is what its layers saw there. Up
    to `memory_limit` bytes stay in the memory of the host, whatever device the model is on; further batches go to
    files in a temporary folder, which lives as long as the `with` block.

    Attributes:
        projections: for each layer the weight `(C, H·D)` of the linear map that follows attention, None if there
            is none.
        longest: tokens of the longest input.
        telling: the indices of the batches of which some layer makes something else than softmax does.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        wanted: Collection[int] | None = None,
        *,
        memory_limit: int,
        on_batch: OnBatch | None = None,
    ) -> None:
        self._mechanisms = {name: mechanism_of(module) for name, module in require_converted(model)}
        self.names = list(self._mechanisms)
        self.projections: dict[str, Tensor | None] = dict.fromkeys(self.names)
        self.longest = 0
        self.telling: list[int] = []
        self._kept: dict[int, dict[str, Attended] | Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._free = memory_limit
        self._device = torch.device("cpu")
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            indices = sorted(range(len(batches)) if wanted is None else wanted)
            for index in indices:
                self._keep(index, self._record(model, index, batches[index]))
                if on_batch is not None:
                    on_batch(len(self._kept), len(indices))
        except BaseException:
            self.close()
            raise
        finally:
            for module, training in modes.items():
                module.training = training

    def __getitem__(self, index: int) -> dict[str, Attended]:
        kept = self._kept[index]
        if isinstance(kept, Path):
            kept = {name: Attended(*parts) for name, parts in torch.load(kept, weights_only=True).items()}
        if self._device.type == "cpu":
            return kept
        return {name: _moved(seen, self._device) for name, seen in kept.items()}

    def __enter__(self) -> Activations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget everything, on disk too."""
        self._kept = {}
        if self._folder is not None:
            self._folder.cleanup()

    @torch.no_grad()
    def _record(self, model: nn.Module, index: int, batch: Batch) -> dict[str, Attended]:
        notes: dict[str, list[_Note]] = {}
        hooks = [] if self._kept else self._watch_projections(model, notes)
        try:
            with substituted(model, lambda name, mechanism: _Recorder(mechanism, name, notes)):
                call(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        missing = [name for name in self.names if name not in notes]
        if missing:
            raise ValueError(f"the model ran a batch without using {missing[0]!r}: check the inputs.")
        seen = {name: _attended(runs, self.projections[name]) for name, runs in notes.items()}
        for name, layer in seen.items():
            if not layer.target.isfinite().all():
                require_finite(batch, f"batch {index}")
                raise ValueError(
                    f"batch {index}: the inputs are finite, but what softmax attention gives in {name!r} is not: look "
                    "at the model's weights."
                )
        return seen

    def _watch_projections(
        self, model: nn.Module, notes: dict[str, list[_Note]]
    ) -> list[torch.utils.hooks.RemovableHandle]:
        """The output projection of a layer is the first linear map that runs after its attention."""

        def note(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if notes and isinstance(linear, nn.Linear):
                last = next(reversed(notes))
                value = notes[last][-1].v
                width = value.shape[1] * value.shape[3]
                if self.projections[last] is None and inputs[0].shape[-1] == width and last not in watched:
                    self.projections[last] = linear.weight.detach()
                watched.add(last)

        watched: set[str] = set()
        return [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, nn.Linear)]

    def _keep(self, index: int, seen: dict[str, Attended]) -> None:
        self._device = next(iter(seen.values())).q.device
        self.longest = max(self.longest, *(layer.length for layer in seen.values()))
        if not all(layer.is_softmax_to(self._mechanisms[name]) for name, layer in seen.items()):
            self.telling.append(index)
        seen = {name: _moved(layer, torch.device("cpu")) for name, layer in seen.items()}
        size = sum(x.nbytes for layer in seen.values() for x in layer.tensors)
        if size <= self._free:
            self._free -= size
            self._kept[index] = seen
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lotformer-activations-")
        path = Path(self._folder.name) / f"{index:06d}.pt"
        torch.save({name: (*layer.tensors, layer.mask, layer.grid) for name, layer in seen.items()}, path)
        self._kept[index] = path
