"""`lotformer bench …`: run time, memory and distance from the machine's limit."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import attention
from ..bench import figure, memory, roofline, runtime, solvers
from ..bench.agreement import KernelDisagrees, check_backend
from ..bench.timing import thread_count
from ..bench.workload import Shape
from ..results.provenance import Provenance, provenance, write_json

app = typer.Typer(help="Measure run time, memory and distance from the machine's limit.", no_args_is_help=True)

Threads = Annotated[int, typer.Option(min=1, help="Threads to compute with.")]
Seed = Annotated[int, typer.Option(help="Seed of the random tokens and parameters.")]
Seconds = Annotated[float, typer.Option(help="Seconds to repeat each alternative for.")]
Backend = Annotated[str | None, typer.Option(help="Backend of LOT; the best available by default.")]
Rank = Annotated[int, typer.Option(min=1, help="Number of pivots.")]
Iters = Annotated[int, typer.Option(min=1, help="Sinkhorn sweeps of LOT.")]
Eps = Annotated[float, typer.Option(help="Entropic regularisation of LOT.")]

CORES = min(2, os.cpu_count() or 1)


@app.command("runtime")
def runtime_command(
    mechanisms: Annotated[
        str | None, typer.Option(help="Comma-separated names; the paper's figure by default.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Ranks of LOT, comma-separated.")] = ",".join(map(str, runtime.RANKS)),
    min_n: Annotated[int, typer.Option(help="Shortest sequence.")] = 2**9,
    max_n: Annotated[int, typer.Option(help="Longest sequence; lengths double from the shortest.")] = 2**17,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    backward: Annotated[bool, typer.Option("--backward", help="Time forward + backward.")] = False,
    against: Annotated[
        str | None, typer.Option(help='"sdpa": LOT at one rank against fused softmax on the four target shapes.')
    ] = None,
    rank: Rank = 32,
    iters: Iters = 5,
    eps: Eps = 1.0,
    backend: Backend = None,
    threads: Threads = CORES,
    seconds: Seconds = 0.5,
    time_limit: Annotated[float, typer.Option(help="Leave out calls that would take longer, in seconds.")] = 20.0,
    json: Annotated[
        Path | None, typer.Option(help="File to write; the figure goes beside it as .png and .svg.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Time mechanisms over the length of the sequence, or LOT against fused softmax (--against sdpa)."""
    console = Console()
    source = provenance(command_line(), threads=threads, seed=seed)
    direction = "backward" if backward else "forward"
    with thread_count(threads):
        if against is not None:
            if against != "sdpa":
                raise typer.BadParameter(f"expected 'sdpa', got {against!r}.", param_hint="--against")
            name = checked_backend(
                console, backend, [rank], head_dim=64, heads=4, eps=eps, iters=iters, backward=backward
            )
            shapes = [s for s in runtime.TARGET_SHAPES if s.n <= max_n]
            _against_sdpa(
                console, source, shapes, rank, iters, eps, name, backward, seconds,
                json or Path(f"results/sdpa_{direction}.json"),
            )  # fmt: skip
            return
        names = mechanism_names(mechanisms or ",".join([*runtime.QUADRATIC, *runtime.LINEAR, "lot"]))
        lot_ranks = _numbers(ranks, "--ranks")
        chosen = runtime.candidates(names, lot_ranks, {"iters": iters, "eps": eps, "backend": backend})
        used = None
        if "lot" in names:
            used = checked_backend(
                console, backend, lot_ranks, head_dim=head_dim, heads=heads, eps=eps, iters=iters, backward=backward
            )
        with console.status("Timing …") as status:
            result = runtime.run(
                chosen,
                doubling(min_n, max_n),
                Shape(min_n, batch, heads, head_dim),
                backward=backward,
                provenance=source,
                lot_backend=used,
                seconds_each=seconds,
                time_limit=time_limit,
                on_point=lambda point: status.update(f"Timed {point.label} at N={point.n}"),
            )
    _show_runtime(console, result)
    path = json or Path(f"results/runtime_{direction}.json")
    write_json(result, path)
    files = [path]
    try:
        files += figure.draw_runtime(result, path)
    except ImportError as error:
        console.print(f"No figure: {error}", markup=False)
    console.print("Wrote " + ", ".join(map(str, files)))


