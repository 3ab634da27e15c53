"""Extras by package: a missing optional dependency is an error that says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = {
    "figures": ("matplotlib",),
    "vision": ("timm",),
    "text": ("transformers", "tokenizers", "safetensors", "torchmetrics", "scipy", "sacrebleu", "sentencepiece"),
    "audio": ("soundfile",),
    "train": ("accelerate", "timm", "tensorboard"),
    "gpu": ("triton",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}
"""The extras of pyproject.toml by the names that their packages are imported by."""

_BROUGHT_BY = {name: extra for extra, names in reversed(PACKAGES.items()) for name in names} | {"PIL": "vision"}


def command(*extras: str) -> str:
    """The command that installs these extras."""
    return f"pip install 'lotformer[{','.join(extras)}]'"


def reason(error: ModuleNotFoundError, *extras: str) -> str:
    """An error message with the command to type: for these extras, or for the one that brings the package."""
    package = (error.name or "").partition(".")[0]
    if package not in _BROUGHT_BY:
        return str(error)
    return f"{package} is not installed: {command(*(extras or (_BROUGHT_BY[package],)))}."


@contextmanager
def needed_for(what: str, *extras: str) -> Iterator[None]:
    """Around imports: an error about a package of an extra says what needs it and how to get it.

    Raises:
        ModuleNotFoundError: it is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{what}: {reason(error, *extras)}", name=error.name) from error
