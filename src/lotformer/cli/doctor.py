"""`lotformer doctor`: what is installed, what runs here, and why something does not."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..extras import PACKAGES, command
from ..machine import cpu_model
from ..ops import cpu
from ..ops.backends import OPERATORS, names


def doctor() -> None:
    """Show what is installed, which devices and backends are usable, and why the others are not."""
    console = Console()
    versions = Table("part", "version or how to get it", title="Versions")
    versions.add_row("lotformer", __version__)
    versions.add_row("python", platform.python_version())
    versions.add_row("torch", torch.__version__)
    for extra, packages in PACKAGES.items():
        for package in packages:
            try:
                versions.add_row(package, metadata.version(package))
            except metadata.PackageNotFoundError:
                versions.add_row(package, Text.assemble(("missing", "yellow"), f": {command(extra)}"))
    console.print(versions)

    devices = Table("device", "what", title="Devices")
    cores = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    devices.add_row("cpu", Text(f"{cpu_model()}, {cores}"))
    devices.add_row("instruction sets of the kernel", ", ".join(cpu.instruction_sets()) or Text("not built", "dim"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            devices.add_row(f"cuda:{index}", Text(torch.cuda.get_device_name(index)))
    else:
        devices.add_row("cuda", Text("none found", "dim"))
    console.print(devices)

    columns = names()
    table = Table("operator", *columns, title="Backends, best first")
    reasons: dict[str, None] = {}
    for operator in OPERATORS:
        had = {backend.name: backend for backend in operator.backends}
        cells = [Text("–", "dim")] * len(columns)
        for place, name in enumerate(columns):
            if name in had:
                reason = had[name].why_unavailable()
                cells[place] = Text("no", "red") if reason else Text("yes", "green")
                if reason:
                    reasons[f"{name}: {reason}"] = None
        table.add_row(operator.name, *cells)
    console.print(table)
    for reason in reasons:
        console.print(Text(reason))
