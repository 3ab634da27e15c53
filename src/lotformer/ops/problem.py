"""What the operator is asked to compute, checked once at the door and handed to a backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Solver = Literal["sinkhorn", "newton"]


@dataclass(frozen=True)
class Problem:
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
        return batch, heads, n, self.k.shape[2], self.pivots.shape[1], d, self.v.shape[3]


def check(problem: Problem) -> None:
    """Raise one clear error if the problem is not well posed. Shapes always; values where that is free."""
    _check_shapes(problem)
    _check_kinds(problem)
    _check_options(problem)
    if not _is_traced(problem.q):
        _check_values(problem)


def _is_traced(x: Tensor) -> bool:
    """Under compile, export or a functorch transform values cannot be looked at."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


def _expect(ok: bool, name: str, expected: str, got: object, hint: str = "") -> None:
    if not ok:
        raise ValueError(f"`{name}`: expected {expected}, got {got}.{' ' + hint if hint else ''}")


def _check_shapes(p: Problem) -> None:
    for name, x in (("q", p.q), ("k", p.k), ("v", p.v)):
        _expect(x.dim() == 4, name, "shape (B, H, tokens, D)", tuple(x.shape))
    _expect(p.pivots.dim() == 3, "pivots", "shape (H, R, D)", tuple(p.pivots.shape))
    batch, heads, n, d = p.q.shape
    m = p.k.shape[2]
    _expect(p.k.shape == (batch, heads, m, d), "k", f"({batch}, {heads}, M, {d}) to match q", tuple(p.k.shape))
    _expect(p.v.shape[:3] == (batch, heads, m), "v", f"({batch}, {heads}, {m}, Dv) to match k", tuple(p.v.shape))
    _expect(
        p.pivots.shape[0] == heads and p.pivots.shape[2] == d,
        "pivots",
        f"({heads}, R, {d}): one set of pivots per head, in the space of the queries",
        tuple(p.pivots.shape),
    )
    rank = p.pivots.shape[1]
    _expect(rank >= 1, "pivots", "at least one pivot", tuple(p.pivots.shape))
    _expect(p.log_masses.shape == (heads, rank), "log_masses", f"({heads}, {rank})", tuple(p.log_masses.shape))
    if isinstance(p.eps, Tensor):
        _expect(p.eps.shape in ((), (heads,)), "eps", f"a float or shape ({heads},)", tuple(p.eps.shape))
    for name, mask, length in (("query_mask", p.query_mask, n), ("key_mask", p.key_mask, m)):
        if mask is not None:
            _expect(
                mask.dtype == torch.bool,
                name,
                "a boolean mask, True = a real token",
                mask.dtype,
                "Use `mask.bool()` for 0/1 masks and `mask == 0` for additive ones.",
            )
            _expect(mask.shape == (batch, length), name, f"({batch}, {length})", tuple(mask.shape))
    for name, masses, length in (("query_masses", p.query_masses, n), ("key_masses", p.key_masses, m)):
        if masses is not None:
            _expect(
                masses.shape in ((batch, length), (batch, heads, length)),
                name,
                f"({batch}, {length}) or ({batch}, {heads}, {length})",
                tuple(masses.shape),
            )


def _check_kinds(p: Problem) -> None:
    _expect(p.q.is_floating_point(), "q", "a floating-point tensor", p.q.dtype)
    for name, x in (("k", p.k), ("v", p.v)):
        _expect(x.dtype == p.q.dtype, name, f"the dtype of q, {p.q.dtype}", x.dtype, f"Use `{name}.to(q.dtype)`.")
    named: dict[str, object] = {
        "pivots": p.pivots,
        "log_masses": p.log_masses,
        "eps": p.eps,
        "query_masses": p.query_masses,
        "key_masses": p.key_masses,
    }
    for name, value in named.items():
        if isinstance(value, Tensor):
            _expect(value.is_floating_point(), name, "a floating-point tensor", value.dtype)
    named |= {"k": p.k, "v": p.v, "query_mask": p.query_mask, "key_mask": p.key_mask}
    for name, value in named.items():
        if isinstance(value, Tensor):
            _expect(
                value.device == p.q.device,
                name,
                f"the device of q, {p.q.device}",
                value.device,
                f"Use `{name}.to(q.device)`.",
            )


def _check_options(p: Problem) -> None:
    _expect(p.solver in get_args(Solver), "solver", " or ".join(map(repr, get_args(Solver))), repr(p.solver))
    _expect(isinstance(p.iters, int) and p.iters >= 1, "iters", "an integer of at least 1", p.iters)
    _expect(p.tol is None or 0 < p.tol < 1, "tol", "a number between 0 and 1, or None for a fixed cost", p.tol)
    _expect(math.isfinite(p.scale), "scale", "a finite number", p.scale)
    if not isinstance(p.eps, Tensor):
        _expect(math.isfinite(p.eps) and p.eps > 0, "eps", "a finite number above 0", p.eps)


def _check_values(p: Problem) -> None:
    """Checks that read numbers. On the CPU they cost microseconds; elsewhere they must not wait for the device."""
    if isinstance(p.eps, Tensor):
        _expect_true((p.eps > 0) & p.eps.isfinite(), "eps", "finite numbers above 0", p.eps)
    total = p.log_masses.detach().logsumexp(-1)
    _expect_true(total.abs() < 1e-3, "log_masses", "logarithms of masses that sum to 1", p.log_masses,
                 "Use `log_masses.log_softmax(-1)`.")  # fmt: skip
    for name, masses, mask in (
        ("query_masses", p.query_masses, p.query_mask),
        ("key_masses", p.key_masses, p.key_mask),
    ):
        if masses is None:
            continue
        real = masses.detach().reshape(masses.shape[0], -1, masses.shape[-1])
        if mask is not None:
            real = real.masked_fill(~mask[:, None], 0.0)
        _expect_true(real >= 0, name, "numbers of at least 0", masses)
        sums = real.float().sum(-1)
        normalised = (sums - 1).abs() < 1e-2
        if mask is not None:
            normalised = normalised | ~mask.any(-1)[:, None]
        _expect_true(normalised, name, "masses that sum to 1 over the real tokens", sums,
                     "Divide by their sum.")  # fmt: skip


def _expect_true(ok: Tensor, name: str, expected: str, got: Tensor, hint: str = "") -> None:
    if ok.device.type == "cpu":
        if not bool(ok.all()):
            worst = got.detach().flatten()[:4].tolist()
            _expect(False, name, expected, f"{worst}{' …' if got.numel() > 4 else ''}", hint)
    else:
        torch._assert_async(ok.all(), f"`{name}`: expected {expected}. {hint}")
