"""The configuration of LOT attention: frozen, checked, and nested so that no option stands without its part.

    LOTConfig(rank=64, solver=Newton(), window=Window("1d", 9), prefix=Prefix(1))

The same options as keyword arguments, `rank=64, solver="newton", window="1d", window_size=9, prefix_tokens=1`, become
a configuration in `LOTConfig.from_options`, which refuses an option whose part is missing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, get_type_hints

from ..nn.checks import require_count, require_moderate, require_probability
from ..nn.key_masses import KeyMassKind
from ..ops.backends import names
from ..ops.problem import Balance, Solver
from .config_parts import Content, LocalConv, Newton, Part, Pivots, Prefix, Sinkhorn, Window, flat_name, lacks
from .options import Option, option, plain, require_one_of, with_field_docs

__all__ = [
    "IMAGE_WINDOW",
    "OPTIONS",
    "TEXT_WINDOW",
    "Content",
    "LOTConfig",
    "LocalConv",
    "Newton",
    "Pivots",
    "Prefix",
    "Sinkhorn",
    "Window",
    "without_part",
]


TEXT_WINDOW, IMAGE_WINDOW = 129, 9
"""Width of the window for checkpoints, in tokens along a text and in patches a side. Wider ones take a few percent of
the time of a whole model; what they are worth is in docs/conversion.md."""


@with_field_docs
@dataclass(frozen=True, repr=False)
class LOTConfig(Part):
    """The configuration of LOT attention. The defaults are the paper's; `for_text` and `for_images` suit checkpoints.

    Attributes:
        {fields}
    """

    rank: int = option("number of pivots R, which bounds the rank of the attention matrix; the cost is O(N·R).", 32)
    eps: float = option("entropic regularisation ε, above 0; small is sharp.", 1.0)
    solver: Sinkhorn | Newton = option(
        '"sinkhorn" (`Sinkhorn`) runs a fixed number of sweeps, right at ε ≈ 1; "newton" (`Newton`) solves to `tol`, '
        "right for small ε and for exact column sums.",
        Sinkhorn(),
    )
    scale: float | None = option("factor of the scores, D^-1/2 by default.", None)
    balance: Balance = option(
        'which sums are imposed beside unit rows: "both" is the paper\'s; "keys" keeps the column sums for half the '
        'work, with the masses of the pivots as a prior; "none" imposes nothing and solves nothing.',
        "both",
    )
    learn_eps: bool = option("make ε a parameter, one per head, that starts at `eps`.", False)
    pivots: Pivots = option("the kind, the start and the masses of the pivots (`Pivots`).", Pivots())
    key_masses: KeyMassKind = option(
        '"uniform" is doubly stochastic; "linear" and "query-aware" learn column sums (`KeyMasses`).', "uniform"
    )
    prefix: Prefix | None = option("special tokens that read by softmax (`Prefix`).", None)
    local_conv: LocalConv | None = option("a depthwise convolution of the values (`LocalConv`).", None)
    window: Window | None = option("neighbours read by softmax (`Window`).", None)
    content: Content | None = option("keys of heavy groups read by softmax, with found pivots (`Content`).", None)
    dropout: float = option(
        "probability of dropping a key in training, the same keys for every query of a head, whichever way it reads "
        "them. Local mixing sees all values.",
        0.0,
    )
    softmax_up_to: int = option(
        "inputs of up to so many tokens, padding included, are read by exact softmax, which is faster there; not while "
        "gradients are recorded, nor in an exported model.",
        0,
    )
    backend: str | None = option("None picks the fastest that can run the problem; a name forces it.", None)

    def _check(self) -> None:
        require_count("rank", self.rank)
        require_moderate("eps", self.eps)
        if self.scale is not None:
            require_moderate("scale", self.scale, signed=True)
        require_one_of("balance", self.balance, Balance)
        require_one_of("key_masses", self.key_masses, KeyMassKind)
        require_probability("dropout", self.dropout)
        require_count("softmax_up_to", self.softmax_up_to, least=0)
        known = names()
        if self.backend is not None and self.backend not in known:
            raise ValueError(f"backend must be None or one of {', '.join(map(repr, known))}, got {self.backend!r}.")
        for name, parts in _PARTS.items():
            value = getattr(self, name)
            if not isinstance(value, parts) and not (value is None and name in _OPTIONAL):
                spelled = " or ".join(f"{part.__name__}(…)" for part in parts)
                raise ValueError(f"{name} of a LOTConfig must be {spelled}, got {value!r}.")
        self._check_found()

    def _check_found(self) -> None:
        """Refuse options that found pivots cannot use: their scores are softmax's, their masses those of groups."""
        if self.pivots.kind != "found":
            if self.content is not None:
                raise ValueError(f'content={self.content.groups} reads groups of keys: it needs pivots="found".')
            return
        fixed = {"eps": 1.0, "scale": None, "learn_eps": False, "key_masses": "uniform"}
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f'{name}={getattr(self, name)!r} has no meaning for pivots="found": their scores are softmax\'s, '
                    f"their masses those of groups. Leave it at {value!r}."
                )
        if self.balance not in ("both", "none"):
            raise ValueError(
                'pivots="found" send every key its mass by construction: balance="none" reads as softmax does, "both" '
                "is doubly stochastic."
            )
        if self.balance == "both" and (self.window is not None or self.content is not None):
            raise ValueError(
                'pivots="found" with a window or keys by content impose no sums on queries: give balance="none".'
            )

    @property
    def prefix_tokens(self) -> int:
        """The number of special tokens in front."""
        return 0 if self.prefix is None else self.prefix.tokens

    @classmethod
    def paper(cls, *, mass_temperature: float = 1.0) -> LOTConfig:
        """The paper's attention: doubly stochastic, 32 fixed pivots with learned masses, ε = 1, five Sinkhorn sweeps.

        At ε = 1 five sweeps come close to the exact sums, and unrolled they cost less than an exact solve. Pivots start
        where scores over ε deviate by one, so that they have gradients from the first step. The paper tempers the
        masses of the pivots by task (`mass_temperature`). For training from scratch.
        """
        return cls(pivots=Pivots(mass_temperature=mass_temperature))

    @classmethod
    def for_text(cls) -> LOTConfig:
        """For trained text encoders: transport with a window of 129 tokens; what `convert` gives them.

        Trained heads read neighbours and attention sinks, which no doubly stochastic matrix of low rank imitates: the
        window reads neighbours by softmax, inputs of up to 65 tokens entirely, and query-aware key masses let columns
        sum to what the sinks take. Column sums alone are imposed (`balance="keys"`), for half the work, and exactly,
        since ε is small. Pivots follow the keys of the input and start small, near uniform attention. No prefix: texts
        may be padded on the left, where no position is special.
        """
        return cls(
            eps=0.1,
            solver=Newton(1e-5),
            balance="keys",
            pivots=Pivots("input-aware", "small"),
            key_masses="query-aware",
            window=Window("1d", TEXT_WINDOW),
        )

    @classmethod
    def for_images(cls, special_tokens: int = 1) -> LOTConfig:
        """For trained vision transformers: a window of 9 × 9 patches, and special tokens that read by softmax.

        `special_tokens` counts [CLS], distillation and register tokens in front of the patches: a row that pools must
        take more than one token's worth from a key, which no doubly stochastic row may. The rest is as in `for_text`,
        for the same reasons; this is what `convert` gives images.
        """
        prefix = Prefix(special_tokens) if special_tokens else None
        return replace(cls.for_text(), prefix=prefix, window=Window("2d", IMAGE_WINDOW))

    @classmethod
    def of(cls, config: LOTConfig | None, options: Mapping[str, Any]) -> LOTConfig:
        """The configuration of a call that takes either `config` or keyword arguments.

        Dropout may stand beside a configuration: layers are told theirs by the model around them.
        """
        if config is None:
            return cls.from_options(**options)
        if not isinstance(config, LOTConfig):
            raise TypeError(f"config must be a LOTConfig, got {type(config).__name__}: LOTConfig.from_options(…).")
        others = dict(options)
        dropout = others.pop("dropout", 0.0) or config.dropout
        if others:
            raise TypeError(
                f"config=… holds every option: put {', '.join(others)} into it, "
                "for example by dataclasses.replace(config, rank=64)."
            )
        return config if dropout == config.dropout else replace(config, dropout=dropout)

    @classmethod
    def from_options(cls, **options: Any) -> LOTConfig:
        """The configuration that keyword arguments describe, `window="1d", window_size=9` for `Window("1d", 9)`.

        Raises:
            TypeError: there is no such option.
            ValueError: an option lacks its part, or a value cannot be.
        """
        for name in options.keys() - OPTIONS.keys():
            close = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"unexpected option {name!r}.{hint} Options: {', '.join(OPTIONS)}.")
        if "solver" in options:
            require_one_of("solver", options["solver"], Solver)
        for name in without_part(options):
            raise ValueError(lacks(name, options[name]))
        values = {f.name: options[f.name] for f in fields(cls) if f.name in options and f.name not in _PARTS}
        for name, parts in _PARTS.items():
            part = next((p for p in parts if _is_named(name, p, options)), None)
            if part is not None:
                given = {f.name: options[flat_name(f)] for f in fields(part) if flat_name(f) in options}
                values[name] = part(**given)
        return cls(**values)

    def to_options(self) -> dict[str, Any]:
        """The keyword arguments that describe this configuration, in the order of `OPTIONS`.

        Every option of every part it has is stated, and that there are no others: `window=None`.
        """
        options: dict[str, Any] = {"solver": self.solver.name}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Part):
                options |= {flat_name(inner): getattr(value, inner.name) for inner in fields(value)}
            elif value is None and f.name in _OPTIONAL:
                key, off = _OPTIONAL[f.name]
                options[key] = off
            else:
                options[f.name] = value
        return {name: options[name] for name in OPTIONS if name in options}

    def to_dict(self) -> dict[str, Any]:
        """Plain nested data that JSON can hold; `from_dict` reads it."""
        return _written(self)

    @classmethod
    def from_dict(cls, written: object) -> LOTConfig:
        """Read what `to_dict` has written.

        Raises:
            ValueError: it is something else.
        """
        values = _table("a LOTConfig", cls, written)
        for name, parts in _PARTS.items():
            if values.get(name) is None and (name in _OPTIONAL or name not in values):
                continue
            given = values[name]
            if name == "solver":
                solver: Any = given.get("name") if isinstance(given, dict) else None
                require_one_of("the name of the solver", solver, Solver)
                parts, given = (SOLVERS[solver],), {n: v for n, v in given.items() if n != "name"}
            values[name] = parts[0](**_table(f"the {name} of a LOTConfig", parts[0], given))
        return cls(**values)


