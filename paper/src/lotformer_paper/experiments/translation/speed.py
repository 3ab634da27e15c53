"""Decoding speed of a translation model: softmax against a converted encoder, on sentences and on long documents."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.reading import read_lines
from lotformer.settings import Settings, setting

from ...results.cells import Origin, Record
from ...results.provenance import thread_count
from ...results.sources import checkpoint_source, files_source
from ..engine import Cells, Experiment, Job, described
from .rows import ROWS

_Opened = tuple[dict[str, Any], dict[str, list[list[int]]]]


@dataclass(frozen=True)
class SpeedSettings(Settings):
    """Inputs and decoding."""

    row: str = setting("lot-exact", f"What takes the place of softmax: {', '.join(ROWS)}.")
    sentences: int = setting(1000, "Sentences that are translated, from the beginning of the text.", at_least=1)
    documents: int = setting(4, "Documents that are translated.", at_least=1)
    document_tokens: int = setting(2000, "Source tokens of a document: sentences one after another.", at_least=8)
    document_output: int = setting(100, "Tokens after which a document's translation is cut off.", at_least=1)
    beams: int = setting(5, "Beams of the search.", at_least=1)
    length_penalty: float = setting(1.0, "Power of the length that scores are divided by.")
    repeats: int = setting(3, "Times that everything is timed, in turns; the fastest counts.", at_least=1)
    lowercase: bool = setting(True, "Lower-case the text.")
    threads: int = setting(1, "Threads of PyTorch.", at_least=1)
    seed: int = setting(0, "Of the new parameters.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.row not in ROWS:
            raise ValueError(f"row must be among {', '.join(ROWS)}, got {self.row!r}.")


@dataclass(frozen=True)
class Cell:
    """One workload with one encoder. Times are those that the process had the processor, in the fastest turn.

    `texts` were translated in `seconds`, of which encoding alone takes `encoder_seconds`; `said` are the tokens that
    came out, mean over the texts.
    """

    workload: str
    encoder: str
    texts: int
    source_tokens: float
    said: float
    seconds: float
    encoder_seconds: float


def plan(
    settings: SpeedSettings,
    listen: Listener,
    model: Annotated[Path, typer.Argument(help="Folder of a Marian checkpoint with softmax attention.")],
    text: Annotated[Path, typer.Argument(help="File with one source sentence per line.")],
) -> Iterator[Job]:
    """A job for every workload; the two encoders take turns."""
    origin = Origin(described(settings), {"model": checkpoint_source(model), "text": files_source(text.name, [text])})
    opened = cache(partial(_opened, settings, model, text))
    for workload in ("sentences", "documents"):
        names = [f"{workload}-{encoder}" for encoder in ("softmax", settings.row)]
        make = thread_count(settings.threads)(partial(_timed, settings, workload, opened, listen))
        yield Job(dict.fromkeys(names, origin), make, settings.seed)


def _opened(settings: SpeedSettings, model: Path, text: Path) -> _Opened:
    """Both models by the name of their encoder, and the source tokens of both workloads."""
    from .conversions import swap
    from .decoding import load

    softmax, tokenizer = load(model)
    converted = copy.deepcopy(softmax)
    swap(converted, ROWS[settings.row], settings.seed)
    return {"softmax": softmax, settings.row: converted}, _tokens(settings, tokenizer, read_lines(text))


def _tokens(settings: SpeedSettings, tokenizer: Any, lines: Sequence[str]) -> dict[str, list[list[int]]]:
    """Source tokens of every text of both workloads, each with its closing token."""
    texts = [line.lower() if settings.lowercase else line for line in lines if line.strip()]
    sentences: list[list[int]] = tokenizer(texts, truncation=True, max_length=512)["input_ids"]
    documents: list[list[int]] = []
    place = 0
    for _ in range(settings.documents):
        body: list[int] = []
        while len(body) < settings.document_tokens - 1:  # texts are read again from the beginning if they end
            body += sentences[place % len(sentences)][:-1]
            place += 1
        documents.append([*body[: settings.document_tokens - 1], sentences[0][-1]])
    return {"sentences": sentences[: settings.sentences], "documents": documents}


def _timed(
    settings: SpeedSettings, workload: str, opened: Callable[[], _Opened], listen: Listener, cells: Cells
) -> None:
    import torch

    from .decoding import batches_of_tokens, search

    models, tokens = opened()
    texts, most = tokens[workload], settings.document_output if workload == "documents" else None
    batches = [
        (ids, real, most or int(1.2 * ids.shape[1] + 10))
        for _, ids, real in batches_of_tokens(texts, next(iter(models.values())).config.pad_token_id)
    ]
    whole: dict[str, list[float]] = {name: [] for name in models}
    encoding: dict[str, list[float]] = {name: [] for name in models}
    said: dict[str, float] = {}
    for turn in range(settings.repeats):
        for number, (name, model) in enumerate(models.items()):
            listen(f"{workload}, {name}", turn * len(models) + number, settings.repeats * len(models))
            found: list[Any] = []

            def translate(model: Any = model, found: list[Any] = found) -> None:
                for ids, real, longest in batches:
                    made = search(
                        model, ids, real, longest, beams=settings.beams, length_penalty=settings.length_penalty
                    )
                    found.append(made)

            @torch.no_grad()
            def encode(model: Any = model) -> None:
                for ids, real, _ in batches:
                    model.get_encoder()(input_ids=ids, attention_mask=real)

            whole[name].append(_seconds(translate))
            encoding[name].append(_seconds(encode))
            pad = model.config.pad_token_id
            said[name] = sum(float((rows[:, 1:] != pad).sum()) for rows in found) / len(texts)
    for name in models:
        cell = Cell(
            workload=workload,
            encoder=name,
            texts=len(texts),
            source_tokens=statistics.fmean(map(len, texts)),
            said=said[name],
            seconds=min(whole[name]),
            encoder_seconds=min(encoding[name]),
        )
        cells.finish(f"{workload}-{name}", cell, {"repeats": settings.repeats})


def _seconds(work: Callable[[], None]) -> float:
    """Of the processor: other processes may take turns with this one."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _arranged(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (r.cell.workload != "sentences", r.cell.encoder != "softmax"))


