"""One byte-pair vocabulary for both languages, learned from training text alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

BOS, PAD, EOS, UNKNOWN = "<s>", "<pad>", "</s>", "<unk>"
"""The special tokens, with the ids 0 to 3 as in fairseq."""

_SPECIAL = (BOS, PAD, EOS, UNKNOWN)


def learn(texts: Iterable[str], size: int) -> Any:
    """A `tokenizers.Tokenizer` of at most `size` tokens; every text it encodes ends with `</s>`.

    Spaces become part of the tokens that follow them and punctuation stands alone, so decoding gives the text back.

    Raises:
        ValueError: `size` has no room for the characters of the texts.
    """
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    except ImportError as error:
        raise ImportError("a vocabulary needs tokenizers: pip install 'lotformer[text]'.") from error
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    alone = pre_tokenizers.Split(Regex(r"[^\w\s▁]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), alone])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(_SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() > size:
        raise ValueError(
            f"the texts have {tokenizer.get_vocab_size() - len(_SPECIAL)} different characters: "
            f"a vocabulary of {size} is too small."
        )
    end = tokenizer.token_to_id(EOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, end)])
    return tokenizer


def as_transformers(tokenizer: Any) -> Any:
    """The same for transformers, which saves it beside a model."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
