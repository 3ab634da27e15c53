"""The recipe of a conversion: one form for memory, config.json and the metadata of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from ..attention.config import LOTConfig, without_part
from .schema import LARGEST_INTEGER, checked_options

VERSION = 3  # since 3, LOT is described by a nested configuration
READABLE = (2, VERSION)  # since 2, keys inside a window do not count as far away


TokenKind = Literal["text", "image", "sound"]
"""Words, patches on a grid, or frames of sound in a row."""


@dataclass(frozen=True)
class Positions:
    """Lengths that a model reads: `trained` as it was, `tokens` with its table interpolated."""

    trained: int
    tokens: int


@dataclass(frozen=True)
class Recipe:
    """Everything that turns a model into the converted one, weights aside; valid by construction.

    Attributes:
        mechanism: a name of `lotformer.attention.names()`. options: its own keyword arguments; for LOT all of them, as
            `LOTConfig.to_options` spells them out.
        layers: names of the converted attention modules, as `model.named_modules()` gives them.
        towers: options that differ where a model has layers of texts and of images: for layers that "text" reaches,
            and for those that "image" patches reach. Found by what stands before a layer, not by its name, so that a
            tower loads from the checkpoint of both.
        positions: how the table of positions was stretched, if it was.
        folded: whether they are in their inference form (`lotformer.fold`).

    Raises:
        ValueError: unknown mechanism, an option it does not take, or a value of the wrong type or of absurd size.
    """

    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    folded: bool = False
    towers: Mapping[TokenKind, Mapping[str, Any]] = field(default_factory=dict)
    positions: Positions | None = None

    def __post_init__(self) -> None:
        options = checked_options(self.mechanism, self.options)
        for kind in self.towers:
            if kind not in get_args(TokenKind):
                raise ValueError(
                    f"a tower of a lotformer recipe reads {' or '.join(get_args(TokenKind))}, got {kind!r}."
                )
        towers = {kind: checked_options(self.mechanism, own) for kind, own in self.towers.items()}
        if self.mechanism == "lot":
            towers = {kind: _effective({**options, **own}).to_options() for kind, own in towers.items()}
            options = _effective(options).to_options()
            towers = {kind: own for kind, own in towers.items() if own != options}
        object.__setattr__(self, "options", options)
        object.__setattr__(self, "towers", towers)

    def options_for(self, tokens: TokenKind | None) -> dict[str, Any]:
        """The options of a layer that such tokens reach; None where that is not known."""
        return {**self.options, **(self.towers.get(tokens, {}) if tokens is not None else {})}

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; `from_dict` reads it."""
        written = {
            "version": VERSION,
            "mechanism": self.mechanism,
            self._key: self._described(self.options),
            "layers": list(self.layers),
        }
        if self.folded:
            written["folded"] = True
        if self.positions is not None:
            written["positions"] = asdict(self.positions)
        if self.towers:
            written["towers"] = {kind: self._described(options) for kind, options in self.towers.items()}
        return written

    @property
    def _key(self) -> str:
        return "config" if self.mechanism == "lot" else "options"

    def _described(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if self.mechanism == "lot":
            return LOTConfig.from_options(**options).to_dict()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}

    @classmethod
    def from_dict(cls, written: object) -> Recipe:
        """Read what `to_dict` has written, or anything else with a clear error."""
        if not isinstance(written, dict):
            raise ValueError(f"a lotformer recipe must be a table, got {written!r}.")
        version = written.get("version")
        if version not in READABLE:
            raise ValueError(
                f"a lotformer recipe of version {' or '.join(map(str, READABLE))} is expected, got version "
                f"{version!r}: the file is not a conversion, or was written by another version of lotformer."
            )
        nested = version == VERSION and written.get("mechanism") == "lot"
        key = "config" if nested else "options"
        if written.keys() - {"folded", "towers", "positions"} != {"version", "mechanism", key, "layers"}:
            raise ValueError(
                f"a lotformer recipe holds version, mechanism, {key} and layers, got {', '.join(map(str, written))}."
            )
        mechanism, options, layers = written["mechanism"], written[key], written["layers"]
        if not isinstance(mechanism, str):
            raise ValueError(f"the mechanism of a lotformer recipe must be a name, got {mechanism!r}.")
        if not isinstance(options, dict):
            raise ValueError(f"the {key} of a lotformer recipe must be a table, got {options!r}.")
        if not isinstance(layers, list) or not layers or not all(isinstance(name, str) for name in layers):
            raise ValueError(f"the layers of a lotformer recipe must be a list of names, got {layers!r}.")
        if version == 2 and options.get("polarize_prefix") and options.get("prefix_beta") is None:
            raise ValueError(
                "a lotformer recipe with polarize_prefix must state prefix_beta: it was made when the default was "
                "head_dim ** -0.5. Write that number into its options."
            )
        folded = written.get("folded", False)
        if not isinstance(folded, bool):
            raise ValueError(f"whether a lotformer recipe is folded must be true or false, got {folded!r}.")
        towers = written.get("towers", {})
        if not isinstance(towers, dict) or not all(isinstance(options, dict) for options in towers.values()):
            raise ValueError(f"the towers of a lotformer recipe must be tables of options, got {towers!r}.")
        if nested:
            options = LOTConfig.from_dict(options).to_options()
            towers = {kind: LOTConfig.from_dict(own).to_options() for kind, own in towers.items()}
        return cls(mechanism, options, tuple(layers), folded, towers, _positions(written.get("positions")))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        try:
            written = json.loads(text)
        except (ValueError, RecursionError) as error:  # nested too deeply
            raise ValueError(f"a lotformer recipe must be JSON: {error}.") from error
        return cls.from_dict(written)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def names(self, layer: str) -> bool:
        """True if the recipe covers a layer, also in a part or an enclosure of the model that was converted.

        The same layer is `encoder.layer.0…` in a body and `bert.encoder.layer.0…` in a model with a head.
        """
        return any(_is_tail(a, b) for name in self.layers for a, b in ((name, layer), (layer, name)))


def _positions(written: object) -> Positions | None:
    if written is None:
        return None
    expected = "the positions of a lotformer recipe must be the tokens trained on and those stretched to"
    if not isinstance(written, dict) or written.keys() != {"trained", "tokens"}:
        raise ValueError(f"{expected}, got {written!r}.")
    numbers = [written["trained"], written["tokens"]]
    if not all(type(number) is int and 0 < number <= LARGEST_INTEGER for number in numbers) or numbers[0] >= numbers[1]:
        raise ValueError(f"{expected}, got {written!r}.")
    return Positions(*numbers)


def _effective(options: Mapping[str, Any]) -> LOTConfig:
    """The configuration of LOT without the options that have no effect, which recipes of version 2 may hold."""
    idle = without_part(options)
    return LOTConfig.from_options(**{name: value for name, value in options.items() if name not in idle})


def _is_tail(end: str, name: str) -> bool:
    return name == end or name.endswith(f".{end}")
