"""Checkpoints of a run: one file that is always whole, and that knows which run it belongs to.

A file holds `format`, `belongs_to`, `state` and `checksums` of these: of every tensor, and of everything else together.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .fingerprints import checksums, damaged, differences, fingerprint

_FORMAT = 2
_UNSIGNED = 1  # the format before, without checksums: weights are read from it, but no run is resumed
_PLAIN = "plain values"
_ABANDONED = 600  # seconds without a write after which a partial file belongs to nobody


class Checkpoint:
    """A file that a run writes to and resumes from.

    A new state is written beside the old one under a name of its own, flushed to disk and renamed: whatever happens,
    `path` holds one whole state, and several processes may write to it.

    Args:
        path: the file; its folder must exist.
        belongs_to: nested plain data that describes the run. `read` refuses the file of another one.
    """

    def __init__(self, path: str | Path, belongs_to: Mapping[str, Any]) -> None:
        self.path, self.belongs_to = Path(path), dict(belongs_to)
        check_writable(self.path)
        for partial in self.path.parent.glob(f"{self.path.name}.*.partial"):
            if time.time() - partial.stat().st_mtime > _ABANDONED:
                partial.unlink(missing_ok=True)

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace what the file holds.

        Raises:
            OSError: the state could not be written (disk full, folder read-only); the previous one is still there.
        """
        content = {"format": _FORMAT, "belongs_to": self.belongs_to, "state": dict(state)}
        content["checksums"] = checksums(_tensors(content)) | {_PLAIN: _plain(content)}
        partial = self.path.with_name(f"{self.path.name}.{secrets.token_hex(6)}.partial")
        try:
            with open(partial, "xb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
            _sync_folder(self.path.parent)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as either
            partial.unlink(missing_ok=True)
            kept = "the previous checkpoint is intact" if self.path.exists() else "there was none before it"
            raise OSError(
                f"the checkpoint {self.path} could not be written ({_reason(error)}); {kept}. "
                "Free some space or give another path, and start again to resume."
            ) from error
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def read(self) -> dict[str, Any] | None:
        """The state in the file, None if there is no file.

        Raises:
            ValueError: it is not a checkpoint, is damaged, or belongs to another run; the message names what differs.
        """
        if not self.path.exists():
            return None
        content = read(self.path)
        if content["format"] != _FORMAT:
            raise ValueError(
                f"{self.path} has checkpoint format {content['format']}, and runs are resumed from format {_FORMAT}: "
                "finish it with the version that began it, or delete it to start over."
            )
        self.refuse_if(differences(self.belongs_to, content["belongs_to"]))
        return content["state"]

    def refuse_if(self, difference: str) -> None:
        """Raise the error for a file that belongs to another run, unless `difference` is empty."""
        if difference:
            raise ValueError(
                f"{self.path} belongs to another run: {difference}. "
                "Give what it was made with to resume, another path to keep it, or delete it to start over."
            )


def read(path: Path) -> dict[str, Any]:
    """The content of a file, known to be what was written: `format`, `belongs_to`, `state`.

    Raises:
        ValueError: it is not a checkpoint, or damaged; the message names the tensor where that can be told.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        version, _, _ = content["format"], content["belongs_to"], content["state"]
        signed = content.pop("checksums", None)
        tensors, plain = dict(_tensors(content)), _plain(content)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint, or is damaged. {_REMEDY}") from error
    if version not in (_FORMAT, _UNSIGNED):
        raise ValueError(f"{path} has checkpoint format {version}, this version reads {_FORMAT}. {_REMEDY}")
    if version == _UNSIGNED and signed is None:
        return content
    if not isinstance(signed, dict) or signed.keys() != {*tensors, _PLAIN}:
        raise ValueError(f"{path} is damaged: its tensors are not those that were written. {_REMEDY}")
    wrong = damaged(tensors, signed) + [_PLAIN] * (signed[_PLAIN] != plain)
    if wrong:
        rest = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(
            f"{path} is damaged: {wrong[0]}{rest} is not what was written (its checksum differs). {_REMEDY}"
        )
    return content


_REMEDY = "Put a copy of it back, or delete it to start over."


def _tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """All tensors in nested mappings and sequences, named by the way to them: `state.updates.weights.head.bias`."""
    if isinstance(value, Tensor):
        return {name: value}
    return {
        path: x
        for key, item in _items(value)
        for path, x in _tensors(item, f"{name}.{key}" if name else str(key)).items()
    }


def _plain(value: Any) -> str:
    """A fingerprint of all else: values, keys, kinds of containers, and where tensors are."""
    return fingerprint(_outline(value))


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor", value.requires_grad
    if isinstance(value, list | tuple) and not any(isinstance(x, Tensor | Mapping | list | tuple) for x in value):
        return repr(value)  # long ones are common: losses, states of generators
    if isinstance(value, Mapping | list | tuple):
        # the versions of modules, which `nn.Module.state_dict` attaches, say how its tensors are read
        attached = _outline(getattr(value, "_metadata", None))
        return type(value).__name__, attached, [(key, _outline(item)) for key, item in _items(value)]
    return value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def check_writable(path: Path) -> None:
    """Notice before the work begins that a file cannot be written.

    Raises:
        OSError: the folder is missing or read-only, or the path is a folder.
    """
    folder = path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {folder} for the checkpoint {path.name} does not exist: create it first.")
    if path.is_dir():
        raise IsADirectoryError(f"the checkpoint {path} is a folder: expected the path of a file.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"the folder {folder} for the checkpoint {path.name} is read-only: give another path.")


def _sync_folder(folder: Path) -> None:
    """Make the rename last through a power cut, where folders can be opened (not on Windows)."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: BaseException) -> str:
    """The first line of an error: torch's go on with a stack."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".")
