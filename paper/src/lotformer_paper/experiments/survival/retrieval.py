"""A sentence encoder as a retriever (BEIR's SciFact) and on pairs of sentences (STS-B dev).

It learns from claims of the training set and from documents that are not searched or, as whoever indexes a collection
can, from searched ones that answer no test query. Neither test queries nor the sentences of the pairs are among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lotformer.cli.terminal import Listener
from lotformer.conversion.recipe import TokenKind
from lotformer.data import glue
from lotformer.data.checkpoints import checkpoint_folder, save_like
from lotformer.data.folder import data_folder
from lotformer.data.sentence_pairs import SentencePairs
from lotformer.data.text import embed, text_batches
from lotformer.settings import setting

from ...data import retrieval
from ...results.sources import checkpoint_source, files_source
from ..engine import Job
from ..inputs import Checkpoint, DataDir, Variants
from .protocol import EVERYTHING, ProtocolSettings, jobs, survival

_STRUNG = 10  # claims that are about as long as an abstract


@dataclass(frozen=True)
class RetrievalSettings(ProtocolSettings):
    """Texts to learn from and to search among."""

    calibration_inputs: int = setting(1024, "Unlabelled texts to learn from.", at_least=2)
    batch_size: int = setting(16, "Texts per step.", at_least=1)
    documents: int = setting(EVERYTHING, "Documents to search among: the relevant ones, and others up to this number.")
    learned_documents: Literal["unsearched", "irrelevant"] = setting(
        "unsearched", "Documents to learn from: not searched, or to no test query relevant."
    )
    pairs: int = setting(1500, "Pairs of STS-B dev to compare.", at_least=2)
    max_length: int = setting(256, "Longer texts are cut to this many tokens.", at_least=8)


class RetrievalTask:
    """A Hugging Face encoder whose embeddings are means over tokens."""

    tokens: TokenKind = "text"

    def __init__(self, checkpoint: Path, folder: Path, pairs: Path, settings: RetrievalSettings) -> None:
        from transformers import AutoTokenizer

        self.checkpoint, self.settings = checkpoint, settings
        self.tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
        self.set = retrieval.load(folder)
        self.searched = self.set.searched(settings.documents)
        self.pairs = SentencePairs(glue.load(glue.TASKS["stsb"], "dev", pairs)[: settings.pairs])
        self.reference: Tensor | None = None

    def load(self, place: Path | None = None) -> Any:
        from transformers import AutoModel

        return AutoModel.from_pretrained(str(self.checkpoint if place is None else place))

    def save(self, model: Any, place: Path) -> None:
        save_like(self.checkpoint, model, place)

    def body(self, model: nn.Module) -> nn.Module:
        return model

    def learned_from(self, count: int) -> list[str]:
        """Half claims and half documents, each evenly spread.

        Where there are too few documents, claims are strung together to the length of a document: a model that has seen
        short texts alone is not ready for long ones.
        """
        tested = {self.set.queries[name] for name in self.set.relevance["test"]} | set(self.pairs.texts)
        claims = [self.set.queries[name] for name in self.set.relevance["train"]]
        claims = [text for text in dict.fromkeys(claims) if text not in tested]
        if self.settings.learned_documents == "unsearched":
            kept_from = set(self.searched)
        else:
            kept_from = {name for relevant in self.set.relevance["test"].values() for name in relevant}
        documents = [text for name, text in self.set.documents.items() if name not in kept_from]
        short = _spread(claims, count // 2)
        long = _spread(documents, count - len(short))
        return short + long + _strung(claims, count - len(short) - len(long))

    def batches(self, count: int) -> list[dict[str, Tensor]]:
        texts, length = self.learned_from(count), self.settings.max_length
        return text_batches(self.tokenizer, texts, batch_size=self.settings.batch_size, max_length=length)

    def test_batches(self) -> list[dict[str, Tensor]]:
        texts = [self.set.documents[name] for name in self.searched[:8]] + self.pairs.texts[:24]
        return text_batches(self.tokenizer, texts, batch_size=8, max_length=self.settings.max_length)

    def scores(self, model: nn.Module, listen: Listener) -> dict[str, float]:
        queries = [name for name in self.set.relevance["test"] if name in self.set.queries]
        listen("embedding documents", 0, 2)
        found = self._embed(model, [self.set.documents[name] for name in self.searched])
        listen("embedding queries and pairs", 1, 2)
        asked = self._embed(model, [self.set.queries[name] for name in queries])
        judged = self.set.relevance["test"]
        relevance = torch.tensor([[judged[q].get(d, 0.0) for d in self.searched] for q in queries])
        with self.settings.products():
            pairs = self.pairs.embed(model, self.tokenizer, max_length=self.settings.max_length)
        everything = torch.cat([found, asked, pairs.flatten(0, 1)])
        self.reference = everything if self.reference is None else self.reference
        return {
            "nDCG@10": retrieval.ndcg(asked @ found.T, relevance),
            "STS-B": self.pairs.spearman(pairs),
            "cosine": float((everything * self.reference).sum(-1).mean()),
        }

    def _embed(self, model: nn.Module, texts: list[str]) -> Tensor:
        with self.settings.products():
            return embed(model, self.tokenizer, texts, batch_size=16, max_length=self.settings.max_length)


def _strung(texts: list[str], count: int) -> list[str]:
    """So many texts of several each, no two alike in their order."""
    return [" ".join(texts[(i + 7 * j) % len(texts)] for j in range(_STRUNG)) for i in range(count if texts else 0)]


def _spread(texts: list[str], count: int) -> list[str]:
    count = max(0, min(count, len(texts)))
    return [texts[i * len(texts) // count] for i in range(count)]


def plan(
    settings: RetrievalSettings,
    listen: Listener,
    checkpoint: Checkpoint,
    data_dir: DataDir = None,
    variants: Variants = "lot-32, lot-64, lot-128, lot-transport-alone, lot-uniform",
) -> Iterator[Job]:
    folder = data_folder(data_dir, f"scifact in BEIR's layout and {glue.WANTED}")
    weights, stsb = checkpoint_folder(checkpoint), glue.TASKS["stsb"]
    sources = {
        "checkpoint": checkpoint_source(weights),
        "data": files_source("scifact", retrieval.files(folder / "scifact")),
        "pairs": files_source(f"glue/{stsb.folder}", glue.files(stsb, folder)),
    }
    return jobs(RetrievalTask(weights, folder / "scifact", folder, settings), sources, settings, variants, listen)


EXPERIMENT = survival(
    name="survival-retrieval",
    about="A sentence encoder: SciFact and STS-B before and after its attention is converted, without labels.",
    settings=RetrievalSettings,
    plan=plan,
    title="nDCG@10 and Spearman (% of softmax); mean cosine with the original's embeddings",
    relative=("nDCG@10", "STS-B"),
)
