"""Layouts, padding and masks: the CPU kernel reads what hosts pass, and padding never matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lotformer.ops import lot_attention
from support.cpu_kernel import FORMS, assert_agrees, attend, needs_kernel, problem, run, scored

pytestmark = needs_kernel

MASKS = {
    "right": lambda n: torch.arange(n) < n - 5,
    "left": lambda n: torch.arange(n) >= 4,
    "holes": lambda n: torch.arange(n) % 3 != 1,
    "one left": lambda n: torch.arange(n) == n // 2,
    "none": lambda n: torch.ones(n, dtype=torch.bool),
    "empty": lambda n: torch.zeros(n, dtype=torch.bool),
}


def pair_of_masks(kind: str, n: int) -> Tensor:
    """The kind for the first sample, all real for the second."""
    return torch.stack([MASKS[kind](n), MASKS["none"](n)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masses", [False, True], ids=["uniform", "masses"])
@pytest.mark.parametrize("queries", MASKS)
@pytest.mark.parametrize("keys", MASKS)
def test_masked_results_agree_with_the_reference(queries: str, keys: str, masses: bool, form: str) -> None:
    x = problem(n=23, m=29, rank=5, dim=6, query_masses=masses, key_masses=masses)
    options: dict[str, Any] = {"query_mask": pair_of_masks(queries, 23), "key_mask": pair_of_masks(keys, 29)}
    for side in ("query", "key"):
        if masses:
            mask = options[f"{side}_mask"]
            mask = mask[:, None] if x[f"{side}_masses"].dim() == 3 else mask
            real = x[f"{side}_masses"] * mask
            x[f"{side}_masses"] = (real / real.sum(-1, keepdim=True).clamp_min(1e-9)).float().double()
    if masses and queries == "holes":
        x = scored(x)
    got = run(x, torch.float32, "cpu", eps=0.5, **FORMS[form], **options)
    expected = run(x, torch.float64, "reference", eps=0.5, **FORMS[form], **options)
    assert_agrees(got, expected, 1e-5, floor=0.1)
    assert (got["out"][0][:, ~options["query_mask"][0]] == 0).all()


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
def test_the_contents_of_padding_never_matter(junk: float) -> None:
    x = problem(n=31, m=31)
    mask = pair_of_masks("holes", 31)
    clean = run(x, torch.float32, "cpu", query_mask=mask, key_mask=mask)
    for name in ("q", "k", "v"):
        x[name] = x[name].masked_fill(~mask[:, None, :, None], junk)
    cotangent = torch.randn(2, 3, 31, 19, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dirty = run(x, torch.float32, "cpu", cotangent.masked_fill(~mask[:, None, :, None], junk), query_mask=mask,
                key_mask=mask)  # fmt: skip
    for name, expected in clean.items():
        assert torch.equal(dirty[name], expected), name


def test_a_padded_sample_is_its_truncation_to_the_bit() -> None:
    x = problem(batch=1, n=40, m=40)
    mask = torch.arange(40)[None] < 33
    padded = run(x, torch.float32, "cpu", query_mask=mask, key_mask=mask)["out"][:, :, :33]
    short = {name: t[:, :, :33] if name in ("q", "k", "v") else t for name, t in x.items()}
    assert torch.equal(padded, run(short, torch.float32, "cpu")["out"])


def test_a_batch_is_its_samples_one_by_one() -> None:
    x = problem(batch=5, n=90, m=80, rank=32)
    together = run(x, torch.float32, "cpu")["out"]
    for b in range(5):
        alone = {name: t[b : b + 1] if name in ("q", "k", "v") else t for name, t in x.items()}
        assert torch.equal(run(alone, torch.float32, "cpu")["out"][0], together[b])


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of a packed projection": lambda x: torch.stack([x, x + 1, x - 1], 3)[:, :, :, 0],
    "every other token": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "transposed rows": lambda x: x.mT.contiguous().mT,
    "offset rows": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
}


@pytest.mark.parametrize("given", ["pivots", "scores"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layouts_do_not_change_the_result(layout: str, dtype: torch.dtype, given: str) -> None:
    plain = problem(rank=16, dim=16, value_dim=32) if given == "pivots" else scored(problem(rank=16))
    x = {name: t.to(dtype if name in "qkv" else torch.float32) for name, t in plain.items()}
    arranged = {name: LAYOUTS[layout](t) if name in "qkv" else t for name, t in x.items()}
    results = []
    for inputs in (x, arranged):
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        out = attend(leaves, backend="cpu")
        results.append((out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out).cumsum(2))))
    for plain, strided in zip(*results, strict=True):
        torch.testing.assert_close(strided, plain, rtol=0, atol=0)


def test_an_expanded_gradient_is_accepted() -> None:
    """`out.sum().backward()` hands over a gradient with zero strides."""
    x = {name: t.float() for name, t in problem().items()}
    q = x["q"].requires_grad_()
    lot_attention(**x, backend="cpu").sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_the_output_keeps_the_layout_of_the_queries() -> None:
    """So that a host which transposes back before its projection gets a view."""
    plain = problem()
    for either in (plain, scored(plain)):
        x = {name: t.float() for name, t in either.items()}
        q = x["q"].transpose(1, 2).contiguous().transpose(1, 2)
        assert attend(x | {"q": q}, backend="cpu").transpose(1, 2).is_contiguous()
        assert attend(x, backend="cpu").is_contiguous()


sizes = st.integers(1, 70)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=sizes, m=sizes, rank=st.integers(1, 40), dim=st.integers(1, 40), value_dim=st.integers(1, 40))
def test_any_shape_stride_and_mask_agrees(
    data: st.DataObject, n: int, m: int, rank: int, dim: int, value_dim: int
) -> None:
    batch, heads = data.draw(st.integers(1, 3), "batch"), data.draw(st.integers(1, 3), "heads")
    seed = data.draw(st.integers(0, 1000), "seed")
    form = data.draw(st.sampled_from(sorted(FORMS)), "form")
    x = problem(batch, heads, n, m, rank, dim, value_dim, seed=seed)
    for name in ("q", "k", "v"):
        layout = data.draw(st.sampled_from(sorted(LAYOUTS)), f"layout of {name}")
        x[name] = LAYOUTS[layout](x[name])
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"eps": data.draw(st.sampled_from([0.2, 1.0, 5.0]), "eps"), **FORMS[form]}
    for side, length in (("query_mask", n), ("key_mask", m)):
        if data.draw(st.booleans(), side):
            options[side] = torch.rand(batch, length, generator=generator) < 0.7
    if data.draw(st.booleans(), "scores are given"):
        x = scored(x)
    expected = run(x, torch.float64, "reference", **options)
    assert_agrees(run(x, torch.float32, "cpu", **options), expected, 1e-5, floor=0.1 / options["eps"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("windows", ["tokens", "heads"])
def test_tokens_that_overlap_in_memory_have_gradients_of_their_own(windows: str, form: str) -> None:
    base = torch.randn(2, 60, generator=torch.Generator().manual_seed(0))
    q = base[:, None].unfold(2, 16, 1)[:, :, :9] if windows == "tokens" else base.unfold(1, 16, 1)[:, :3, None]
    x = {name: t.float() for name, t in problem(heads=q.shape[1], n=q.shape[2], rank=8, dim=16).items()}

    def gradients(q: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in ({**x, "q": q}).values()]
        out = lot_attention(*leaves, eps=0.5, **FORMS[form], backend="cpu")
        return torch.autograd.grad(out, leaves, torch.ones_like(out.contiguous()))

    assert q.stride(-1) == 1
    for got, expected in zip(gradients(q), gradients(q.contiguous()), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [25, 32])
@pytest.mark.parametrize("side", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_shows_in_its_head_and_in_no_other(bad: float, side: str, rank: int, form: str) -> None:
    x = {name: t.float() for name, t in problem(rank=rank, dim=16).items()}
    clean = lot_attention(**x, **FORMS[form], backend="cpu")
    x[side][1, 2, 7, 3] = bad
    out = lot_attention(**x, **FORMS[form], backend="cpu")
    spoilt = out[1, 2] if side != "v" else out[1, 2, :, 3:4]
    if side == "q" and form == "none":  # nothing ties one query to the others
        clean[1, 2, 7] = out[1, 2, 7]
        assert torch.equal(out[1, 2].nan_to_num(), clean[1, 2].nan_to_num())
        spoilt = spoilt[7:8]
    assert not spoilt.isfinite().all(-1).any()
    clean[1, 2] = out[1, 2] = 0
    assert torch.equal(out, clean)
