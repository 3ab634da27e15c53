"""`lotformer zoo`: every mechanism at a glance."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .. import attention
from ..bench import zoo
from ..bench.report import provenance, write_json
from ..bench.timing import thread_count
from ..bench.workload import Shape
from .bench import CORES, Seed, Threads, command_line, mechanism_names


def zoo_command(
    mechanisms: Annotated[str | None, typer.Option(help="Comma-separated names; all by default.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Tokens for times and memory.")] = 1024,
    long: Annotated[int, typer.Option(min=1, help="Tokens at which linear mechanisms are timed too.")] = 16384,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    threads: Threads = CORES,
    seconds: Annotated[float, typer.Option(help="Seconds to repeat each call for.")] = 0.3,
    json: Annotated[Path | None, typer.Option(help="Write the table as JSON.")] = None,
    seed: Seed = 0,
) -> None:
    """Print what every mechanism promises and what it costs on this machine."""
    console = Console()
    names = mechanism_names(mechanisms) if mechanisms else attention.names()
    with thread_count(threads), Progress(console=console, transient=True) as progress:
        task = progress.add_task("Measuring", total=len(names))
        result = zoo.run(
            names,
            Shape(n, 1, heads, head_dim),
            long,
            provenance=provenance(command_line(), threads=threads, seed=seed),
            seconds_each=seconds,
            on_row=lambda name: progress.update(task, advance=1, description=f"Measured {name}"),
        )
    table = Table(
        title=f"H{heads} D{head_dim}, fp32, {threads} threads: forward in milliseconds, peak of forward + backward"
    )
    columns = (
        "mechanism", "linear", "doubly\nstochastic", "parameters", f"GFLOP\nN={n}", f"GFLOP\nN={long}",
        f"ms\nN={n}", f"ms\nN={long}", f"peak MiB\nN={n}", "restrictions",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in ("mechanism", "restrictions") else "right")
    for row in result.rows:
        table.add_row(
            row.name,
            "yes" if row.linear else "",
            "yes" if row.doubly_stochastic else "",
            f"{row.parameters:,}",
            *(f"{row.flops[length] / 1e9:.3g}" for length in (n, long)),
            *(f"{row.milliseconds[length]:.3g}" if length in row.milliseconds else "–" for length in (n, long)),
            "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}",
            restrictions(row),
        )
    console.print(table)
    if json is not None:
        write_json(result, json)
        console.print(f"Wrote {json}")


def restrictions(row: zoo.ZooRow) -> str:
    """What the mechanism cannot do or needs, in words."""
    words = {
        "causal_only": "along the order",
        "stochastic": "random",
        "fixed_length": "fixed length",
        "needs_equal_lengths": "self-attention",
        "needs_grid": "2-D grid",
    }
    flags = dataclasses.asdict(row)
    return ", ".join([word for flag, word in words.items() if flags[flag]] + ([row.notes] if row.notes else []))
