"""The report of a conversion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...attention.config import OPTIONS
from ..recipe import Positions


@dataclass(frozen=True)
class Layer:
    """One attention module of the model: converted, or skipped for a reason.

    A layer that is converted without a window has its reason, too.
    """

    name: str
    kind: str
    converted: bool
    reason: str = ""
    parameters_added: int = 0

    def __str__(self) -> str:
        return f"{self.name or 'the module itself'} ({self.kind})"


@dataclass(frozen=True)
class Probe:
    """The model's output on one batch before and after, no calibration yet."""

    relative_change: float
    cosine: float


@dataclass(frozen=True)
class ConversionReport:
    """Layers converted and skipped, parameters added, and how much the output moved on a probe batch.

    `longest` is the number of tokens that the model has learned positions for, `positions` how they were stretched;
    `towers` are options beside `options` where texts, images or sound are read, in a model that reads several of them.
    `unasked` names the converted layers that have no window though nobody has asked for that.
    """

    model: str
    mechanism: str
    options: dict[str, Any]
    layers: tuple[Layer, ...]
    probe: Probe | None
    towers: dict[str, dict[str, Any]] = field(default_factory=dict)
    positions: Positions | None = None
    longest: int | None = None
    unasked: tuple[str, ...] = ()

    @property
    def converted(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.converted)

    @property
    def skipped(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if not layer.converted)

    @property
    def parameters_added(self) -> int:
        return sum(layer.parameters_added for layer in self.layers)

    @property
    def softmax_up_to(self) -> dict[str, int]:
        """The length up to which layers read by softmax, by what they read; nothing where LOT reads every length."""
        asked = {"inputs": self.options, **self.towers} if self.mechanism == "lot" else {}
        return {tokens: own["softmax_up_to"] for tokens, own in asked.items() if own.get("softmax_up_to")}

    @property
    def advice(self) -> str:
        """Advice on layers that have no window; empty if there are none."""
        if not self.unasked:
            return ""
        names = ", ".join(name or "the module itself" for name in self.unasked[:3])
        names += f" and {len(self.unasked) - 3} more" if len(self.unasked) > 3 else ""
        return (
            f"no window in {_counted(len(self.unasked), 'layer')} ({names}), which costs a trained model most: give "
            'window="1d" for tokens in a row (text, sound, time), window="2d" for patches of an image, or '
            "window=None to leave it so"
        )

    def __str__(self) -> str:
        options = _spelled(_notable(self.mechanism, self.options))
        for tokens, own in self.towers.items():
            differing = {name: value for name, value in own.items() if self.options.get(name, _ABSENT) != value}
            options += f"; where {tokens} is read: {_spelled(differing)}"
        lines = [
            f"{self.model}: {_counted(len(self.converted), 'attention layer')} now use {self.mechanism!r} ({options}), "
            f"{self.parameters_added:,} parameters added"
        ]
        lines += [f"  converted  {layer}" + (f", {layer.reason}" if layer.reason else "") for layer in self.converted]
        lines += [f"  left alone {layer}: {layer.reason}" for layer in self.skipped]
        for tokens, length in self.softmax_up_to.items():
            lines.append(
                f"  reads {tokens} of up to {length:,} tokens, padding included, by softmax, which is faster there: "
                "what comes out is the original's"
            )
        if self.advice:
            lines.append(f"  {self.advice}")
        if self.positions is not None:
            lines.append(
                f"  reads up to {self.positions.tokens:,} tokens: the {self.positions.trained:,} positions it has "
                "learned are interpolated"
            )
        elif self.longest is not None:
            lines.append(
                f"  reads up to {self.longest:,} tokens, for which it has learned positions; max_positions=… "
                "interpolates them for longer texts"
            )
        if self.probe is not None:
            reader = ", read by LOT" if self.softmax_up_to else ""
            lines.append(
                f"  on a probe batch{reader}, before calibration: relative change {self.probe.relative_change:.2g}, "
                f"cosine {self.probe.cosine:.5f}"
            )
        return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


_ABSENT = object()


def _notable(mechanism: str, options: dict[str, Any]) -> dict[str, Any]:
    """The rank, and what differs from LOT's defaults; for other mechanisms all that was given."""
    if mechanism != "lot":
        return options
    return {n: v for n, v in options.items() if n == "rank" or n not in OPTIONS or v != OPTIONS[n].default}


def _spelled(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
