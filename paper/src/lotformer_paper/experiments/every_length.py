"""Conversions that experiments measure."""

from __future__ import annotations

from typing import Any

from torch import nn

from lotformer import conversion


def convert_at_every_length(model: nn.Module, mechanism: str, **options: Any) -> conversion.ConversionReport:
    """`lotformer.convert`, with the mechanism at every length.

    What an experiment measures is the mechanism, not the softmax that short inputs get otherwise, up to a length that
    depends on the machine.
    """
    every_length: dict[str, Any] = {"softmax_up_to": 0} if mechanism == "lot" else {}
    return conversion.convert(model, mechanism, **every_length, **options)
