"""The demo itself: convert MiniLM, calibrate, fine-tune, and measure after every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import conversion
from ..attention.lot import LOT
from ..attention.softmax import SoftmaxAttention
from ..conversion.hosts.sites import mechanism_of, require_converted, transporting
from ..conversion.learning.activations import Activations, Attended
from ..conversion.learning.objectives import dense
from ..conversion.measuring.couplings import CouplingQuality
from ..conversion.measuring.fidelity import Fidelity, fidelity
from ..data import glue, minilm
from ..data.checkpoints import save_like
from ..data.prose import python_reference
from ..data.sentence_pairs import SentencePairs
from ..data.text import embed, text_batches
from ..settings import Settings, setting
from .speed import Speed, compare_speed

Listener = Callable[[str, int, int], None]
"""Called with what is being done, how far it is, and how far it will go."""

LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384)
SECOND_BEST: dict[str, Any] = {"pivots": "fixed"}
PASSAGE = (
    "The value of the expression is computed first, and then it is bound to the name on the left. If the name was "
    "bound before, the old value is given up, and it is gone as soon as nothing else refers to it. A name that is "
    "bound anywhere in a function belongs to the function as a whole, unless it is declared to live outside. Whoever "
    "reads it before it is bound gets an error, however often the same name occurs in the module around the function."
)
_BATCH = 16  # passages: fewer steps would see all of them with twice as many


@dataclass(frozen=True)
class DemoSettings(Settings):
    """The budget of the demo."""

    rank: int = setting(32, "Pivots per head.", at_least=1)
    steps: int = setting(120, "Steps of calibration.", at_least=1)
    finetune_steps: int = setting(80, "Steps of fine-tuning without labels; 0 for none.", at_least=0)
    longest: int = setting(LENGTHS[-1], "Longest text in the comparison of speed, in tokens.", at_least=LENGTHS[0])
    seed: int = setting(0, "Random seed.")


@dataclass(frozen=True)
class Stage:
    """The converted model at one point of its way."""

    name: str
    fidelity: Fidelity
    coupling: CouplingQuality
    seconds: float
    sts_recovered: float | None = None


@dataclass(frozen=True)
class Heads:
    """One attention head on one text, before and after, `(tokens, tokens)` each."""

    layer: int
    head: int
    tokens: list[str]
    softmax: Tensor
    converted: Tensor


@dataclass(frozen=True)
class DemoResult:
    """Everything the report shows."""

    conversion: conversion.ConversionReport
    stages: list[Stage]
    second_best: Stage
    losses: tuple[float, ...]
    speeds: list[Speed]
    heads: list[Heads]
    saved: Path
    calibration_texts: int
    held_back_texts: int
    sts_softmax: float | None


def run(
    folder: Path,
    settings: DemoSettings,
    *,
    data: Path | None = None,
    listen: Listener = lambda what, now, total: None,
) -> DemoResult:
    """Run all stages and save the converted model into `folder`."""
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(settings.seed)
    listen("getting the weights", 0, 1)
    source = minilm.weights()
    tokenizer = AutoTokenizer.from_pretrained(str(source))
    original = AutoModel.from_pretrained(str(source)).eval()
    model = copy.deepcopy(original)
    prose = python_reference()
    batches = text_batches(tokenizer, prose.calibration, batch_size=_BATCH)
    judge = _Judge(original, tokenizer, prose.held_back, data)

    report = conversion.convert(model, "lot", rank=settings.rank)
    listen("measuring the fresh conversion", 0, 1)
    stages = [judge.stage("only converted", model, 0.0)]
    calibrated = _calibrated(model, batches, settings, listen)
    stages.append(judge.stage("calibrated", model, calibrated.seconds))
    if settings.finetune_steps:
        tuned = conversion.finetune(
            model,
            batches,
            teacher=original,
            steps=settings.finetune_steps,
            seed=settings.seed,
            on_step=lambda now, total, _: listen("fine-tuning without labels", now, total),
        )
        stages.append(judge.stage("fine-tuned", model, tuned.seconds))

    other = copy.deepcopy(original)
    conversion.convert(other, "lot", rank=settings.rank, **SECOND_BEST)
    seconds = _calibrated(other, batches, settings, listen).seconds
    second_best = judge.stage("second best: fixed pivots, calibrated", other, seconds)

    saved = folder / "all-MiniLM-L6-v2-lot"
    save_like(source, model, saved)
    lengths = tuple(length for length in LENGTHS if length <= settings.longest)
    listen("comparing speed", 0, len(lengths))
    speeds = compare_speed(
        original,
        model.eval(),
        lengths,
        on_length=lambda speed: listen("comparing speed", lengths.index(speed.tokens) + 1, len(lengths)),
    )
    return DemoResult(
        conversion=report,
        stages=stages,
        second_best=second_best,
        losses=calibrated.losses,
        speeds=speeds,
        heads=_look_inside(model, tokenizer),
        saved=saved,
        calibration_texts=len(prose.calibration),
        held_back_texts=len(prose.held_back),
        sts_softmax=judge.sts_softmax,
    )


def _calibrated(
    model: nn.Module, batches: list[dict[str, Tensor]], settings: DemoSettings, listen: Listener
) -> conversion.CalibrationReport:
    return conversion.calibrate(
        model,
        batches,
        steps=settings.steps,
        seed=settings.seed,
        on_step=lambda now, total, _: listen("calibrating", now, total),
        on_batch=lambda now, total: listen("running the original", now, total),
    )


class _Judge:
    """Measures stages against the original on held-back text, and on STS-B where there is one."""

    def __init__(self, original: nn.Module, tokenizer: Any, texts: list[str], data: Path | None) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.reference = embed(original, tokenizer, texts)
        self.couplings = text_batches(tokenizer, texts, batch_size=_BATCH)[::3]
        self.sts: SentencePairs | None = None
        if data is not None and (data / "glue" / glue.TASKS["stsb"].folder).is_dir():
            self.sts = SentencePairs(glue.load(glue.TASKS["stsb"], "dev", data))
        self.sts_softmax = self._sts(original)

    def stage(self, name: str, model: nn.Module, seconds: float) -> Stage:
        quality = conversion.coupling_quality(model, self.couplings)
        assert quality is not None
        with transporting(model):  # passages are so short that softmax would read some
            stage = Stage(name, fidelity(self.reference, embed(model, self.tokenizer, self.texts)), quality, seconds)
            score = self._sts(model)
        if score is None or self.sts_softmax is None:
            return stage
        return replace(stage, sts_recovered=score / self.sts_softmax)

    def _sts(self, model: nn.Module) -> float | None:
        return None if self.sts is None else self.sts.spearman(self.sts.embed(model, self.tokenizer))


@torch.no_grad()
def _look_inside(model: nn.Module, tokenizer: Any) -> list[Heads]:
    """In three layers, the head whose softmax columns are most uneven: its sink is what learned masses are for."""
    inputs = dict(tokenizer([PASSAGE], return_tensors="pt"))
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    sites = require_converted(model)
    found = []
    with Activations(model, [inputs], memory_limit=1 << 30) as seen:
        for layer in sorted({0, len(sites) // 2, len(sites) - 1}):
            name, module = sites[layer]
            mechanism = mechanism_of(module)
            assert isinstance(mechanism, LOT)
            activation: Attended = seen[0][name]
            before = dense(SoftmaxAttention(mechanism.head_dim, mechanism.num_heads), activation)[0]
            head = int(before.sum(-2).amax(-1).argmax())
            after = dense(mechanism, activation)[0]
            found.append(Heads(layer, head, tokens, before[head], after[head]))
    return found