SOLVERS: dict[str, type[Sinkhorn] | type[Newton]] = {"sinkhorn": Sinkhorn, "newton": Newton}

_PARTS: dict[str, tuple[type[Part], ...]] = {
    "solver": tuple(SOLVERS.values()),
    "pivots": (Pivots,),
    "prefix": (Prefix,),
    "local_conv": (LocalConv,),
    "window": (Window,),
    "content": (Content,),
}
_OPTIONAL: dict[str, tuple[str, Any]] = {"prefix": ("prefix_tokens", 0), "local_conv": ("local_conv", None),
                                         "window": ("window", None), "content": ("content", 0)}  # fmt: skip
"""Parts that may be missing: the keyword argument that brings each, and its value without one."""


def without_part(options: Mapping[str, Any]) -> list[str]:
    """The keyword arguments that would have no effect, because the part they describe is missing."""
    idle = []
    for name, parts in _PARTS.items():
        for part in parts:
            if _is_named(name, part, options):
                continue
            for f in fields(part):
                flat = flat_name(f)
                # an option that only says what no part says, too, is in nobody's way
                nothing = f.default in (None, False) and options.get(flat) == f.default
                if flat in options and flat != _OPTIONAL.get(name, ("",))[0] and not nothing:
                    idle.append(flat)
    if options.get("pivot_steps") is not None and options.get("pivots") != "found":
        idle.append("pivot_steps")
    powers = options.get("polarize_powers") is not None and not options.get("polarize_prefix", False)
    return [*idle, "polarize_powers"] if powers and "polarize_powers" not in idle else idle


