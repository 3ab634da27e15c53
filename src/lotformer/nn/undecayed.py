"""Parameters that weight decay must leave alone, in a form that other libraries' optimisers respect."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WIDE = (torch.float32, torch.float64)


class Undecayed(nn.Module):
    """One tensor, learned without weight decay; `module(x)` is its value, ready to meet the tokens `x`.

    Pivots and log masses live in the space of tokens or of logarithms, where zero is no neutral place: decay would pull
    them to nowhere. timm and Hugging Face's `Trainer` never ask a layer what to spare, they go by names, and `bias` is
    the one name that both of them, and most training scripts, spare. So the tensor is called `bias` here: `points`
    appears as `points.bias` in state dicts.

    It is read through `forward` alone, which is also where PEFT's `target_parameters` puts its adapters.
    """

    bias: Tensor

    def __init__(self, *shape: int, learn: bool = True) -> None:
        super().__init__()
        if learn:
            self.bias = nn.Parameter(torch.empty(shape))
        else:
            self.register_buffer("bias", torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        """The tensor in the wider precision of itself and `x`, at least fp32: a rounded logit is a wrong mass."""
        if self.bias.dtype == x.dtype and x.dtype in _WIDE:  # the usual case, without asking twice
            return self.bias
        wide = torch.promote_types(torch.promote_types(self.bias.dtype, x.dtype), torch.float32)
        return self.bias.to(wide)

    def extra_repr(self) -> str:
        return f"{tuple(self.bias.shape)}, learned={isinstance(self.bias, nn.Parameter)}"


def undecayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters of every `Undecayed` below `model`."""
    return {
        f"{name}.bias"
        for name, module in model.named_modules()
        if isinstance(module, Undecayed) and isinstance(module.bias, nn.Parameter)
    }


def no_weight_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay should leave alone: pivots, masses, ε, and what the model names itself.

    timm's `create_optimizer_v2` and Hugging Face's `Trainer` spare them without being told. This is for optimisers that
    go by other rules than names, for example timm's layer-wise decay:
    `timm.optim.param_groups_layer_decay(model, no_weight_decay_list=lotformer.no_weight_decay(model))`.
    """
    of_its_own = getattr(model, "no_weight_decay", None)  # timm's models have it
    return undecayed_names(model) | set(of_its_own() if callable(of_its_own) else ())
