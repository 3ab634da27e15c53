"""What the operator is asked to compute, checked once at the door and handed to a backend."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, NoReturn, get_args

import torch
from torch import Tensor

Solver = Literal["sinkhorn", "newton"]


SOLVERS = get_args(Solver)

LEAST_LOG_MASS: dict[Solver, float] = {"sinkhorn": -1e4, "newton": -60.0}
"""Lighter pivots count as this light, which is nothing next to 1 in any precision. Sweeps only need it finite; the
exact solver looks at the relative error of every pivot, which has no meaning for masses that underflow."""


class Problem(NamedTuple):
    """One call of the operator. Shapes as in `lot_attention`; `eps` is a float or a tensor `(H,)`."""

    q: Tensor
    k: Tensor
    v: Tensor
    pivots: Tensor
    log_masses: Tensor
    eps: float | Tensor
    solver: Solver
    iters: int
    tol: float | None
    scale: float
    query_mask: Tensor | None
    key_mask: Tensor | None
    query_masses: Tensor | None
    key_masses: Tensor | None

    @property
    def shape(self) -> tuple[int, int, int, int, int, int, int]:
        """`(B, H, N, M, R, D, Dv)`."""
        batch, heads, n, d = self.q.shape
        return batch, heads, n, self.k.shape[2], self.pivots.shape[-2], d, self.v.shape[3]


# A small call should not pay much for its checks: they run before every one of them.


def check(problem: Problem) -> None:
    """Raise one clear error if the problem is not well posed. Shapes always; values where that is free.

    The masses of the pivots are left to `check_pivot_masses`.
    """
    _check_shapes(problem)
    _check_kinds(problem)
    _check_options(problem)
    if not _is_traced(problem.q):
        _check_values(problem)


def _is_traced(x: Tensor) -> bool:
    """Under compile, export or a functorch transform values cannot be looked at."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


def _refuse(name: str, expected: str, got: object, hint: str = "") -> NoReturn:
    raise ValueError(f"`{name}`: expected {expected}, got {got}.{' ' + hint if hint else ''}")


# The text of an error is only put together when there is one: printing a symbolic length would fix it to a number
# while tracing, and well-formed calls should not pay for it.


def _check_shapes(p: Problem) -> None:
    for name, x in (("q", p.q), ("k", p.k), ("v", p.v)):
        if x.dim() != 4:
            _refuse(name, "shape (B, H, tokens, D)", tuple(x.shape))
    if p.pivots.dim() not in (3, 4):
        _refuse("pivots", "shape (H, R, D) or (B, H, R, D)", tuple(p.pivots.shape))
    batch, heads, n, d = p.q.shape
    m = p.k.shape[2]
    if p.k.shape != (batch, heads, m, d):
        _refuse("k", f"({batch}, {heads}, M, {d}) to match q", tuple(p.k.shape))
    if p.v.shape[:3] != (batch, heads, m):
        _refuse("v", f"({batch}, {heads}, {m}, Dv) to match k", tuple(p.v.shape))
    *samples, sets, rank, width = p.pivots.shape
    if sets != heads or width != d or samples not in ([], [batch]):
        expected = f"({heads}, R, {d}), or ({batch}, {heads}, R, {d}) for every sample, in the space of the queries"
        _refuse("pivots", expected, tuple(p.pivots.shape))
    if rank < 1:
        _refuse("pivots", "at least one pivot", tuple(p.pivots.shape))
    if p.log_masses.shape != (heads, rank):
        _refuse("log_masses", f"({heads}, {rank})", tuple(p.log_masses.shape))
    if isinstance(p.eps, Tensor) and p.eps.shape not in ((), (heads,)):
        _refuse("eps", f"a float or shape ({heads},)", tuple(p.eps.shape))
    for name, mask, length in (("query_mask", p.query_mask, n), ("key_mask", p.key_mask, m)):
        if mask is None:
            continue
        if mask.dtype != torch.bool:
            hint = "Use `mask.bool()` for 0/1 masks and `mask == 0` for additive ones."
            _refuse(name, "a boolean mask, True = a real token", mask.dtype, hint)
        if mask.shape != (batch, length):
            _refuse(name, f"({batch}, {length})", tuple(mask.shape))
    for name, masses, length in (("query_masses", p.query_masses, n), ("key_masses", p.key_masses, m)):
        if masses is not None and masses.shape not in ((batch, length), (batch, heads, length)):
            _refuse(name, f"({batch}, {length}) or ({batch}, {heads}, {length})", tuple(masses.shape))


