"""Gradients of the dense mechanisms, nothing to read, and wrong input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lotformer import attention
from support import small_zoo
from support.dense import build, tokens

GRADCHECKED: dict[str, dict[str, object]] = {
    "sinkformer": {"half_steps": 5},
    "espformer": {"tau": 0.5, "temperature": 2.0},
    "espformer-hard": {"temperature": 2.0},
    "linear-transformer": {},
    "performer": {"features": 5},
    "linformer": {"rank": 3, "max_length": 5},
    "nystromformer": {"landmarks": 3, "conv_kernel": 3, "inverse_iters": 3},
    "kernelized": {},
    "skyformer": {"features": 4, "inverse_iters": 3},
    "cosformer": {},
    "hedgehog": {},
    "t2r": {"features": 4},
    "efficient": {},
    "hydra": {},
    "angular": {"conv_kernel": 3},
    "flatten": {"kernel_size": 3, "num_tokens": 4},
    "enhanced": {},
    "polaformer": {"kernel_size": 3, "num_tokens": 4},
    "mobiattention": {},
}


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradients_are_those_of_the_formula_also_under_a_mask(name: str) -> None:
    module = attention.build(name, head_dim=4, num_heads=2, **GRADCHECKED[name]).double()
    q, k, v = (torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    parameters = tuple(module.parameters())

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return module(q, k, v, mask, mask, grid=(2, 2))

    assert torch.autograd.gradcheck(run, (q, k, v, *parameters))


SELF_ATTENTIVE = [
    "quantum-ds", "synthesizer", "local", "longformer", "reformer", "bigbird", "informer", "deltanet", "mamba2", "diff",
]  # fmt: skip


@pytest.mark.parametrize("name", SELF_ATTENTIVE)
def test_gradients_are_those_of_the_forward(name: str) -> None:
    """Mechanisms that choose discretely (LSH, ProbSparse) are smooth around these inputs."""
    torch.manual_seed(0)
    model = small_zoo.make(name, **small_zoo.SMALL.get(name, {}))
    q, k, v = (x.requires_grad_() for x in small_zoo.tokens(1, 9))
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, 7:] = False
    torch.autograd.gradcheck(lambda *x: model(*x, mask, mask), (q, k, v), atol=1e-6)


# Bad input


@pytest.mark.parametrize("name", GRADCHECKED)
def test_nothing_to_read_gives_zeros(name: str) -> None:
    module = attention.build(name, head_dim=4, num_heads=2)
    q = torch.randn(2, 2, 4, 4, requires_grad=True)
    nothing = torch.randn(2, 2, 0, 4)
    assert module(nothing, nothing, nothing).shape == (2, 2, 0, 4)
    if not attention.entry(name).needs_equal_lengths:
        out = module(q, nothing, nothing)
        assert not out.any()
        out.sum().backward()


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"key_mask": torch.ones(2, 9)}, "key_mask.*boolean.*torch.float32"),
        ({"key_mask": torch.ones(9, dtype=torch.bool)}, r"key_mask.*\(2, 9\).*\(9,\)"),
        ({"query_mask": torch.ones(2, 9, dtype=torch.bool)}, r"query_mask.*\(2, 7\).*\(2, 9\)"),
    ],
    ids=["float", "no-batch", "wrong-length"],
)
def test_masks_of_the_wrong_kind_or_shape_are_named(masks: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("performer")(*tokens(7, 9), **masks)


def test_tokens_of_another_layer_are_named() -> None:
    q, k, v = tokens(7)
    with pytest.raises(ValueError, match=r"3 heads of dimension 6.*\(2, 2, 7, 6\)"):
        build("cosformer")(q[:, :2], k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="keys and values"):
        build("cosformer")(q, k, v[:, :, :5])


def test_a_count_that_is_no_integer_is_named() -> None:
    for name, option in (
        ("performer", "features"),
        ("linformer", "rank"),
        ("local", "block_size"),
        ("t2r", "features"),
    ):
        with pytest.raises(ValueError, match=rf"{option} must be an integer, got 8\.0"):
            build(name, **{option: 8.0})
