"""Fingerprints of runs: two runs with equal fingerprints see equal settings, weights and data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Fingerprint:
    """A digest of nested mappings, sequences, tensors and plain values, fed piece by piece."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, value: Any) -> Fingerprint:
        if isinstance(value, Tensor):
            self._text(f"{value.dtype}{list(value.shape)}")
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._hash.update(raw.numpy().data)
        elif isinstance(value, np.ndarray):  # large ones are abbreviated when printed
            self._text(f"{value.dtype}{list(value.shape)}")
            self._hash.update(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
        elif isinstance(value, Mapping):
            self._text(f"mapping of {len(value)}")
            for key, item in value.items():
                self._text(repr(key))
                self.add(item)
        elif isinstance(value, (list, tuple)):
            self._text(f"sequence of {len(value)}")
            for item in value:
                self.add(item)
        else:
            self._text(repr(value))
        return self

    def __str__(self) -> str:
        return self._hash.hexdigest()

    def _text(self, text: str) -> None:
        self._hash.update(text.encode() + b"\0")


def fingerprint(value: Any) -> str:
    """16 hexadecimal digits that change with anything in `value`."""
    return str(Fingerprint().add(value))


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The fingerprint of each tensor, to be stored beside it."""
    return {name: fingerprint(x) for name, x in tensors.items()}


def damaged(tensors: Mapping[str, Tensor], stored: Mapping[str, str]) -> list[str]:
    """Names of the tensors that are not what their stored checksums say; tensors without one are not judged."""
    return [name for name, x in tensors.items() if name in stored and fingerprint(x) != stored[name]]


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Dtype and shape of each tensor, e.g. `float32[6, 8]`."""
    return {name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in tensors.items()}


def differences(here: Mapping[str, Any], there: Mapping[str, Any], most: int = 4) -> str:
    """Describe the differences of two nested descriptions; empty if they are equal."""
    mine, theirs = _flat(here), _flat(there)
    missing = "absent"
    told = [
        f"{name} is {mine.get(name, missing)} here and {theirs.get(name, missing)} there"
        for name in dict.fromkeys((*mine, *theirs))
        if mine.get(name, missing) != theirs.get(name, missing)
    ]
    rest = [f"and {len(told) - most} more"] if len(told) > most else []
    return ", ".join(told[:most] + rest)


def _flat(description: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in description.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
