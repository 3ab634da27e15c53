"""Every mechanism by name: ours with one import and one line each, those of other packages by `register`."""

from __future__ import annotations

import difflib
import inspect
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


_OURS = frozenset(_ENTRIES)


def register(entry: Entry) -> None:
    """Add a mechanism of another package, for `build`, `AttentionLayer`, `lotformer.convert` and all else by name.

    Whoever loads a model with it has to register it, too. `check(entry.name)` tells whether it does what is expected of
    a mechanism. Options are keyword arguments of `entry.build`; conversions are saved with them, so that they are
    numbers, strings, booleans, None, or tuples of these, and are checked against their annotations.

    Raises:
        TypeError: `entry` is no `Entry`, or its `build` does not take `head_dim` and `num_heads`.
        ValueError: the name is taken.
    """
    if not isinstance(entry, Entry):
        raise TypeError(f"expected a lotformer.attention.Entry, got {entry!r}.")
    if not isinstance(entry.name, str) or not entry.name:
        raise TypeError(f"the name of a mechanism must be a string, got {entry.name!r}.")
    if entry.name in _ENTRIES:
        known = _ENTRIES[entry.name]
        raise ValueError(
            f"a mechanism is called {entry.name!r} already ({known.summary.rstrip('.')}): choose another name"
            + ("." if entry.name in _OURS else f", or unregister({entry.name!r}) first.")
        )
    try:
        inspect.signature(entry.build).bind_partial(head_dim=1, num_heads=1)
    except TypeError as error:
        raise TypeError(f"`build` of {entry.name!r} must take head_dim and num_heads by keyword: {error}.") from None
    _ENTRIES[entry.name] = entry


def unregister(name: str) -> None:
    """Take a mechanism away that was registered; modules that are built stay as they are.

    Raises:
        ValueError: none of this name was registered.
    """
    if name in _OURS or name not in _ENTRIES:
        others = [known for known in _ENTRIES if known not in _OURS]
        raise ValueError(f"no mechanism {name!r} was registered. Registered: {', '.join(others) or 'none'}.")
    del _ENTRIES[name]


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
