"""Translation as a task of the training loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lotformer.files import new_folder
from lotformer.training import checkpoints
from lotformer.training.loader import LoaderStream
from lotformer.training.run import BEST
from lotformer.training.stream import TrainingStream
from lotformer.training.task import Sums
from lotformer.training.teams import Process

from ...data.translation.batches import Batch, Collate, EncodedPairs, by_tokens, labels_of
from ...data.translation.sets import TranslationSet
from ...models import translation as models
from .decoding import translate
from .scoring import require_sacrebleu, score
from .settings import TranslationSettings

MODEL = "model"
"""The folder of a run that holds the best weights as a checkpoint of transformers, with the tokenizer."""


class Translation:
    """Cross-entropy of the next token; judged by BLEU of validation sentences translated with beam search."""

    name, metric, higher_is_better = "translation", "bleu", True

    def __init__(self, settings: TranslationSettings, pairs: TranslationSet) -> None:
        require_sacrebleu()
        self.settings, self.pairs, self.tokenizer = settings, pairs, pairs.tokenizer

    def build_model(self) -> nn.Module:
        return build_model(self.settings, self.tokenizer)

    def stream(self, process: Process) -> TrainingStream:
        s, data = self.settings, EncodedPairs(self.pairs["train"], self.tokenizer)
        batches = partial(by_tokens, data.lengths(), s.max_tokens // s.accumulate, s.seed, max_sentences=s.part_size)
        return LoaderStream(
            data,
            lambda epoch: batches(epoch=epoch),
            seed=s.seed,
            process=process,
            collate=Collate(self.tokenizer.pad_token_id, self.tokenizer.eos_token_id),
            workers=s.workers,
            described=f"{self.pairs.folder.name}, {self.pairs.fingerprint}",
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(**batch, use_cache=False).logits
        labels = labels_of(batch["decoder_input_ids"], self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return smoothed_loss(logits, labels, self.tokenizer.pad_token_id, self.settings.label_smoothing)

    def evaluate(self, model: nn.Module, process: Process) -> Sums:
        """BLEU of a whole set is no sum over its parts: the first process translates, the others wait."""
        if process.index:
            return {"bleu": (0.0, 0.0)}
        pairs = self.pairs["valid"]
        count = min(len(pairs), self.settings.evaluated or len(pairs))
        chosen = [pairs[i * len(pairs) // count] for i in range(count)]
        made = translate(model, self.tokenizer, [source for source, _ in chosen], beams=self.settings.beams)
        return {"bleu": (score(made, [target for _, target in chosen], tokenized=self.settings.tokenized).bleu, 1.0)}

    def export(self, run: Path) -> Path:
        """The best weights of a finished run as a checkpoint of transformers, beside it; returns the folder."""
        best = checkpoints.read(run / BEST)["state"]
        model: Any = self.build_model()
        model.load_state_dict(best["weights"])
        with new_folder(run / MODEL) as draft:
            model.save_pretrained(draft)
            self.tokenizer.save_pretrained(draft)
        return run / MODEL


def smoothed_loss(logits: Tensor, labels: Tensor, pad: int, smoothing: float) -> Tensor:
    """fairseq's label-smoothed cross-entropy, mean over real tokens.

        (1 − ε − ε / (V−1)) (−log p_y) + ε / (V−1) Σ_v (−log p_v)

    The target has the weight 1 − ε, every other token ε / (V−1). PyTorch spreads its share over all V tokens, so it
    is asked for ε V / (V−1).

    Args:
        logits: `(B, M, V)`. labels: `(B, M)`, with `pad` where there is nothing to say.
    """
    classes = logits.shape[-1]
    share = smoothing * classes / (classes - 1)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=pad, label_smoothing=share)


def build_model(settings: TranslationSettings, tokenizer: Any) -> Any:
    """The model of the settings for a vocabulary."""
    return models.build(
        settings.backbone,
        settings.size,
        vocabulary=len(tokenizer),
        pad=tokenizer.pad_token_id,
        eos=tokenizer.eos_token_id,
        bos=tokenizer.bos_token_id,
        dropout=settings.dropout,
    )
