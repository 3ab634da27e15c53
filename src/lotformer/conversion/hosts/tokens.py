"""What stands before and around the tokens that a host hands to its attention, as far as its model tells."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

TokenKind = Literal["text", "image"]

_NAMES = ("cls_token", "class_embedding", "distillation_token", "dist_token", "register_tokens", "reg_token")


def special_tokens(model: nn.Module, name: str) -> int:
    """How many ([CLS], distillation, registers) a vision transformer puts before the patches that reach a module.

    0 if it has none. timm says it; Hugging Face's models hold one parameter for each kind in the part that makes the
    embeddings.
    """
    while name:
        name = name.rpartition(".")[0]
        enclosure = model.get_submodule(name)
        told = getattr(enclosure, "num_prefix_tokens", None)
        if isinstance(told, int):
            return told
        own = [p for n, p in enclosure.named_parameters() if n.rpartition(".")[2] in _NAMES]
        if own:
            return sum(map(_count, own))
    return 0


def _count(tokens: Tensor) -> int:
    """`(C)` and `(1, 1, C)` are one token, `(1, n, C)` are n."""
    return tokens.shape[-2] if tokens.dim() > 1 else 1


def tokens_before(model: nn.Module, name: str) -> TokenKind | None:
    """What the tokens are that reach the module called `name`: words, or patches on a grid; None if nobody says."""
    if patches_before(model, name) is not None:
        return "image"
    return "text" if _reads_text(model, name) else None


def patches_before(model: nn.Module, name: str) -> tuple[str, nn.Conv2d] | None:
    """The convolution that makes the patches which reach the module called `name`, and the name of what encloses both.

    It is that of the nearest enclosure.

    A tower beside the module keeps its patches to itself.
    """
    while name:
        name = name.rpartition(".")[0]
        enclosure = model.get_submodule(name)
        for part_name, part in enclosure.named_modules():
            if part_name.rpartition(".")[2].startswith("patch_embed") and not _is_of_a_tower(enclosure, part_name):
                convolutions = [m for m in part.modules() if isinstance(m, nn.Conv2d)]
                if convolutions:
                    return name, convolutions[-1]
        if getattr(enclosure, "main_input_name", "pixel_values") != "pixel_values":
            return None  # the text half of a Hugging Face model; patches further out are not its own
    return None


def _is_of_a_tower(enclosure: nn.Module, part: str) -> bool:
    """Whether a part of a module lies in a child with attention of its own, which the patches are for."""
    child, _, inner = part.partition(".")
    return bool(inner) and any(
        "Attention" in type(module).__name__ for module in enclosure.get_submodule(child).modules()
    )


def _reads_text(model: nn.Module, name: str) -> bool:
    """Whether a Hugging Face model of texts encloses the module called `name`.

    The name of its main input is not enough: models of images that do not say theirs inherit that of texts.
    """
    while name:
        name = name.rpartition(".")[0]
        enclosure = model.get_submodule(name)
        if hasattr(enclosure, "main_input_name"):
            kinds = getattr(enclosure, "input_modalities", "text")
            return bool(enclosure.main_input_name == "input_ids" and kinds in ("text", ("text",), ["text"]))
    return False
