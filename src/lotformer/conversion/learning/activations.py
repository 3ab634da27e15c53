"""The teacher's activations: what every attention layer saw when it was still softmax, kept in memory or on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn

from ...attention import Attention
from ...attention.softmax import SoftmaxAttention
from ...data.batches import Batch, call
from ..hosts.sites import require_converted, substituted

OnBatch = Callable[[int, int], None]
"""Called with (batches run, batches in all)."""


@dataclass(frozen=True)
class LayerInput:
    """Queries, keys and values `(B, H, N, D)` of one layer on one batch, its key mask `(B, N)` or None, and the
    grid of its tokens where the host knows one."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    grid: tuple[int, int] | None = None


def _moved(layer_input: LayerInput, device: torch.device) -> LayerInput:
    """The same on another device, contiguous: views into larger buffers would hold more than they must."""
    mask = layer_input.mask
    q, k, v = (x.to(device).contiguous() for x in (layer_input.q, layer_input.k, layer_input.v))
    return LayerInput(q, k, v, None if mask is None else mask.to(device), layer_input.grid)


def _joined(before: LayerInput, now: LayerInput) -> LayerInput:
    """One batch out of two: a layer that a model runs several times (ALBERT) has to serve all of them."""
    q, k, v = (torch.cat(pair) for pair in ((before.q, now.q), (before.k, now.k), (before.v, now.v)))
    if before.mask is None or now.mask is None:
        return LayerInput(q, k, v, None, now.grid)  # the host passes one mask, or none, to all runs of a layer
    return LayerInput(q, k, v, torch.cat((before.mask, now.mask)), now.grid)


class _Recorder(SoftmaxAttention):
    """Softmax attention that notes what it was given."""

    def __init__(self, mechanism: Attention, name: str, seen: dict[str, LayerInput]) -> None:
        super().__init__(mechanism.head_dim, mechanism.num_heads)
        self.name = name
        self.seen = seen

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None,
                query_mask: Tensor | None = None, *, grid: tuple[int, int] | None = None) -> Tensor:  # fmt: skip
        now, before = LayerInput(q, k, v, key_mask, grid), self.seen.get(self.name)
        self.seen[self.name] = now if before is None else _joined(before, now)
        return super().forward(q, k, v, key_mask, query_mask)


class Activations:
    """What each converted layer of a model saw, batch by batch, with softmax in place of its mechanism.

    The model runs on the batches with a `wanted` index, all by default; `cache[index]` is what its layers saw there. Up
    to `memory_limit` bytes stay in the memory of the host, whatever device the model is on; further batches go to
    files in a temporary folder, which lives as long as the `with` block.

    Attributes:
        projections: for each layer the weight `(C, H·D)` of the linear map that follows attention, None if there
            is none.
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
        self.names = [name for name, _ in require_converted(model)]
        self.projections: dict[str, Tensor | None] = dict.fromkeys(self.names)
        self._kept: dict[int, dict[str, LayerInput] | Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._free = memory_limit
        self._device = torch.device("cpu")
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            indices = sorted(range(len(batches)) if wanted is None else wanted)
            for index in indices:
                self._keep(index, self._record(model, batches[index]))
                if on_batch is not None:
                    on_batch(len(self._kept), len(indices))
        except BaseException:
            self.close()
            raise
        finally:
            for module, training in modes.items():
                module.training = training

    def __getitem__(self, index: int) -> dict[str, LayerInput]:
        kept = self._kept[index]
        if isinstance(kept, Path):
            kept = {name: LayerInput(*tensors) for name, tensors in torch.load(kept, weights_only=True).items()}
        if self._device.type == "cpu":
            return kept
        return {name: _moved(layer_input, self._device) for name, layer_input in kept.items()}

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
    def _record(self, model: nn.Module, batch: Batch) -> dict[str, LayerInput]:
        seen: dict[str, LayerInput] = {}
        hooks = [] if self._kept else self._watch_projections(model, seen)
        try:
            with substituted(model, lambda name, mechanism: _Recorder(mechanism, name, seen)):
                call(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        missing = [name for name in self.names if name not in seen]
        if missing:
            raise ValueError(f"the model ran a batch without using {missing[0]!r}: check the inputs.")
        return seen

    def _watch_projections(
        self, model: nn.Module, seen: dict[str, LayerInput]
    ) -> list[torch.utils.hooks.RemovableHandle]:
        """The output projection of a layer is the first linear map that runs after its attention."""

        def note(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if seen and isinstance(linear, nn.Linear):
                last = next(reversed(seen))
                width = seen[last].v.shape[1] * seen[last].v.shape[3]
                if self.projections[last] is None and inputs[0].shape[-1] == width and last not in watched:
                    self.projections[last] = linear.weight.detach()
                watched.add(last)

        watched: set[str] = set()
        return [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, nn.Linear)]

    def _keep(self, index: int, seen: dict[str, LayerInput]) -> None:
        self._device = next(iter(seen.values())).q.device
        seen = {name: _moved(layer_input, torch.device("cpu")) for name, layer_input in seen.items()}
        size = sum(x.nbytes for i in seen.values() for x in (i.q, i.k, i.v))
        if size <= self._free:
            self._free -= size
            self._kept[index] = seen
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lotformer-activations-")
        path = Path(self._folder.name) / f"{index:06d}.pt"
        torch.save({name: (i.q, i.k, i.v, i.mask, i.grid) for name, i in seen.items()}, path)
        self._kept[index] = path
