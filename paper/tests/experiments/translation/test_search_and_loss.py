"""Beam search against all hypotheses there are, and the loss against its formula."""

from __future__ import annotations

import itertools

import pytest
import torch

from lotformer_paper.experiments.translation.decoding import search
from lotformer_paper.experiments.translation.scoring import score
from lotformer_paper.experiments.translation.task import smoothed_loss
from lotformer_paper.models.translation import build

PAD, EOS = 1, 2


@torch.no_grad()
def best_of_all(model, ids: torch.Tensor, most: int, penalty: float) -> list[int]:
    """Every sequence of tokens that can be said, scored one by one without a cache."""
    words = [token for token in range(model.config.vocab_size) if token not in (PAD, EOS)]
    candidates: list[tuple[float, list[int]]] = []
    for count in range(most):
        for said in itertools.product(words, repeat=count):
            shown = torch.tensor([[EOS, *said]])
            logs = model(input_ids=ids, decoder_input_ids=shown).logits[0].log_softmax(-1)
            closing = 0.0 if count == most - 1 else float(logs[count, EOS])
            total = sum(float(logs[place, token]) for place, token in enumerate(said)) + closing
            candidates.append((total / (count + 1) ** penalty, [*said, EOS]))
    return max(candidates)[1]


@pytest.mark.parametrize("backbone", ["transformer", "diff"])
@pytest.mark.parametrize("penalty", [0.0, 1.0], ids=["sum", "mean"])
def test_a_beam_as_wide_as_everything_finds_the_best_of_all(backbone, penalty):
    torch.manual_seed(3)
    model = build(backbone, "tiny", vocabulary=7, positions=16).eval()
    ids = torch.tensor([[4, 5, 6, 2], [6, 2, 1, 1], [3, 0, 2, 1]])
    real = (ids != PAD).long()
    found = search(model, ids, real, 3, beams=5 * 5 + 5 + 1, length_penalty=penalty)
    lengths = set()
    for row, source, mask in zip(found.tolist(), ids, real.bool(), strict=True):
        said = row[1 : row.index(EOS, 1) + 1]
        assert said == best_of_all(model, source[mask][None], 3, penalty)
        lengths.add(len(said))
    assert lengths


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_label_smoothing_is_fairseqs(smoothing):
    logits = torch.randn(2, 5, 11, dtype=torch.float64)
    labels = torch.randint(2, 11, (2, 5))
    labels[1, 3:] = PAD
    logs, total = logits.log_softmax(-1), 0.0
    for row, place in itertools.product(range(2), range(5)):
        if labels[row, place] != PAD:
            spread = smoothing / (11 - 1)
            nll = -logs[row, place, labels[row, place]]
            total += (1 - smoothing - spread) * nll + spread * -logs[row, place].sum()
    assert float(smoothed_loss(logits, labels, PAD, smoothing)) == pytest.approx(float(total) / 8, rel=1e-6)


def test_scores_carry_their_signature():
    same = score(["a dog runs home now"], ["a dog runs home now"])
    assert (same.bleu, same.chrf) == (pytest.approx(100), pytest.approx(100))
    assert "tok:13a" in same.bleu_signature
    assert "tok:none" in score(["a"], ["a"], tokenized=True).bleu_signature
    assert "version:" in same.chrf_signature
