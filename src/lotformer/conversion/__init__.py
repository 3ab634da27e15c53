"""Swap the attention inside a trained model, calibrate the new parameters, fine-tune, save and load."""

from .api import convert, revert
from .calibration import CalibrationReport, calibrate
from .couplings import CouplingQuality, coupling_quality
from .finetuning import FinetuningReport, finetune
from .recipe import recipe
from .report import ConversionReport
from .saving import load, save

__all__ = [
    "CalibrationReport",
    "ConversionReport",
    "CouplingQuality",
    "FinetuningReport",
    "calibrate",
    "convert",
    "coupling_quality",
    "finetune",
    "load",
    "recipe",
    "revert",
    "save",
]
