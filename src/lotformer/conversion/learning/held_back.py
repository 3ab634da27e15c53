"""Splits batches into those to learn from and those to measure on, and checks that a model can learn."""

from __future__ import annotations

from torch import nn


def apart(count: int, holdout: float) -> tuple[list[int], list[int]]:
    """Indices of the batches to learn from and of those to measure on: none if there are too few to hold any back."""
    held = min(round(holdout * count), count - 1) if count >= 5 else 0
    chosen = {int((i + 0.5) * count / held) for i in range(held)}  # evenly spaced: batches often come sorted by length
    return [i for i in range(count) if i not in chosen], sorted(chosen)


def require_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{name} is a share: expected a number from 0 to 1, got {share}.")


def require_learning(model: nn.Module) -> None:
    """Refuse parameters that cannot have gradients, whatever the mode is now."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError("the model was made in inference mode, so it cannot learn: make it outside of that.")
