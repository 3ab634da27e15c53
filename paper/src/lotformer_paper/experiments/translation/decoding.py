"""Text in, text out: beam search with a Marian model and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load(folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of a checkpoint: one of ours, converted or not, or any Marian of transformers'.

    Raises:
        ValueError: there is no readable encoder–decoder.
    """
    try:
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, logging
    except ImportError as error:
        raise ImportError("translation needs transformers: pip install 'lotformer[text]'.") from error
    from ...models import translation  # noqa: F401  registers DiffTransformer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(str(folder)).eval()
        return model, AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        if any(folder.glob("*.spm")) and find_spec("sentencepiece") is None:
            raise ImportError(
                f"the vocabulary in {folder} needs sentencepiece: pip install 'lotformer[text]'."
            ) from error
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{folder} holds no translation model that can be read: {reason[0]}") from error


@torch.no_grad()
def translate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    beams: int = 5,
    length_penalty: float = 1.0,
    max_tokens: int = 1024,
    longest: int = 1024,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """The best translation of every text, in their order.

    Hypotheses are ranked by `log p / length^length_penalty` and have at most 1.2 tokens per source token and 10 more,
    as in fairseq. Texts of similar length share a batch of at most `max_tokens` source tokens, padding counted; an
    empty text stays empty.

    Args:
        longest: source tokens after which a text is cut.
        on_batch: called with how many texts are done, and of how many.
    """
    tokens = tokenizer(list(texts), truncation=True, max_length=longest)["input_ids"] if texts else []
    order = [index for index in range(len(texts)) if texts[index].strip()]
    found = [""] * len(texts)
    done = 0
    pad = model.config.pad_token_id
    for chunk, ids, real in batches_of_tokens([tokens[index] for index in order], pad, max_tokens):
        ids, real = ids.to(model.device), real.to(model.device)
        made = search(model, ids, real, int(1.2 * ids.shape[1] + 10), beams=beams, length_penalty=length_penalty)
        for place, text in zip(chunk, tokenizer.batch_decode(made, skip_special_tokens=True), strict=True):
            found[order[place]] = text.strip()
        done += len(chunk)
        on_batch(done, len(order))
    return found


def batches_of_tokens(
    tokens: Sequence[Sequence[int]], pad: int, max_tokens: int = 1024
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Texts of similar length together: their places, their tokens `(B, N)`, and 1 where a token is real."""
    order = sorted(range(len(tokens)), key=lambda place: len(tokens[place]))
    done = 0
    while done < len(order):
        count = 1
        while done + count < len(order) and (count + 1) * len(tokens[order[done + count]]) <= max_tokens:
            count += 1
        chunk = order[done : done + count]
        width = len(tokens[chunk[-1]])
        ids = torch.tensor([[*tokens[place], *[pad] * (width - len(tokens[place]))] for place in chunk])
        real = torch.arange(width) < torch.tensor([len(tokens[place]) for place in chunk])[:, None]
        yield chunk, ids, real.long()
        done += count


@torch.no_grad()
def search(model: Any, ids: Tensor, real: Tensor, most: int, *, beams: int = 5, length_penalty: float = 1.0) -> Tensor:
    """The best hypothesis of every row by beam search, padded: `(B, ≤ most + 1)`, from the decoder's start on.

    A hypothesis of tokens y, the closing one included, has the score `Σ log p(y_t | y_<t) / len(y)^length_penalty`;
    one that has `most` tokens is closed without a cost.

    Args:
        ids: source tokens `(B, N)`. real: 1 where there is one, 0 on padding. most: tokens of a hypothesis at most.
    """
    return model.generate(
        input_ids=ids,
        attention_mask=real,
        num_beams=beams,
        length_penalty=length_penalty,
        max_new_tokens=most,
        max_length=None,
        do_sample=False,
    )
