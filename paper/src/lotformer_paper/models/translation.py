"""Encoder–decoders for translation on transformers' Marian: fairseq's IWSLT model and a DiffTransformer.

Beam search, caching and saving are transformers'. `DiffMarianMTModel` has differential attention (Ye et al. 2025) in
the encoder, in the decoder and between them:

    (softmax(q₁ k₁ᵀ s) − λ softmax(q₂ k₂ᵀ s)) v,   then RMSNorm per head, times 1 − λ₀

    λ = exp(λq₁·λk₁) − exp(λq₂·λk₂) + λ₀,   λ₀ = 0.8 − 0.6 exp(−0.3 layer)

q₁, q₂ and k₁, k₂ are the halves of a head. Both softmaxes go through transformers' dispatch as 2 H heads of half the
width, so converting such a model replaces the two softmaxes and leaves λ, the norm and the projections as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, EncoderDecoderCache, MarianConfig, MarianMTModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.marian.modeling_marian import MarianAttention


@dataclass(frozen=True)
class Size:
    """Layers of each half, width, width of the feed-forward layers, heads, dropout of the residual branches."""

    layers: int
    dim: int
    ffn: int
    heads: int
    dropout: float = 0.3


SIZES: dict[str, Size] = {
    "iwslt": Size(6, 512, 1024, 4),
    "small": Size(2, 192, 512, 6),
    "tiny": Size(1, 32, 64, 2, dropout=0.0),
}
"""`iwslt` is fairseq's `transformer_iwslt_de_en`; the others are the same, smaller. `tiny` is for tests."""

BACKBONES = ("transformer", "diff")


class DiffMarianConfig(MarianConfig):
    """Marian with differential attention."""

    model_type = "lotformer_diff_marian"


class DifferentialMarianAttention(MarianAttention):
    """Differential attention with Marian's projections, masks and cache.

    `num_heads` and `head_dim` are those of the softmaxes, twice as many and half as wide as the heads whose values
    they mix, and what a conversion sees.
    """

    def __init__(self, like: MarianAttention, layer: int) -> None:
        super().__init__(
            like.embed_dim,
            like.num_heads,
            like.dropout,
            is_decoder=like.is_decoder,
            is_causal=like.is_causal,
            config=like.config,
            layer_idx=like.layer_idx,
        )
        if self.head_dim % 2:
            raise ValueError(f"differential attention halves its heads: expected an even width, got {self.head_dim}.")
        self.value_dim, self.head_dim, self.num_heads = self.head_dim, self.head_dim // 2, 2 * self.num_heads
        self.scaling = self.head_dim**-0.5
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.query_lambda = nn.Parameter(torch.empty(2, self.head_dim))
        self.key_lambda = nn.Parameter(torch.empty(2, self.head_dim))
        self.head_norm = nn.Parameter(torch.empty(self.value_dim))
        self.reset_lambda()

    @torch.no_grad()
    def reset_lambda(self) -> None:
        """The published first values: λ's vectors from N(0, 0.1²), the norm 1."""
        nn.init.normal_(self.query_lambda, std=0.1)
        nn.init.normal_(self.key_lambda, std=0.1)
        nn.init.ones_(self.head_norm)

    def balance(self) -> Tensor:
        """λ, the weight of the second softmax."""
        first, second = (self.query_lambda * self.key_lambda).sum(-1).exp()
        return first - second + self.start

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`hidden_states (B, N, C)` attend to `key_value_states (B, M, C)`, or to themselves and what is cached."""
        q = self._heads(self.q_proj(hidden_states))
        k, v = self._keys_and_values(hidden_states, key_value_states, past_key_values)
        # the first half of the heads is the first softmax of every pair, the second half the second
        q, k = (torch.cat(x.chunk(2, -1), 1) for x in (q, k))
        config: Any = self.config
        mixer = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, sdpa_attention_forward)
        both, weights = mixer(
            self,
            q,
            k,
            v.repeat(1, 2, 1, 1),
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        first, second = both.float().chunk(2, 2)  # (B, N, H, value_dim)
        out = F.rms_norm(first - self.balance() * second, (self.value_dim,), self.head_norm.float(), eps=1e-5)
        out = (out * (1 - self.start)).to(both.dtype)
        return self.out_proj(out.flatten(2)), weights

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.value_dim)).transpose(1, 2)

    def _keys_and_values(self, own: Tensor, other: Tensor | None, past: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of this call with those of earlier ones; the other side's are projected once."""
        crossing, two_sided = other is not None, isinstance(past, EncoderDecoderCache)
        cache = past
        if two_sided:
            cache = past.cross_attention_cache if crossing else past.self_attention_cache
            if crossing and past.is_updated.get(self.layer_idx):
                kept = cache.layers[self.layer_idx]
                return kept.keys, kept.values
        read = own if other is None else other
        k, v = self._heads(self.k_proj(read)), self._heads(self.v_proj(read))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
            if crossing and two_sided:
                past.is_updated[self.layer_idx] = True
        return k, v


