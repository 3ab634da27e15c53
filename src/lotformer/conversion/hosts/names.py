"""Names that the vision transformers of many libraries share, timm's and Hugging Face's among them."""

from __future__ import annotations

from torch import Tensor, nn

_SPECIAL = ("cls_token", "class_embedding", "distillation_token", "dist_token", "register_tokens", "reg_token")


def special_tokens(enclosure: nn.Module) -> int | None:
    """As many as parameters called `cls_token`, `register_tokens`, … hold; None without any."""
    own = [p for name, p in enclosure.named_parameters() if name.rpartition(".")[2] in _SPECIAL]
    return sum(map(_count, own)) if own else None


def _count(tokens: Tensor) -> int:
    """`(C)` and `(1, 1, C)` are one token, `(1, n, C)` are n."""
    return tokens.shape[-2] if tokens.dim() > 1 else 1


def patches(enclosure: nn.Module) -> nn.Module | None:
    """The last convolution of the first part called `patch_embed…`.

    A tower beside the attention keeps its patches to itself.
    """
    for name, part in enclosure.named_modules():
        if name.rpartition(".")[2].startswith("patch_embed") and not _is_of_a_tower(enclosure, name):
            convolutions = [module for module in part.modules() if isinstance(module, nn.Conv2d)]
            if convolutions:
                return convolutions[-1]
    return None


def _is_of_a_tower(enclosure: nn.Module, part: str) -> bool:
    """True if a part lies in a child that has attention of its own, for which the patches are made."""
    child, _, inner = part.partition(".")
    return bool(inner) and any(
        "Attention" in type(module).__name__ for module in enclosure.get_submodule(child).modules()
    )
