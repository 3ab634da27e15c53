"""`lotformer bench …`: run time, memory and distance from the machine's limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console

from lotformer.cli.settings import with_settings
from lotformer.cli.tables import Table
from lotformer.cli.terminal import command_line, one_clear_error, show_table
from lotformer.files import require_writable

from ..bench import against_sdpa, encoder, layer, loop, memory, model, roofline, runtime, solvers, vision_models, zoo
from ..bench.settings import BenchSettings
from ..results import plain
from ..results.provenance import Provenance, provenance, thread_count
from ..results.report import Report
from .reports import publish

app = typer.Typer(help="Measure run time, memory and distance from the machine's limit.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option(help="Folder for numbers, table and figure; by default out/bench/<name>.")]


class Benchmark(Protocol):
    """A module of `lotformer_paper.bench`."""

    NAME: str

    @property
    def run(self) -> Callable[[Any, Provenance, Callable[[str], None]], Any]: ...

    def render(self, folder: Path) -> Report: ...


def measure(benchmark: Benchmark, settings: BenchSettings, out: Path | None, suffix: str = "") -> None:
    """Run a benchmark, store what it measured, and render it."""
    console = Console()
    folder = out or Path("out/bench") / f"{benchmark.NAME}{suffix}"
    with one_clear_error(console, f"Cannot measure {benchmark.NAME}"):
        require_writable(folder)
        source = provenance(command_line(), threads=settings.threads, seed=settings.seed)
        with thread_count(settings.threads), console.status("Measuring …") as status:
            result = benchmark.run(settings, source, status.update)
        plain.write(result, folder / "result.json")
        publish(console, benchmark.render(folder), folder)


@app.command("runtime")
@with_settings(runtime.RuntimeSettings)
def runtime_command(settings: runtime.RuntimeSettings, out: Out = None) -> None:
    """Time mechanisms over the length of the sequence, or LOT against fused softmax (--against sdpa)."""
    suffix = "_backward" if settings.backward else "_forward"
    measure(runtime if settings.against is None else against_sdpa, settings, out, suffix)


@app.command("memory")
@with_settings(memory.MemorySettings)
def memory_command(settings: memory.MemorySettings, out: Out = None) -> None:
    """Measure memory against fused softmax: bytes kept for backward, and the peak of forward and backward.

    Counted beyond q, k, v, the output and their gradients.
    """
    measure(memory, settings, out)


@app.command("solvers")
@with_settings(solvers.SolverSettings)
def solvers_command(settings: solvers.SolverSettings, out: Out = None) -> None:
    """Compare the exact solver, bf16 tokens, balancing the keys alone, and given scores, with sweeps in fp32."""
    measure(solvers, settings, out, "_backward" if settings.backward else "")


@app.command("roofline")
@with_settings(roofline.RooflineSettings)
def roofline_command(settings: roofline.RooflineSettings, out: Out = None) -> None:
    """Compare the flops per second of LOT with those of a matrix product, measured in turns."""
    measure(roofline, settings, out)


@app.command("model")
@with_settings(model.ModelSettings)
def model_command(settings: model.ModelSettings, out: Out = None) -> None:
    """Time inference and a training step of DeiT-Tiny, with LOT and with fused softmax, as images grow."""
    measure(model, settings, out)


@app.command("layer")
@with_settings(layer.LayerSettings)
def layer_command(settings: layer.LayerSettings, out: Out = None) -> None:
    """Time a whole attention layer in LOT's forms against the same layer with fused softmax."""
    measure(layer, settings, out)


@app.command("encoder")
@with_settings(encoder.EncoderSettings)
def encoder_command(settings: encoder.EncoderSettings, out: Out = None) -> None:
    """Time converted text encoders against the softmax model, with their cosine and residual."""
    measure(encoder, settings, out)


@app.command("loop")
@with_settings(loop.LoopBenchSettings)
def loop_command(settings: loop.LoopBenchSettings, out: Out = None) -> None:
    """Compare training steps in the loop with bare ones of the same model, in turns."""
    measure(loop, settings, out)


@app.command("vision-models")
@with_settings(vision_models.VisionModelsSettings)
def vision_models_command(settings: vision_models.VisionModelsSettings, out: Out = None) -> None:
    """Count parameters and multiply-adds of the paper's vision models."""
    measure(vision_models, settings, out)


@with_settings(zoo.ZooSettings)
def zoo_command(settings: zoo.ZooSettings, out: Out = None) -> None:
    """List what every mechanism promises and what it costs on this machine."""
    measure(zoo, settings, out)


@app.command("gpu-resources")
def gpu_resources_command(
    head_dim: Annotated[int, typer.Option(min=1, help="Head dimension to compile for.")] = 64,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, to paste as it is.")] = False,
) -> None:
    """Compile every GPU kernel for sm_80, sm_90 and sm_100 and list registers, shared memory and spills."""
    console = Console()
    with one_clear_error(console, "Cannot compile for GPUs"):
        try:
            from lotformer.ops.triton import resources
        except ImportError as error:
            raise ImportError("it needs triton: pip install 'lotformer[gpu]'.") from error
        header, rows = resources.as_table(resources.measure(depths=(head_dim,)))
        title = "Registers on sm_80 / sm_90 / sm_100, and the most shared memory"
        table = Table(title, header, tuple(rows), left=len(header))
        if markdown:
            typer.echo(table.markdown())
        else:
            show_table(console, table)
