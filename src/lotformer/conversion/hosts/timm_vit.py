"""timm's vision transformers: the `Attention` layer of ViT, DeiT and most of their relatives, and the rotary ones."""

from __future__ import annotations

from timm.layers.attention import Attention as TimmAttention
from torch import Tensor, nn

from ...attention.folded import split_tokens
from ...attention.unformed import Projections
from ...layers import value_rows
from .sites import Site, Skipped, is_folded, mix, relative_scale
from .timm_rotary import AttentionRope, ConvertedAttentionRope, ConvertedEvaAttention, EvaAttention


class ConvertedTimmAttention(TimmAttention):
    """timm's attention layer whose middle is a mechanism; everything else, names included, is unchanged."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if is_causal:
            raise ValueError("this attention was converted and cannot attend causally; convert without it.")
        batch, length, _ = x.shape
        if is_folded(self):
            v = self.qkv(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
            q = k = split_tokens(x, self.head_dim)
        else:
            q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            q, k = self.q_norm(q), self.k_norm(k)
        out = mix(self, q, k, v, attn_mask, self.scale)
        out = self.norm(out.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim))
        gate: nn.Module | None = getattr(self, "gate", None)
        if gate is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


_CONVERTED: dict[type[nn.Module], type[nn.Module]] = {
    TimmAttention: ConvertedTimmAttention,
    AttentionRope: ConvertedAttentionRope,
    EvaAttention: ConvertedEvaAttention,
}
_ORIGINAL = {converted: original for original, converted in _CONVERTED.items()}


def find(model: nn.Module) -> list[Site | Skipped]:
    """Every attention module of timm's in the model."""
    found: list[Site | Skipped] = []
    for name, module in model.named_modules():
        if type(module) in _CONVERTED or type(module) in _ORIGINAL:
            found.append(Site(name, module, module.num_heads, module.head_dim))
        elif type(module).__module__.startswith("timm.") and "Attention" in type(module).__name__:
            if any("relative_position" in part or "rel_pos" in part for part in dict(module.named_parameters())):
                reason = "it adds a position bias to its scores"
            else:
                reason = (
                    "only timm's Attention, AttentionRope and EvaAttention (ViT, DeiT, EVA and relatives) are converted"
                )
            found.append(Skipped(name, module, reason))
    return found


def attach(model: nn.Module, modules: list[nn.Module]) -> None:
    """Let the modules run their mechanisms."""
    for module in modules:
        module.__class__ = _CONVERTED.get(type(module), type(module))


def detach(model: nn.Module, modules: list[nn.Module]) -> None:
    """Let the modules run softmax again."""
    for module in modules:
        module.__class__ = _ORIGINAL[type(module)]


def projections(module: nn.Module, num_heads: int, head_dim: int) -> Projections | str:
    """The first two thirds of `qkv`."""
    if not isinstance(module, TimmAttention):
        return "queries and keys are turned by their positions, so their scores are not linear in the input"
    qkv, norms = module.qkv, (module.q_norm, module.k_norm)
    if type(qkv) is not nn.Linear:
        return f"its projection is a {type(qkv).__name__}, not a plain linear map"
    if not all(isinstance(norm, nn.Identity) for norm in norms):
        return "queries and keys are normalised, so their scores are not linear in the input"
    return Projections.of(qkv.weight, qkv.bias, num_heads, head_dim, relative_scale(module.scale, head_dim))


def drop_projections(module: nn.Module) -> None:
    """`qkv` makes values alone."""
    assert isinstance(module.qkv, nn.Linear)
    module.qkv = value_rows(module.qkv)
