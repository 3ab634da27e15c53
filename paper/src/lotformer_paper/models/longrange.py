"""The Long Range Arena's model: the two-layer encoder of Skyformer's protocol, with any mechanism."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lotformer import attention as mechanisms
from lotformer.attention import Attention, Inputs
from lotformer.attention.masking import zero_padding
from lotformer.layers import AttentionLayer
from lotformer.nn.depthwise import DepthwiseMixing
from lotformer.nn.dropout import ByteDropout

Pooling = Literal["real", "published", "learned"]


class LongRangeEncoder(nn.Module):
    """Classifies one sequence of tokens `(B, N)`, or a pair `(B, 2, N)`.

    Learned token and position embeddings, `depth` pre-norm blocks, a final norm, the mean over tokens, and a head of
    two layers, which for a pair reads `[a, b, a·b, a − b]`.

    Args:
        vocabulary, max_length, classes, documents, grid: of the task; a longer sequence is an error.
        attention: a mechanism by name, with `attention_options` as its own options.
        local_mixing: add a depthwise convolution of the values to what the mechanism returns: over `grid` where the
            task has one, along the sequence elsewhere.
        pooling: "real" averages over real tokens. "published" does what the protocol's code does: token 0 is padding
            wherever it occurs (black pixels too), and the sum is divided by the padded length, a power of two.
            "learned" weighs real tokens by a softmax of its own in each head (`LearnedPooling`). A mean cannot see
            what a doubly stochastic matrix does: where columns sum to one, Σ_i A_ij v_j is Σ_j v_j.
        dropout: of embeddings, attention output and both layers of the MLP.
        attention_dropout: inside mechanisms that have one.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        max_length: int,
        classes: int,
        documents: int = 1,
        grid: tuple[int, int] | None = None,
        attention: str = "lot",
        attention_options: Mapping[str, Any] | None = None,
        local_mixing: bool = False,
        pooling: Pooling = "real",
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 2,
        mlp_dim: int = 128,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if documents not in (1, 2):
            raise ValueError(f"documents must be 1 or 2, got {documents}.")
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling must be one of {', '.join(map(repr, get_args(Pooling)))}, got {pooling!r}.")
        self.max_length, self.documents, self.grid, self.pooling = max_length, documents, grid, pooling
        self.token_embedding = nn.Embedding(vocabulary, dim)
        self.position_embedding = nn.Parameter(torch.empty(max_length, dim))
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.position_embedding, std=0.02)
        self.dropout = ByteDropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                _layer(
                    dim,
                    num_heads,
                    attention,
                    dict(attention_options or {}),
                    max_length=max_length,
                    local="none" if not local_mixing else "1d" if grid is None else "2d",
                    attn_drop=attention_dropout,
                    proj_drop=dropout,
                ),
                dim,
                mlp_dim,
                dropout,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.pool = LearnedPooling(dim, num_heads) if pooling == "learned" else None
        self.head = nn.Sequential(
            nn.Linear(dim if documents == 1 else 4 * dim, mlp_dim), nn.ReLU(), nn.Linear(mlp_dim, classes)
        )

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits `(B, classes)`; `mask`, of the shape of `tokens`, is True on real tokens."""
        expected = "(B, N)" if self.documents == 1 else "(B, 2, N)"
        if tokens.dim() != self.documents + 1 or (self.documents == 2 and tokens.shape[1] != 2):
            raise ValueError(f"`tokens`: expected {expected}, got {tuple(tokens.shape)}.")
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(f"`mask` must have the shape of `tokens`, got {tuple(mask.shape)}.")
        if self.documents == 1:
            return self.head(self.encode(tokens, mask))
        both = self.encode(tokens.flatten(0, 1), None if mask is None else mask.flatten(0, 1))
        a, b = both.unflatten(0, (-1, 2)).unbind(1)
        return self.head(torch.cat([a, b, a * b, a - b], 1))

    def encode(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """One vector per sequence, `(B, N) → (B, dim)`."""
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"the model was built for at most {self.max_length} tokens, got {length}: "
                "truncate the sequence or build it with a larger max_length."
            )
        if self.pooling == "published":
            mask = tokens != 0
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding[:length])
        for block in self.blocks:
            x = block(x, mask, self.grid)
        x = self.norm(x)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        if self.pool is not None:
            return self.pool(x, mask)
        if self.pooling == "published":
            return x.sum(1) / (1 << (self.max_length - 1).bit_length())
        return x.mean(1) if mask is None else x.sum(1) / mask.sum(1, keepdim=True).clamp_min(1)


class LearnedPooling(nn.Module):
    """A weighted mean of the tokens in each head, `Σ_i softmax_i(u_h·x_i) x_i`; it starts as the mean."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.queries = nn.Linear(dim, num_heads, bias=False)
        nn.init.zeros_(self.queries.weight)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`(B, N, dim) → (B, dim)` over real tokens; zeros where there are none, as padding must be in `x`."""
        scores = self.queries(x)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., None], torch.finfo(scores.dtype).min)
        heads = x.unflatten(2, (self.queries.out_features, -1))
        return (scores.softmax(1)[..., None] * heads).sum(1).flatten(1)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, attn: AttentionLayer, dim: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_dim), nn.GELU(), ByteDropout(dropout), nn.Linear(mlp_dim, dim), ByteDropout(dropout)
        )

    def forward(self, x: Tensor, mask: Tensor | None, grid: tuple[int, int] | None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask=mask, grid=grid)
        return x + self.mlp(self.norm2(x))


class LocallyMixed(Attention):
    """A mechanism plus a depthwise convolution of the values, for mechanisms without one of their own."""

    def __init__(self, inner: Attention, kind: Literal["1d", "2d"]) -> None:
        super().__init__(inner.head_dim, inner.num_heads)
        self.inner = inner
        self.local = DepthwiseMixing(inner.num_heads * inner.head_dim, kind)

    def why_equal_lengths(self) -> str | None:
        return "its convolution runs over the tokens of both"

    def attend(self, inputs: Inputs) -> Tensor:
        *tokens, grid = inputs
        mixed = zero_padding(self.local(zero_padding(inputs.v, inputs.key_mask), grid), inputs.query_mask)
        return self.inner(*tokens, grid=grid) + mixed


def _layer(
    dim: int,
    num_heads: int,
    mechanism: str,
    options: dict[str, Any],
    *,
    max_length: int,
    local: Literal["none", "1d", "2d"],
    attn_drop: float,
    proj_drop: float,
) -> AttentionLayer:
    """The layer with what depends on the task filled in where the mechanism asks for it."""
    known = inspect.signature(mechanisms.entry(mechanism).build).parameters
    filled: dict[str, Any] = {}
    own_mixing = "local_conv" in known
    if own_mixing:
        # LOT's is None, "1d" or "2d"; that of the vision mechanisms is over a grid, or off
        filled["local_conv"] = (None if local == "none" else local) if mechanism == "lot" else local == "2d"
        own_mixing = mechanism == "lot" or local == "2d"
    if "max_length" in known:
        filled["max_length"] = max_length
    layer = AttentionLayer(
        dim,
        num_heads,
        mechanism,
        attn_drop=attn_drop if "dropout" in known else 0.0,
        **{**filled, **options},
    )
    layer.proj_drop = ByteDropout(proj_drop)
    if local != "none" and not own_mixing:
        layer.mechanism = LocallyMixed(layer.mechanism, local)
    return layer
