"""A second, independent reading of ListOps: recursive descent over the text, one expression at a time.

`PYTHONPATH=src:tests python -m support.listops --expressions 100000 --original test_d20s.tsv` compares it with the
generator and with the answers of a released file.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

from lotformer_paper.data.longrange import listops

_OPERATIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda arguments: int(statistics.median(arguments)),
    "[SM": lambda arguments: sum(arguments) % 10,
}


def evaluate(expression: str) -> int:
    """The value of an expression; anything malformed is an error."""
    symbols = iter(expression.split())
    value = _value(next(symbols), symbols)
    assert next(symbols, None) is None, "symbols after the end of the expression"
    return value


def _value(symbol: str, rest: Iterator[str]) -> int:
    if symbol.isdigit():
        return int(symbol)
    arguments = []
    while (following := next(rest)) != "]":
        arguments.append(_value(following, rest))
    return _OPERATIONS[symbol](arguments)


def depth(expression: str) -> int:
    """Levels of nesting; a digit alone has one."""
    deepest = level = 1
    for symbol in expression.split():
        level += {"]": -1}.get(symbol, 1 if symbol.startswith("[") else 0)
        deepest = max(deepest, level)
    return deepest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expressions", type=int, default=100_000)
    parser.add_argument("--original", type=Path, help="A released TSV file to compare as well.")
    arguments = parser.parse_args()
    source = listops.ListOps(seed=1, sizes={"train": arguments.expressions})
    checked = wrong = 0
    for number in range(source.shards()["train"]):
        shard = source.make("train", number)
        for tokens, answer in zip(shard.documents, shard.labels, strict=True):
            checked += 1
            wrong += evaluate(listops.decode(tokens)) != answer
    print(f"generated: {checked} expressions, {wrong} answers differ")
    if arguments.original is not None:
        rows = list(listops.read_tsv(arguments.original))
        wrong = sum(evaluate(listops.decode(tokens)) != answer for tokens, answer in rows)
        print(f"{arguments.original.name}: {len(rows)} expressions, {wrong} answers differ")


if __name__ == "__main__":
    main()
