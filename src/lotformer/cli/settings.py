"""A command line built from a settings dataclass: one option per field, and a TOML file that options override."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..settings import Settings, fields, load, make, optional, read_toml

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}  # short, so that help has room at 80 columns
_CONFIG = typer.Option(metavar="PATH", help="TOML file with any of these settings; options on the command line win.")


Values = Mapping[str, Any]


def with_settings(
    cls: type[Settings], completed: Callable[[Values], Values] = lambda chosen: chosen
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for every field of `cls`; it receives them as its argument `settings`.

        @app.command()
        @with_settings(Training)
        def train(settings: Training, out: Annotated[Path, typer.Option(help="…")] = Path("out")) -> None: ...

    A value comes from the command line, else from the file of `--config`, else from the field's default. Unknown names
    in the file and values that are not allowed end the command with exit code 2 and the name of what was wrong.
    `completed` may add to what was chosen, e.g. the values of a recipe where nothing else was said.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "settings"]
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("context", keyword_only, annotation=typer.Context),
            *(parameter.replace(kind=keyword_only) for parameter in own),
            inspect.Parameter("config", keyword_only, default=None, annotation=Annotated[Path | None, _CONFIG]),
            *(_option(field, kind) for field, kind in _own_first(cls)),
        ]

        @functools.wraps(command)
        def run(context: typer.Context, config: Path | None, **arguments: Any) -> Any:
            rest = {parameter.name: arguments.pop(parameter.name) for parameter in own}
            return command(settings=_settings(cls, context, config, arguments, completed), **rest)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # where typer looks
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _own_first(cls: type[Settings]) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Put the command's own options before those it shares with others."""
    return sorted(fields(cls), key=lambda item: item[0].name not in vars(cls).get("__annotations__", {}))


def _settings(
    cls: type[Settings],
    context: typer.Context,
    config: Path | None,
    values: dict[str, Any],
    completed: Callable[[Values], Values],
) -> Settings:
    kinds = {field.name: optional(kind)[0] for field, kind in fields(cls)}
    typed = {name: value for name, value in values.items() if _was_typed(context, name)}
    chosen = {name: _parsed(name, value, kinds[name]) for name, value in typed.items()}
    try:
        make(cls, chosen)  # first, so that the file is not blamed for what was typed
        if config:
            load(cls, config)
            chosen = {**read_toml(config), **chosen}
        return make(cls, completed(chosen))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _option(field: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
    bare, may_be_none = optional(kind)
    default: Any = field.default
    help = field.metadata.get("help")
    metavar = _METAVARS.get(bare)
    bounds: dict[str, Any] = {"min": field.metadata.get("at_least"), "max": field.metadata.get("at_most")}
    if typing.get_origin(bare) is tuple:
        default, metavar, bare, bounds = ", ".join(map(str, default)) if default else None, "A,B,…", str, {}
    elif typing.get_origin(bare) is Literal:
        help, metavar, bare, bounds = f"{help} One of {', '.join(typing.get_args(bare))}.", "NAME", str, {}
    if default is None or may_be_none:
        bare = bare | None
    info = typer.Option(help=help, metavar=metavar, **bounds)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[bare, info]
    )


def _parsed(name: str, value: Any, kind: Any) -> Any:
    """A tuple is typed as its parts with commas between them; typer has parsed everything else."""
    if typing.get_origin(kind) is not tuple:
        return value
    part = typing.get_args(kind)[0]
    try:
        return tuple(part(text.strip()) if part in (int, float) else text.strip() for text in value.split(","))
    except ValueError:
        option = f"--{name.replace('_', '-')}"
        raise typer.BadParameter(f"expected numbers separated by commas, got {value!r}.", param_hint=option) from None
