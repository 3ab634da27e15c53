"""From a trained translation model to one with another encoder attention: swapped, calibrated, fine-tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lotformer import conversion
from lotformer.conversion.hosts.sites import MECHANISM

from ...data.translation.batches import Batch, Collate, EncodedPairs, by_tokens, labels_of
from ...data.translation.lines import Pair
from ..every_length import convert_at_every_length
from .rows import Row
from .task import smoothed_loss

OnStep = Callable[[int, int, float], None]


def swap(model: Any, row: Row, seed: int) -> None:
    """Replace the encoder's self-attention, in place, and make sure that nothing else has changed.

    Raises:
        RuntimeError: a weight beside the new mechanisms has changed, something outside the encoder was converted, or
            the decoder's output on fixed encoder states is no longer the same bit for bit.
    """
    weights, said = snapshot(model), _decoder_output(model)
    torch.manual_seed(seed)
    report = convert_at_every_length(model, row.mechanism, **row.options)
    require_untouched(model, weights)
    elsewhere = [layer.name for layer in report.converted if ".encoder.layers." not in f".{layer.name}"]
    if elsewhere:
        raise RuntimeError(f"outside the encoder's self-attention, {', '.join(elsewhere)} was converted.")
    if not torch.equal(said, _decoder_output(model)):
        raise RuntimeError("the decoder's output on fixed encoder states has changed.")


def snapshot(model: Any) -> dict[str, Tensor]:
    """Copies of all weights but those of mechanisms."""
    own = model.state_dict().items()
    return {name: tensor.detach().clone() for name, tensor in own if f".{MECHANISM}." not in name}


def require_untouched(model: Any, before: Mapping[str, Tensor]) -> None:
    """Every weight of a snapshot is still there, bit for bit, and nothing new but mechanisms.

    Raises:
        RuntimeError: naming what differs.
    """
    now = snapshot(model)
    different = sorted(set(now) ^ set(before)) or [name for name in before if not torch.equal(now[name], before[name])]
    if different:
        raise RuntimeError(f"weights that should be untouched differ: {', '.join(different[:4])}.")


@torch.no_grad()
def _decoder_output(model: Any) -> Tensor:
    """Logits on made-up encoder states: they depend on the decoder and its cross-attention alone."""
    training, generator = model.training, torch.Generator().manual_seed(0)
    model.eval()
    states = torch.randn(2, 5, model.config.d_model, generator=generator).to(model.device, model.dtype)
    shown = torch.randint(0, model.config.decoder_vocab_size, (2, 4), generator=generator).to(model.device)
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], device=model.device)
    logits = model(encoder_outputs=(states,), attention_mask=real, decoder_input_ids=shown).logits
    model.train(training)
    return logits


def calibrate(
    model: Any,
    batches: Iterable[Batch],
    *,
    steps: int,
    seed: int,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> None:
    """Fit the new parameters to what softmax would have returned, from source texts alone; nothing else changes."""
    before = snapshot(model)
    # the encoder is what learns; the decoder only has to run
    only_sources = [{**batch, "decoder_input_ids": batch["decoder_input_ids"][:, :1]} for batch in batches]
    conversion.calibrate(model, only_sources, steps=steps, seed=seed, checkpoint=checkpoint, on_step=on_step)
    require_untouched(model, before)


def finetune(
    model: Any,
    batches: list[Batch],
    *,
    steps: int,
    lr: float,
    mechanism_lr: float,
    label_smoothing: float,
    seed: int,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> None:
    """Train all weights on pairs, by the loss of training; the decoder's attention stays softmax."""
    pad, eos = model.config.pad_token_id, model.config.eos_token_id

    def loss(output: Any, batch: Any) -> Tensor:
        return smoothed_loss(output.logits, labels_of(batch["decoder_input_ids"], pad, eos), pad, label_smoothing)

    conversion.finetune(
        model,
        batches,
        loss=loss,
        steps=steps,
        lr=lr,
        mechanism_lr=mechanism_lr,
        seed=seed,
        checkpoint=checkpoint,
        on_step=on_step,
    )


def batches_of(model: Any, tokenizer: Any, pairs: list[Pair], max_tokens: int, seed: int) -> list[Batch]:
    """All pairs as batches for a model, in the order of one epoch."""
    data = EncodedPairs(pairs, tokenizer, longest=min(1024, max_tokens))
    collate = Collate(model.config.pad_token_id, model.config.decoder_start_token_id)
    return [collate([data[i] for i in batch]) for batch in by_tokens(data.lengths(), max_tokens, seed, 0)]
