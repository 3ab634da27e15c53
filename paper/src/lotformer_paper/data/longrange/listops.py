"""ListOps: nested operations on digits, `[MAX 4 [MED 1 5 9 ] 7 ]`, whose value is a digit.

Trees are drawn as the published generator draws them: a node is an operator with probability 1/4 above the maximal
depth, with 2 to 10 arguments, and a digit otherwise; expressions of other lengths are rejected. Here thousands of trees
grow at once, one level at a time, so that rejecting 99 % of them costs seconds instead of hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lotformer.data.contents import sha256
from lotformer.reading import shown, table

from .store import Shard, Tokens

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
SYMBOLS = ("", *OPERATORS, CLOSE, *"0123456789")
"""Token id → symbol, the same on every machine; 0 is padding."""

IDS = {symbol: number for number, symbol in enumerate(SYMBOLS) if symbol}
_DIGITS = set("0123456789")
_FIRST_OPERATOR, _CLOSE, _ZERO = IDS[OPERATORS[0]], IDS[CLOSE], IDS["0"]

SIZES: Mapping[str, int] = {"train": 96_000, "dev": 2_000, "test": 2_000}
_PER_SHARD = 1_000
_AT_ONCE = 1_000  # trees that grow together

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ListOps:
    """Generated expressions of between `shortest` and `longest` tokens (exclusive, operators and brackets counted).

    Args:
        brackets: keep the closing brackets. Without them the tree cannot be told from the sequence; that is how the
            published pipelines read the task (their tokenizer drops what is not alphanumeric).
    """

    seed: int = 0
    brackets: bool = True
    shortest: int = 500
    longest: int = 2000
    max_depth: int = 10
    max_args: int = 10
    sizes: Mapping[str, int] = field(default_factory=lambda: dict(SIZES))

    task: ClassVar[str] = "listops"
    aliases: ClassVar[Mapping[str, str]] = {}

    def describe(self) -> dict[str, Any]:
        return {"task": self.task, "source": "generated", **asdict(self)}

    def shards(self) -> dict[str, int]:
        return {split: -(-size // _PER_SHARD) for split, size in self.sizes.items()}

    def make(self, split: str, number: int) -> Shard:
        first = number * _PER_SHARD
        count = min(_PER_SHARD, self.sizes[split] - first)
        rng = np.random.default_rng([self.seed, list(self.sizes).index(split), number])
        documents: list[Tokens] = []
        labels: list[int] = []
        while len(documents) < count:
            expressions, answers = grow(
                rng, _AT_ONCE, shortest=self.shortest, longest=self.longest, depth=self.max_depth, args=self.max_args
            )
            documents += expressions
            labels += answers
        kept = documents[:count] if self.brackets else [without_brackets(document) for document in documents[:count]]
        return Shard.of_single(kept, labels[:count], first)


@dataclass(frozen=True)
class ListOpsFiles:
    """The released files `basic_{train,val,test}.tsv`, whose columns are Source and Target."""

    folder: Path
    brackets: bool = True

    task: ClassVar[str] = "listops-released"
    aliases: ClassVar[Mapping[str, str]] = {}

    def describe(self) -> dict[str, Any]:
        checksums = {split: sha256(self._file(split)) for split in SIZES}
        return {"task": self.task, "source": "tsv", "brackets": self.brackets, "checksums": checksums}

    def shards(self) -> dict[str, int]:
        return dict.fromkeys(SIZES, 1)

    def make(self, split: str, number: int) -> Shard:
        documents, labels = zip(*read_tsv(self._file(split)), strict=True)
        kept = documents if self.brackets else [without_brackets(document) for document in documents]
        return Shard.of_single(kept, labels, 0)

    def _file(self, split: str) -> Path:
        path = self.folder / f"basic_{'val' if split == 'dev' else split}.tsv"
        if not path.is_file():
            raise FileNotFoundError(f"no ListOps {split} set: expected {path}.")
        return path


def read_tsv(path: Path) -> Iterator[tuple[Tokens, int]]:
    """Expressions with their answers, from the arena's files (Source, Target) or the original ones (answer first).

    Raises:
        ValueError: a row is anything else, with its line, or there is none.
    """
    found = False
    for number, row in table(path):
        if number == 1 and row == ["Source", "Target"]:
            continue
        where = f"{path}, line {number}"
        if len(row) != 2 or not {row[0], row[1]} & _DIGITS:
            what = shown("\t".join(row))
            raise ValueError(f"{where}: expected an expression and a digit separated by a tab, got {what}.")
        text, answer = (row[1], row[0]) if row[0] in _DIGITS and len(row[1]) > 1 else row
        try:
            tokens = encode(text)
        except KeyError as error:
            raise ValueError(f"{where}: {error} is not a symbol of ListOps.") from None
        if len(tokens) == 0 or np.sum(tokens == _CLOSE) != np.sum(tokens < _CLOSE):
            raise ValueError(f"{where}: expected as many closing brackets as operators, got {shown(text)}.")
        found = True
        yield tokens, int(answer)
    if not found:
        raise ValueError(f"{path}: expected expressions, found none.")


def encode(text: str) -> Tokens:
    """Token ids of an expression; parentheses, which only group binary trees, are dropped."""
    return np.array([IDS[symbol] for symbol in text.split() if symbol not in "()"], dtype=np.uint8)


def decode(tokens: Sequence[int] | Tokens) -> str:
    """The expression as text."""
    return " ".join(SYMBOLS[token] for token in tokens)


def without_brackets(tokens: Tokens) -> Tokens:
    """An expression as the published tokenizer leaves it."""
    return tokens[tokens != _CLOSE]


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth of all trees, siblings next to each other.

    `arguments` is 0 for digits; `kind` is the operator's index, or the digit.
    """

    tree: _Ints
    arguments: _Ints
    kind: _Ints


