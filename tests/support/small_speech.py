"""Speech models of a few thousand parameters, and sound for them."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
import transformers
from torch import Tensor

FRAMES = 50
"""Tokens in the encoder of the small Whisper."""


def whisper(**changes: object) -> transformers.WhisperForConditionalGeneration:
    """Whisper with two layers a side and heads of 8 channels; what attention does shows in its output."""
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3}
    sizes |= {"decoder_attention_heads": 3, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "num_mel_bins": 80}
    sizes |= {"max_source_positions": FRAMES, "max_target_positions": 16, "vocab_size": 60, "init_std": 0.3}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**{**sizes, **special, **changes})
    return transformers.WhisperForConditionalGeneration(config).eval()


def save_whisper(folder: Path) -> transformers.WhisperForConditionalGeneration:
    """A checkpoint with all that transcribing takes: it hears a second at a time, and knows sixty words."""
    model = whisper()
    model.generation_config.max_length = 12
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=1).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"word{i}": i for i in range(3, 60)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return model


def features(batch: int = 2, seed: int = 1) -> Tensor:
    """Of as much sound as the small Whisper takes."""
    return torch.randn(batch, 80, 2 * FRAMES, generator=torch.Generator().manual_seed(seed))


def wav2vec2(kind: str = "Wav2Vec2", **changes: object) -> transformers.PreTrainedModel:
    """An encoder of waves with two layers, positions by convolution, and a token for every ten samples."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    waves = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    # a norm over time would look at the padding
    norms = {"feat_extract_norm": "layer", "conv_bias": True, "do_stable_layer_norm": True, "initializer_range": 0.3}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 30}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **waves, **norms, **positions, **changes})
    return getattr(transformers, f"{kind}Model")(config).eval()
