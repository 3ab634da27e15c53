"""A converted text encoder against the softmax model it was made from, end to end, with what the conversion costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lotformer import conversion
from lotformer.attention import Sinkhorn
from lotformer.attention.lot import LOT
from lotformer.cli.tables import Table
from lotformer.conversion.hosts.sites import converted, mechanism_of, transporting
from lotformer.conversion.measuring.fidelity import fidelity
from lotformer.data.checkpoints import checkpoint_folder
from lotformer.data.prose import python_reference
from lotformer.data.text import embed, text_batches
from lotformer.settings import setting

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from ..results.sources import Source, checkpoint_source
from .agreement import check_backend
from .settings import SAMPLE, BenchSettings
from .timing import alternate

NAME = "encoder"

SHAPES = ((64, 32), (32, 128), (1, 128), (8, 512), (1, 4096), (1, 16384))
"""Samples and tokens of each."""


@dataclass(frozen=True)
class EncoderSettings(BenchSettings):
    """The two checkpoints, and how long to measure."""

    original: str = setting("", "Folder of the softmax encoder, or a package with a MODEL_DIR.")
    converted: tuple[str, ...] = setting((), "Folders of encoders that were made from it by `lotformer convert`.")
    texts: int = setting(400, "Held-back texts to compare embeddings of, at most.", at_least=2)
    max_n: int = setting(512, "Skip shapes with more tokens.")
    seconds: float = setting(3.0, "Seconds to spend on each model and shape.")


@dataclass(frozen=True)
class Variant:
    """A converted model: what it is, and how near to the original and how balanced it is on held-back texts."""

    name: str
    source: Source
    options: dict[str, Any]
    cosine: float
    residual: float | None


@dataclass(frozen=True)
class EncoderPoint:
    """Milliseconds by model ("softmax" and the variants) for so many samples of so many tokens."""

    batch: int
    tokens: int
    milliseconds: dict[str, float]


@dataclass(frozen=True)
class EncoderResult:
    experiment: str
    provenance: Provenance
    settings: EncoderSettings
    original: Source
    variants: tuple[Variant, ...]
    points: tuple[EncoderPoint, ...]


def run(
    settings: EncoderSettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None
) -> EncoderResult:
    """Compare embeddings of held-back texts, then time all models in turns on random tokens without padding."""
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not settings.original or not settings.converted:
        raise ValueError("give --original and --converted: a softmax encoder, and what was made from it.")
    place = checkpoint_folder(settings.original)
    tokenizer = AutoTokenizer.from_pretrained(str(place))
    softmax = AutoModel.from_pretrained(str(place)).eval()
    texts = python_reference().held_back[: settings.texts]
    expected = embed(softmax, tokenizer, texts)
    models: dict[str, nn.Module] = {"softmax": softmax}
    variants = []
    for folder in settings.converted:
        listen(f"Comparing {folder}")
        root = checkpoint_folder(folder)
        model = AutoModel.from_pretrained(str(root)).eval()
        name = Path(folder).name
        models[name] = model
        _require_agreement(model)
        quality = conversion.coupling_quality(model, text_batches(tokenizer, texts)[::4])
        with transporting(model):  # softmax, which short texts get, would say nothing
            cosine = fidelity(expected, embed(model, tokenizer, texts)).cosine
        options = dict(conversion.recipe(model).options)
        residual = None if quality is None else quality.residual_max
        variants.append(Variant(name, checkpoint_source(root), options, cosine, residual))
    points = []
    for batch, tokens in (shape for shape in SHAPES if shape[1] <= settings.max_n):
        listen(f"{batch} × {tokens} tokens")
        inputs = _inputs(softmax, batch, tokens, settings.seed)
        timings = alternate(
            {name: partial(_infer, model, inputs) for name, model in models.items()}, seconds_each=settings.seconds
        )
        points.append(EncoderPoint(batch, tokens, {name: 1e3 * timing.best for name, timing in timings.items()}))
    return EncoderResult(NAME, provenance, settings, checkpoint_source(place), tuple(variants), tuple(points))


def render(folder: Path) -> Report:
    result = read(EncoderResult, folder / "result.json")
    rows = []
    for variant in result.variants:
        gains = (f"{p.milliseconds['softmax'] / p.milliseconds[variant.name]:.2f}×" for p in result.points)
        residual = "–" if variant.residual is None else f"{variant.residual:.0e}"
        rows.append((variant.name, f"{variant.cosine:.4f}", residual, *gains))
    rows.append(("softmax, ms", "1", "–", *(f"{p.milliseconds['softmax']:.1f}" for p in result.points)))
    columns = ("", "cosine", "residual,\nmax", *(f"{p.batch} × {p.tokens}" for p in result.points))
    notes = [
        f"{v.name}: " + ", ".join(f"{name}={value!r}" for name, value in sorted(v.options.items())) + "."
        for v in result.variants
    ]
    first = (
        f"How many times as fast as {result.original.name} with PyTorch's fused softmax, samples × tokens, fp32, no "
        "padding. Cosine with the original's embeddings and residual on texts of Python's manual that were kept "
        "back."
    )
    return Report(
        (result.provenance.command,),
        (Table("", columns, tuple(rows)),),
        (first, *notes, f"{result.provenance.where()}."),
    )


def _require_agreement(model: nn.Module) -> None:
    """The kernel that runs this model's attention agrees with the reference, in the form in which it runs."""
    mechanisms = [mechanism_of(module) for _, module in converted(model)]
    for lot in [m for m in mechanisms if isinstance(m, LOT)][:1]:
        eps = lot.eps if isinstance(lot.eps, float) else float(lot.eps.min())
        check_backend(
            lot.config.backend, rank=lot.pivots.rank, head_dim=lot.head_dim, heads=lot.num_heads, n=SAMPLE, eps=eps,
            iters=lot.config.solver.sweeps if isinstance(lot.config.solver, Sinkhorn) else 5, backward=False,
            solver=lot.config.solver.name, balance=lot.config.balance,
            scores=lot.why_formed() == "it is folded already",
        )  # fmt: skip


def _inputs(model: nn.Module, batch: int, tokens: int, seed: int) -> dict[str, Tensor]:
    """Random tokens; positions repeat past those that the model has learned, which takes as long."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1000, config.vocab_size, (batch, tokens), generator=generator),
        "position_ids": (torch.arange(tokens) % config.max_position_embeddings).expand(batch, -1),
        "token_type_ids": torch.zeros(batch, tokens, dtype=torch.long),
        "attention_mask": torch.ones(batch, tokens, dtype=torch.long),
    }


@torch.inference_mode()
def _infer(model: nn.Module, inputs: dict[str, Tensor]) -> object:
    return model(**inputs)