@app.command("memory")
def memory_command(
    min_n: Annotated[int, typer.Option(help="Shortest sequence.")] = 2**12,
    max_n: Annotated[int, typer.Option(help="Longest sequence; lengths double from the shortest.")] = 2**17,
    mechanisms: Annotated[str, typer.Option(help="Comma-separated names to measure beside sdpa.")] = "lot",
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    rank: Rank = 32,
    iters: Iters = 5,
    eps: Eps = 1.0,
    backend: Backend = None,
    threads: Threads = CORES,
    time_limit: Annotated[float, typer.Option(help="Leave out calls that would take longer, in seconds.")] = 600.0,
    json: Annotated[Path, typer.Option(help="File to write.")] = Path("results/memory.json"),
    seed: Seed = 0,
) -> None:
    """Bytes kept for backward and peak of forward + backward, beyond the tensors in and out, against fused softmax."""
    console = Console()
    source = provenance(command_line(), threads=threads, seed=seed)
    alternatives: dict[str, tuple[str, dict[str, object]]] = {"sdpa": ("sdpa", {})}
    for name in mechanism_names(mechanisms):
        if name == "lot":
            checked_backend(
                console, backend, [rank], head_dim=head_dim, heads=heads, eps=eps, iters=iters, backward=True
            )
        options: dict[str, object] = (
            {"rank": rank, "iters": iters, "eps": eps, "backend": backend} if name == "lot" else {}
        )
        alternatives[f"lot r={rank}" if name == "lot" else name] = (name, options)
    with console.status("Measuring …") as status:
        result = memory.run(
            alternatives,
            doubling(min_n, max_n),
            Shape(min_n, batch, heads, head_dim),
            provenance=source,
            time_limit=time_limit,
            on_point=lambda point: status.update(f"Measured {point.label} at N={point.n}"),
        )
    table = _table(
        f"MiB beyond q, k, v, out and their gradients (B{batch} H{heads} D{head_dim})",
        ("mechanism", "N", "kept for backward", "peak", ""),
        left={"mechanism", ""},
    )
    for point in result.points:
        table.add_row(
            point.label, str(point.n), _mebibytes(point.saved_bytes), _mebibytes(point.peak_bytes), point.skipped or ""
        )
    _publish(console, table, result, json)


@app.command("solvers")
def solvers_command(
    rank: Rank = 32,
    iters: Iters = 5,
    eps: Eps = 0.1,
    tol: Annotated[float, typer.Option(help="Residual the exact solver stops at.")] = 1e-5,
    max_n: Annotated[int, typer.Option(help="Leave out longer shapes.")] = 2**17,
    backend: Backend = None,
    threads: Threads = CORES,
    seconds: Seconds = 1.0,
    json: Annotated[Path, typer.Option(help="File to write.")] = Path("results/solvers.json"),
    seed: Seed = 0,
) -> None:
    """The exact solver and bf16 tokens against Sinkhorn sweeps in fp32: time and residual."""
    console = Console()
    source = provenance(command_line(), threads=threads, seed=seed)
    with thread_count(threads):
        name = checked_backend(console, backend, [rank], head_dim=64, heads=4, eps=eps, iters=iters, backward=False)
        with console.status("Timing …") as status:
            result = solvers.run(
                [shape for shape in runtime.TARGET_SHAPES if shape.n <= max_n],
                rank=rank,
                iters=iters,
                eps=eps,
                tol=tol,
                backend=name,
                provenance=source,
                seconds_each=seconds,
                on_point=lambda point: status.update(f"Timed {point.shape}"),
            )
    table = _table(
        f"LOT r={rank} T={iters} ε={eps:g} tol={tol:g}, backend {name}, forward, {threads} threads",
        ("shape", "sweeps ms", "residual", "newton ms", "residual", "× sweeps", "bf16 ms", "× faster"),
        left={"shape"},
    )
    for point in result.points:
        ms, residual = point.milliseconds, point.residual
        table.add_row(
            str(point.shape), f"{ms['sinkhorn']:.3f}", f"{residual['sinkhorn']:.1e}", f"{ms['newton']:.3f}",
            f"{residual['newton']:.1e}", f"{point.newton_times:.2f}", f"{ms['sinkhorn bf16']:.3f}",
            f"{point.bf16_times_faster:.2f}",
        )  # fmt: skip
    _publish(console, table, result, json)


@app.command("roofline")
def roofline_command(
    rank: Rank = 32,
    iters: Iters = 5,
    eps: Eps = 1.0,
    max_n: Annotated[int, typer.Option(help="Leave out longer shapes.")] = 2**17,
    backend: Backend = None,
    threads: Threads = CORES,
    seconds: Seconds = 1.0,
    json: Annotated[Path, typer.Option(help="File to write.")] = Path("results/roofline.json"),
    seed: Seed = 0,
) -> None:
    """Flops per second of LOT against those of a matrix product, measured in turns."""
    console = Console()
    source = provenance(command_line(), threads=threads, seed=seed)
    with thread_count(threads):
        name = checked_backend(console, backend, [rank], head_dim=64, heads=4, eps=eps, iters=iters, backward=True)
        with console.status("Timing …") as status:
            result = roofline.run(
                [shape for shape in roofline.SHAPES if shape.n <= max_n],
                rank=rank,
                iters=iters,
                eps=eps,
                backend=name,
                provenance=source,
                seconds_each=seconds,
                on_point=lambda point: status.update(f"Timed {point.shape}"),
            )
    table = _table(
        f"LOT r={rank} T={iters}, backend {name}, {threads} threads",
        ("shape", "direction", "ms", "GFLOP/s", "matmul GFLOP/s", "× its flops' time"),
        left={"shape", "direction"},
    )
    for point in result.points:
        table.add_row(
            str(point.shape), point.direction, f"{point.milliseconds:.3f}", f"{point.gflops_per_second:.1f}",
            f"{point.matmul_gflops_per_second:.1f}", f"{point.times_limit:.2f}",
        )  # fmt: skip
    _publish(console, table, result, json)


