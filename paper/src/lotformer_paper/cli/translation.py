"""Translation on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lotformer.cli.settings import with_settings
from lotformer.cli.terminal import one_clear_error, progress_bar, say
from lotformer.data.folder import data_folder
from lotformer.reading import decoded_lines, read_lines

from ..data.translation.sets import prepare
from ..experiments.inputs import PAIRS, PairsData
from ..experiments.translation.settings import PairSettings, TranslationSettings, completed, recipe_of


def prepare_pairs(console: Console, settings: PairSettings, folder: Path) -> None:
    """Prepare a set and say what is in it."""
    made = prepare(recipe_of(settings), folder)
    sizes = ", ".join(f"{split} {len(made[split]):,}" for split in ("train", "valid", "test"))
    say(console, f"translation: {sizes}; {len(made.tokenizer):,} tokens; fingerprint {made.fingerprint}; {made.folder}")


@with_settings(TranslationSettings, completed)
def train_translation(
    settings: TranslationSettings,
    data_dir: PairsData = None,
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoints, weights, logs.")] = Path("out/translation"),
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out, if there is one.")] = False,
) -> None:
    """Train an encoder–decoder to translate, by fairseq's recipe for IWSLT'14; the best weights end in OUT/model."""
    console = Console()
    with one_clear_error(console, "Cannot train", "text"):
        from lotformer.cli.training import train_with_progress

        from ..experiments.translation.decoding import load, translate
        from ..experiments.translation.scoring import score
        from ..experiments.translation.task import Translation

        pairs = prepare(recipe_of(settings), data_folder(data_dir, PAIRS))
        task = Translation(settings, pairs)
        train_with_progress(task, out, resume=resume)
        model, tokenizer = load(task.export(out))
        sources, references = zip(*pairs["test"], strict=True)
        with progress_bar(console) as listen:
            made = translate(
                model, tokenizer, sources, beams=settings.beams,
                on_batch=lambda done, total: listen("translating the test set", done, total),
            )  # fmt: skip
        found = score(made, references, tokenized=settings.tokenized)
    say(console, f"Test: BLEU {found.bleu:.2f} ({found.bleu_signature}), chrF {found.chrf:.2f}")


def translate_command(
    model: Annotated[Path, typer.Argument(help="Folder of a Marian checkpoint: OUT/model of a run, or any other.")],
    text: Annotated[
        Path | None, typer.Argument(help="File with one text per line; standard input if not given.")
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beams of the search.")] = 5,
    length_penalty: Annotated[float, typer.Option(help="Power of the length that scores are divided by.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most source tokens of a batch, padding counted.")] = 1024,
    longest: Annotated[int, typer.Option(min=2, help="Source tokens after which a text is cut.")] = 1024,
    lowercase: Annotated[bool, typer.Option(help="Lower-case the texts, for models trained so.")] = False,
) -> None:
    """Translate texts, one per line, to as many lines on standard output."""
    console = Console(stderr=True)
    with one_clear_error(console, "Cannot translate", "text"):
        from ..experiments.translation.decoding import load, translate

        lines = read_lines(text) if text is not None else decoded_lines(sys.stdin.buffer.read(), "standard input")
        loaded, tokenizer = load(model)
        lines = [line.lower() if lowercase else line for line in lines]
        with progress_bar(console) as listen:
            made = translate(
                loaded, tokenizer, lines, beams=beams, length_penalty=length_penalty, max_tokens=max_tokens,
                longest=longest, on_batch=lambda done, total: listen("translating", done, total),
            )  # fmt: skip
    sys.stdout.writelines(f"{line}\n" for line in made)
