"""Attention layers that drop into a transformer block: projections around a mechanism from the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import attention
from .attention.config import OPTIONS, LOTConfig
from .attention.folded import FoldedLOT, split_tokens, why_unfoldable
from .attention.host_masks import key_mask_from_sdpa
from .attention.lot import LOT
from .attention.options import documents
from .attention.unformed import Linear, Projections, why_too_coarse
from .nn.checks import require_count
from .nn.padding import zero_padding_to_learn
from .nn.watched import is_watched
from .ops.attention import CAUSAL_REFUSAL
from .ops.precision import is_autocast

if TYPE_CHECKING:
    from typing_extensions import Self


class AttentionLayer(nn.Module):
    """Self-attention `(B, N, dim) → (B, N, dim)` with any mechanism of the registry between the projections.

    It is built and called as timm builds and calls its own `Attention`, and names its parts as timm does (`qkv`,
    `q_norm`, `k_norm`, `norm`, `proj`, `proj_drop`), so that state dicts carry over; the mechanism is `mechanism`, as
    in converted models.

        performer = lotformer.AttentionLayer.with_options(mechanism="performer")
        vit = timm.models.vision_transformer.VisionTransformer(attn_layer=performer)

    Args:
        dim: width of the tokens, a multiple of `num_heads`.
        mechanism: a name from `lotformer.attention.names()`; `options` are that mechanism's own.
        qkv_bias, proj_bias: whether the projections have a bias.
        qk_norm: normalise queries and keys per head; scale_norm: normalise the output before `proj`. Both by
            `norm_layer(width, device=…, dtype=…)`.
        attn_drop: dropout inside the mechanism, refused where it has none. proj_drop: dropout of the output.
        grid_size: `(rows, columns)` of the tokens after the prefix, for 2-D parts; square by default. timm's models do
            not say it when they call: pass `model.patch_embed.grid_size`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        mechanism: str = "softmax",
        *,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        grid_size: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        require_count("dim", dim)
        require_count("num_heads", num_heads)
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got dim={dim} and num_heads={num_heads}.")
        if norm_layer is None:
            if qk_norm or scale_norm:
                raise ValueError("qk_norm and scale_norm need a norm_layer, for example norm_layer=torch.nn.LayerNorm.")
            norm_layer = nn.Identity
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.grid_size = grid_size
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.q_norm = norm_layer(self.head_dim, **factory) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **factory) if qk_norm else nn.Identity()
        with nullcontext() if device is None else torch.device(device):
            made = attention.build(
                mechanism, head_dim=self.head_dim, num_heads=num_heads, **_dropout(mechanism, attn_drop), **options
            )
        self.mechanism = made if dtype is None else made.to(dtype)
        self.norm = norm_layer(dim, **factory) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    @classmethod
    def with_options(cls, **options: Any) -> type[Self]:
        """The class with options filled in, for hosts that take a class and build it themselves.

        timm takes only a class: `functools.partial` is refused. What the host passes wins. The layers that come out are
        of the original class: they copy, pickle and print as if built by hand.
        """

        def build(_: type[Self], *args: Any, **given: Any) -> Self:
            return cls(*args, **{**options, **given})

        return type(cls.__name__, (cls,), {"__new__": build, "__doc__": f"{cls.__name__} with {options}."})

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        mask: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        **others: Any,
    ) -> Tensor:
        """Mix the tokens of `x (B, N, dim)`.

        Args:
            attn_mask: as in `scaled_dot_product_attention`: broadcasts to `(B, heads, N, N)`, boolean or additive. It
                must be a pure padding mask; causal, windowed and other masks, and position biases, are refused.
            is_causal: refused, unless the mechanism itself only looks back.
            mask: boolean `(B, N)`, True = a real token; instead of `attn_mask`.
            grid: `(rows, columns)` of the tokens after the prefix; wins over the constructor's `grid_size`.
        """
        if others or attn_mask is x or isinstance(is_causal, Tensor):
            raise TypeError(_of_another_layer(type(self).__name__, others))
        if is_causal and not self.mechanism.is_causal:
            raise ValueError(
                CAUSAL_REFUSAL if isinstance(self.mechanism, LOT) else "`is_causal`: this layer looks both ways."
            )
        for name, given in (("x", x), ("attn_mask", attn_mask), ("mask", mask)):
            if not isinstance(given, Tensor) and (given is not None or name == "x"):
                raise TypeError(
                    f"`{name}`: expected a tensor, got {type(given).__name__}: use torch.as_tensor({name})."
                )
        if x.dim() != 3 or x.shape[2] != self.qkv.in_features:
            raise ValueError(f"`x`: expected (B, N, {self.qkv.in_features}), got {tuple(x.shape)}.")
        batch, length, dim = x.shape
        real = self._real_tokens(mask, attn_mask, batch, length)
        x = zero_padding_to_learn(x, real)
        out = self._mix(x, real, self.grid_size if grid is None else grid)
        out = self.norm(out.transpose(1, 2).reshape(batch, length, dim))
        return self.proj_drop(self.proj(out))

    def fold(self) -> None:
        """Turn the layer into its inference form, in place: `lotformer.fold` for one layer.

        `qkv` then makes values alone, and the mechanism reads the scores of queries and keys off the input.

        Raises:
            ValueError: it cannot be, with the reason.
        """
        reason = self.why_unfoldable()
        if reason is not None:
            raise ValueError(f"this layer cannot be folded: {reason}.")
        assert isinstance(self.mechanism, LOT)
        self.mechanism = FoldedLOT.of(self.mechanism, self._projections())
        self.qkv = value_rows(self.qkv)

    def why_unfoldable(self) -> str | None:
        """The reason why the layer has no inference form, or None if it has."""
        if type(self.qkv) is not nn.Linear:
            return f"its projection is a {type(self.qkv).__name__}, not a plain linear map"
        if not isinstance(self.q_norm, nn.Identity) or not isinstance(self.k_norm, nn.Identity):
            return "queries and keys are normalised, so their scores are not linear in the input"
        return why_too_coarse(self.qkv.weight.dtype) or why_unfoldable(self.mechanism)

    def _mix(self, x: Tensor, real: Tensor | None, grid: tuple[int, int] | None) -> Tensor:
        """The mixed values `(B, H, N, D)`; LOT reads queries and keys off the input where that is cheaper."""
        mechanism = self.mechanism
        if isinstance(mechanism, FoldedLOT):
            if self._is_plain(x, mechanism) and why_too_coarse(x.dtype) is None:
                return mechanism.attend_input(x, Linear(self.qkv.weight, self.qkv.bias), real, real, grid=grid)
            tokens = split_tokens(x, self.head_dim)
            return mechanism(tokens, tokens, self._heads(self.qkv(x)), real, real, grid=grid)
        if type(mechanism) is LOT and self._reads_input(x, mechanism):
            # taken apart once: every part on its own would have a gradient as large as the whole
            parts = [2 * self.qkv.in_features, self.qkv.in_features]
            scored, weight = self.qkv.weight.split(parts)
            scored_bias, bias = (None, None) if self.qkv.bias is None else self.qkv.bias.split(parts)
            projections = Projections.of(scored, scored_bias, self.num_heads, self.head_dim)
            return mechanism.attend_unformed(x, projections, Linear(weight, bias), real, real, grid=grid)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        # under autocast a norm raises the precision of what it returns
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return mechanism(q, k, v, real, real, grid=grid)

    def _reads_input(self, x: Tensor, mechanism: LOT) -> bool:
        """True if forming queries and keys can be skipped and skipping is cheaper."""
        if self.why_unfoldable() is not None or not self._is_plain(x, mechanism):
            return False
        # under tracing a length stands for all lengths, and must not decide
        tokens = None if torch.compiler.is_compiling() else x.shape[0] * x.shape[1]
        return tokens != 0 and mechanism.is_cheaper_unformed(x.shape[2], tokens)

    def _is_plain(self, x: Tensor, mechanism: LOT) -> bool:
        """True if no hook or replacement watches the projection or the mechanism, so that they may be fused."""
        if is_watched(self.qkv) or is_watched(mechanism) or type(self.qkv) is not nn.Linear:
            return False
        return self.qkv.weight.dtype == x.dtype and not is_autocast(x.device.type)

    def _projections(self) -> Projections:
        return Projections.of(self.qkv.weight, self.qkv.bias, self.num_heads, self.head_dim)

    def _heads(self, v: Tensor) -> Tensor:
        return v.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _real_tokens(self, mask: Tensor | None, attn_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
        if mask is not None and attn_mask is not None:
            raise ValueError("`mask` and `attn_mask` say the same thing: pass one of them.")
        if attn_mask is not None:
            return key_mask_from_sdpa(attn_mask, batch, self.num_heads, length)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, length)):
            expected = f"a boolean mask ({batch}, {length}), True = a real token"
            raise ValueError(f"`mask`: expected {expected}, got {mask.dtype} {tuple(mask.shape)}.")
        return mask