def command_line() -> str:
    """The command as typed, without the path of the program."""
    return " ".join(["lotformer", *sys.argv[1:]])


def _table(title: str, columns: Sequence[str], left: Collection[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def _publish(console: Console, table: Table, result: object, path: Path) -> None:
    console.print(table)
    write_json(result, path)
    console.print(f"Wrote {path}")


def mechanism_names(text: str) -> list[str]:
    """Names separated by commas, each known to the registry."""
    try:
        return [attention.entry(name.strip()).name for name in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--mechanisms") from None


def doubling(first: int, last: int) -> list[int]:
    """first, 2·first, … up to last."""
    if first < 1 or last < first:
        raise typer.BadParameter(f"expected 1 <= min-n <= max-n, got {first} and {last}.", param_hint="--min-n")
    lengths = [first]
    while 2 * lengths[-1] <= last:
        lengths.append(2 * lengths[-1])
    return lengths


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected integers separated by commas, got {text!r}.", param_hint=option) from None


def checked_backend(
    console: Console,
    backend: str | None,
    ranks: list[int],
    *,
    head_dim: int,
    heads: int,
    eps: float,
    iters: int,
    backward: bool,
) -> str:
    """The backend that will be timed, after it has agreed with the reference at every rank; otherwise exit."""
    try:
        names = {
            check_backend(
                backend, rank=rank, head_dim=head_dim, heads=heads, n=517, eps=eps, iters=iters, backward=backward
            )
            for rank in ranks
        }
    except (KernelDisagrees, ValueError) as error:
        console.print(str(error), markup=False, style="red")
        raise typer.Exit(1) from error
    return "/".join(sorted(names))


def _against_sdpa(
    console: Console, source: Provenance, shapes: list[Shape], rank: int, iters: int, eps: float, backend: str,
    backward: bool, seconds: float, path: Path,
) -> None:  # fmt: skip
    with console.status("Timing …") as status:
        result = runtime.compare_with_sdpa(
            shapes,
            rank=rank,
            iters=iters,
            eps=eps,
            backend=backend,
            backward=backward,
            provenance=source,
            seconds_each=seconds,
            on_comparison=lambda comparison: status.update(f"Timed {comparison.shape}"),
        )
    table = Table(title=f"LOT r={rank} T={iters} ({backend}), {result.direction}, {source.threads} threads")
    for column in ("shape", "lot ms", "sdpa ms", "plain PyTorch ms", "× sdpa", "× plain PyTorch"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for comparison in result.comparisons:
        times = (f"{comparison.milliseconds[name]:.3f}" for name in ("lot", "sdpa", "plain PyTorch"))
        faster = (f"{comparison.times_faster[name]:.2f}" for name in ("sdpa", "plain PyTorch"))
        table.add_row(str(comparison.shape), *times, *faster)
    console.print(table)
    write_json(result, path)
    console.print(f"Wrote {path}")


def _show_runtime(console: Console, result: runtime.RuntimeResult) -> None:
    lengths = sorted({point.n for point in result.points})
    table = Table(title=f"{result.direction}, milliseconds (B{result.batch} H{result.heads} D{result.head_dim})")
    table.add_column("mechanism")
    for n in lengths:
        table.add_column(f"{n}", justify="right")
    for label in dict.fromkeys(point.label for point in result.points):
        cells = {point.n: point for point in result.points if point.label == label}
        table.add_row(
            label, *("–" if cells[n].milliseconds is None else f"{cells[n].milliseconds:.3g}" for n in lengths)
        )
    console.print(table)
    for label in dict.fromkeys(point.label for point in result.points):
        left_out = [point for point in result.points if point.label == label and point.skipped]
        if left_out:
            console.print(f"{label}: left out from N={left_out[0].n}: {left_out[0].skipped}", markup=False)


def _mebibytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**20:.2f}"


@app.command("gpu-resources")
def gpu_resources_command(
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head to compile for.")] = 64,
) -> None:
    """Compile every GPU kernel for sm_80, sm_90 and sm_100 and list registers, shared memory and spills."""
    try:
        from ..ops.triton import resources
    except ImportError as error:
        raise typer.BadParameter("compiling for GPUs needs triton: pip install 'lotformer[gpu]'.") from error
    # a plain print: the table is Markdown, to be pasted as it is
    typer.echo(resources.as_markdown(resources.measure(depths=(head_dim,))))
