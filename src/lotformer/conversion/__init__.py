"""Swap the attention inside a trained model, calibrate the new parameters, fine-tune, save and load."""

from ..nn.grids import token_grid
from .api import convert, revert
from .folding import FoldingReport, fold
from .hosts import Host, register_host, unregister_host
from .hosts.sites import mix, recipe
from .learning.calibration import CalibrationReport, calibrate
from .learning.finetuning import FinetuningReport, finetune
from .measuring.couplings import CouplingQuality, coupling_quality
from .measuring.report import ConversionReport
from .saving import load, save

__all__ = [
    "CalibrationReport",
    "ConversionReport",
    "CouplingQuality",
    "FinetuningReport",
    "FoldingReport",
    "Host",
    "calibrate",
    "convert",
    "coupling_quality",
    "finetune",
    "fold",
    "load",
    "mix",
    "recipe",
    "register_host",
    "revert",
    "save",
    "token_grid",
    "unregister_host",
]
