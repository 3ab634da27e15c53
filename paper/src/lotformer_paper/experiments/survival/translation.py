"""A translator: the encoder of an encoder–decoder is converted, and its translations of Multi30k are scored.

It learns from source sentences of the training set, without their translations: its encoder imitates its own states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lotformer.cli.terminal import Listener
from lotformer.conversion.recipe import TokenKind
from lotformer.data.checkpoints import checkpoint_folder, save_like
from lotformer.data.folder import data_folder
from lotformer.data.text import embed, load_tokenizer, text_batches
from lotformer.settings import setting

from ...data.translation.corpora import multi30k, multi30k_files
from ...results.sources import checkpoint_source, files_source
from ..engine import Job
from ..inputs import Checkpoint, DataDir, Variants
from ..translation.scoring import require_sacrebleu, score
from .protocol import ProtocolSettings, jobs, survival


@dataclass(frozen=True)
class TranslationSettings(ProtocolSettings):
    """Languages of Multi30k, and how to translate."""

    calibration_inputs: int = setting(2048, "Source sentences to learn from.", at_least=2)
    batch_size: int = setting(32, "Sentences per step.", at_least=1)
    source: str = setting("fr", "Language to translate from.")
    target: str = setting("en", "Language to translate into.")
    sentences: int = setting(1000, "Sentences of the test set to translate: the first ones.", at_least=1)
    beams: int = setting(4, "Hypotheses kept while translating.", at_least=1)
    max_length: int = setting(128, "Longer sentences are cut to this many tokens.", at_least=8)


class TranslationTask:
    """Marian and its relatives, by way of `AutoModelForSeq2SeqLM`."""

    tokens: TokenKind = "text"

    def __init__(self, checkpoint: Path, folder: Path, settings: TranslationSettings) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        self.tokenizer = load_tokenizer(checkpoint)
        corpus = multi30k(folder, settings.source, settings.target)
        self.files = multi30k_files(folder, settings.source, settings.target)
        self.test = corpus.test[: settings.sentences]
        tested = {ours for ours, _ in corpus.test}
        self.pool = [ours for ours, _ in corpus.train if ours not in tested]
        self.reference: Tensor | None = None

    def load(self, place: Path | None = None) -> Any:
        from transformers import AutoModelForSeq2SeqLM

        return AutoModelForSeq2SeqLM.from_pretrained(str(self.checkpoint if place is None else place))

    def save(self, model: Any, place: Path) -> None:
        save_like(self.checkpoint, model, place)

    def body(self, model: Any) -> nn.Module:
        encoder: nn.Module = model.get_encoder()
        return encoder

    def learned_from(self, count: int) -> list[str]:
        """So many sentences, evenly spread; all if there are fewer."""
        count = min(count, len(self.pool))
        return [self.pool[i * len(self.pool) // count] for i in range(count)]

    def batches(self, count: int) -> list[dict[str, Tensor]]:
        texts, length = self.learned_from(count), self.settings.max_length
        return text_batches(self.tokenizer, texts, batch_size=self.settings.batch_size, max_length=length)

    def test_batches(self) -> list[dict[str, Tensor]]:
        return text_batches(self.tokenizer, [ours for ours, _ in self.test[:64]], batch_size=32)

    @torch.no_grad()
    def scores(self, model: Any, listen: Listener) -> dict[str, float]:
        sources = [ours for ours, _ in self.test]
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        found = [""] * len(sources)
        for start in range(0, len(order), 32):
            listen("translating", start, len(order))
            chunk = order[start : start + 32]
            batch = self.tokenizer([sources[i] for i in chunk], padding=True, return_tensors="pt")
            with self.settings.products():
                made = model.generate(**batch, num_beams=self.settings.beams, max_new_tokens=self.settings.max_length)
            for i, text in zip(chunk, self.tokenizer.batch_decode(made, skip_special_tokens=True), strict=True):
                found[i] = text
        counted = score(found, [theirs for _, theirs in self.test])
        encoder, length = self.body(model), self.settings.max_length
        with self.settings.products():
            states = embed(encoder, self.tokenizer, sources, batch_size=32, max_length=length)
        self.reference = states if self.reference is None else self.reference
        cosine = float((states * self.reference).sum(-1).mean())
        return {"BLEU": counted.bleu, "chrF": counted.chrf, "cosine": cosine}


def plan(
    settings: TranslationSettings,
    listen: Listener,
    checkpoint: Checkpoint,
    data_dir: DataDir = None,
    variants: Variants = "lot-32, lot-64, lot-transport-alone, lot-uniform, sinkformer, espformer",
) -> Iterator[Job]:
    weights = checkpoint_folder(checkpoint)
    task = TranslationTask(weights, data_folder(data_dir, "Multi30k"), settings)
    sources = {"checkpoint": checkpoint_source(weights), "data": files_source("multi30k", task.files)}
    return jobs(task, sources, settings, variants, listen)


EXPERIMENT = survival(
    name="survival-translation",
    about="A translator: BLEU on Multi30k before and after its encoder's attention is converted, without translations.",
    settings=TranslationSettings,
    plan=plan,
    title="sacreBLEU and chrF (% of softmax); mean cosine with the original's encoder states, mean over tokens",
    relative=("BLEU", "chrF"),
    require=require_sacrebleu,
)
