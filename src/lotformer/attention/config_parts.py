"""The parts of LOT's configuration: the solver, the pivots, and what may stand beside the transport."""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

from ..nn.checks import is_number, require_count, require_moderate
from ..nn.depthwise import ConvKind, ConvSharing, require_convolution
from ..nn.pivot_pooling import PivotKind
from ..nn.pivots import PivotInit
from ..nn.prefix import DEFAULT_POWERS, require_rows
from ..nn.windows import WindowKind, require_window
from ..ops.problem import Solver
from .options import option, plain, require_flag, require_one_of, with_field_docs

FOUND_STEPS = 3


def flat_name(f: Field[Any]) -> str:
    name: str = f.metadata["flat"] or f.name
    return name


_NEEDS = {
    "iters": 'sweeps: solver="sinkhorn"',
    "tol": 'the exact solver: solver="newton"',
    "prefix_beta": "a prefix: prefix_tokens=1, or as many special tokens as there are",
    "polarize_prefix": "a prefix: prefix_tokens=1, or as many special tokens as there are",
    "polarize_powers": "a polarised prefix: polarize_prefix=True and prefix_tokens",
    "conv_sharing": 'a convolution: local_conv="1d" or local_conv="2d"',
    "kernel_size": 'a convolution: local_conv="1d" or local_conv="2d"',
    "pivot_steps": 'pivots that are found: pivots="found"',
    "content_most": "keys by content: content=2, or as many groups as a query should read",
    "window_size": 'a window: window="1d" (along a text) or window="2d" (of patches)',
}


def lacks(name: str, value: Any) -> str:
    return f"{name}={value!r} needs {_NEEDS[name]}."


