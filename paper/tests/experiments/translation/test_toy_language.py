"""A toy language is learned, translated and survives a conversion; a run that was interrupted ends the same."""

from __future__ import annotations

import pytest
import torch

from lotformer.training.run import train
from lotformer_paper.experiments.translation import conversions
from lotformer_paper.experiments.translation.decoding import load, translate
from lotformer_paper.experiments.translation.rows import ROWS
from lotformer_paper.experiments.translation.task import MODEL, Translation
from support import toy_language


def exact(model, tokenizer, pairs) -> float:
    made = translate(model, tokenizer, [source for source, _ in pairs], beams=2)
    return sum(text == target for text, (_, target) in zip(made, pairs, strict=True)) / len(pairs)


@pytest.mark.long
@pytest.mark.parametrize(("backbone", "steps"), [("transformer", 400), ("diff", 300)])
def test_a_toy_language_is_learned_and_survives_conversion(tmp_path, monkeypatch, backbone, steps):
    from lotformer_paper.models import translation

    monkeypatch.setitem(translation.SIZES, "tiny", translation.Size(2, 64, 128, 2, dropout=0.0))
    toy_language.write(tmp_path)
    pairs = toy_language.pairs(tmp_path)
    task = Translation(toy_language.settings(backbone=backbone, steps=steps, lr=3e-3, warmup_steps=40), pairs)
    train(task, tmp_path / "run")
    model, tokenizer = load(task.export(tmp_path / "run"))
    assert exact(model, tokenizer, pairs["test"]) > 0.95

    before = conversions.snapshot(model)
    conversions.swap(model, ROWS["lot-aware"], seed=0)
    batches = conversions.batches_of(model, tokenizer, pairs["train"][:600], 384, seed=0)
    conversions.calibrate(model, batches, steps=20, seed=0)
    conversions.require_untouched(model, before)
    conversions.finetune(model, batches, steps=20, lr=5e-4, mechanism_lr=1e-3, label_smoothing=0.0, seed=0)
    assert exact(model, tokenizer, pairs["test"]) > 0.95
    with pytest.raises(RuntimeError, match="untouched"):
        conversions.require_untouched(model, before)  # fine-tuning moves everything


class _Interrupted(Exception):
    pass


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path):
    toy_language.write(tmp_path, train=120, scored=12)
    pairs = toy_language.pairs(tmp_path)
    task = Translation(toy_language.settings(steps=6, save_every=2, dropout=0.2), pairs)

    class Killer:
        def started(self, step, steps): ...
        def evaluated(self, step, metrics): ...
        def ended(self): ...
        def stepped(self, progress):
            if progress.step == 5:
                raise _Interrupted

    whole = train(task, tmp_path / "whole")
    with pytest.raises(_Interrupted):
        train(task, tmp_path / "cut", listeners=[Killer()])
    resumed = train(task, tmp_path / "cut", resume=True)
    assert resumed.losses == whole.losses
    ours, theirs = (torch.load(tmp_path / run / "best.pt")["state"]["weights"] for run in ("whole", "cut"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_one_sentence_is_translated_as_among_others(tmp_path):
    toy_language.write(tmp_path, train=120, scored=12)
    pairs = toy_language.pairs(tmp_path)
    task = Translation(toy_language.settings(steps=2), pairs)
    train(task, tmp_path / "run")
    model, tokenizer = load(task.export(tmp_path / "run"))
    assert (tmp_path / "run" / MODEL / "tokenizer.json").is_file()
    texts = ["ba de", "", "gi ko lu", "ma  ", "ba de gi ko lu"]
    together = translate(model, tokenizer, texts)
    one_by_one = [translate(model, tokenizer, [text])[0] for text in texts]
    assert translate(model, tokenizer, texts, max_tokens=1) == one_by_one
    assert together[1] == ""
    assert translate(model, tokenizer, []) == []
