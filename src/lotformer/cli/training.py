"""Training on a terminal: a progress bar, the report, and errors in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ..training.logs import Progress
from ..training.run import TrainingReport, train
from ..training.task import Task
from .terminal import one_clear_error


class ProgressBar:
    """Steps, loss, samples per second, time left, and where the time of a step goes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("training", total=None, told="")

    def started(self, step: int, steps: int) -> None:
        if step:
            self._console.print(f"Resumed after step {step} of {steps}.")
        self._bar.update(self._task, total=steps, completed=step)
        self._bar.start()

    def stepped(self, progress: Progress) -> None:
        told = f"loss {progress.loss:.4f}  {progress.samples_per_second:.0f}/s  {shares(progress)}"
        if progress.skipped:
            told += f"  {progress.skipped} skipped"
        self._bar.update(self._task, completed=progress.step, told=told)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._console.print(f"step {step}: {escape(told)}")

    def ended(self) -> None:
        self._bar.stop()


def shares(of: Progress | TrainingReport) -> str:
    """The shares of a step's time, e.g. `data 2 %, attention 31 %, rest 67 %`."""
    told = f"data {of.waiting:.0%}"
    if of.attention is not None:
        told += f", attention {of.attention:.0%}, rest {max(0.0, 1 - of.waiting - of.attention):.0%}"
    return told.replace("%", " %")


def train_with_progress(task: Task, out: Path, *, resume: bool) -> TrainingReport:
    """`train`, with a progress bar and a closing line; what cannot work ends the command with exit code 1."""
    console = Console()
    with one_clear_error(console, "Cannot train"):
        report = train(task, out, resume=resume, listeners=[ProgressBar(console)])
    best = "" if report.best is None else f", best {task.metric} {report.best:.4f} at step {report.best_step}"
    console.print(
        f"{report.steps} steps in {report.seconds:.0f} s, {report.samples_per_second:.0f} samples per second "
        f"({shares(report)}){best}. Weights: {escape(str(out))}",
        soft_wrap=True,
    )
    return report
