"""Checks of the operator's arguments: each is examined here, once, before any backend runs."""

from __future__ import annotations

import math
from numbers import Real
from typing import NoReturn

import torch
from torch import Tensor

from . import cpu
from .problem import BALANCES, SOLVERS, Solve, Transport, is_traced

_MASKS = ("query_mask", "key_mask")
_OPTIONAL = frozenset({*Transport._field_defaults, "pivots"})
_SCORES = {"q": "query_scores", "k": "key_scores"}  # what the tokens are called where there are no pivots
_NUMBERS = (float, int, Real, torch.SymFloat, torch.SymInt)  # the common ones first: `Real` is slow to ask

# A small call should not pay much for its checks: they run before every one of them. The text of an error is only put
# together when there is one, also because printing a symbolic length would fix it to a number while tracing.


class NonFiniteError(ValueError):
    """Numbers are NaN or infinite where they must not be, often for reasons upstream: inputs, weights, rates."""


def check(transport: Transport, solve: Solve) -> None:
    """Raise one clear error if the problem is not well posed. Kinds and shapes always; values where that is free."""
    _check_kinds(transport, solve)
    _check_shapes(transport, solve)
    _check_options(solve)
    if not is_traced(transport.q):
        _check_values(transport, solve)


def check_probability(name: str, x: float) -> None:
    if not isinstance(x, _NUMBERS):
        _refuse_kind(name, "a number", x)
    if not 0 <= x < 1:
        _refuse(name, "a probability in [0, 1)", x)


def _refuse(name: str, expected: str, got: object, hint: str = "", kind: type[ValueError] = ValueError) -> NoReturn:
    raise kind(f"`{name}`: expected {expected}, got {got}.{' ' + hint if hint else ''}")


def _refuse_kind(name: str, expected: str, got: object, hint: str = "") -> NoReturn:
    kind = type(got)
    origin = "" if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}."
    raise TypeError(f"`{name}`: expected {expected}, got {origin}{kind.__name__}.{' ' + hint if hint else ''}")


def _check_kinds(t: Transport, s: Solve) -> None:
    first, second = ("q", "k") if t.pivots is not None else _SCORES.values()
    if not isinstance(t.q, Tensor):
        _refuse_kind(first, "a tensor", t.q, f"Use `torch.as_tensor({first})`.")
    device, dtype = t.q.device, t.q.dtype
    for name, x in zip((first, second, *t._fields[2:]), t, strict=True):
        if x is None and name in _OPTIONAL:
            continue
        if not isinstance(x, Tensor):
            _refuse_kind(name, "a tensor", x, f"Use `torch.as_tensor({name})`.")
        if name in _MASKS:
            if x.dtype != torch.bool:
                hint = "Use `mask.bool()` for 0/1 masks and `mask == 0` for additive ones."
                _refuse(name, "a boolean mask, True = a real token", x.dtype, hint)
        elif not x.dtype.is_floating_point:
            _refuse(name, "a floating-point tensor", x.dtype, f"Use `{name}.float()`.")
        if x.device != device:
            _refuse(name, f"the device of {first}, {device}", x.device, f"Use `{name}.to({first}.device)`.")
    for name, x in ((second, t.k), ("v", t.v)):
        if x.dtype != dtype:
            _refuse(name, f"the dtype of {first}, {dtype}", x.dtype, f"Use `{name}.to({first}.dtype)`.")
    if not isinstance(s.eps, Tensor):
        if not isinstance(s.eps, _NUMBERS):
            _refuse_kind("eps", "a number or a tensor with one per head", s.eps)
    elif not s.eps.dtype.is_floating_point:
        _refuse("eps", "a floating-point tensor", s.eps.dtype, "Use `eps.float()`.")
    elif s.eps.device != device:
        _refuse("eps", f"the device of {first}, {device}", s.eps.device, f"Use `eps.to({first}.device)`.")


def _check_shapes(t: Transport, s: Solve) -> None:
    first, second, width = ("q", "k", "D") if t.pivots is not None else (*_SCORES.values(), "R")
    for name, x, last in ((first, t.q, width), (second, t.k, width), ("v", t.v, "Dv")):
        if x.dim() != 4:
            _refuse(name, f"shape (B, H, tokens, {last})", tuple(x.shape))
    batch, heads, n, d = t.q.shape
    m = t.k.shape[2]
    if t.k.shape != (batch, heads, m, d):
        _refuse(second, f"({batch}, {heads}, M, {d}) to match {first}", tuple(t.k.shape))
    if t.v.shape[:3] != (batch, heads, m):
        _refuse("v", f"({batch}, {heads}, {m}, Dv) to match {second}", tuple(t.v.shape))
    if t.pivots is not None:
        _check_pivots(t.pivots, batch, heads, d)
    elif d < 1:
        _refuse(first, "scores with at least one pivot", tuple(t.q.shape))
    rank = t.rank
    if t.log_masses.dim() != 2 or t.log_masses.shape != (heads, rank):
        _refuse("log_masses", f"({heads}, {rank})", tuple(t.log_masses.shape))
    if isinstance(s.eps, Tensor) and s.eps.dim() and s.eps.shape != (heads,):
        _refuse("eps", f"a float or shape ({heads},)", tuple(s.eps.shape))
    for name, mask, length in (("query_mask", t.query_mask, n), ("key_mask", t.key_mask, m)):
        if mask is not None and (mask.dim() != 2 or mask.shape != (batch, length)):
            _refuse(name, f"({batch}, {length})", tuple(mask.shape))
    for name, masses, length in (("query_masses", t.query_masses, n), ("key_masses", t.key_masses, m)):
        if masses is not None and not _has_shape_of_masses(masses, batch, heads, length):
            _refuse(name, f"({batch}, {length}) or ({batch}, {heads}, {length})", tuple(masses.shape))


