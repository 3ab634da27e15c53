"""Groups found in the sample: what is read through them, exactly and otherwise; what never matters; what is refused."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from lotformer.ops import Grouping, Reach, cpu, found_attention
from lotformer.ops.plain import find_groups
from support.cpu_kernel import assert_agrees
from support.found import Problem, as_matrix, attend, build, problems, with_gradients

CONTENT = Problem(rank=6, heaviest=2, most=3, grid=(5, 8), reach=(1, 1), prefix=2)
BACKENDS = ["reference"] + ([] if cpu.why_unavailable() else ["cpu"])
both = pytest.mark.parametrize("backend", BACKENDS)
contents = st.builds(replace, problems, heaviest=st.integers(1, 5), most=st.integers(1, 9))


def values(backend: str, x: Tensor) -> Tensor:
    return x.float() if backend == "cpu" else x.double()


def softmax(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if key_mask is None else key_mask[:, None, None])


@given(problems | contents)
@example(CONTENT)
@example(replace(CONTENT, masked=True, window="1d"))
@example(replace(CONTENT, window=None, rank=3, heaviest=5, most=40))
def test_it_is_one_matrix_of_softmax_and_of_groups(p: Problem) -> None:
    b = build(p)
    got, groups = with_gradients(b, torch.float64, backend="reference")
    leaves = {name: t.detach().requires_grad_() for name, t in b.x.items()}
    matrix, exact = as_matrix(b, leaves, groups)
    out = matrix @ leaves["v"]
    cotangent = torch.arange(out.numel()).sin().bfloat16().to(out.dtype).view(out.shape)
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent, allow_unused=True, materialize_grads=True)
    expected = {"out": out.detach(), "share": (matrix * exact).sum(-1).detach()}
    expected |= {f"grad of {name}": g for name, g in zip(leaves, grads, strict=True)}
    assert_agrees(got, expected, 1e-9, floor=1e-2)


def one_by_one(q: Tensor, k: Tensor, rank: int, steps: int) -> Tensor:
    """Groups of the keys `(M, D)` of one head, all of them real, by the definition."""
    sampled = q[:: max(len(q) // (8 * q.shape[1]), 1)]  # as many as tell how queries see keys
    metric = sampled.mT @ sampled
    centres = k[[t * (len(k) - 1) // max(rank - 1, 1) for t in range(rank)]].clone()
    groups = torch.zeros(len(k), dtype=torch.int64)
    for step in range(steps):
        for j, key in enumerate(k):
            apart = centres - key
            groups[j] = ((apart @ metric) * apart).sum(-1).float().argmin()
        for t in groups.unique() if step < steps - 1 else ():
            centres[t] = k[groups == t].mean(0)
    return groups


@both
@given(problems)
def test_groups_are_those_of_a_few_steps_of_assignment_and_mean(backend: str, p: Problem) -> None:
    b = build(replace(p, batch=1, heads=1, dim=max(p.dim, 3)))
    real = b.masks.get("key_mask", torch.ones(1, b.x["k"].shape[2], dtype=torch.bool))[0, p.prefix :]
    queries = b.masks.get("query_mask", torch.ones(1, p.length, dtype=torch.bool))[0]
    assume(real.any() and queries.any())
    x = {name: values(backend, t) for name, t in b.x.items()}
    groups = attend(b, x, backend=backend).groups[0, 0]
    expected = one_by_one(b.x["q"][0, 0, queries], b.x["k"][0, 0, p.prefix :][real], p.rank, p.steps)
    assert (groups[~real] == p.rank).all()
    assert (groups[real] == expected).double().mean() > (0.999 if backend == "reference" else 0.9)


@both
@pytest.mark.parametrize("window", [None, "1d", "2d"])
def test_with_a_group_for_every_key_it_is_softmax(window: str | None, backend: str) -> None:
    for rank in (28, 40):
        b = build(Problem(rank=rank, window=window, corrected=False, masked=True))
        x = {name: values(backend, t) for name, t in b.x.items()}
        got = attend(b, x, backend=backend)
        expected = softmax(*x.values(), b.masks["key_mask"]) * b.masks["query_mask"][:, None, :, None]
        torch.testing.assert_close(got.out, expected, rtol=1e-5, atol=1e-5)


@both
def test_keys_that_repeat_are_one_group(backend: str) -> None:
    """Also where fewer keys differ than there are groups, whichever of equal centres they start from."""
    generator = torch.Generator().manual_seed(0)
    few = values(backend, torch.randn(1, 2, 7, 16, generator=generator))
    q, k = values(backend, torch.randn(1, 2, 90, 16, generator=generator)), few.repeat_interleave(10, 2)
    v = values(backend, torch.randn(1, 2, 70, 16, generator=generator))
    found = found_attention(q, k, v, Grouping(30), backend=backend)
    torch.testing.assert_close(found.out, softmax(q, k, v), rtol=1e-5, atol=1e-5)
    assert all(len(head.unique()) == 7 for head in found.groups[0])
    same = found_attention(q, k[:, :, :1].expand_as(k), v, Grouping(30), backend=backend)
    torch.testing.assert_close(same.out, v.mean(2, keepdim=True).expand_as(same.out), rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("window", ["1d", "2d"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_window_that_sees_everything_is_softmax_whatever_the_corrections(masked, window, backend) -> None:
    b = build(Problem(window=window, reach=(40, 40), masked=masked))
    b.x["offset"] += 30  # groups would outweigh everything by far if anything were left in them
    x = {name: values(backend, t) for name, t in b.x.items()}
    got = attend(b, x, backend=backend)
    expected = softmax(x["q"], x["k"], x["v"], b.masks.get("key_mask"))
    if masked:
        expected = expected * b.masks["query_mask"][:, None, :, None]
    torch.testing.assert_close(got.out, expected, rtol=1e-5, atol=1e-5)


def test_keys_by_content_that_are_all_of_them_are_softmax() -> None:
    b = build(replace(CONTENT, heaviest=6, most=40))
    torch.testing.assert_close(attend(b).out, softmax(b.x["q"], b.x["k"], b.x["v"]))


def test_keys_by_content_come_closer_to_softmax() -> None:
    errors = []
    for heaviest in (0, 1, 2, 4):
        b = build(Problem(rank=8, heaviest=heaviest, most=40, grid=(10, 20), window=None, corrected=False))
        b.x["k"] = b.x["k"] * 2
        errors.append((attend(b).out - softmax(b.x["q"], b.x["k"], b.x["v"])).norm().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.7 * errors[0]


@both
@given(problems)
def test_padding_is_as_good_as_not_there(backend: str, p: Problem) -> None:
    """Before, behind and, without a window, between the tokens."""
    p = replace(p, batch=1, masked=True, window=p.window and "1d")
    b = build(p)
    queries, keys = b.masks["query_mask"][0], b.masks["key_mask"][0]
    if p.window is not None:
        first, last = p.length // 4, p.length - p.length // 3
        queries[:] = (torch.arange(p.length) >= first) & (torch.arange(p.length) < last)
        keys[p.prefix :] = queries
    assume(queries.any() and keys[p.prefix :].any())
    x = {name: values(backend, t) for name, t in b.x.items()}
    whole = attend(b, x, backend=backend)
    kept = x | {"q": x["q"][:, :, queries], "k": x["k"][:, :, keys], "v": x["v"][:, :, keys]}
    tokens = [kept.pop(name) for name in ("q", "k", "v")]
    where = p.where()
    grouping = p.grouping._replace(prefix=int(keys[: p.prefix].sum()))
    alone = found_attention(*tokens, grouping, where, **kept, backend=backend)
    tolerance = 1e-5 if backend == "cpu" else 1e-10
    same = (whole.groups[:, :, keys[p.prefix :]] == alone.groups).all()
    assert same or backend == "cpu"  # the mean of the keys is summed in another order: fp32 may see a tie elsewhere
    if same:
        torch.testing.assert_close(whole.out[:, :, queries], alone.out, rtol=tolerance, atol=tolerance)
        assert whole.out[:, :, ~queries].abs().sum() == 0


@both
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("p", [Problem(masked=True), Problem(masked=True, window=None, more_keys=9)], ids=str)
def test_the_contents_of_padding_never_matter(p: Problem, junk: float, backend: str) -> None:
    dtype = torch.float32 if backend == "cpu" else torch.float64
    b = build(p)
    clean, groups = with_gradients(b, dtype, backend=backend)
    masks = {"q": b.masks["query_mask"], "k": b.masks["key_mask"], "v": b.masks["key_mask"]}
    for name, mask in masks.items():
        b.x[name] = b.x[name].masked_fill(~mask[:, None, :, None], junk)
    dirty, same = with_gradients(b, dtype, backend=backend)
    assert torch.equal(groups, same)
    for name, found in dirty.items():
        assert torch.equal(found, clean[name]), name


@both
def test_a_query_without_a_key_reads_nothing(backend: str) -> None:
    dtype = torch.float32 if backend == "cpu" else torch.float64
    b = build(Problem(masked=True))
    b.masks["key_mask"][0] = False
    found, groups = with_gradients(b, dtype, backend=backend)
    assert all(t.isfinite().all() for t in found.values())
    assert found["out"][0].abs().max() == found["share"][0].max() == 0
    assert found["out"][1].abs().max() > 0
    assert (groups[0] == 5).all()


def test_gradients_with_the_groups_held_fixed_are_exact() -> None:
    for p in (
        Problem(grid=(2, 5), rank=3, reach=(1, 1), dim=3, value_dim=2, masked=True),
        replace(CONTENT, grid=(2, 5), dim=3),
    ):
        b = build(p)
        groups = attend(b).groups
        names = list(b.x)

        def run(*tensors: Tensor, names=names, b=b, groups=groups) -> Tensor:
            return attend(b, dict(zip(names, tensors, strict=True)), groups=groups, backend="reference").out

        assert torch.autograd.gradcheck(run, [b.x[name].clone().requires_grad_() for name in names])


@both
@pytest.mark.parametrize(
    "p", [Problem(batch=3, grid=(9, 11), masked=True), Problem(batch=3, window=None, more_keys=40)]
)
def test_a_sample_does_not_depend_on_its_batch(p: Problem, backend: str) -> None:
    b = build(p)
    x = {name: values(backend, t) for name, t in b.x.items()}
    together = attend(b, x, backend=backend)
    for order in ([0], [1], [2], [2, 0, 1]):
        part = {name: t if name in ("gain", "shift", "offset") else t[order] for name, t in x.items()}
        masks = {name: t[order] for name, t in b.masks.items()}
        alone = attend(b, part, backend=backend, **masks)
        assert torch.equal(alone.groups, together.groups[order])
        tolerance = 0 if backend == "cpu" else 1e-12
        torch.testing.assert_close(alone.out, together.out[order], rtol=tolerance, atol=tolerance)


@both
def test_groups_make_blocks(backend: str) -> None:
    """Keys of one group that a query does not read exactly are one to it."""
    b = build(Problem(rank=4, prefix=1, window="1d", reach=(0, 3), grid=(1, 40)))
    keys = b.x["k"].shape[2]
    x = {name: values(backend, t) for name, t in b.x.items()}
    x["v"] = torch.eye(keys, dtype=x["q"].dtype).expand(2, 2, -1, -1)
    found = attend(b, x, backend=backend)
    torch.testing.assert_close(found.out.sum(-1), torch.ones_like(found.share))
    for i in range(40):
        far = [j for j in range(40) if abs(i - j) > 3]
        for t in range(4):
            block = found.out[0, 0, i, [1 + j for j in far if found.groups[0, 0, j] == t]]
            assert len(block) == 0 or block.max() - block.min() < 1e-6
    expected, _ = as_matrix(b, {n: t.double() for n, t in x.items()}, found.groups)
    torch.testing.assert_close(found.out.double(), expected, rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("size", [1e-18, 1e-6, 1e6, 1e15])
def test_groups_do_not_depend_on_the_units(size: float, backend: str) -> None:
    b = build(Problem(corrected=False))
    x = {name: values(backend, t) for name, t in b.x.items()}
    groups = attend(b, x, backend=backend).groups
    for name in ("q", "k"):
        found = attend(b, x | {name: x[name] * size}, backend=backend)
        assert found.out.isfinite().all()
        assert (found.groups == groups).float().mean() > 0.98
    far = attend(b, x | {"k": x["k"] + 1000}, backend=backend)  # all keys have a direction in common
    assert (far.groups == groups).float().mean() > 0.95


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_its_numbers(dtype: torch.dtype, backend: str) -> None:
    if backend == "cpu" and dtype == torch.float16:
        pytest.skip("the kernel takes no float16")
    for p in (Problem(masked=True), Problem(dim=19, value_dim=5, window="1d")):
        b = build(p)
        for name in ("q", "k", "v"):
            b.x[name] = b.x[name].to(dtype).double()
        got, groups = with_gradients(b, dtype, backend=backend)
        expected, _ = with_gradients(b, torch.float64, groups=groups, backend="reference")
        assert got["out"].dtype == got["grad of k"].dtype == dtype
        assert_agrees({name: t.double() for name, t in got.items()}, expected, 1e-2)


def test_autocast_changes_nothing() -> None:
    for backend in BACKENDS:
        b = build(Problem(window=None))
        x = {name: t.float() for name, t in b.x.items()}
        plainly = attend(b, x, backend=backend).out
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(attend(b, x, backend=backend).out, plainly)


class Layer(torch.nn.Module):
    def __init__(self, grouping: Grouping, reach: Reach | None) -> None:
        super().__init__()
        self.grouping, self.reach = grouping, reach

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor) -> Tensor:
        return found_attention(q, k, v, self.grouping, self.reach, key_mask=key_mask).out


@pytest.mark.parametrize("p", [Problem(window="1d"), Problem(window=None), CONTENT], ids=str)
def test_it_goes_into_an_exported_file(p: Problem) -> None:
    b = build(replace(p, masked=True, corrected=False))
    arguments = (*(x.float() for x in b.x.values()), b.masks["key_mask"])
    layer = Layer(p.grouping, p.where())
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, arguments), file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(*arguments), layer(*arguments), rtol=1e-4, atol=1e-5)


def test_what_is_refused() -> None:
    q, k = torch.randn(2, 2, 12, 8), torch.randn(2, 2, 13, 8)
    with pytest.raises(ValueError, match="a window takes a query for each of the 13 keys"):
        found_attention(q, k, k, Grouping(4), Reach(None, 0, 3))
    with pytest.raises(ValueError, match="`rank`: expected an integer of at least 1, got 0"):
        found_attention(q, k, k, Grouping(0))
    with pytest.raises(ValueError, match="`prefix`: expected at most the number of keys"):
        found_attention(q, k, k, Grouping(2, prefix=14))
    with pytest.raises(ValueError, match="`key_mask`: expected booleans"):
        found_attention(q, k, k, Grouping(2), key_mask=torch.ones(2, 12, dtype=torch.bool))
    with pytest.raises(ValueError, match="here for the found groups: it has no derivative of keys by content"):
        found_attention(q.requires_grad_(), k, k, Grouping(2, heaviest=1, most=2), backend="cpu")


def test_no_tokens_are_no_problem() -> None:
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 0, 8)
    assert found_attention(q, k, k, Grouping(3)).out.abs().sum() == 0
    assert found_attention(k, q, q, Grouping(3)).out.shape == (2, 2, 0, 8)
    assert find_groups(k, k, None, None, 3, 2).shape == (2, 2, 0)
    special = torch.randn(2, 2, 3, 8)
    torch.testing.assert_close(
        found_attention(q, special, special, Grouping(4, prefix=3)).out, softmax(q, special, special)
    )
