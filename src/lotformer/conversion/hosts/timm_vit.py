"""timm's vision transformers: the `Attention` layer that ViT, DeiT and most relatives share, and the rotary ones."""

from __future__ import annotations

from torch import Tensor, nn

from ... import _torchvision
from .sites import Site, Skipped, mix

_torchvision.prepare()  # must come before timm, which cannot be imported without it beside a CPU build of torch

from timm.layers.attention import Attention as TimmAttention  # noqa: E402

from .timm_rotary import AttentionRope, ConvertedAttentionRope, ConvertedEvaAttention, EvaAttention  # noqa: E402


class ConvertedTimmAttention(TimmAttention):
    """timm's attention layer whose middle is a mechanism; everything else, names included, is unchanged."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if is_causal:
            raise ValueError("this attention was converted and cannot attend causally; convert without it.")
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        out = mix(self, self.q_norm(q), self.k_norm(k), v, attn_mask, self.scale)
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
        module.__class__ = _CONVERTED[type(module)]


def detach(model: nn.Module, modules: list[nn.Module]) -> None:
    """Let the modules run softmax again."""
    for module in modules:
        module.__class__ = _ORIGINAL[type(module)]
