"""The operator as two PyTorch ops, forward and backward, on top of the kernels."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .. import reference
from ..problem import Problem
from . import launch
from .launch import Inputs, Strategy


def run(problem: Problem, strategy: Strategy | None = None) -> Tensor:
    """The operator. What is small (temperature, normalised masses) stays with PyTorch, which differentiates it."""
    p = problem
    _, _, n, m, rank, _, _ = p.shape
    temperature = p.scale / p.eps
    if isinstance(temperature, Tensor):
        temperature = temperature.float().expand(p.pivots.shape[0])[:, None, None]
    query_log_a, query_valid = _query_masses(p)
    key_log_a, key_valid = _key_masses(p)
    out, _, _, _ = attention(
        _rows(p.q), _rows(p.k), _rows(p.v),
        (p.pivots.float() * temperature).contiguous(), reference.log_pivot_masses(p)[:, 0].contiguous(),
        query_log_a, key_log_a, query_valid, key_valid,
        p.solver == "newton", p.iters, p.tol, strategy or launch.strategy_for(n, m, rank),
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _query_masses(p: Problem) -> tuple[Tensor | None, Tensor | None]:
    if p.query_masses is None and p.query_mask is None:
        return None, None
    log_a, _ = reference._log_masses(reference.query_masses(p))
    valid = None if p.query_mask is None else p.query_mask[:, None].to(torch.uint8).contiguous()
    return log_a.contiguous(), valid


def _key_masses(p: Problem) -> tuple[Tensor | None, Tensor | None]:
    """A key without mass is treated like padding: whatever it holds, it is not read."""
    if p.key_masses is None and p.key_mask is None:
        return None, None
    a = reference.key_masses(p)
    log_a, _ = reference._log_masses(a)
    return log_a.contiguous(), (a > 0).to(torch.uint8).contiguous()


@torch.library.custom_op("lotformer::triton_attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, log_m: Tensor,
    query_log_a: Tensor | None, key_log_a: Tensor | None, query_valid: Tensor | None, key_valid: Tensor | None,
    newton: bool, iters: int, tol: float | None, strategy: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, query and key potentials, `Wᵀ v`; see `launch.forward`."""
    inputs = Inputs(q, k, v, z, log_m, query_log_a, key_log_a, query_valid, key_valid, newton, iters, tol)
    return launch.forward(inputs, cast(Strategy, strategy))


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, log_m: Tensor,
    query_log_a: Tensor | None, key_log_a: Tensor | None, query_valid: Tensor | None, key_valid: Tensor | None,
    newton: bool, iters: int, tol: float | None, strategy: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, n, _ = q.shape
    rank, width = z.shape[1], v.shape[3]
    slots = 2 if newton else iters + 1
    query_g = z.new_empty(batch, heads, slots, rank)
    return (
        q.new_empty(batch, heads, n, width),
        query_g,
        torch.empty_like(query_g),
        z.new_empty(batch, heads, rank, width),
    )


@torch.library.custom_op("lotformer::triton_attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor, query_g: Tensor, key_g: Tensor, u: Tensor,
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, log_m: Tensor,
    query_log_a: Tensor | None, key_log_a: Tensor | None, query_valid: Tensor | None, key_valid: Tensor | None,
    newton: bool, iters: int, strategy: str, query_mass_gradient: bool, key_mass_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, z, log_m and both log masses (empty where not asked for); see `launch.backward`."""
    inputs = Inputs(q, k, v, z, log_m, query_log_a, key_log_a, query_valid, key_valid, newton, iters, None)
    wanted = (query_mass_gradient, key_mass_gradient)
    grads = launch.backward(inputs, cast(Strategy, strategy), (query_g, key_g), u, grad_out, mass_gradients=wanted)
    masses = [z.new_empty(0) if x is None else x for x in (grads.query_log_a, grads.key_log_a)]
    return grads.q, grads.k, grads.v, grads.z, grads.log_m, masses[0], masses[1]


@attention_backward.register_fake
def _(
    grad_out: Tensor, query_g: Tensor, key_g: Tensor, u: Tensor,
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, log_m: Tensor,
    query_log_a: Tensor | None, key_log_a: Tensor | None, query_valid: Tensor | None, key_valid: Tensor | None,
    newton: bool, iters: int, strategy: str, query_mass_gradient: bool, key_mass_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def masses(x: Tensor, wanted: bool) -> Tensor:
        return z.new_empty(x.shape[:3]) if wanted else z.new_empty(0)

    grads = [x.new_empty(x.shape) for x in (q, k, v, z, log_m)]
    grads += [masses(q, query_mass_gradient), masses(k, key_mass_gradient)]
    return grads[0], grads[1], grads[2], grads[3], grads[4], grads[5], grads[6]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, (ctx.newton, ctx.iters, _, ctx.strategy) = inputs[:9], inputs[9:]
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 13
    saved = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[5], ctx.needs_input_grad[6]]
    *grads, query_mass, key_mass = attention_backward(
        grad_out, *saved, ctx.newton, ctx.iters, ctx.strategy, wanted[0], wanted[1]
    )
    masses = [
        _like(grad, given) if want else None
        for grad, given, want in zip((query_mass, key_mass), saved[8:10], wanted, strict=True)
    ]
    return (*grads, *masses, None, None, None, None, None, None)


def _like(grad: Tensor, given: Tensor) -> Tensor:
    """Masses may be shared by the heads."""
    return grad.sum(1, keepdim=True) if given.shape[1] == 1 else grad


attention.register_autograd(_differentiate, setup_context=_keep)
