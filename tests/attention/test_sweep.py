"""What every registered mechanism must do: one sweep over the registry, whatever is in it."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor

from lotformer import attention
from lotformer.attention.base import Attention

NAMES = attention.names()
D = 8

# knobs brought to the size of the sweep's sequences, so that they bite; everything else is the default
SMALL: dict[str, dict[str, object]] = {
    "linformer": {"max_length": 64},
    "nystromformer": {"landmarks": 5},
    "skyformer": {"features": 8},
    "lowrank-ot": {"outer_steps": 4, "inner_steps": 4},
}

# mechanisms for which a padded sequence is not the truncated one, with the reason; they still ignore the contents
# of padding. Fixed-length mechanisms are not among them: their tables are read from the first row.
PADDING_IS_NOT_TRUNCATION: dict[str, str] = {}

# options under which mechanisms that iterate towards double stochasticity have arrived
CONVERGED: dict[str, dict[str, object]] = {
    "sinkformer": {"half_steps": 401},
    "lowrank-ot": {"outer_steps": 5, "inner_steps": 200},
    "lot": {"solver": "newton"},
}


def build(name: str, heads: int = 3, **options: object) -> Attention:
    torch.manual_seed(0)
    module = attention.build(name, head_dim=D, num_heads=heads, **{**SMALL.get(name, {}), **options})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # away from starts at zero or at the identity, where parts of a formula are silent
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module


def tokens(batch: int, heads: int, n: int, m: int | None = None, *, seed: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (n, n if m is None else m, n if m is None else m)
    return [torch.randn(batch, heads, length, D, generator=generator) for length in lengths]


def run(module: torch.nn.Module, *arguments: object, **options: object) -> Tensor:
    """Call with the same random numbers each time: some mechanisms draw."""
    torch.manual_seed(3)
    return module(*arguments, **options)


def gradients(module: Attention, out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a random projection of `out` by the inputs and the parameters; zeros where there is no path."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    inputs = [*leaves, *module.parameters()]
    found = torch.autograd.grad((out.float() * weights).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def close(got: Tensor, expected: Tensor, what: str, tol: float = 2e-5) -> None:
    size = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol * size, msg=lambda text: f"{what}: {text}")


def lengths(name: str) -> tuple[int, int, int]:
    """One token, an odd number, and more; squares for mechanisms that need a grid."""
    return (1, 9, 25) if attention.entry(name).needs_grid else (1, 7, 33)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 3), (3, 4)], ids=["1x1", "2x3", "3x4"])
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_reach_every_input_and_parameter(name: str, batch: int, heads: int) -> None:
    module = build(name, heads)
    for n in lengths(name):
        inputs = leaves(tokens(batch, heads, n))
        out = run(module, *inputs)
        assert out.shape == (batch, heads, n, D)
        assert out.dtype == inputs[0].dtype
        assert out.isfinite().all()
        module.zero_grad()
        (out * torch.randn(out.shape)).sum().backward()
        for label, parameter in module.named_parameters():
            assert parameter.grad is not None, f"{label} is in no formula"
            assert parameter.grad.isfinite().all(), label
            assert n == 1 or parameter.grad.any(), f"{label} has no effect"
        for x in inputs:
            assert x.grad is None or x.grad.isfinite().all()
        assert inputs[2].grad is not None
        assert n == 1 or inputs[2].grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_cross_attention_works_or_is_refused_as_the_entry_says(name: str) -> None:
    module = build(name)
    for n, m in ((7, 12), (12, 5)):
        inputs = leaves(tokens(2, 3, n, m))
        if attention.entry(name).needs_equal_lengths:
            with pytest.raises(ValueError, match=f"{n} queries.*{m} keys"):
                run(module, *inputs)
        else:
            out = run(module, *inputs)
            assert out.shape == (2, 3, n, D)
            assert all(g.isfinite().all() for g in gradients(module, out, inputs))


@pytest.mark.parametrize("name", NAMES)
def test_bf16_autocast_keeps_the_precision_of_its_inputs(name: str) -> None:
    module = build(name)
    rounded = [x.bfloat16() for x in tokens(2, 3, lengths(name)[2])]
    exact = run(module, *(x.float() for x in rounded))
    inputs = leaves(rounded)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(module, *inputs)
    assert out.dtype == torch.bfloat16
    close(out.float(), exact, "bf16", 2e-2)
    assert all(g.isfinite().all() for g in gradients(module, out, inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert run(module, *(x.float() for x in rounded)).dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_or_copied_modules_give_equal_output(name: str) -> None:
    module = build(name)
    inputs = tokens(2, 3, lengths(name)[1])
    expected = run(module, *inputs)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    other = attention.build(name, head_dim=D, num_heads=3, **SMALL.get(name, {}))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(run(other, *inputs), expected)
    assert torch.equal(run(copy.deepcopy(module), *inputs), expected)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_to_one_graph_with_the_same_output_and_gradients(name: str) -> None:
    _compare_compiled(name, "aot_eager")


@pytest.mark.parametrize(("name", "options"), [("softmax", {}), ("lot", {"iters": 1})], ids=["softmax", "lot"])
def test_inductor_gives_the_same_output_and_gradients(name: str, options: dict[str, object]) -> None:
    _compare_compiled(name, "inductor", **options)


def _compare_compiled(name: str, backend: str, **options: object) -> None:
    torch._dynamo.reset()
    module = build(name, **options)
    n = lengths(name)[1]
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1, n // 2 :] = False
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    results = []
    for candidate in (module, compiled):
        inputs = leaves(tokens(2, 3, n))
        out = run(candidate, *inputs, mask, mask)
        results.append([out, *gradients(module, out, inputs)])
    for got, expected in zip(*reversed(results), strict=True):
        close(got, expected, "compiled", 1e-4)


@pytest.mark.parametrize("masks", ["keys-and-queries", "keys-only"])
@pytest.mark.parametrize("name", NAMES)
def test_the_contents_of_padding_never_matter(name: str, masks: str) -> None:
    module = build(name)
    n = 16 if attention.entry(name).needs_grid else 13
    mask = torch.rand(3, n, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[:, 0], mask[:, 1] = True, False
    query_mask = mask if masks == "keys-and-queries" else None
    results = []
    for garbage in (0.0, 1e30, torch.inf, torch.nan):
        q, k, v = tokens(3, 3, n)
        k, v = (x.masked_fill(~mask[:, None, :, None], garbage) for x in (k, v))
        if query_mask is not None:
            q = q.masked_fill(~mask[:, None, :, None], garbage)
        inputs = leaves([q, k, v])
        out = run(module, *inputs, mask, query_mask)
        results.append([out, *gradients(module, out, inputs)])
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            close(got, expected, "padding", 1e-6)
    out, _, k_grad, v_grad, *_ = results[0]
    padding = ~mask[:, None, :, None]
    assert not k_grad.masked_select(padding).any()
    assert not v_grad.masked_select(padding).any()
    if query_mask is not None:
        assert not out.masked_select(padding).any()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PADDING_IS_NOT_TRUNCATION])
def test_a_padded_sequence_equals_the_truncated_one(name: str) -> None:
    module = build(name)
    needs_grid = attention.entry(name).needs_grid
    n, real = (16, (16, 12, 4)) if needs_grid else (13, (13, 9, 1))
    mask = torch.arange(n) < torch.tensor(real)[:, None]
    inputs = leaves(tokens(3, 3, n))
    padded = run(module, *inputs, mask, mask, grid=(4, 4) if needs_grid else None)
    padded_gradients = gradients(module, padded, inputs)[:3]
    for sample, length in enumerate(real):
        cut = leaves([x[sample : sample + 1, :, :length].detach() for x in inputs])
        grid = (length // 4, 4) if needs_grid else None
        whole = run(module, *cut, grid=grid)
        close(padded[sample, :, :length], whole[0], f"{length} of {n}")
        weights = torch.randn(padded.shape, generator=torch.Generator().manual_seed(4))[sample, :, :length]
        found = torch.autograd.grad((whole[0] * weights).sum(), cut, allow_unused=True)
        for got, expected in zip(padded_gradients, found, strict=True):
            expected = torch.zeros_like(got[:1, :, :length]) if expected is None else expected
            close(got[sample, :, :length], expected[0], f"gradient, {length} of {n}", 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_samples_do_not_depend_on_their_batch(name: str) -> None:
    module = build(name)
    inputs = tokens(3, 3, lengths(name)[1])
    inputs = [x * torch.tensor([0.1, 1.0, 10.0])[:, None, None, None] for x in inputs]
    batched = run(module, *inputs)
    for sample in range(3):
        alone = run(module, *(x[sample : sample + 1] for x in inputs))
        close(batched[sample], alone[0], f"sample {sample}")


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_without_tokens_gives_zeros_and_finite_gradients(name: str) -> None:
    module = build(name)
    n = lengths(name)[1]
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1] = False
    for query_mask in (mask, None):
        inputs = leaves(tokens(2, 3, n))
        out = run(module, *inputs, mask, query_mask)
        assert not out[1].any()
        assert out[0].any()
        assert all(g.isfinite().all() for g in gradients(module, out, inputs))


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_modules_run_on_half_precision_tokens(name: str) -> None:
    module = build(name).bfloat16()
    out = run(module, *(x.bfloat16() for x in tokens(2, 3, lengths(name)[1])))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_declared_cost_grows_as_the_entry_says(name: str) -> None:
    entry = attention.entry(name)
    near, far = entry.cost(1 << 10, 64), entry.cost(1 << 20, 64)
    assert near.flops > 0
    assert near.bytes > 0
    exponent = math.log(far.flops / near.flops, 1 << 10)
    least, most = {"n": (0, 1), "n log n": (1.001, 1.12), "n²": (1.97, 2), "n³": (2.97, 3)}[entry.time]
    assert least <= exponent <= most + 1e-9
    assert entry.linear == (exponent < 1.5)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_sees_the_ones_after_it_unless_the_entry_names_the_option_that_forbids_it(name: str) -> None:
    def sees_the_last(module: Attention) -> bool:
        q, k, v = tokens(1, 3, lengths(name)[1])
        v.requires_grad_()
        (gradient,) = torch.autograd.grad(run(module, q, k, v)[:, :, :-1].sum(), v)
        return bool(gradient[:, :, -1].any())

    module = build(name)
    assert not module.is_causal
    assert sees_the_last(module)
    option = attention.entry(name).causal_only
    if option is not None:
        key, value = option.split("=")
        causal = build(name, **{key: {"False": False}[value]})
        assert causal.is_causal
        assert not sees_the_last(causal)


@pytest.mark.parametrize("name", [name for name in NAMES if attention.entry(name).doubly_stochastic])
def test_rows_and_columns_sum_to_one_where_the_entry_promises_it(name: str) -> None:
    assert (name in CONVERGED) == (attention.entry(name).doubly_stochastic == "converged")
    module = build(name, **CONVERGED.get(name, {}))
    q, k, _ = tokens(2, 3, lengths(name)[1])
    found = attention.diagnose(module, q, k)
    for sums in (found.row_sums, found.column_sums):
        close(sums, torch.ones_like(sums), "sums", 1e-4)


def test_unknown_names_are_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(ValueError, match="Did you mean 'sinkformer'"):
        attention.build("sinkforner", head_dim=D, num_heads=1)
