"""Settings: frozen dataclasses whose fields say what they mean and what they may be.

    @dataclass(frozen=True)
    class Training(Settings):
        steps: int = setting(1000, "Steps to train for.", at_least=1)
        schedule: Literal["cosine", "constant"] = setting("cosine", "How the learning rate falls.")

Values are checked whenever settings are made, be it in Python, from a TOML file (`load`) or from a command line
(`cli.settings` builds one from the fields), so a default, a help text and a bound are each stated once.

A field is an `int`, `float`, `bool`, `str`, `Path`, a `Literal` of strings, a `tuple[…, ...]` of one of these, or
one of these `| None`; each has a default.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
S = TypeVar("S", bound="Settings")

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path"}


def setting(default: T, help: str, *, at_least: float | None = None, at_most: float | None = None) -> T:
    """A field of `Settings` with its default, its help text and, for numbers, its bounds."""
    metadata = {"help": help, "at_least": at_least, "at_most": at_most}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Base of all settings: every value is checked against its field when the settings are made.

    Whole numbers given for a `float`, strings for a `Path` and lists for a tuple are converted.

    Raises:
        ValueError: a value is of another type or out of bounds, with its name and what was expected.
    """

    def __post_init__(self) -> None:
        for field, kind in fields(type(self)):
            value = _checked(field.name, getattr(self, field.name), kind, field.metadata)
            object.__setattr__(self, field.name, value)


def fields(cls: type[Settings]) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The fields with their types resolved, in the order of their declaration."""
    kinds = typing.get_type_hints(cls)
    return [(field, kinds[field.name]) for field in dataclasses.fields(cls)]


def make(cls: type[S], values: Mapping[str, Any], source: str = "") -> S:
    """Settings from plain values, e.g. a table of a TOML file; what is not named keeps its default.

    `source` is where the values are from, for the error.

    Raises:
        ValueError: a name is unknown (the nearest one is suggested) or a value is not allowed.
    """
    known = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise ValueError(f"{source and f'{source}: '}unknown setting {name!r}; {hint}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{source and f'{source}: '}{error}") from None


def load(cls: type[S], path: Path, overrides: Mapping[str, Any] | None = None) -> S:
    """Settings from a TOML file; `overrides` win over what the file says."""
    return make(cls, {**read_toml(path), **(overrides or {})}, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file.

    Raises:
        ValueError: the file is missing or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a TOML file: {error}.") from error


def name_value_pairs(texts: Sequence[str]) -> dict[str, Any]:
    """`("rank=16", "solver=newton")` as keyword arguments: literals of Python where they are, else strings."""
    made: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip().isidentifier():
            raise ValueError(f"an option is written name=value, got {text!r}.")
        try:
            made[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            made[name.strip()] = value.strip()
    return made


def optional(kind: Any) -> tuple[Any, bool]:
    """`T | None` as (T, True); anything else as (itself, False)."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        rest = [part for part in typing.get_args(kind) if part is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return kind, False


def _checked(name: str, value: Any, kind: Any, metadata: Mapping[str, Any]) -> Any:
    kind, may_be_none = optional(kind)
    if value is None and may_be_none:
        return None
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, got {value!r}.")
        return tuple(_checked(f"each of {name}", part, typing.get_args(kind)[0], metadata) for part in value)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.{hint}")
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if kind is Path and isinstance(value, str):
        value = Path(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be {_NAMES[kind]}, got {value!r}.")
    low, high = metadata.get("at_least"), metadata.get("at_most")
    if low is not None and not value >= low:
        raise ValueError(f"{name} must be at least {low:g}, got {value!r}.")
    if high is not None and not value <= high:
        raise ValueError(f"{name} must be at most {high:g}, got {value!r}.")
    return value
