"""Results as JSON: dataclasses to plain values and back, with the version of the format."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, Union

from lotformer.files import write_text
from lotformer.reading import read_json

T = TypeVar("T")

FORMAT = 1
"""Of the files that are written; one that does not say its format is of this one."""


def write(result: Any, path: Path) -> None:
    """Write a dataclass as JSON."""
    write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(result)}, indent=1) + "\n", path)


def read(kind: type[T], path: Path) -> T:
    """A dataclass from the JSON file it was written to.

    Raises:
        ValueError: the file is not JSON, has another format, or holds something else.
    """
    with reading(path):
        plain = read_json(path)
        written = plain.pop("format", FORMAT)
        if written != FORMAT:
            raise ValueError(f"it has format {written}, this version reads {FORMAT}")
        return restore(kind, plain)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with the contents of a file is one error with its name."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of this version of lotformer ({error}).") from error


def restore(kind: Any, plain: Any) -> Any:
    """The inverse of `dataclasses.asdict` and a trip through JSON, where tuples become lists and keys strings."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        kinds = typing.get_type_hints(kind)
        return kind(**{name: restore(kinds[name], value) for name, value in plain.items()})
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        part = next((part for part in parts if _may_be(part, plain)), parts[0])
        return None if plain is None else restore(part, plain)
    if origin is tuple:
        return tuple(restore(parts[0], value) for value in plain)
    if origin is dict:
        return {(int(key) if parts[0] is int else key): restore(parts[1], value) for key, value in plain.items()}
    return plain


def _may_be(part: Any, plain: Any) -> bool:
    """True if a value may be of this part of a union; of several dataclasses, the first that has all its names."""
    if dataclasses.is_dataclass(part) and isinstance(plain, dict):
        return plain.keys() <= {field.name for field in dataclasses.fields(part)}
    return part is not type(None)