def grow(
    rng: np.random.Generator, trees: int, *, shortest: int, longest: int, depth: int, args: int
) -> tuple[list[Tokens], list[int]]:
    """Draw `trees` random trees; the expressions that are long enough and not too long, with their answers."""
    levels: list[_Level] = []
    tree = np.arange(trees)
    length = np.zeros(trees, dtype=np.int64)
    for level in range(1, depth + 1):
        operator = (rng.random(len(tree)) < 0.25) & (level < depth)
        arguments = np.where(operator, rng.integers(2, args + 1, len(tree)), 0)
        kind = np.where(operator, rng.integers(len(OPERATORS), size=len(tree)), rng.integers(10, size=len(tree)))
        levels.append(_Level(tree, arguments, kind))
        length += np.bincount(tree, weights=1 + operator, minlength=trees).astype(np.int64)
        tree = np.repeat(tree, arguments)
        tree = tree[length[tree] < longest]  # a tree that is too long already need not grow
        if len(tree) == 0:
            break
    accepted = (length > shortest) & (length < longest)
    return _written([_only(level, accepted) for level in levels], np.flatnonzero(accepted))


def _only(level: _Level, accepted: npt.NDArray[np.bool_]) -> _Level:
    kept = accepted[level.tree]
    return _Level(level.tree[kept], level.arguments[kept], level.kind[kept])


def _written(levels: list[_Level], accepted: _Ints) -> tuple[list[Tokens], list[int]]:
    """Values and lengths from the leaves up, then positions from the root down."""
    values, lengths = [np.empty(0, np.int64)] * len(levels), [np.empty(0, np.int64)] * len(levels)
    for depth in reversed(range(len(levels))):
        level = levels[depth]
        values[depth], lengths[depth] = level.kind.copy(), np.ones(len(level.kind), np.int64)
        operator = level.arguments > 0
        if operator.any():
            starts = np.cumsum(level.arguments[operator]) - level.arguments[operator]
            values[depth][operator] = _evaluated(level.kind[operator], values[depth + 1], starts)
            lengths[depth][operator] = 2 + np.add.reduceat(lengths[depth + 1], starts)
    if len(accepted) == 0:
        return [], []
    ends = np.cumsum(lengths[0])
    text = np.empty(ends[-1], dtype=np.uint8)
    position = ends - lengths[0]
    for depth, level in enumerate(levels):
        operator = level.arguments > 0
        text[position] = np.where(operator, _FIRST_OPERATOR, _ZERO) + level.kind
        text[position[operator] + lengths[depth][operator] - 1] = _CLOSE
        if not operator.any():
            break
        below = lengths[depth + 1]
        before = np.cumsum(below) - below  # tokens of all nodes to the left on that level
        first = np.cumsum(level.arguments[operator]) - level.arguments[operator]
        position = np.repeat(position[operator] + 1 - before[first], level.arguments[operator]) + before
    return np.split(text, ends[:-1]), values[0].tolist()


def _evaluated(operators: _Ints, values: _Ints, starts: _Ints) -> _Ints:
    """The value of every operator over its arguments, `values[starts[i] : starts[i + 1]]`."""
    counts = np.diff(starts, append=len(values))
    owner = np.repeat(np.arange(len(starts)), counts)
    ordered = values[np.lexsort((values, owner))]
    median = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) // 2
    by_operator = (ordered[starts], ordered[starts + counts - 1], median, np.add.reduceat(values, starts) % 10)
    return np.choose(operators, by_operator)
