"""The identity of a run of calibration or fine-tuning: its checkpoint carries it and refuses any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...training.fingerprints import fingerprint, shapes
from ..hosts.sites import converted, record_of


def _what_is_learned(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without the length up to which softmax takes over, which is measured anew in every run."""
    return {name: value for name, value in sorted(options.items()) if name != "softmax_up_to"}


def identity(
    kind: str,
    model: nn.Module,
    settings: Mapping[str, Any],
    trained: Mapping[str, Tensor],
    data: str,
    *,
    host: bool = False,
) -> dict[str, Any]:
    """Kind of run, settings, mechanisms, trained tensors (named as in the model's state dict) and data; with `host`,
    the host's weights too.

    The host's weights say which model this is as long as they do not change, that is, in calibration.
    """
    layers = {name: record_of(module) for name, module in converted(model)}
    described: dict[str, Any] = {
        "kind": kind,
        "model": type(model).__name__,
        "settings": dict(settings),
        "mechanisms": {
            # sorted: a recipe that was read from a file may name its options in another order
            name: f"{r.recipe.mechanism} {_what_is_learned(r.recipe.options_for(r.tokens))}"
            for name, r in layers.items()
            if r is not None
        },
        "parameters": shapes(trained),
        "data": data,
    }
    if host:
        described["weights"] = fingerprint({n: v for n, v in model.state_dict().items() if n not in trained})
    return described
