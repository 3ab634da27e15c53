"""The grid of a vision transformer's patches, for mechanisms with a 2-D part."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ...nn.grids import GridSource, needs_grid
from .sites import converted, mechanism_of, record_of, remember
from .tokens import patches_before


def supply_grids(model: nn.Module) -> None:
    """Let the converted modules of a model read the grid of its patches, where their mechanisms need one."""
    sources: dict[tuple[int, int], GridSource] = {}
    for name, module in converted(model):
        record, mechanism = record_of(module), mechanism_of(module)
        assert record is not None
        if record.grids is not None or not needs_grid(mechanism):
            continue
        found = patches_before(model, name)
        if found is None:
            continue
        enclosure, patches = found
        prefix = getattr(mechanism, "prefix_tokens", 0)
        source = sources.setdefault((id(patches), prefix), GridSource(prefix))
        source.supply(model.get_submodule(enclosure), patches, name[len(enclosure) :].removeprefix("."))
        remember(module, replace(record, grids=source))
