"""Checksums of all tensors in a safetensors file, in its metadata: damage is named, not loaded.

They stand beside the tensors rather than in a config, so that whoever writes the tensors anew, without knowing of
checksums, drops these too. Files without any, of earlier versions or of other programs, are not judged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor

from ..training.fingerprints import checksums, damaged

_KEY = "lotformer.checksums"


def sealed(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> dict[str, str]:
    """The metadata of a file of these tensors, with their checksums."""
    return {**(metadata or {}), _KEY: json.dumps(checksums(tensors), separators=(",", ":"))}


def require_undamaged(
    path: str | Path, metadata: Mapping[str, str], names: Collection[str], tensor: Callable[[str], Tensor]
) -> None:
    """Compare what a file holds with its checksums, one tensor at a time, as it is in the file.

    Raises:
        ValueError: with the names of file and tensor.
    """
    if _KEY not in metadata:
        return
    try:
        stored = json.loads(metadata[_KEY])
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict):
        raise ValueError(f"{path} is damaged: its checksums cannot be read. {_ADVICE}")
    for name in names:
        if name not in stored:
            raise ValueError(f"{path} is damaged: it has no checksum of its tensor {name}. {_ADVICE}")
        if damaged({name: tensor(name)}, stored):
            raise ValueError(f"{path} is damaged: its tensor {name} is not what was saved. {_ADVICE}")


_ADVICE = "Copy or download it again, or convert the original once more."
