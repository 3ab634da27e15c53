"""The options of a mechanism, checked against its own signature, whether they come from a call or from a file."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from .. import attention
from ..attention.options import plain

LARGEST_INTEGER = 2**20
"""No size, count or window of a mechanism is larger. A file that says otherwise is broken or hostile."""


def checked_options(mechanism: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a mechanism, each of its declared type, as JSON will give them back.

    Raises:
        ValueError: the mechanism is unknown, does not take an option, or takes it of another type.
    """
    declared = _declared(mechanism)
    checked = {}
    for name, value in options.items():
        if name not in declared:
            close = difflib.get_close_matches(name, declared, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"{mechanism!r} does not take these options: {name}.{hint} It takes {', '.join(declared) or 'none'}."
            )
        value = plain(value)
        if not _fits(value, declared[name]):
            raise ValueError(f"{name} must be {_spelled(declared[name])}, got {value!r}.")
        checked[name] = value
    return checked


def takes(mechanism: str, option: str) -> bool:
    """True if a mechanism has an option of this name."""
    return option in _declared(mechanism)


def _declared(mechanism: str) -> dict[str, Any]:
    build: Any = attention.entry(mechanism).build
    made_by = inspect.unwrap(build.func if isinstance(build, functools.partial) else build)
    constructor = getattr(made_by, "__init__", None)  # of a class; what functions have is not Python
    scope = getattr(constructor, "__globals__", None) or getattr(made_by, "__globals__", {})
    return {
        name: _annotation(parameter, scope)
        for name, parameter in inspect.signature(build).parameters.items()
        if name not in ("head_dim", "num_heads", "config") and parameter.kind is not parameter.VAR_KEYWORD
    }


def _annotation(parameter: inspect.Parameter, scope: dict[str, Any]) -> Any:
    """The type of an option; without one, whatever JSON can hold."""
    if parameter.annotation is parameter.empty:
        return Any
    # the mechanism's own source, not a file's: annotations are text under `from __future__ import annotations`
    return eval(parameter.annotation, scope) if isinstance(parameter.annotation, str) else parameter.annotation


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, choice) for choice in get_args(kind))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if origin is tuple:
        kinds = get_args(kind)
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if kind is Any:
        return value is None or isinstance(value, bool | int | float | str | tuple)
    if kind in (None, NoneType):
        return value is None
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INTEGER
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind)


def _spelled(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_spelled, get_args(kind)))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if origin is tuple:
        return f"a tuple ({', '.join(map(_spelled, get_args(kind)))})"
    known = {int: f"an integer of at most {LARGEST_INTEGER:,}", float: "a finite number", str: "a string"}
    return {**known, bool: "True or False", NoneType: "None"}.get(kind, str(kind))