def _check_pivots(pivots: Tensor, batch: int, heads: int, d: int) -> None:
    if pivots.dim() not in (3, 4):
        _refuse("pivots", "shape (H, R, D) or (B, H, R, D)", tuple(pivots.shape))
    *samples, sets, rank, width = pivots.shape
    if sets != heads or width != d or (samples and samples[0] != batch):
        expected = f"({heads}, R, {d}), or ({batch}, {heads}, R, {d}) for every sample, in the space of the queries"
        _refuse("pivots", expected, tuple(pivots.shape))
    if rank < 1:
        _refuse("pivots", "at least one pivot", tuple(pivots.shape))


def _has_shape_of_masses(x: Tensor, batch: int, heads: int, length: int) -> bool:
    # by dimension first: comparing (B, H, N) with (B, N) asks whether the heads are as many as the tokens, which would
    # bar an exported program from that length
    if x.dim() == 3:
        return x.shape == (batch, heads, length)
    return x.dim() == 2 and x.shape == (batch, length)


def _check_options(s: Solve) -> None:
    if s.solver not in SOLVERS:
        _refuse("solver", " or ".join(map(repr, SOLVERS)), repr(s.solver))
    if s.balance not in BALANCES:
        _refuse("balance", " or ".join(map(repr, BALANCES)), repr(s.balance))
    if not isinstance(s.iters, int) or s.iters < 1:
        _refuse("iters", "an integer of at least 1", s.iters)
    for name, x in (("tol", s.tol), ("scale", s.scale)):
        if x is not None and not isinstance(x, _NUMBERS):
            _refuse_kind(name, "a number or None", x)
    if s.tol is not None and not 0 < s.tol < 1:
        _refuse("tol", "a number between 0 and 1, or None for a fixed cost", s.tol)
    if s.scale is not None and not abs(s.scale) < math.inf:
        _refuse("scale", "a finite number", s.scale)
    if not isinstance(s.eps, Tensor) and not 0 < s.eps < math.inf:
        _refuse("eps", "a finite number above 0", s.eps)


def _check_values(t: Transport, s: Solve) -> None:
    """Checks that read numbers. On the CPU they cost microseconds; elsewhere they must not wait for the device."""
    if isinstance(s.eps, Tensor):
        _expect(_are_positive(s.eps), "eps", "finite numbers above 0", s.eps)
    _expect(_sum_to_one(t.log_masses), "log_masses", "logarithms of masses that sum to 1", t.log_masses,
            "Use `log_masses.log_softmax(-1)`.")  # fmt: skip
    for name, masses, mask in (
        ("query_masses", t.query_masses, t.query_mask),
        ("key_masses", t.key_masses, t.key_mask),
    ):
        if masses is None or masses.shape[-1] == 0:
            continue
        real = masses.detach() if masses.dim() == 3 else masses.detach()[:, None]
        if mask is not None:
            real = real.masked_fill(~mask[:, None], 0.0)
        _expect(real >= 0, name, "numbers of at least 0", masses)
        sums = _widened(real).sum(-1)
        normalised = (sums - 1).abs() < 1e-2
        if mask is not None:
            normalised = normalised | ~mask.any(-1)[:, None]
        _expect(normalised, name, "masses that sum to 1 over the real tokens", sums, "Divide by their sum.")


def _are_positive(x: Tensor) -> Tensor | bool:
    if x.device.type == "cpu":  # a few numbers: quicker one by one than by three operators
        return all(0 < number < math.inf for number in x.reshape(-1).tolist())
    return (x > 0) & x.isfinite()


def _sum_to_one(log_masses: Tensor) -> Tensor | bool:
    """To 2 %, which logarithms rounded to bfloat16 keep: what is left over is normalised away."""
    told = cpu.sum_to_one(log_masses)
    return (_widened(log_masses.detach()).exp().sum(-1) - 1).abs() < 2e-2 if told is None else told


def _widened(x: Tensor) -> Tensor:
    """At least fp32, and fp64 stays fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _expect(ok: Tensor | bool, name: str, expected: str, got: Tensor, hint: str = "") -> None:
    if isinstance(ok, Tensor):
        if ok.device.type != "cpu":
            torch._assert_async(ok.all(), f"`{name}`: expected {expected}. {hint}")
            return
        ok = bool(ok.all())
    if not ok:
        told = f"{got.detach().flatten()[:4].tolist()}{' …' if got.numel() > 4 else ''}"
        _refuse(name, expected, told, hint, ValueError if got.isfinite().all() else NonFiniteError)
