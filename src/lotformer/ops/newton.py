"""The exact solver: Newton's method on the semi-dual of entropic transport between tokens and r pivots.

Eliminating the token potentials leaves a convex problem in the pivot potentials `g` alone,

    φ(g) = Σ_i a_i LSE_j(s_ij + g_j) − Σ_j m_j g_j,     P = softmax_j(s + g),     b = Pᵀa
    ∇φ = b − m,                                         H = Diag(b) − Pᵀ Diag(a) P

`H` is the Laplacian of a graph on the pivots with weights `Pᵀ Diag(a) P`, and is built that way: the diagonal
is a sum of positive terms, so nothing cancels at small ε. Newton's method from a cold start would meet columns
of `P` that have underflowed, so the scores are switched on gradually: solve for `β·s` while β grows to 1, with
the tangent of the path as predictor and Newton steps as corrector. The length of a step comes from
`|D³φ[v,v,u]| ≤ range(u)·D²φ[v,v]`; no line search is needed. A jump along the path starts from near it, and is
taken back and shortened if it ends far from it.

At small ε the graph may fall apart: whole groups of pivots share no token that either could have, and `H` is
singular to rounding. The tangent is therefore written as `dg/dβ = (g + x) / β`, where `H x = −∂b` along
`(β s + g) → ρ (β s + g)`: in directions of which `H` knows nothing `x` is zero, the potential grows with the scores,
and every token stays where it is.

Potentials grow like the scores, and in fp32 a potential of 1e4 has three digits behind the point: so the solve and
the plans are in fp64, whatever the inputs, on every device that has it.

The gradient is implicit: at the solution `dg = −H⁺ d(b − m)`, so one more Newton step, taken through
differentiable `b` and `m` with `H` held constant, has the right value and the right derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FIXED_PASSES = 24
"""Passes over the scores when the cost must not depend on the data (compiled code, vmap, `tol=None`)."""

MAX_PASSES = 400
"""Bound on the passes of the adaptive solve: typical problems need 5 (ε = 1) to 20 (ε = 0.01), hard ones up to 45.

