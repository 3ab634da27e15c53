"""Hugging Face models: attention that dispatches through `AttentionInterface`.

A converted module keeps its projections and gains a `mechanism`; its config says `_attn_implementation = "lot"`,
so transformers' own dispatch calls `dispatch.attention_forward`. What the configs of a model say is `configs.settle`'s
business.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.unformed import Projections
from ...data.batches import Batch
from ...data.text import positions_of
from . import configs
from .base import CAUSAL, Host, InputKind
from .configs import dispatches, names_in_forward
from .sites import relative_scale

_QUERY_AND_KEY = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"))
_CROSS = ("encoder_attn", "crossattention", "cross_attn", "encoder_attention", "cross_attention")
_NOT_LINEAR = ("rotary", "norm")
_SAMPLE_TOKENS = 256
_SOUND = ("input_features", "input_values")
_SAMPLE_SOUND = 80_000  # samples of a wave, which are 249 tokens to wav2vec2


class HuggingFace(Host):
    """Models of transformers."""

    name = "huggingface"

    def is_attention(self, module: nn.Module) -> bool:
        if dispatches(module):
            return True
        home = type(module).__module__
        return home.startswith("transformers.models.") and type(module).__name__.endswith("SelfAttention")

    def heads(self, module: nn.Module) -> tuple[int, int]:
        read = _heads(module)
        assert read is not None  # `why_not` has looked
        return read

    def is_causal(self, model: nn.Module, name: str, module: nn.Module) -> bool:
        return super().is_causal(model, name, module) or _in_causal_tower(model, name)

    def why_not(self, model: nn.Module, name: str, module: nn.Module) -> str | None:
        if not dispatches(module):
            return "it computes its own scores, outside AttentionInterface"
        if _is_cross_attention(name, module):  # first: decoders' say that they are causal, which they are not
            return "it is cross-attention"
        if self.is_causal(model, name, module):
            return CAUSAL
        if getattr(module, "is_decoder", False):
            return "it belongs to a decoder"
        if _has_position_bias(module):
            return "it adds a position bias to its scores"
        if getattr(module, "sliding_window", None) is not None:
            return f"it attends within a window of {module.sliding_window}"
        return "its heads could not be read from its attributes" if _heads(module) is None else None

    def attach(self, model: nn.Module, modules: list[nn.Module]) -> None:
        """Let transformers dispatch to the mechanisms."""
        configs.settle(model)

    def detach(self, model: nn.Module, modules: list[nn.Module]) -> None:
        """Let transformers dispatch as before."""
        configs.settle(model)

    def projections(self, module: nn.Module, num_heads: int, head_dim: int) -> Projections | str:
        """The query and key projections of a module, if nothing but a view stands between them and the attention."""
        changed = [name for name in names_in_forward(module) if any(part in name for part in _NOT_LINEAR)]
        if changed:
            return f"{changed[0]} comes between its projections and its scores, which are not linear in the input then"
        names = _projection_names(module)
        if names is None:
            return "its query and key projections are not linear maps of their own"
        query, key = (getattr(module, name) for name in names)
        if query.weight.shape != key.weight.shape or query.in_features % head_dim:
            return "its queries and keys are not as wide as its input, or not as many"
        biases = [x.weight.new_zeros(len(x.weight)) if x.bias is None else x.bias for x in (query, key)]
        factor = relative_scale(getattr(module, "scaling", None), head_dim)
        return Projections.of(torch.cat([query.weight, key.weight]), torch.cat(biases), num_heads, head_dim, factor)

    def drop_projections(self, module: nn.Module) -> None:
        """Identities hand the input through, and the module cuts it into heads as it would cut queries and keys."""
        for name in _projection_names(module) or ():
            setattr(module, name, nn.Identity())

    def input_kind(self, enclosure: nn.Module) -> InputKind | None:
        """The main input. Its name is not enough: models of images that do not say theirs inherit that of texts, and
        tables have `input_values`, too."""
        main = getattr(enclosure, "main_input_name", None)
        if main in (None, "pixel_values"):
            return None if main is None else "image"
        kinds = getattr(enclosure, "input_modalities", "text")
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if main in _SOUND and "audio" in kinds:
            return "sound"
        return "text" if main == "input_ids" and kinds == ("text",) else "other"

    def sample_inputs(self, model: nn.Module) -> Batch | None:
        """As the config says.

        Texts are longer than the window that they get by default, if the model's positions allow it, and have a square
        number of tokens, for mechanisms that see a grid.
        """
        generator = torch.Generator().manual_seed(0)
        config, main_input = getattr(model, "config", None), getattr(model, "main_input_name", None)
        size, vocabulary = getattr(config, "image_size", None), getattr(config, "vocab_size", None)
        if main_input == "pixel_values" and isinstance(size, int):
            shape = (2, getattr(config, "num_channels", 3), size, size)
            return {"pixel_values": torch.randn(shape, generator=generator)}
        if main_input in _SOUND and self.input_kind(model) == "sound":
            return _sample_sound(config, main_input, generator)
        if main_input != "input_ids" or not isinstance(vocabulary, int):
            return None
        tokens = math.isqrt(min(_SAMPLE_TOKENS, positions_of(model) or _SAMPLE_TOKENS)) ** 2
        # the first and last ids are often special tokens that models count
        some = (vocabulary // 4, max(vocabulary // 2, 1 + vocabulary // 4))
        batch = {"input_ids": torch.randint(*some, (2, tokens), generator=generator)}
        if getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = batch["input_ids"][:, :5]
        return batch

    def takes_a_mapping(self, model: nn.Module) -> bool:
        """A `SentenceTransformer` does, and writes its results into it."""
        whole = getattr(sys.modules.get("sentence_transformers"), "SentenceTransformer", None)
        return whole is not None and isinstance(model, whole)

    def missing_inputs(self, model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> list[str]:
        """The main input, and that of the decoder."""
        main, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
        given = set(inputs) if isinstance(inputs, Mapping) else {main}
        missing = [] if main is None or given & {main, "inputs_embeds", "encoder_outputs"} else [f"`{main}`"]
        decodes = getattr(config, "is_encoder_decoder", False)
        if decodes and not given & {"decoder_input_ids", "decoder_inputs_embeds", "labels"}:
            missing.append("`decoder_input_ids` (or `labels`)")
        return missing


def _sample_sound(config: Any, main_input: str, generator: torch.Generator) -> Batch | None:
    """A few seconds of a wave, or the features of as much sound as a model has positions for; one sample of that."""
    shape: tuple[int, ...] = (2, _SAMPLE_SOUND)
    if main_input == "input_features":
        bins, positions = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
        if not isinstance(bins, int) or not isinstance(positions, int):
            return None
        shape = (1, bins, 2 * positions)
    batch = {main_input: torch.randn(shape, generator=generator)}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.zeros(shape[0], 2, dtype=torch.long)
    return batch


def _projection_names(module: nn.Module) -> tuple[str, str] | None:
    for names in _QUERY_AND_KEY:
        if all(type(getattr(module, name, None)) is nn.Linear for name in names):
            return names
    return None


def _heads(module: nn.Module) -> tuple[int, int] | None:
    heads = _first(module, "num_attention_heads", "num_heads", "n_heads", "n_head")
    dim = _first(module, "attention_head_size", "head_dim", "attention_head_dim")
    if dim is None and heads is not None:
        width = _first(module, "all_head_size", "embed_dim", "hidden_size", "dim")
        dim = None if width is None else width // heads
    return None if heads is None or dim is None else (heads, dim)


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    if "CrossAttention" in type(module).__name__ or getattr(module, "is_cross_attention", False):
        return True
    return name.rpartition(".")[2] in _CROSS


def _in_causal_tower(model: nn.Module, name: str) -> bool:
    """True if the mask that reaches a module is causal though the module does not say so (CLIP's text half).

    Masks are made in the `forward` of an enclosing model. The nearest one that makes any decides; one that makes both
    kinds leaves the choice to attributes that the modules carry.
    """
    while name:
        name = name.rpartition(".")[0]
        made = {part for part in names_in_forward(model.get_submodule(name)) if part.endswith("_mask")}
        causal = any("causal" in part for part in made)
        if causal or any("bidirectional" in part or "attention_mask" in part for part in made):
            return causal and not any("bidirectional" in part or "extended" in part for part in made)
    return False


def _first(module: nn.Module, *names: str) -> int | None:
    for place in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _has_position_bias(module: nn.Module) -> bool:
    names = [*module.__dict__, *(name for name, _ in module.named_children()), *dict(module.named_parameters())]
    return any("relative" in name and "bias" in name for name in names)
