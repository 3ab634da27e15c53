"""Promises of every mechanism, a function each: the tests sweep them over the registry, `check` over yours."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import registry
from .base import Attention, Entry
from .diagnose import diagnose

DIM = 8
_HEADS = 3


@dataclass(frozen=True)
class Subject:
    """A registered mechanism with the options that it is checked with.

    `converged` are options with which one that iterates towards double stochasticity arrives.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    converged: Mapping[str, Any] | None = None

    @property
    def entry(self) -> Entry:
        return registry.entry(self.name)

    def fresh(self, heads: int = _HEADS, **options: Any) -> Attention:
        return registry.build(self.name, head_dim=DIM, num_heads=heads, **{**self.options, **options})

    def build(self, heads: int = _HEADS, **options: Any) -> Attention:
        """With parameters away from zero and the identity, where parts of a formula are silent."""
        torch.manual_seed(0)
        module = self.fresh(heads, **options)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return module

    @property
    def lengths(self) -> tuple[int, int, int]:
        """One token, an odd number, and more; squares for mechanisms that need a grid."""
        return (1, 9, 25) if self.entry.needs_grid else (1, 7, 33)


Check = Callable[[Subject], None]


def check(name: str, *, converged: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Hold a mechanism to the promises of the registry: shapes, gradients, precision, padding, batches, its entry's.

    For the tests of a package that registers one:

        lotformer.attention.register(ENTRY)
        lotformer.attention.check("mine", landmarks=5)

    It takes seconds, on the CPU, with heads of 8 channels and up to 33 tokens.

    Args:
        name: of a registered mechanism. options: its own, of a size that suits 33 tokens.
        converged: options with which a mechanism whose entry says `doubly_stochastic="converged"` converges; without,
            its sums are not checked.

    Raises:
        AssertionError: it breaks promises; the message lists all of them.
        ValueError: no mechanism has this name.
    """
    subject, broken = Subject(name, options, converged), []
    registry.entry(name)
    for promise in PROMISES:
        try:
            with torch.random.fork_rng(devices=[]):
                promise(subject)
        except Exception as error:  # whatever goes wrong inside a mechanism, the others are checked too
            what = f"{error}" if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            broken.append(f"- {promise.__name__.replace('_', ' ')}: {what}")
    if broken:
        lines = "\n".join(broken)
        raise AssertionError(f"{name!r} breaks {len(broken)} of {len(PROMISES)} promises:\n{lines}")


def every_input_and_parameter_gets_a_gradient(subject: Subject) -> None:
    for batch, heads in ((1, 1), (2, 3), (3, 4)):
        module = subject.build(heads)
        for n in subject.lengths:
            inputs = leaves(tokens(batch, heads, n))
            out = run(module, *inputs)
            _require(out.shape == (batch, heads, n, DIM), f"{tuple(out.shape)} of {n} tokens")
            _require(out.dtype == inputs[0].dtype, f"the output is {out.dtype}, queries are {inputs[0].dtype}")
            _require(out.isfinite().all(), "the output is not finite")
            module.zero_grad()
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
            (out * weights).sum().backward()
            for label, parameter in module.named_parameters():
                _require(parameter.grad is not None, f"the parameter {label} is in no formula")
                assert parameter.grad is not None
                _require(parameter.grad.isfinite().all(), f"the gradient of {label} is not finite")
                _require(n == 1 or parameter.grad.any(), f"the parameter {label} has no effect")
            for x in inputs:
                _require(x.grad is None or x.grad.isfinite().all(), "the gradient of an input is not finite")
            v = inputs[2].grad
            _require(v is not None and (n == 1 or v.any()), "values have no effect")


def cross_attention_works_or_is_refused_as_the_entry_says(subject: Subject) -> None:
    module = subject.build()
    for n, m in ((7, 12), (12, 5)):
        inputs = leaves(tokens(2, _HEADS, n, m))
        if not subject.entry.needs_equal_lengths:
            out = run(module, *inputs)
            _require(out.shape == (2, _HEADS, n, DIM), f"{tuple(out.shape)} of {n} queries and {m} keys")
            _require(all(g.isfinite().all() for g in gradients(module, out, inputs)), "gradients are not finite")
            continue
        try:
            run(module, *inputs)
        except ValueError as error:
            named = f"{n} queries" in str(error) and f"{m} keys" in str(error)
            _require(named, f"the refusal does not name {n} queries and {m} keys: {error}")
        else:
            raise AssertionError("it accepts cross-attention, which its entry denies")


def bf16_autocast_keeps_the_precision_of_its_inputs(subject: Subject) -> None:
    module = subject.build()
    rounded = [x.bfloat16() for x in tokens(2, _HEADS, subject.lengths[2])]
    exact = run(module, *(x.float() for x in rounded))
    inputs = leaves(rounded)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(module, *inputs)
    _require(out.dtype == torch.bfloat16, f"the output is {out.dtype}, queries are bfloat16")
    close(out.float(), exact, "bf16", 2e-2)
    _require(all(g.isfinite().all() for g in gradients(module, out, inputs)), "gradients are not finite")
    with torch.autocast("cpu", torch.bfloat16):
        dtype = run(module, *(x.float() for x in rounded)).dtype
    _require(dtype == torch.float32, f"the output is {dtype}, queries are float32")


def half_precision_modules_run_on_half_precision_tokens(subject: Subject) -> None:
    module = subject.build().bfloat16()
    out = run(module, *(x.bfloat16() for x in tokens(2, _HEADS, subject.lengths[2])))
    _require(out.dtype == torch.bfloat16, f"the output is {out.dtype}, queries are bfloat16")
    _require(out.isfinite().all(), "the output is not finite")


def saved_and_loaded_or_copied_modules_give_equal_output(subject: Subject) -> None:
    module = subject.build()
    inputs = tokens(2, _HEADS, subject.lengths[1])
    expected = run(module, *inputs)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    other = subject.fresh()
    other.load_state_dict(torch.load(file, weights_only=True))
    _require(torch.equal(run(other, *inputs), expected), "its state dict does not hold all that matters")
    _require(torch.equal(run(copy.deepcopy(module), *inputs), expected), "a copy gives another output")


def the_contents_of_padding_never_matter(subject: Subject) -> None:
    module = subject.build()
    n = 16 if subject.entry.needs_grid else 13
    mask = torch.rand(3, n, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[:, 0], mask[:, 1] = True, False
    padding = ~mask[:, None, :, None]
    for query_mask in (mask, None):
        results = []
        for garbage in (0.0, 1e30, torch.inf, torch.nan):
            q, k, v = tokens(3, _HEADS, n)
            k, v = (x.masked_fill(padding, garbage) for x in (k, v))
            if query_mask is not None:
                q = q.masked_fill(padding, garbage)
            inputs = leaves([q, k, v])
            out = run(module, *inputs, mask, query_mask)
            results.append([out, *gradients(module, out, inputs)])
        for other in results[1:]:
            for got, expected in zip(other, results[0], strict=True):
                close(got, expected, "padding", 1e-6)
        out, _, k_grad, v_grad, *_ = results[0]
        for grad in (k_grad, v_grad):
            _require(not grad.masked_select(padding).any(), "padded keys or values have a gradient")
        if query_mask is not None:
            _require(not out.masked_select(padding).any(), "the rows of padded queries are not zero")


def a_padded_sequence_equals_the_truncated_one(subject: Subject) -> None:
    module = subject.build()
    needs_grid = subject.entry.needs_grid
    n, real = (16, (16, 12, 4)) if needs_grid else (13, (13, 9, 1))
    mask = torch.arange(n) < torch.tensor(real)[:, None]
    inputs = leaves(tokens(3, _HEADS, n))
    padded = run(module, *inputs, mask, mask, grid=(4, 4) if needs_grid else None)
    padded_gradients = gradients(module, padded, inputs)[:3]
    for sample, length in enumerate(real):
        cut = leaves([x[sample : sample + 1, :, :length].detach() for x in inputs])
        whole = run(module, *cut, grid=(length // 4, 4) if needs_grid else None)
        close(padded[sample, :, :length], whole[0], f"{length} of {n}")
        weights = torch.randn(padded.shape, generator=torch.Generator().manual_seed(4))[sample, :, :length]
        alone = torch.autograd.grad((whole[0] * weights).sum(), cut, allow_unused=True)
        for got, expected in zip(padded_gradients, alone, strict=True):
            expected = torch.zeros_like(got[:1, :, :length]) if expected is None else expected
            close(got[sample, :, :length], expected[0], f"gradient, {length} of {n}", 1e-4)


def samples_do_not_depend_on_their_batch(subject: Subject) -> None:
    module = subject.build()
    sizes = torch.tensor([0.1, 1.0, 10.0])[:, None, None, None]
    inputs = [x * sizes for x in tokens(3, _HEADS, subject.lengths[1])]
    batched = run(module, *inputs)
    for sample in range(3):
        alone = run(module, *(x[sample : sample + 1] for x in inputs))
        close(batched[sample], alone[0], f"sample {sample}")


def a_sample_without_tokens_gives_zeros_and_finite_gradients(subject: Subject) -> None:
    module = subject.build()
    n = subject.lengths[1]
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1] = False
    for query_mask in (mask, None):
        inputs = leaves(tokens(2, _HEADS, n))
        out = run(module, *inputs, mask, query_mask)
        _require(not out[1].any(), "a sample without tokens does not give zeros")
        _require(out[0].any(), "the other sample gives zeros, too")
        _require(all(g.isfinite().all() for g in gradients(module, out, inputs)), "gradients are not finite")


def the_declared_cost_grows_as_the_entry_says(subject: Subject) -> None:
    entry = subject.entry
    near, far = entry.cost(1 << 10, 64), entry.cost(1 << 20, 64)
    _require(near.flops > 0 and near.bytes > 0, f"its cost is {near}")
    exponent = math.log(far.flops / near.flops, 1 << 10)
    least, most = {"n": (0, 1), "n log n": (1.001, 1.12), "n²": (1.97, 2), "n³": (2.97, 3)}[entry.time]
    _require(least <= exponent <= most + 1e-9, f"its time is {entry.time}, its flops grow as n^{exponent:.2f}")
    _require(entry.linear == (exponent < 1.5), f"linear is {entry.linear}, its flops grow as n^{exponent:.2f}")


def tokens_see_those_after_them_unless_the_entry_names_the_option_that_forbids_it(subject: Subject) -> None:
    def sees_the_last(module: Attention) -> bool:
        q, k, v = tokens(1, _HEADS, subject.lengths[1])
        v.requires_grad_()
        (gradient,) = torch.autograd.grad(run(module, q, k, v)[:, :, :-1].sum(), v)
        return bool(gradient[:, :, -1].any())

    module = subject.build()
    _require(not module.is_causal and sees_the_last(module), "it only looks back")
    option = subject.entry.causal_only
    if option is not None:
        key, value = option.split("=")
        causal = subject.build(**{key: {"False": False, "True": True}[value]})
        _require(causal.is_causal and not sees_the_last(causal), f"with {option} it looks ahead")


def rows_and_columns_sum_to_one_where_the_entry_promises_it(subject: Subject) -> None:
    promise = subject.entry.doubly_stochastic
    if promise is None or (promise == "converged" and subject.converged is None):
        return
    module = subject.build(**(subject.converged or {}))
    q, k, _ = tokens(2, _HEADS, subject.lengths[1])
    found = diagnose(module, q, k)
    for sums, which in ((found.row_sums, "row sums"), (found.column_sums, "column sums")):
        close(sums, torch.ones_like(sums), which, 1e-4)


PROMISES: tuple[Check, ...] = (
    every_input_and_parameter_gets_a_gradient,
    cross_attention_works_or_is_refused_as_the_entry_says,
    bf16_autocast_keeps_the_precision_of_its_inputs,
    half_precision_modules_run_on_half_precision_tokens,
    saved_and_loaded_or_copied_modules_give_equal_output,
    the_contents_of_padding_never_matter,
    a_padded_sequence_equals_the_truncated_one,
    samples_do_not_depend_on_their_batch,
    a_sample_without_tokens_gives_zeros_and_finite_gradients,
    the_declared_cost_grows_as_the_entry_says,
    tokens_see_those_after_them_unless_the_entry_names_the_option_that_forbids_it,
    rows_and_columns_sum_to_one_where_the_entry_promises_it,
)


def tokens(batch: int, heads: int, n: int, m: int | None = None) -> list[Tensor]:
    """Queries, keys and values, the same each time."""
    generator = torch.Generator().manual_seed(2)
    lengths = (n, n if m is None else m, n if m is None else m)
    return [torch.randn(batch, heads, length, DIM, generator=generator) for length in lengths]


def run(module: nn.Module, *arguments: Any, **options: Any) -> Tensor:
    """Call with the same random numbers each time: some mechanisms draw."""
    torch.manual_seed(3)
    out: Tensor = module(*arguments, **options)
    return out


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def gradients(module: nn.Module, out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a random projection of `out` by the inputs and the parameters; zeros where there is no path."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    inputs = [*leaves, *module.parameters()]
    found = torch.autograd.grad((out.float() * weights).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def close(got: Tensor, expected: Tensor, what: str, tol: float = 2e-5) -> None:
    """Equal to a tolerance that is relative to the largest entry, where that is more than one."""
    size = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol * size, msg=lambda text: f"{what}: {text}")


def _require(condition: Any, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)
