"""The methods that Table 4 compares, and how long and how fast they learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lotformer.conversion.learning.objectives import Objective
from lotformer.settings import Settings, setting

from .forms import AWARE, NEAR, TRANSPORT, WIDE


@dataclass(frozen=True)
class Method:
    """A column of the table: a mechanism and how its new parameters are taught before fine-tuning.

    `objective` None skips calibration; `mechanism_lr` is the rate of the new parameters during fine-tuning.
    """

    mechanism: str
    objective: Objective | None
    options: dict[str, Any] = field(default_factory=dict)
    calibration_lr: float = 2e-2
    mechanism_lr: float = 5e-3


METHODS: dict[str, Method] = {
    "t2r": Method("t2r", None, mechanism_lr=1e-3),
    "t2r-hh": Method("t2r", "attention", calibration_lr=1e-2, mechanism_lr=1e-3),
    "hedgehog": Method("hedgehog", "attention", calibration_lr=1e-2, mechanism_lr=1e-3),
    "lot": Method("lot", "output", TRANSPORT),
    "lot-uniform": Method("lot", "output", {**TRANSPORT, "key_masses": "uniform"}),
    "lot-keys": Method("lot", "output", {**TRANSPORT, "balance": "keys"}),
    "lot-none": Method("lot", "output", {**TRANSPORT, "balance": "none"}),
    "lot-aware": Method("lot", "output", AWARE),
    "lot-aware-uniform": Method("lot", "output", {**AWARE, "key_masses": "uniform"}),
    "lot-aware-keys": Method("lot", "output", {**AWARE, "balance": "keys"}),
    "lot-aware-none": Method("lot", "output", {**AWARE, "balance": "none"}),
    "lot-near": Method("lot", "output", NEAR, mechanism_lr=1e-3),
    "lot-near-keys": Method("lot", "output", {**NEAR, "balance": "keys"}, mechanism_lr=1e-3),
    "lot-near-none": Method("lot", "output", {**NEAR, "balance": "none"}, mechanism_lr=1e-3),
    "lot-near-fixed": Method("lot", "output", {**NEAR, "pivots": "fixed"}, mechanism_lr=1e-3),
    "lot-wide": Method("lot", "output", WIDE, mechanism_lr=1e-3),
    "lot-33": Method("lot", "output", {**WIDE, "window_size": 33}, mechanism_lr=1e-3),
}
"""T2R learns its feature maps by fine-tuning alone; T2R-HH and Hedgehog first match attention matrices row by row.
`lot` is transport alone; in `lot-aware` and its variants pivots see the input; `lot-near` and its variants read the
five nearest tokens by softmax too and start so close to the original that higher rates throw them back. `lot-33`
reads 33, and `lot-wide` reads 129, as `convert` does by itself."""


@dataclass(frozen=True)
class GlueSettings(Settings):
    """Budgets and rates; epochs are capped at `max_steps` steps (softmax) and `max_swap_steps` (converted)."""

    epochs: float = setting(3.0, "Epochs of the softmax model.", at_least=0)
    max_steps: int = setting(100_000, "Most steps for the softmax model.", at_least=0)
    lr: float = setting(5e-5, "Learning rate of the softmax model.", at_least=0)
    recipe: Literal["ours", "paper"] = setting(
        "ours",
        "How converted models learn. The paper's appendix: the attention is distilled at a rate of 0.01 for up to five "
        "epochs with early stopping, then all weights see labels for up to five epochs, batch 8, a rate of 1e-5.",
    )
    imitation_steps: int = setting(1000, "Steps of imitating the softmax model after the swap.", at_least=0)
    imitation_lr: float = setting(1e-4, "Learning rate of the original weights during that.", at_least=0)
    swap_epochs: float = setting(1.0, "Epochs with labels after the imitation.", at_least=0)
    max_swap_steps: int = setting(100_000, "Most steps with labels after the swap.", at_least=0)
    swap_lr: float = setting(2e-5, "Learning rate of the original weights with labels.", at_least=0)
    batch_size: int = setting(32, "Examples per step.", at_least=1)
    precision: Literal["fp32", "bf16"] = setting("fp32", "Of products while all weights learn.")
    max_length: int = setting(128, "Longer texts are cut to this many tokens.", at_least=8)
    calibration_steps: int = setting(250, "Steps of calibration, at most.", at_least=0)
    calibration_texts: int = setting(2560, "Examples to calibrate on.", at_least=1)
    seed: int = setting(0, "Random seed.")

    def calibration(self, batches: int) -> int:
        """Steps, of an epoch of so many batches."""
        return min(self.calibration_steps, PAPER_EPOCHS * batches) if self.recipe == "paper" else self.calibration_steps

    def taught(self, method: Method) -> Method:
        """The method with the rates of the recipe."""
        if self.recipe == "ours":
            return method
        return replace(method, calibration_lr=PAPER_CALIBRATION_LR, mechanism_lr=self.swap_lr)


PAPER_EPOCHS, PAPER_CALIBRATION_LR = 5, 1e-2
_PAPER: dict[str, Any] = {
    "batch_size": 8,
    "imitation_steps": 0,
    "swap_epochs": float(PAPER_EPOCHS),
    "swap_lr": 1e-5,
    "calibration_steps": 100_000,  # no limit but the epochs
    "calibration_texts": 10_000_000,  # all
}


def completed(chosen: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was chosen, and what the recipe says of the rest."""
    return {**_PAPER, **chosen} if chosen.get("recipe") == "paper" else chosen
