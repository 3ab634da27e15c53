"""Retrieval sets in BEIR's layout: corpus.jsonl, queries.jsonl and qrels/{train,test}.tsv; and nDCG."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lotformer.reading import json_lines, read_lines, shown


@dataclass(frozen=True)
class RetrievalSet:
    """Documents and queries by id, and how relevant documents are to queries, by split."""

    documents: dict[str, str]
    queries: dict[str, str]
    relevance: dict[str, dict[str, dict[str, float]]]

    def searched(self, count: int) -> list[str]:
        """Ids of at most `count` documents, all that are relevant in the test among them, the others evenly spread."""
        wanted = {d for judged in self.relevance["test"].values() for d, grade in judged.items() if grade > 0}
        others = [name for name in self.documents if name not in wanted]
        room = min(max(0, count - len(wanted)), len(others))
        chosen = wanted | {others[i * len(others) // room] for i in range(room)}
        return [name for name in self.documents if name in chosen]


def files(folder: Path) -> list[Path]:
    """The files of a set, or an error that names what is missing."""
    names = ("corpus.jsonl", "queries.jsonl", "qrels/train.tsv", "qrels/test.tsv")
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing: expected {', '.join(names)}, as BEIR has them.")
    return [folder / name for name in names]


def load(folder: Path) -> RetrievalSet:
    """Titles are put before the texts of documents; a header of qrels is optional, and so is TREC's second column.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a row is not as BEIR has it, or names an id twice or one that is not there; with file and line.
    """
    corpus, queries, *splits = files(folder)
    documents = dict(_texts(corpus))
    asked = dict(_texts(queries))
    relevance = {path.stem: _judged(path, asked, documents) for path in splits}
    return RetrievalSet(documents, asked, relevance)


def ndcg(similarities: Tensor, relevance: Tensor, depth: int = 10) -> float:
    """Mean over queries of `DCG / ideal DCG` among the first `depth`; both `(queries, documents)`.

    DCG sums `relevance / log2(1 + place)`, places from 1. Queries without a relevant document do not count, and grades
    below zero, TREC's for junk, count as zero.
    """
    relevance = relevance.double().clamp_min(0)
    depth = min(depth, similarities.shape[1])
    discount = 1 / torch.arange(2, depth + 2, dtype=torch.double).log2()
    order = similarities.argsort(dim=-1, descending=True, stable=True)[:, :depth]
    gained = (relevance.gather(1, order) * discount).sum(-1)
    ideal = (relevance.sort(dim=-1, descending=True).values[:, :depth] * discount).sum(-1)
    return float((gained / ideal)[ideal > 0].mean())


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Id and text of each row of a corpus, with its title if it has one, or of queries."""
    lines: dict[str, int] = {}
    for line, row in json_lines(path):
        name, text = _field(row, "_id", path, line), _field(row, "text", path, line)
        title = _field(row, "title", path, line) if row.get("title") is not None else ""
        if name in lines:
            raise ValueError(f"{path}, line {line}: the id {name!r} is taken by line {lines[name]}.")
        lines[name] = line
        yield name, f"{title} {text}".strip() if "title" in row else text


def _field(row: Mapping[str, Any], name: str, path: Path, line: int) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        what = shown(repr(value)) if name in row else "nothing"
        raise ValueError(f'{path}, line {line}: expected "{name}" to be a text, got {what}.')
    return value


def _judged(path: Path, queries: Mapping[str, str], documents: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Grades by query and document."""
    judged: dict[str, dict[str, float]] = {}
    for line, text in enumerate(read_lines(path), 1):
        # between tabs ids may hold blanks; TREC's own files have blanks between the columns
        columns = text.split("\t") if "\t" in text else text.split()
        if line == 1 and columns[-1:] == ["score"]:
            continue
        query, *iteration, document, grade = columns if len(columns) in (3, 4) else ("", "", "")
        # some copies keep TREC's second column, a zero, between blanks beside either id
        query = query if query in queries else re.sub(r"\s+0\s*$", "", query)
        document = document if document in documents else re.sub(r"^\s*0\s+", "", document)
        if not query or iteration not in ([], ["0"], ["Q0"]) or not _finite(grade):
            expected = "expected query, document and grade between tabs"
            raise ValueError(f"{path}, line {line}: {expected}, got {shown(text)}.")
        for name, known, what in ((query, queries, "query"), (document, documents, "document")):
            if name not in known:
                raise ValueError(f"{path}, line {line}: there is no {what} with the id {name!r}.")
        if document in judged.setdefault(query, {}):
            raise ValueError(f"{path}, line {line}: the document {document!r} is judged twice for the query {query!r}.")
        judged[query][document] = float(grade)
    if not judged:
        raise ValueError(f"{path}: expected judgements, found none.")
    return judged


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
