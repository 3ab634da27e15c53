"""The operator as two PyTorch ops, forward and backward, on top of the kernels.

Their schemas are made of the fields of `Inputs`, so that an input is stated in one place.
"""

from __future__ import annotations

from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from .. import reference
from ..problem import Potentials, Result, Solve, Transport
from .arguments import rows
from .backward import Gradients, backward
from .forward import forward, outputs
from .inputs import Inputs
from .sizes import Strategy, strategy_for

_SPELLED = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "int", float | None: "float?", str: "str"}
_INPUTS = ", ".join(f"{_SPELLED[kind]} {name}" for name, kind in get_type_hints(Inputs).items())
_COUNT = len(Inputs._fields)


def run(transport: Transport, solve: Solve, strategy: Strategy | None = None) -> Result:
    """The operator. What is small (temperature, normalised masses) stays with PyTorch, which differentiates it."""
    t = transport
    _, heads, n, m, rank, dim, _ = t.shape
    temperature = solve.temperature(dim)
    if not isinstance(temperature, Tensor):
        temperature = torch.full((), temperature, device=t.q.device)
    z = temperature.float().expand(heads)
    if t.pivots is not None:
        z = t.pivots.float() * z[:, None, None]
    query_log_a, query_valid = _query_masses(t)
    key_log_a, key_valid = _key_masses(t)
    inputs = Inputs(
        q=rows(t.q),
        k=rows(t.k),
        v=rows(t.v),
        z=z.contiguous(),
        log_m=reference.log_pivot_masses(t, solve)[:, 0].contiguous(),
        query_log_a=query_log_a,
        key_log_a=key_log_a,
        query_valid=query_valid,
        key_valid=key_valid,
        newton=solve.solver == "newton" and solve.balance != "none",
        iters=solve.iters,
        tol=solve.tol,
        balance=solve.balance,
    )
    out, query_g, key_g, _ = attention(*inputs, strategy or strategy_for(n, m, rank))

    def potentials() -> Potentials:
        # the keys' last slot holds the closing half-step, which normalises the columns
        query_slot, key_slot = inputs.plan_slots
        return query_g[:, :, query_slot].detach(), key_g[:, :, max(key_slot, 0)].detach()

    return Result(out, lambda: reference.residual(t, solve, potentials()), potentials)


def _query_masses(t: Transport) -> tuple[Tensor | None, Tensor | None]:
    if t.query_masses is None and t.query_mask is None:
        return None, None
    log_a, _ = reference.log_token_masses(reference.query_masses(t))
    valid = None if t.query_mask is None else t.query_mask[:, None].to(torch.uint8).contiguous()
    return log_a.contiguous(), valid


def _key_masses(t: Transport) -> tuple[Tensor | None, Tensor | None]:
    """A key without mass is treated like padding: whatever it holds, it is not read."""
    if t.key_masses is None and t.key_mask is None:
        return None, None
    a = reference.key_masses(t)
    log_a, _ = reference.log_token_masses(a)
    return log_a.contiguous(), (a > 0).to(torch.uint8).contiguous()


@torch.library.custom_op(
    "lotformer::triton_attention",
    mutates_args=(),
    schema=f"({_INPUTS}, str strategy) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, query and key potentials, `Wᵀ v`; see `forward.forward`."""
    *inputs, strategy = arguments
    return forward(Inputs(*inputs), cast(Strategy, strategy))


@attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return outputs(Inputs(*arguments[:_COUNT]))


@torch.library.custom_op(
    "lotformer::triton_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor query_g, Tensor key_g, Tensor u, {_INPUTS}, str strategy, "
    "bool query_mass_gradient, bool key_mass_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(
    grad_out: Tensor, query_g: Tensor, key_g: Tensor, u: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, z, log_m and both log masses (empty where not asked for); see `backward.backward`."""
    *given, strategy, query_wanted, key_wanted = arguments
    inputs, wanted = Inputs(*given), (query_wanted, key_wanted)
    grads = backward(inputs, cast(Strategy, strategy), (query_g, key_g), u, grad_out, mass_gradients=wanted)
    return tuple(inputs.z.new_empty(0) if x is None else x for x in grads)


@attention_backward.register_fake
def _(grad_out: Tensor, query_g: Tensor, key_g: Tensor, u: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *given, _, query_wanted, key_wanted = arguments
    inputs = Inputs(*given)

    def masses(x: Tensor, wanted: bool) -> Tensor:
        return inputs.z.new_empty(x.shape[:3]) if wanted else inputs.z.new_empty(0)

    grads = (x.new_empty(x.shape) for x in (inputs.q, inputs.k, inputs.v, inputs.z, inputs.log_m))
    return (*grads, masses(inputs.q, query_wanted), masses(inputs.k, key_wanted))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * len(ctx.others)
    if grad_out is None:
        return nothing
    query_g, key_g, u, *tensors = ctx.saved_tensors
    arguments = [y if x is None else x for x, y in zip(tensors, ctx.others, strict=True)]
    inputs, needed = Inputs(*arguments[:_COUNT]), Inputs(*ctx.needs_input_grad[:_COUNT])
    grads = Gradients(
        *attention_backward(grad_out, query_g, key_g, u, *arguments, needed.query_log_a, needed.key_log_a)
    )
    grads = grads._replace(
        query_log_a=_like(inputs.query_log_a, grads.query_log_a) if needed.query_log_a else None,
        key_log_a=_like(inputs.key_log_a, grads.key_log_a) if needed.key_log_a else None,
    )
    return (*grads, *nothing[len(grads) :])


def _like(given: Any, grad: Any) -> Tensor:
    """Masses may be shared by the heads."""
    return grad.sum(1, keepdim=True) if given.shape[1] == 1 else grad


attention.register_autograd(_differentiate, setup_context=_keep)