@documents(OPTIONS, without={"dropout"})
class LOTAttention(AttentionLayer):
    """LOT attention as a drop-in layer: linear in the sequence, doubly stochastic, of rank at most `rank`.

        attn = lotformer.LOTAttention(192, num_heads=3, rank=32, prefix_tokens=1)
        y = attn(torch.randn(2, 197, 192))                     # (B, N, dim) → (B, N, dim)
        y = attn(torch.randn(2, 197, 192), mask=real_tokens)   # boolean (B, N), True = a real token
        lot = lotformer.LOTAttention.with_options(rank=32, prefix_tokens=1)
        vit = timm.models.vision_transformer.VisionTransformer(attn_layer=lot)

    Queries send their mass to R learned pivots and pivots send it on to the keys, both by entropic optimal transport.
    Rows of the attention matrix sum to one in every precision; columns do as far as the solve has converged, which
    `layer.mechanism.coupling(q, k).residual()` tells. Padding carries no mass: a padded sample equals the truncated
    one. Time and memory are O(N·R). It cannot be causal.

    Args:
        dim: width of the tokens, a multiple of `num_heads`.
        qkv_bias, qk_norm, scale_norm, proj_bias, proj_drop, norm_layer, grid_size: as in `AttentionLayer`.
        attn_drop: probability of dropping a key in training, the same keys for every query of a head, whichever way it
            reads them.
        config: the options below as one `LOTConfig`, in place of them.
        {options}
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        grid_size: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        config: LOTConfig | None = None,
        **options: Any,
    ) -> None:
        if config is not None:
            options["config"] = config
        super().__init__(
            dim, num_heads, "lot", qkv_bias=qkv_bias, qk_norm=qk_norm, scale_norm=scale_norm, proj_bias=proj_bias,
            attn_drop=attn_drop, proj_drop=proj_drop, norm_layer=norm_layer, grid_size=grid_size, device=device,
            dtype=dtype, **options,
        )  # fmt: skip


def _of_another_layer(name: str, others: dict[str, Any]) -> str:
    """The reason for refusing arguments that `torch.nn.MultiheadAttention` or another layer would take."""
    takes = "self-attention takes its tokens once, `layer(x, mask=real_tokens)`"
    if "key_padding_mask" in others:
        opposite = "pass the opposite, `mask=~key_padding_mask`"
        return f"{name} has no `key_padding_mask`, True at padding, but `mask`, True at real tokens: {opposite}."
    if others:
        return f"{name} has no {', '.join(f'`{other}`' for other in others)}: {takes}."
    return f"{name} was called with tokens for queries, keys and values: {takes}."


def value_rows(qkv: nn.Linear) -> nn.Linear:
    """The last third of a projection to queries, keys and values: a plain linear map to the values."""
    rows = qkv.out_features // 3
    made = nn.Linear(qkv.in_features, rows, bias=qkv.bias is not None, device="meta")
    made.weight = nn.Parameter(qkv.weight.detach()[-rows:].clone(), requires_grad=qkv.weight.requires_grad)
    if qkv.bias is not None:
        made.bias = nn.Parameter(qkv.bias.detach()[-rows:].clone(), requires_grad=qkv.bias.requires_grad)
    return made.train(qkv.training)


def _dropout(mechanism: str, probability: float) -> dict[str, float]:
    """The argument that gives a mechanism its dropout, or a refusal: dropout that does nothing would go unnoticed."""
    if "dropout" in inspect.signature(attention.entry(mechanism).build).parameters:
        return {"dropout": probability}
    if probability > 0:
        raise ValueError(f"attn_drop={probability}: {mechanism!r} has no dropout; use attn_drop=0 (proj_drop works).")
    return {}
