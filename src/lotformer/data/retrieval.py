"""Retrieval sets in BEIR's layout: corpus.jsonl, queries.jsonl and qrels/{train,test}.tsv; and nDCG."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


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
    """Titles are put before the texts of documents; a header of qrels is optional, and so is TREC's second column."""
    corpus, queries, *splits = files(folder)
    documents = {row["_id"]: f"{row.get('title', '')} {row['text']}".strip() for row in _rows(corpus)}
    relevance: dict[str, dict[str, dict[str, float]]] = {}
    for path in splits:
        judged = relevance.setdefault(path.stem, {})
        for line in path.read_text(encoding="utf-8").splitlines():
            query, *_, document, grade = line.split()
            if grade.replace(".", "").isdigit():
                judged.setdefault(query, {})[document] = float(grade)
    return RetrievalSet(documents, {row["_id"]: row["text"] for row in _rows(queries)}, relevance)


def ndcg(similarities: Tensor, relevance: Tensor, depth: int = 10) -> float:
    """Mean over queries of `DCG / ideal DCG` among the first `depth`; both `(queries, documents)`.

    DCG sums `relevance / log2(1 + place)`, places from 1. Queries without a relevant document do not count.
    """
    depth = min(depth, similarities.shape[1])
    discount = 1 / torch.arange(2, depth + 2, dtype=torch.double).log2()
    order = similarities.argsort(dim=-1, descending=True, stable=True)[:, :depth]
    gained = (relevance.double().gather(1, order) * discount).sum(-1)
    ideal = (relevance.double().sort(dim=-1, descending=True).values[:, :depth] * discount).sum(-1)
    return float((gained / ideal)[ideal > 0].mean())


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
