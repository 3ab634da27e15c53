"""Before and after: run a model on one batch without leaving a trace, and compare outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...data.batches import Batch, call, main_tensor
from ...data.text import positions_of
from .report import Probe

_TOKENS = 256


@torch.no_grad()
def output(model: nn.Module, batch: Batch | None, *, made_up: bool) -> Tensor | None:
    """The main output in evaluation mode; the mode is put back. None without a batch.

    A made-up batch need not suit every model and mechanism: None if it does not.
    """
    if batch is None:
        return None
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return main_tensor(call(model, batch)).float()
    except Exception:
        if made_up:
            return None
        raise
    finally:
        for module, training in modes.items():
            module.training = training


def difference(before: Tensor | None, after: Tensor | None) -> Probe | None:
    """Relative change and mean cosine of the last dimension."""
    if before is None or after is None:
        return None
    change = float((after - before).norm() / before.norm().clamp_min(1e-30))
    return Probe(change, float(torch.cosine_similarity(before, after, dim=-1).mean()))


def sample_inputs(model: nn.Module) -> Batch | None:
    """Two random samples of the kind the model takes, or None where its config does not tell.

    Texts are longer than the window that they get by default, if the model's positions allow it, and have a square
    number of tokens, for mechanisms that see a grid.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type == "meta":
        return None
    generator = torch.Generator().manual_seed(0)
    like = parameter.detach()
    config = getattr(model, "config", None)
    main_input = getattr(model, "main_input_name", None)
    size = getattr(config, "image_size", None)
    if main_input == "pixel_values" and isinstance(size, int):
        shape = (2, getattr(config, "num_channels", 3), size, size)
        return {"pixel_values": torch.randn(shape, generator=generator).to(like)}
    vocabulary = getattr(config, "vocab_size", None)
    if main_input == "input_ids" and isinstance(vocabulary, int):
        tokens = math.isqrt(min(_TOKENS, positions_of(model) or _TOKENS)) ** 2
        # the first and last ids are often special tokens that models count
        some = (vocabulary // 4, max(vocabulary // 2, 1 + vocabulary // 4))
        ids = torch.randint(*some, (2, tokens), generator=generator)
        batch = {"input_ids": ids.to(parameter.device)}
        if getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = ids[:, :5].to(parameter.device)
        return batch
    timm_size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    if timm_size is not None:
        patches = getattr(getattr(model, "patch_embed", None), "img_size", None)
        shape = (2, timm_size[0], *(patches or timm_size[1:]))
        return torch.randn(shape, generator=generator).to(like)
    if isinstance(model, nn.TransformerEncoder):
        width = model.layers[0].self_attn.embed_dim
        return torch.randn(2, 16, width, generator=generator).to(like)
    return None
