"""Forecast of a calibrated model: errors of single layers compound, and outputs tell how far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...attention import Attention
from ...attention.softmax import SoftmaxAttention
from ...data.batches import Batch, main_tensor, pooled, real_tokens
from ..calling import call
from ..hosts.sites import record_of, require_converted, substituted, transporting

READY = 0.98
"""The mean cosine with the original's outputs from which on a converted model can be used as it is."""

HOPELESS = 0.8
"""Below it a short fine-tuning does not bring the model back."""


@dataclass(frozen=True)
class Forecast:
    """The model as a whole on inputs that calibration kept back.

    Attributes:
        cosine: mean cosine between its outputs (hidden states: mean over real tokens, of sound every one) and the
            original's.
        without: the same if one layer went back to softmax, by the name of that layer; where it was looked at.
    """

    cosine: float
    without: dict[str, float]

    def stubborn(self) -> list[str]:
        """The layers whose return to softmax helps, those that help most first."""
        helps = {name: cosine for name, cosine in self.without.items() if cosine > self.cosine}
        return sorted(helps, key=helps.__getitem__, reverse=True)

    def __str__(self) -> str:
        text = f"layer errors compound to an output cosine of {self.cosine:.3f}: "
        if self.cosine >= READY:
            return text + "ready to use"
        keep = ", ".join(repr(name) for name in self.stubborn()[:3])
        kept = f" or keep softmax where it is missed most, `lotformer.revert(model, layers=[{keep}])`" if keep else ""
        if self.cosine >= HOPELESS:
            return text + f"fine-tune{kept}"
        return text + f"raise the rank, then fine-tune{kept}"


@torch.no_grad()
def outputs(model: nn.Module, batches: Sequence[Batch], softmax: frozenset[str] | None = frozenset()) -> list[Tensor]:
    """Outputs `(B, C)` in evaluation mode, with softmax in the named layers; None names all of them.

    The others transport inputs of every length. Of sound, states of all real tokens: whoever transcribes reads each.
    """
    told = _of_every_token if _hears(model) else pooled
    modes = {module: module.training for module in model.modules()}
    model.eval()

    def chosen(name: str, mechanism: Attention) -> Attention:
        kept = softmax is not None and name not in softmax
        return mechanism if kept else SoftmaxAttention(mechanism.head_dim, mechanism.num_heads)

    try:
        with transporting(model), substituted(model, chosen):
            return [told(main_tensor(call(model, batch)), batch).float() for batch in batches]
    finally:
        for module, training in modes.items():
            module.training = training


def forecast(model: nn.Module, batches: Sequence[Batch], *, layers: bool = True) -> Forecast:
    """Compare a converted model with its softmax self; with `layers`, once more for each layer, on the first batch."""
    targets = outputs(model, batches, None)
    cosine = _cosine(outputs(model, batches), targets)
    without = {}
    if layers:
        first = _cosine(outputs(model, batches[:1]), targets[:1])
        for name, _ in require_converted(model):
            # relative to the same batch: batches differ more than layers do
            gain = _cosine(outputs(model, batches[:1], frozenset({name})), targets[:1]) - first
            without[name] = cosine + gain
    return Forecast(cosine, without)


def _hears(model: nn.Module) -> bool:
    records = (record_of(module) for _, module in require_converted(model))
    return all(record is not None and record.tokens == "sound" for record in records)


def _of_every_token(hidden: Tensor, batch: Batch) -> Tensor:
    mask = real_tokens(hidden, batch)
    states = hidden.flatten(0, -2)
    return states if mask is None else states[mask.flatten().bool()]


def _cosine(ours: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    pairs = zip(ours, targets, strict=True)
    return float(torch.cat([torch.cosine_similarity(a, b, dim=-1).flatten() for a, b in pairs]).mean())
