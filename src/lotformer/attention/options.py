"""Options stated once: a `TypedDict` that type checkers read, with default and explanation beside each type.

A class takes them as `**options: Unpack[ItsOptions]`. `documents` spells them out for people and for `inspect`: in the
signature, with their defaults, and in the docstring.
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Option:
    """What stands beside the type of an option: `Annotated[int, Option(32, "number of pivots")]`."""

    default: Any
    text: str


def with_defaults(declared: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the `TypedDict` `declared`: as given, or its default.

    Raises:
        TypeError: an option is not declared, as for any unexpected keyword argument.
    """
    options = _options(declared)
    for name in given.keys() - options.keys():
        close = difflib.get_close_matches(name, options, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"unexpected option {name!r}.{hint} Options: {', '.join(options)}.")
    return {name: option.default for name, (_, option) in options.items()} | dict(given)


def documents(declared: type) -> Callable[[_Class], _Class]:
    """A class decorator for `__init__(…, **options: Unpack[declared])`: a full signature and a line for each option.

    The lines replace `{options}` in the docstring of the class.
    """

    def decorate(owner: _Class) -> _Class:
        options = _options(declared)
        init = vars(owner)["__init__"]
        signature = inspect.signature(init)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=kind)
            for name, (kind, option) in options.items()
        ]
        init.__signature__ = signature.replace(parameters=named)
        if owner.__doc__ is not None:  # python -OO strips it
            owner.__doc__ = owner.__doc__.replace("{options}", _lines(options))
        return owner

    return decorate


def _options(declared: type) -> dict[str, tuple[Any, Option]]:
    hints = get_type_hints(declared, include_extras=True)
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}


def _lines(options: dict[str, tuple[Any, Option]]) -> str:
    """Indented as the arguments of a class are; the first line stands where `{options}` stood."""
    wrapped = (
        textwrap.fill(f"{name}: {option.text}", 116, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for name, (_, option) in options.items()
    )
    return "\n".join(wrapped).lstrip()
