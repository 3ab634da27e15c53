"""Options stated once, as fields of frozen dataclasses, and spelled out where they are passed one by one.

A field is declared by `option`, with its default and its explanation. `documents` shows the same options in the
signature and the docstring of a class that takes them as keyword arguments.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar, get_args

_Class = TypeVar("_Class", bound=type)


class Option(NamedTuple):
    """An option as a keyword argument: its type, its default and what it means."""

    kind: Any
    default: Any
    text: str


def option(text: str, default: Any = MISSING, *, flat: str | None = None) -> Any:
    """A field of a configuration; `flat` is its name as a keyword argument, where that differs from the field's."""
    return field(default=default, metadata={"text": text, "flat": flat})


def with_field_docs(owner: _Class) -> _Class:
    """Replace `{fields}` in the docstring of a dataclass by a line for each of its fields."""
    if owner.__doc__ is not None:  # python -OO strips it
        owner.__doc__ = owner.__doc__.replace("{fields}", lines((f.name, f.metadata["text"]) for f in fields(owner)))
    return owner


def documents(options: Mapping[str, Option], *, without: Iterable[str] = ()) -> Callable[[_Class], _Class]:
    """A class decorator for `__init__(…, **options)`: a full signature and a line for each option.

    The lines replace `{options}` in the docstring of the class.
    """
    shown = {name: entry for name, entry in options.items() if name not in without}

    def decorate(owner: _Class) -> _Class:
        init = vars(owner)["__init__"]
        signature = inspect.signature(init)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=entry.default, annotation=entry.kind)
            for name, entry in shown.items()
        ]
        init.__signature__ = signature.replace(parameters=named)
        if owner.__doc__ is not None:
            owner.__doc__ = owner.__doc__.replace("{options}", lines((n, e.text) for n, e in shown.items()))
        return owner

    return decorate


def lines(entries: Iterable[tuple[str, str]]) -> str:
    """Indented as the arguments of a class are; the first line stands where the placeholder stood."""
    wrapped = (
        textwrap.fill(f"{name}: {text}", 116, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for name, text in entries
    )
    return "\n".join(wrapped).lstrip()


def plain(value: Any) -> Any:
    """A value as JSON gives it back: numpy's numbers become Python's, lists tuples."""
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def require_one_of(name: str, value: Any, kind: Any) -> None:
    """Refuse what is not among the choices of a `Literal`."""
    if not isinstance(value, str) or value not in get_args(kind):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, got {value!r}.")


def require_flag(name: str, value: Any) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")
