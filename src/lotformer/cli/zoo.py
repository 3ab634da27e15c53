"""`lotformer zoo`: every mechanism at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .. import attention
from ..bench import zoo
from ..bench.timing import thread_count
from ..bench.workload import Shape
from ..results.provenance import provenance, write_json
from .bench import CORES, Backend, Seed, Threads, checked_backend, command_line, mechanism_names


def zoo_command(
    mechanisms: Annotated[str | None, typer.Option(help="Comma-separated names; all by default.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Tokens for times and memory.")] = 1024,
    long: Annotated[int, typer.Option(min=1, help="Tokens at which linear mechanisms are timed too.")] = 16384,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    backend: Backend = None,
    threads: Threads = CORES,
    seconds: Annotated[float, typer.Option(help="Seconds to repeat each call for.")] = 0.3,
    json: Annotated[Path | None, typer.Option(help="File to write the table to, with summaries and citations.")] = None,
    seed: Seed = 0,
) -> None:
    """Print what every mechanism promises and what it costs on this machine."""
    console = Console()
    names = mechanism_names(mechanisms) if mechanisms else attention.names()
    with thread_count(threads), Progress(console=console, transient=True) as progress:
        if "lot" in names:
            backend = checked_backend(
                console, backend, [zoo.LOT_RANK], head_dim=head_dim, heads=heads, eps=zoo.LOT_EPS,
                iters=zoo.LOT_ITERS, backward=True,
            )  # fmt: skip
        task = progress.add_task("Measuring", total=len(names))
        result = zoo.run(
            names,
            Shape(n, 1, heads, head_dim),
            long,
            provenance=provenance(command_line(), threads=threads, seed=seed),
            lot_backend=backend,
            seconds_each=seconds,
            on_row=lambda name: progress.update(task, advance=1, description=f"Measured {name}"),
        )
    console.print(_table(result))
    for row in result.rows:
        if row.notes:
            console.print(f"{row.name}: not measured at {row.notes}", markup=False)
    options = sorted({row.causal_only for row in result.rows if row.causal_only})
    for option in options:
        who = ", ".join(row.name for row in result.rows if row.causal_only == option)
        console.print(f"{who}: causal with {option}, otherwise both ways", markup=False)
    if json is not None:
        write_json(result, json)
        console.print(f"Wrote {json}")


def _table(result: zoo.ZooResult) -> Table:
    """Fits into 100 columns; the last column wraps if it must."""
    table = Table(
        title=f"H{result.heads} D{result.head_dim}, fp32, threads: {result.provenance.threads}. "
        "Forward in milliseconds, peak of forward + backward in MiB",
        caption="converged: rows and columns sum to one as far as the mechanism's iterations have got. Needs: as many "
        "queries as keys (N=M), tokens on a 2-D grid, a known maximal length, random numbers at evaluation.",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    short, long = (_count(length) for length in (result.short, result.long))
    table.add_column("mechanism", no_wrap=True)
    table.add_column("time", no_wrap=True)
    table.add_column("doubly\nstoch.", no_wrap=True)
    for column in ("para-\nmeters", f"GFLOP\nN={short}", f"GFLOP\nN={long}", f"ms\nN={short}", f"ms\nN={long}",
                   f"peak\nN={short}"):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True, min_width=5)  # a cut number is a wrong one
    table.add_column("needs", overflow="fold")
    for row in result.rows:
        table.add_row(
            row.name,
            row.time,
            row.doubly_stochastic or "",
            _count(row.parameters),
            *(_number(row.flops[length] / 1e9) for length in (result.short, result.long)),
            *(
                _number(row.milliseconds[length]) if length in row.milliseconds else "–"
                for length in (result.short, result.long)
            ),
            "–" if row.peak_bytes is None else _number(row.peak_bytes / 2**20),
            needs(row),
        )
    return table


def needs(row: zoo.ZooRow) -> str:
    """What the mechanism demands, in words that the caption explains."""
    words = {
        "N=M": row.needs_equal_lengths,
        "grid": row.needs_grid,
        "length": row.fixed_length,
        "random": row.stochastic,
    }
    return ", ".join(word for word, holds in words.items() if holds)


def _count(value: int) -> str:
    """A whole number in a few characters: 512, 1k, 16k, 2.11k, 4.2M; powers of two by 1024."""
    if value < 1000:
        return str(value)
    for divisor, unit in ((1024, "k"), (1024**2, "M")):
        if value % divisor == 0 and value // divisor < 1000:
            return f"{value // divisor}{unit}"
    return f"{value / 1e3:.3g}k" if value < 1e6 else f"{value / 1e6:.3g}M"


def _number(value: float) -> str:
    """In five characters up to 99999: three digits, or three decimals below one."""
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"