def _is_named(name: str, part: type[Part], options: Mapping[str, Any]) -> bool:
    """True if keyword arguments ask for this part of a configuration."""
    if name == "solver":
        return SOLVERS.get(options.get("solver", "sinkhorn")) is part
    if name not in _OPTIONAL:
        return True
    key, off = _OPTIONAL[name]
    value = plain(options.get(key, off))
    return type(value) is not type(off) or value != off


def _written(part: Part) -> dict[str, Any]:
    written: dict[str, Any] = {"name": part.name} if isinstance(part, Sinkhorn | Newton) else {}
    for f in fields(part):
        value = getattr(part, f.name)
        if isinstance(value, Part):
            value = _written(value)
        written[f.name] = list(value) if isinstance(value, tuple) else value
    return written


def _table(what: str, part: type[Part], written: object) -> dict[str, Any]:
    """The fields of a part as they were written."""
    if not isinstance(written, dict):
        raise ValueError(f"{what} must be a table, got {written!r}.")
    declared = {f.name: f for f in fields(part)}
    if unknown := written.keys() - declared.keys():
        raise ValueError(f"{what} holds {', '.join(declared)}, got {', '.join(map(str, unknown))}.")
    missing = [name for name, f in declared.items() if f.default is MISSING and name not in written]
    if missing:
        raise ValueError(f"{what} must hold {', '.join(missing)}.")
    return dict(written)


def _keyword_arguments() -> dict[str, Option]:
    """Every option as a keyword argument, from the fields of the configuration and of its parts."""
    options: dict[str, Option] = {}
    kinds = get_type_hints(LOTConfig)
    for f in fields(LOTConfig):
        if f.name == "solver":
            options["solver"] = Option(Solver, Sinkhorn.name, f.metadata["text"])
        if f.name not in _PARTS:
            options[f.name] = Option(kinds[f.name], f.default, f.metadata["text"])
        key, off = _OPTIONAL.get(f.name, ("", None))
        for part in _PARTS.get(f.name, ()):
            hints = get_type_hints(part)
            for inner in fields(part):
                name, kind = flat_name(inner), hints[inner.name]
                if name == key:
                    options[name] = Option(kind | None if off is None else kind, off, inner.metadata["text"])
                else:
                    options[name] = Option(kind, inner.default, inner.metadata["text"])
    return options


OPTIONS = _keyword_arguments()
"""The options of LOT attention as keyword arguments: the mechanism and the layer take all of them."""
