"""`fold`: the inference form of a model with LOT attention, trained or converted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from ..attention.folded import FoldedLOT
from ..attention.lot import LOT
from ..data.batches import Batch
from ..layers import AttentionLayer
from .hosts.sites import converted, mechanism_of, record_of
from .measuring import probe as probing
from .swapping import Snapshot, fold_module, foldable_projections, tell_hosts

_ALLOWED_CHANGE = 1e-2  # of the output on a probe batch; rounding makes 1e-4 of it, a wrong formula much more


@dataclass(frozen=True)
class FoldingReport:
    """The names of the folded layers, parameters of the model before and after, and how far a probe output moved."""

    layers: tuple[str, ...]
    parameters_before: int
    parameters_after: int
    relative_change: float | None

    def __str__(self) -> str:
        moved = "" if self.relative_change is None else f"; output on a probe batch moved by {self.relative_change:.1e}"
        return (
            f"folded {len(self.layers)} attention layers: {self.parameters_before:,} parameters → "
            f"{self.parameters_after:,}{moved}"
        )


def fold(model: nn.Module, *, probe: Batch | None = None) -> FoldingReport:
    """Turn a trained or converted model into its inference form, in place; outputs stay the same to rounding.

    With fixed pivots the scores of queries and keys are linear in the input of a layer. Folding multiplies the weights
    that make queries and keys by the pivots, once: a layer then projects its input to R scores a head in place of D
    channels, twice, and the operator skips two of its four products. The model is smaller where R < D; query-aware key
    masses and the rows of a prefix read one vector per sample through the old weights, which stay then.

    `save_pretrained` and `lotformer.conversion.save` keep the form of converted models; others load a folded state
    dict after they are folded themselves. A folded model cannot be calibrated, fine-tuned, reverted or unfolded: keep
    the original. `AttentionLayer` does without queries and keys unfolded too, but has to multiply the weights by the
    pivots in every call.

    Args:
        model: its `LOTAttention` layers, and LOT in converted attention modules, are folded.
        probe: a batch to compare outputs on, before and after; made up from the model's config where possible.

    Raises:
        ValueError: a layer cannot be folded (input-aware pivots or a window, as `convert` gives them by default;
            normalised or rotated queries and keys; half precision), or there is none. The model is as it was.
    """
    layers = _foldable(model)
    inputs = probe if probe is not None else probing.sample_inputs(model)
    before = probing.output(model, inputs, made_up=probe is None)
    count = _count(model)
    whole = Snapshot(module for module, _ in layers.values())
    try:
        for _, turn in layers.values():
            turn()
        tell_hosts(model)
        change = probing.difference(before, probing.output(model, inputs, made_up=probe is None))
        if change is not None and not change.relative_change <= _ALLOWED_CHANGE:
            raise ValueError(
                f"folding would change what {type(model).__name__} computes (by {change.relative_change:.1e} on a "
                "probe batch): something stands between its projections and its scores."
            )
    except Exception:
        whole.restore()
        tell_hosts(model)
        raise
    return FoldingReport(tuple(layers), count, _count(model), None if change is None else change.relative_change)


def _foldable(model: nn.Module) -> dict[str, tuple[nn.Module, Callable[[], None]]]:
    """Every layer to fold by name, with what folds it; all are looked at before the first one is touched."""
    found: dict[str, tuple[nn.Module, Callable[[], None]]] = {}
    reasons: dict[str, str] = {}
    seen = 0
    for name, layer in model.named_modules():
        if not isinstance(layer, AttentionLayer) or not isinstance(layer.mechanism, LOT):
            continue
        seen += 1
        if isinstance(layer.mechanism, FoldedLOT):
            continue
        reason = layer.why_unfoldable()
        if reason is not None:
            reasons[name] = reason
        found[name] = (layer, layer.fold)
    for name, module in converted(model):
        record, mechanism = record_of(module), mechanism_of(module)
        assert record is not None
        if not isinstance(mechanism, LOT):
            continue
        seen += 1
        if isinstance(mechanism, FoldedLOT):
            continue
        projections = foldable_projections(record.host, module, mechanism)
        if isinstance(projections, str):
            reasons[name] = projections
        found[name] = (module, partial(fold_module, module))
    if reasons:
        name, reason = next(iter(reasons.items()))
        raise ValueError(f"{name or type(model).__name__} cannot be folded: {reason}.")
    if not found:
        raise ValueError(
            f"{type(model).__name__} is folded already."
            if seen
            else f"{type(model).__name__} holds no LOT attention: there is nothing to fold."
        )
    return found


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