def _tables(records: list[Record]) -> list[Table]:
    """Translations per second, both ways."""
    rows = []
    for cell in (record.cell for record in records):
        rows.append(
            (
                f"{cell.workload}, {cell.encoder}",
                f"{cell.texts}",
                f"{cell.source_tokens:.0f}",
                f"{cell.said:.1f}",
                f"{cell.texts / cell.seconds:.2f}",
                f"{1000 * cell.encoder_seconds / cell.texts:.2f}",
            )
        )
    columns = (
        "Texts, encoder",
        "texts",
        "source\ntokens",
        "tokens\nsaid",
        "translations\nper second",
        "encoding,\nms a text",
    )
    return [Table("", columns, tuple(rows))]


def _notes(records: list[Record]) -> list[str]:
    s = records[0].origin.settings
    return [
        f"Beam {s['beams']}, length penalty {s['length_penalty']:g} both ways; translations of documents are cut off "
        f"after {s['document_output']} tokens. Processor time of one process, {s['threads']} thread, in turns, the "
        f"fastest of {s['repeats']}.",
        "The converted encoder is only swapped: how long decoding takes depends on the length of what it says.",
        f"{records[0].provenance.where()}.",
    ]


EXPERIMENT = Experiment(
    name="translation-speed",
    about="Translations per second, softmax against a converted encoder: sentences, and documents of 2,000 tokens.",
    settings=SpeedSettings,
    cell=Cell,
    plan=plan,
    arranged=_arranged,
    tables=_tables,
    notes=_notes,
    extras=("text",),
)
