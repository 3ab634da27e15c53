"""Every mechanism by name: one import and one line each."""

from __future__ import annotations

import difflib
from typing import Any

from . import (
    angular,
    bigbird,
    cosformer,
    deltanet,
    diff,
    efficient,
    enhanced,
    espformer,
    espformer_hard,
    flatten,
    hedgehog,
    hydra,
    informer,
    kernelized,
    linear_transformer,
    linformer,
    local,
    longformer,
    lot,
    lowrank_ot,
    mamba2,
    mobiattention,
    nystromformer,
    performer,
    polaformer,
    quantum_ds,
    reformer,
    sinkformer,
    skyformer,
    softmax,
    synthesizer,
    t2r,
)
from .base import Attention, Entry

_ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        softmax.ENTRY,
        sinkformer.ENTRY,
        espformer.ENTRY,
        espformer_hard.ENTRY,
        quantum_ds.ENTRY,
        lowrank_ot.ENTRY,
        lot.ENTRY,
        linear_transformer.ENTRY,
        performer.ENTRY,
        linformer.ENTRY,
        nystromformer.ENTRY,
        kernelized.ENTRY,
        skyformer.ENTRY,
        cosformer.ENTRY,
        synthesizer.ENTRY,
        hedgehog.ENTRY,
        t2r.ENTRY,
        efficient.ENTRY,
        hydra.ENTRY,
        angular.ENTRY,
        flatten.ENTRY,
        enhanced.ENTRY,
        polaformer.ENTRY,
        mobiattention.ENTRY,
        local.ENTRY,
        longformer.ENTRY,
        reformer.ENTRY,
        bigbird.ENTRY,
        informer.ENTRY,
        deltanet.ENTRY,
        mamba2.ENTRY,
        diff.ENTRY,
    )
}


def names() -> list[str]:
    """The names that `build` accepts, in the order of the registry."""
    return list(_ENTRIES)


def entry(name: str) -> Entry:
    """The registry entry of a mechanism: what it is, what it promises, what it costs."""
    try:
        return _ENTRIES[name]
    except KeyError:
        close = difflib.get_close_matches(name, _ENTRIES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"Unknown mechanism {name!r}.{hint} Known: {', '.join(_ENTRIES)}.") from None


def build(name: str, *, head_dim: int, num_heads: int, **options: Any) -> Attention:
    """Make a mechanism by name; `options` are its own keyword arguments."""
    return entry(name).build(head_dim=head_dim, num_heads=num_heads, **options)