def _check_kinds(p: Problem) -> None:
    device, dtype = p.q.device, p.q.dtype
    for name, x in zip(p._fields, p, strict=True):
        if not isinstance(x, Tensor):
            continue
        if not x.dtype.is_floating_point and name not in ("query_mask", "key_mask"):
            _refuse(name, "a floating-point tensor", x.dtype)
        if x.device != device:
            _refuse(name, f"the device of q, {device}", x.device, f"Use `{name}.to(q.device)`.")
    for name, x in (("k", p.k), ("v", p.v)):
        if x.dtype != dtype:
            _refuse(name, f"the dtype of q, {dtype}", x.dtype, f"Use `{name}.to(q.dtype)`.")


def _check_options(p: Problem) -> None:
    if p.solver not in SOLVERS:
        _refuse("solver", " or ".join(map(repr, SOLVERS)), repr(p.solver))
    if not isinstance(p.iters, int) or p.iters < 1:
        _refuse("iters", "an integer of at least 1", p.iters)
    if p.tol is not None and not 0 < p.tol < 1:
        _refuse("tol", "a number between 0 and 1, or None for a fixed cost", p.tol)
    if not abs(p.scale) < math.inf:
        _refuse("scale", "a finite number", p.scale)
    if not isinstance(p.eps, Tensor) and not 0 < p.eps < math.inf:
        _refuse("eps", "a finite number above 0", p.eps)


def _check_values(p: Problem) -> None:
    """Checks that read numbers. On the CPU they cost microseconds; elsewhere they must not wait for the device."""
    if isinstance(p.eps, Tensor):
        _expect_true((p.eps > 0) & p.eps.isfinite(), "eps", "finite numbers above 0", p.eps)
    for name, masses, mask in (
        ("query_masses", p.query_masses, p.query_mask),
        ("key_masses", p.key_masses, p.key_mask),
    ):
        if masses is None or masses.shape[-1] == 0:
            continue
        real = masses.detach() if masses.dim() == 3 else masses.detach()[:, None]
        if mask is not None:
            real = real.masked_fill(~mask[:, None], 0.0)
        _expect_true(real >= 0, name, "numbers of at least 0", masses)
        sums = real.float().sum(-1)
        normalised = (sums - 1).abs() < 1e-2
        if mask is not None:
            normalised = normalised | ~mask.any(-1)[:, None]
        _expect_true(normalised, name, "masses that sum to 1 over the real tokens", sums,
                     "Divide by their sum.")  # fmt: skip


def check_pivot_masses(p: Problem) -> None:
    """Raise a clear error if the masses of the pivots do not sum to one; for backends that do not look themselves.

    To 2 %, which logarithms rounded to bfloat16 keep: what is left over is normalised away.
    """
    if not _is_traced(p.q):
        exact = torch.promote_types(p.log_masses.dtype, torch.float32)
        total = p.log_masses.detach().to(exact).exp().sum(-1)
        _expect_true((total - 1).abs() < 2e-2, "log_masses", "logarithms of masses that sum to 1", p.log_masses,
                     "Use `log_masses.log_softmax(-1)`.")  # fmt: skip


def _expect_true(ok: Tensor, name: str, expected: str, got: Tensor, hint: str = "") -> None:
    if ok.device.type == "cpu":
        if not bool(ok.all()):
            worst = got.detach().flatten()[:4].tolist()
            _refuse(name, expected, f"{worst}{' …' if got.numel() > 4 else ''}", hint)
    else:
        torch._assert_async(ok.all(), f"`{name}`: expected {expected}. {hint}")