@dataclass(frozen=True, repr=False)
class Part:
    """Plain values in every field; only what differs from the defaults is printed."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = plain(getattr(self, f.name))
            object.__setattr__(self, f.name, value)
            if isinstance(f.default, bool):
                require_flag(flat_name(f), value)
        self._check()

    def _check(self) -> None:
        """Refuse values that no forward can run with."""

    def __repr__(self) -> str:
        values = [(f, getattr(self, f.name)) for f in fields(self)]
        shown = ", ".join(f"{f.name}={value!r}" for f, value in values if value != f.default)
        return f"{type(self).__name__}({shown})"


@with_field_docs
@dataclass(frozen=True, repr=False)
class Sinkhorn(Part):
    """A fixed number of sweeps, as in the paper: right at ε ≈ 1.

    Attributes:
        {fields}
    """

    name: ClassVar[Solver] = "sinkhorn"
    sweeps: int = option(
        "full Sinkhorn sweeps, two half-steps each, before the closing half-step: 5 are 11 half-steps. Published "
        "code counts half-steps: its `max_iter=5` is 2 sweeps.",
        5,
        flat="iters",
    )

    def _check(self) -> None:
        require_count("iters", self.sweeps)

    def arguments(self) -> dict[str, Any]:
        """Arguments of the operator."""
        return {"solver": self.name, "iters": self.sweeps}


@with_field_docs
@dataclass(frozen=True, repr=False)
class Newton(Part):
    """Solve to a tolerance: right for small ε and for exact column sums.

    Attributes:
        {fields}
    """

    name: ClassVar[Solver] = "newton"
    tol: float | None = option(
        "relative error of the column sums at which Newton stops; None: a fixed number of passes.", 1e-6, flat="tol"
    )

    def _check(self) -> None:
        if self.tol is not None and not (is_number(self.tol) and 0 < self.tol < 1):
            raise ValueError(f"tol must be a number between 0 and 1, or None for fixed passes, got {self.tol!r}.")

    def arguments(self) -> dict[str, Any]:
        """Arguments of the operator."""
        return {"solver": self.name, "tol": self.tol}


@with_field_docs
@dataclass(frozen=True, repr=False)
class Pivots(Part):
    """The pivots between queries and keys, and their masses.

    Attributes:
        {fields}
    """

    kind: PivotKind = option(
        '"fixed"; "input-aware": moved to where the keys of the sample are (`PivotPooling`); "found": the centres of '
        "groups of the sample's own keys, with nothing to train (`FoundPivots`).",
        "fixed",
        flat="pivots",
    )
    init: PivotInit = option(
        '"unit" draws pivots so that scores over ε deviate by one on unit-variance tokens, for training from scratch; '
        '"small" from N(0, 0.02²), for trained checkpoints; "data" starts as "small" and waits for '
        "`mechanism.pivots.initialize_from`.",
        "unit",
        flat="pivot_init",
    )
    learn_masses: bool = option("learn the masses of the pivots, starting from uniform.", True)
    mass_temperature: float = option("the masses are softmax(logits / mass_temperature).", 1.0)
    steps: int | None = option(
        "how often found pivots are moved to the mean of their keys, 3 by default.", None, flat="pivot_steps"
    )

    def _check(self) -> None:
        require_one_of("pivots", self.kind, PivotKind)
        require_one_of("pivot_init", self.init, PivotInit)
        require_moderate("mass_temperature", self.mass_temperature)
        if self.kind == "found":
            if (self.init, self.learn_masses, self.mass_temperature) != ("unit", True, 1.0):
                raise ValueError(
                    'pivots="found" have no start and no learned masses: leave out pivot_init, learn_masses and '
                    "mass_temperature."
                )
            object.__setattr__(self, "steps", FOUND_STEPS if self.steps is None else self.steps)
            require_count("pivot_steps", self.steps)
        elif self.steps is not None:
            raise ValueError(lacks("pivot_steps", self.steps))


@with_field_docs
@dataclass(frozen=True, repr=False)
class Prefix(Part):
    """Special tokens in front of the sequence, which read by softmax.

    Attributes:
        {fields}
    """

    tokens: int = option(
        "this many leading tokens ([CLS], registers) read the whole sequence by softmax; the tokens after them are "
        "coupled among themselves. A sequence may consist of prefix tokens alone, but may not be shorter.",
        flat="prefix_tokens",
    )
    beta: float | None = option(
        "temperature of the prefix rows: by default D^-1/2, with polarised scores 1.", None, flat="prefix_beta"
    )
    polarize: bool = option(
        "let prefix rows score like and opposite signs apart (`PrefixRows`).", False, flat="polarize_prefix"
    )
    powers: tuple[float, float] | None = option(
        "the powers of the like and the opposite scores where they are polarised, (1, ½) by default; the paper does "
        "not state its own.",
        None,
        flat="polarize_powers",
    )

    def _check(self) -> None:
        require_count("prefix_tokens", self.tokens)
        if self.powers is not None and not self.polarize:
            raise ValueError(lacks("polarize_powers", self.powers))
        if self.polarize:  # stated, so that what is saved does not depend on a default
            object.__setattr__(self, "beta", 1.0 if self.beta is None else self.beta)
            object.__setattr__(self, "powers", DEFAULT_POWERS if self.powers is None else self.powers)
        require_rows(self.beta, self.powers or DEFAULT_POWERS)


@with_field_docs
@dataclass(frozen=True, repr=False)
class LocalConv(Part):
    """A depthwise convolution of the values after the prefix, added to the output.

    Attributes:
        {fields}
    """

    kind: ConvKind = option(
        'add a depthwise convolution of the values after the prefix: "1d" along the sequence, "2d" on the grid.',
        flat="local_conv",
    )
    size: int = option("width of that convolution, odd.", 3, flat="kernel_size")
    sharing: ConvSharing = option(
        'its filters: "none" has one per channel of each head, "heads" the same in every head.',
        "none",
        flat="conv_sharing",
    )

    def _check(self) -> None:
        require_one_of("conv_sharing", self.sharing, ConvSharing)
        require_convolution(self.kind, self.size)


@with_field_docs
@dataclass(frozen=True, repr=False)
class Window(Part):
    """Neighbours that every token after the prefix reads by softmax.

    Attributes:
        {fields}
    """

    kind: WindowKind = option(
        "let the tokens after the prefix read the prefix and their neighbours by softmax, and transport the rest of "
        'their rows (`NearKeys`): "1d" along the sequence, "2d" on the grid.',
        flat="window",
    )
    size: int = option("width of that window, odd.", 3, flat="window_size")

    def _check(self) -> None:
        require_window(self.kind, self.size)


@with_field_docs
@dataclass(frozen=True, repr=False)
class Content(Part):
    """Keys that a query reads by softmax because of what they are: those of its heaviest groups.

    Attributes:
        {fields}
    """

    groups: int = option(
        "let a query read the keys of so many of its heaviest found groups by softmax, beside its window.",
        flat="content",
    )
    most: int = option("at most so many keys of each of these groups, the first ones.", 64, flat="content_most")

    def _check(self) -> None:
        require_count("content", self.groups)
        require_count("content_most", self.most)