class DiffMarianMTModel(MarianMTModel):
    """Marian with differential attention in every attention of the model."""

    config_class = DiffMarianConfig

    def __init__(self, config: DiffMarianConfig) -> None:
        # the parts are built from a config that says nothing beyond their sizes: whatever else it asks for, such as a
        # saved conversion, concerns the attention they are about to get
        plain = MarianConfig(
            **{name: getattr(config, name) for name in MarianConfig.__annotations__ if name in vars(config)}
        )
        super().__init__(plain)
        if config._attn_implementation is None:
            config._attn_implementation = plain._attn_implementation
        for module in self.modules():
            if getattr(module, "config", None) is plain:
                setattr(module, "config", config)  # noqa: B010  a module's attributes are typed as tensors and modules
        for half in (self.model.encoder, self.model.decoder):
            for number, layer in enumerate(half.layers):
                for name in ("self_attn", "encoder_attn"):
                    if (attention := getattr(layer, name, None)) is not None:
                        setattr(layer, name, DifferentialMarianAttention(attention, number))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        own = (module.query_lambda, module.key_lambda, module.head_norm) if _is_differential(module) else ()
        if own and not any(getattr(p, "_is_hf_initialized", False) for p in own):
            module.reset_lambda()  # type: ignore[operator]  # what has parameters of these names


AutoConfig.register(DiffMarianConfig.model_type, DiffMarianConfig)
AutoModelForSeq2SeqLM.register(DiffMarianConfig, DiffMarianMTModel)


def build(
    backbone: str,
    size: str,
    *,
    vocabulary: int,
    pad: int = 1,
    eos: int = 2,
    bos: int = 0,
    dropout: float | None = None,
    positions: int = 4096,
) -> MarianMTModel:
    """A model with fresh weights, initialised as fairseq does.

    One vocabulary serves both languages; the output shares its embedding with the decoder's input, the encoder has its
    own. Decoding starts from `eos`. Two things differ from fairseq's `transformer_iwslt_de_en`: its sinusoids have
    slightly other frequencies and count from 2, and its two vocabularies list the tokens of one language each.

    Args:
        backbone: "transformer" or "diff". size: a name of `SIZES`. dropout: in place of the size's.
        positions: longest text; positions are sinusoids, so it changes nothing else.
    """
    if backbone not in BACKBONES:
        raise ValueError(f"backbone must be one of {', '.join(BACKBONES)}, got {backbone!r}.")
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, got {size!r}.")
    chosen = SIZES[size]
    kind: Any = DiffMarianConfig if backbone == "diff" else MarianConfig
    model: Any = DiffMarianMTModel if backbone == "diff" else MarianMTModel
    config = kind(
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        max_position_embeddings=positions,
        encoder_layers=chosen.layers,
        decoder_layers=chosen.layers,
        d_model=chosen.dim,
        encoder_ffn_dim=chosen.ffn,
        decoder_ffn_dim=chosen.ffn,
        encoder_attention_heads=chosen.heads,
        decoder_attention_heads=chosen.heads,
        activation_function="relu",
        dropout=chosen.dropout if dropout is None else dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=True,
        share_encoder_decoder_embeddings=False,
        pad_token_id=pad,
        eos_token_id=eos,
        bos_token_id=bos,
        decoder_start_token_id=eos,
        forced_eos_token_id=eos,
    )
    made = model(config)
    _initialise_as_fairseq(made)
    made.generation_config.bad_words_ids = [[pad]]
    return made


@torch.no_grad()
def _initialise_as_fairseq(model: MarianMTModel) -> None:
    """Embeddings N(0, 1/C), projections of queries, keys and values Xavier's at 2^-½, of outputs Xavier's."""
    for module in model.modules():
        if isinstance(module, MarianAttention):
            for linear in (module.q_proj, module.k_proj, module.v_proj):
                nn.init.xavier_uniform_(linear.weight, gain=2**-0.5)
            nn.init.xavier_uniform_(module.out_proj.weight)
        elif isinstance(module, nn.Linear) and module is not model.lm_head:
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for half in (model.model.encoder, model.model.decoder):
        table = half.embed_tokens
        nn.init.normal_(table.weight, std=table.embedding_dim**-0.5)
        table.weight[table.padding_idx].zero_()


def _is_differential(module: nn.Module) -> bool:
    return isinstance(module, DifferentialMarianAttention)
