"""Commands of other distributions, found by entry points.

An entry point of the group `lotformer.commands` adds a command or a group of commands:

    [project.entry-points."lotformer.commands"]
    experiment = "lotformer_paper.cli.experiment:app"      # lotformer experiment …
    "train.lra" = "lotformer_paper.cli.longrange:train_lra"  # lotformer train lra
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

GROUP = "lotformer.commands"

PAPER = frozenset({"bench", "data", "experiment", "figures", "render", "translate", "zoo", "lra", "translation"})
"""Commands that come with lotformer-paper."""


class Extended(TyperGroup):
    """A group that says where a command is to be had which is not installed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in PAPER and self.get_command(ctx, args[0]) is None:
            typer.echo(
                f"`{ctx.command_path} {args[0]}` reproduces the paper and is not installed: "
                "pip install lotformer-paper (in a clone of the repository: pip install ./paper).",
                err=True,
            )
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)


def add_commands(apps: Mapping[str, typer.Typer]) -> None:
    """Add the commands of other distributions to ours; `apps` are the groups by name, "" is the outermost."""
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        group, _, name = point.name.rpartition(".")
        if group not in apps:
            raise ValueError(f"{_origin(point)} adds {point.name!r}, but `lotformer` has no group {group!r}.")
        found = _loaded(point)
        if isinstance(found, typer.Typer):
            apps[group].add_typer(found, name=name)
        else:
            apps[group].command(name)(found)


def _loaded(point: EntryPoint) -> Any:
    """Load an entry point; if it cannot be imported, a command that says why, so that the others still work."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        reason = f"{_origin(point)} cannot be loaded: {error}"

        def unavailable() -> None:
            typer.echo(reason, err=True)
            raise typer.Exit(1)

        unavailable.__doc__ = reason
        return unavailable


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value