A few in ten thousand, of pivots without a mass to speak of, or of tokens whose masses fit groups of pivots exactly,
need up to 270. A walk that is cut short of β = 1 has no solution at all.
"""

START_RANGE = 4.0  # β starts where the scores of a token span about this much: nothing underflows there
PACE = 1.8  # growth of β per jump
SETTLED = 0.25  # log residual below which β may grow again,
SETTLED_REACH = 2.0  # if the corrector ranges over less than this,
_QUIET = {torch.float32: 2e-7, torch.float64: 1e-13}  # or where rounding decides: per unit of the potential
TOO_FAR = 1.0  # log residual at which a jump is taken back
LARGE_STEP = 10.0  # range of a corrector above which steps are not bold
BOLDNESS = 0.25  # 1 is the proven step length; smaller is longer, and safe near a solution
_RIDGE = {torch.float32: 3e-6, torch.float64: 1e-13}
_GRADIENT_RIDGE = {torch.float32: 1e-6, torch.float64: 1e-13}


def precision(s: Tensor) -> torch.dtype:
    """The precision of the solver: fp64, or fp32 on a device without it."""
    return torch.float32 if s.device.type == "mps" else torch.float64


def potential(s: Tensor, a: Tensor, log_m: Tensor, *, tol: float | None) -> Tensor:
    """Pivot potentials `g (..., 1, R)` with `Σ_i a_i softmax_j(s + g)_ij = m_j`, differentiable in all inputs.

    Args:
        s: scores divided by ε `(..., N, R)`. a: token masses `(..., N)`, sum 1. log_m: `(..., 1, R)`.
        tol: bound on the relative error of the glued column sums; None for a fixed cost.

    Returns:
        The potentials in `precision(s)`: plans have to be made of them in that precision too.
    """
    s, a, log_m = (x.to(precision(s)) for x in (s, a, log_m))
    a, log_m = a.expand(s.shape[:-1]), log_m.expand(*s.shape[:-2], 1, s.shape[-1])[..., 0, :]
    exporting = torch.compiler.is_exporting()
    # the two plans share the error of the glued coupling: each gets less than half
    tol = None if tol is None or (torch.compiler.is_compiling() and not exporting) else tol / 3
    g = (_solve_portably if exporting else _solve)(s.detach(), a.detach(), log_m.detach(), tol)
    return _with_implicit_gradient(g, s, a, log_m, portable=exporting)[..., None, :]


def _with_implicit_gradient(g: Tensor, s: Tensor, a: Tensor, log_m: Tensor, *, portable: bool) -> Tensor:
    plan = torch.softmax(s + g[..., None, :], -1)
    b = (a[..., None] * plan).sum(-2)
    with torch.no_grad():
        apply_inverse = _inverse(_laplacian(plan, a), b, _GRADIENT_RIDGE[s.dtype], portable=portable)
    step = apply_inverse((b - log_m.exp())[..., None])[..., 0]
    transformed = torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
    if step.requires_grad and not transformed:
        step.register_hook(_refuse_second_derivative)
    # far from the solution a full Newton step may hurt: then only its derivative is used
    near = (_range(step.detach()) < 0.5)[..., None]
    return g - step + torch.where(near, 0.0, step.detach())


def _refuse_second_derivative(grad: Tensor) -> None:
    if torch.is_grad_enabled():  # only when the backward pass is itself recorded
        raise NotImplementedError(
            "the newton solver has no second derivative: `H` is held constant in its gradient. "
            'Use `solver="sinkhorn", backend="reference"` where gradients are differentiated again.'
        )


class _Look(NamedTuple):
    """Results of one pass over the scores at `(g, β)`."""

    error: Tensor  # max_j |log(b_j / m_j)|
    corrector: Tensor  # Newton direction at fixed β
    length: Tensor  # how far to go along it
    reach: Tensor  # range of the corrector
    tangent: Tensor  # dg/dβ along the path of solutions


class _Walk(NamedTuple):
    """The state of the solve: potentials `(..., R)`, and one number per problem `(...)`."""

    g: Tensor
    beta: Tensor
    best: Tensor  # the best potential at β = 1
    best_error: Tensor
    failures: Tensor  # to improve on the best
    base: Tensor  # the last point near the path, from where jumps start
    base_beta: Tensor
    base_tangent: Tensor
    pace: Tensor
    jumped: Tensor
    done: Tensor  # whether the tolerance is met, or rounding decides


# One opaque node in a traced graph: unrolled, two dozen passes would take minutes to compile.
@torch.library.custom_op("lotformer::newton_solve", mutates_args=())
def _solve(s: Tensor, a: Tensor, log_m: Tensor, tol: float | None) -> Tensor:
    walk = _first_guess(s, a, log_m)
    for _ in range(FIXED_PASSES if tol is None else MAX_PASSES):
        walk = _pass(walk, s, a, log_m, tol, portable=False)
        if tol is not None and bool(walk.done.all()):
            break
    return _arrival(walk).contiguous()


def _solve_portably(s: Tensor, a: Tensor, log_m: Tensor, tol: float | None) -> Tensor:
    """The same as a loop that an exported program and ONNX can hold, of operators that they know."""
    from torch._higher_order_ops.while_loop import while_loop

    def goes_on(count: Tensor, *walk: Tensor) -> Tensor:
        return (count < (FIXED_PASSES if tol is None else MAX_PASSES)) & ~_Walk(*walk).done.all()

    def body(count: Tensor, *walk: Tensor) -> tuple[Tensor, ...]:
        return count + 1, *_pass(_Walk(*walk), s, a, log_m, tol, portable=True)

    start = (x.clone() for x in _first_guess(s, a, log_m))  # what a loop carries may not share memory
    _, *walk = while_loop(goes_on, body, (torch.zeros((), dtype=torch.long, device=s.device), *start))
    return _arrival(_Walk(*walk))


def _first_guess(s: Tensor, a: Tensor, log_m: Tensor) -> _Walk:
    spread = (a * (s.amax(-1) - s.amin(-1))).sum(-1)
    beta = (START_RANGE / spread.clamp_min(1e-6)).clamp_max(1.0)
    g = log_m - beta[..., None] * (a[..., None] * s).sum(-2)  # exact to first order at β = 0
    no = torch.zeros_like(beta, dtype=torch.bool)
    return _Walk(
        g=g,
        beta=beta,
        best=g,
        best_error=torch.full_like(beta, torch.inf),
        failures=torch.zeros_like(beta),
        base=g,
        base_beta=beta,
        base_tangent=torch.zeros_like(g),
        pace=torch.full_like(beta, PACE),
        jumped=no,
        done=no,
    )


def _pass(walk: _Walk, s: Tensor, a: Tensor, log_m: Tensor, tol: float | None, *, portable: bool) -> _Walk:
    """One look at all scores and the step that follows from it."""
    g, beta = walk.g, walk.beta
    look = _look(s, a, log_m, g, beta, portable=portable)
    quiet = _QUIET[s.dtype] * g.abs().amax(-1).clamp_min(5.0)
    arrived = beta >= 1
    improved = arrived & (look.error < walk.best_error)
    best_error = torch.where(improved, look.error, walk.best_error)
    failures = torch.where(improved, 0.0, walk.failures + arrived.to(s.dtype))
    stalled = (best_error < 1e-4) & (failures >= torch.where(best_error < quiet, 1.0, 4.0))
    missed = walk.jumped & ~(look.error < TOO_FAR)
    settled = ~missed & (((look.error < SETTLED) & (look.reach < SETTLED_REACH)) | (look.error < quiet))
    pace = torch.where(missed, walk.pace.sqrt(), walk.pace)
    corrected = g + look.length[..., None] * look.corrector
    base = torch.where(settled[..., None], corrected, walk.base)
    base_tangent = torch.where(settled[..., None], look.tangent, walk.base_tangent)
    base_beta = torch.where(settled, beta, walk.base_beta)
    jumped = missed | (settled & ~arrived)
    next_beta = torch.where(jumped, (pace * base_beta).clamp_max(1.0), beta)
    landing = base + (next_beta - base_beta)[..., None] * base_tangent
    return _Walk(
        g=torch.where(jumped[..., None], landing, corrected),
        beta=next_beta,
        best=torch.where(improved[..., None], g, walk.best),
        best_error=best_error,
        failures=failures,
        base=base,
        base_beta=base_beta,
        base_tangent=base_tangent,
        pace=pace,
        jumped=jumped,
        done=stalled if tol is None else stalled | (best_error < tol),
    )


def _arrival(walk: _Walk) -> Tensor:
    return torch.where(walk.best_error.isfinite()[..., None], walk.best, walk.g / walk.beta[..., None])


@_solve.register_fake
def _(s: Tensor, a: Tensor, log_m: Tensor, tol: float | None) -> Tensor:
    return torch.empty_like(log_m, memory_format=torch.contiguous_format)


@_solve.register_vmap
def _(
    info: object, in_dims: tuple[int | None, ...], s: Tensor, a: Tensor, log_m: Tensor, tol: float | None
) -> tuple[Tensor, int]:
    # every leading dimension is a batch dimension: a mapped one is one more
    size = next(x.shape[dim] for x, dim in zip((s, a, log_m), in_dims, strict=False) if dim is not None)
    s, a, log_m = (
        x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
        for x, dim in zip((s, a, log_m), in_dims, strict=False)
    )
    return _solve(s, a, log_m, tol), 0


def _look(s: Tensor, a: Tensor, log_m: Tensor, g: Tensor, beta: Tensor, *, portable: bool) -> _Look:
    m = log_m.exp()
    exponents = beta[..., None, None] * s + g[..., None, :]
    exponents = exponents - exponents.amax(-1, keepdim=True)
    plan = torch.softmax(exponents, -1)
    weighted = a[..., None] * plan
    b = weighted.sum(-2)
    drift = (weighted * (exponents - (plan * exponents).sum(-1, keepdim=True))).sum(-2)  # β ∂b/∂β as g grows with β
    log_ratio = b.clamp_min(torch.finfo(b.dtype).tiny).log() - log_m
    laplacian = _laplacian(plan, a)
    sides = torch.stack([b - m, b * log_ratio, drift], -1)
    apply_inverse = _inverse(laplacian, b, _RIDGE[s.dtype], portable=portable)
    plain, logarithmic, along = (-apply_inverse(sides)).unbind(-1)
    tangent = (g + along) / beta[..., None]
    error = log_ratio.abs().amax(-1)
    # Newton on log b = log m converges faster from afar, where it is a descent direction of φ. From near its terms
    # of second order would be taken for currents between pivots that hardly share a token.
    descends = (logarithmic * (b - m)).sum(-1) < 0
    corrector = torch.where((descends & (error > SETTLED))[..., None], logarithmic, plain)
    reach = _range(corrector)
    gain = -((b - m) * corrector).sum(-1)
    curvature = ((laplacian @ corrector[..., None])[..., 0] * corrector).sum(-1)
    ratio = (gain / curvature.clamp_min(1e-30)).clamp(1.0, 1e6)
    scaled = (torch.where(reach < LARGE_STEP, BOLDNESS, 1.0) * reach).clamp_min(1e-6)
    length = torch.where(reach < 1, 1.0, (torch.log1p(ratio * scaled) / scaled).clamp_max(1.0))
    return _Look(error, corrector, length, reach, tangent)


def _range(x: Tensor) -> Tensor:
    return x.amax(-1) - x.amin(-1)


def _laplacian(plan: Tensor, a: Tensor) -> Tensor:
    edges = (a[..., None] * plan).mT @ plan
    edges = edges - torch.diag_embed(edges.diagonal(dim1=-2, dim2=-1))
    return torch.diag_embed(edges.sum(-1)) - edges


def _inverse(laplacian: Tensor, b: Tensor, ridge: float, *, portable: bool) -> Callable[[Tensor], Tensor]:
    """`x ↦ D^-½ (D^-½ (H + b bᵀ) D^-½ + ridge)⁻¹ D^-½ x` with `D = Diag(b)`.

    `b bᵀ` fills the constant direction in which `H` is singular; the scaling puts the spectrum in [ridge, 1 + ridge].
    Where rounding leaves no positive definite matrix the identity stands in: a Sinkhorn step.
    """
    weight = b.clamp_min(torch.finfo(b.dtype).tiny).rsqrt()[..., None]
    identity = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
    matrix = (laplacian + b[..., :, None] * b[..., None, :]) * (weight * weight.mT) + ridge * identity
    if portable:
        inverse = _gauss_jordan(matrix, identity)
        return lambda x: inverse @ (x * weight) * weight
    factor, info = torch.linalg.cholesky_ex(matrix)
    factor = torch.where((info == 0)[..., None, None], factor, identity)
    return lambda x: torch.cholesky_solve(x * weight, factor) * weight


def _gauss_jordan(matrix: Tensor, identity: Tensor) -> Tensor:
    """The inverse of a positive definite matrix, in place: one update of rank one per row. ONNX knows no Cholesky."""
    x, smallest = matrix, matrix[..., :1, :1]
    for k, unit in enumerate(identity):
        row, column, pivot = x[..., k : k + 1, :], x[..., k : k + 1], x[..., k : k + 1, k : k + 1]
        smallest = torch.minimum(smallest, pivot)
        x = x - (column - unit[:, None]) * ((row + unit) / pivot)
    return torch.where(smallest > 0, x, identity)
