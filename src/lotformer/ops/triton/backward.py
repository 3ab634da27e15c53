"""Backward: from the gradient of the output to those of the inputs.

Where the queries are not solved, all they do depends on `s + log m`: the gradient of `log m` is the column sums of that
of their scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import passes
from .arguments import given_or, out_strides, rows, value_strides
from .inputs import Inputs
from .launch import Launcher, Passes, launch
from .sides import keys_of, least_log_mass, log_sent, queries_of
from .sizes import Strategy


class Gradients(NamedTuple):
    """Gradients of the first inputs, in their order; of the log masses `(B,H,N or M)`, None where not asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    log_m: Tensor
    query_log_a: Tensor | None
    key_log_a: Tensor | None


def backward(
    inputs: Inputs,
    strategy: Strategy,
    potentials: tuple[Tensor, Tensor],
    u: Tensor,
    grad_out: Tensor,
    *,
    mass_gradients: tuple[bool, bool],
    run: Launcher = launch,
) -> Gradients:
    grads = Gradients(
        q=inputs.q.new_empty(inputs.q.shape),
        k=inputs.k.new_empty(inputs.k.shape),
        v=inputs.v.new_empty(inputs.v.shape),
        z=torch.zeros_like(inputs.z),
        log_m=torch.zeros_like(inputs.log_m),
        query_log_a=inputs.z.new_empty(inputs.q.shape[:3]) if mass_gradients[0] else None,
        key_log_a=inputs.z.new_empty(inputs.k.shape[:3]) if mass_gradients[1] else None,
    )
    _backward(inputs, strategy, potentials, u, rows(grad_out), grads, run)
    return grads


def _backward(
    inputs: Inputs, strategy: Strategy, potentials: tuple[Tensor, Tensor], u: Tensor, grad_out: Tensor,
    grads: Gradients, run: Launcher,
) -> None:  # fmt: skip
    queries, keys = (Passes(inputs, side, run) for side in (queries_of(inputs), keys_of(inputs, potentials[0])))
    query_y, key_y = (torch.zeros_like(g) for g in potentials)  # gradients of the potentials
    width, rank, depth = inputs.v.shape[3], inputs.rank, inputs.depth
    shared = {"u": u, "width": width}
    block_d = queries.blocks.d(width)
    output_y, u_partials = queries.buffer(rank), queries.buffer(rank, width)
    arguments = {
        **shared, "potentials": potentials[0], "grad_out": grad_out, "y_partials": output_y,
        "u_partials": u_partials, "BLOCK_D": block_d, **out_strides(grad_out),
    }  # fmt: skip
    queries.over_tokens(passes.backward_output_kernel, arguments, x="q", depth_blocks=-(-width // block_d))
    shared["grad_u"] = u_partials.sum(1)

    def solve(side: Passes, g: Tensor, y_partials: Tensor, y: Tensor) -> None:
        if inputs.newton:
            side.implicit(g, y_partials, y)
        else:
            (side.reverse_in_one if strategy == "fused" else side.reverse)(g, y_partials, y, keys=side is keys)

    def tokens(side: Passes, g: Tensor, y: Tensor, grad_x: Tensor, grad_log_a: Tensor | None) -> Tensor:
        """Store the gradients of a side's tokens, add to that of z, return the column sums of that of the scores."""
        block_d = side.blocks.d(depth or rank)
        z_partials = side.buffer(rank) if depth is None else side.buffer(rank, depth)
        sums = side.buffer(rank)
        arguments = {
            **shared, "potentials": g, "grad_potentials": y,
            "v": inputs.v, "grad_out": grad_out, "grad_x": grad_x, "grad_v": grads.v,
            "grad_log_a": given_or(grad_log_a, inputs.z), "z_partials": z_partials, "sums": sums,
            "KEYS": side is keys, "NEWTON": inputs.newton and side.side.solved,
            "MASS_GRADIENT": grad_log_a is not None, "BLOCK_D": block_d,
            **value_strides(inputs.v), **out_strides(grad_out),
        }  # fmt: skip
        blocks = 1 if depth is None else -(-depth // block_d)
        side.over_tokens(passes.backward_tokens_kernel, arguments, depth_blocks=blocks)
        parts = z_partials.view(*inputs.q.shape[:2], *z_partials.shape[1:]).sum(2)
        grads.z.add_(parts.sum((0, 2)) if depth is None else parts.sum_to_size(inputs.z.shape))
        return sums.view(*inputs.q.shape[:2], -1, rank).sum((0, 2))

    if keys.side.solved:
        y_partials = keys.buffer(rank)
        arguments = {
            **shared, "v": inputs.v, "potentials": potentials[1], "y_partials": y_partials, **value_strides(inputs.v),
        }  # fmt: skip
        keys.over_tokens(passes.backward_values_kernel, arguments, x="k")
        solve(keys, potentials[1], y_partials, key_y)
    tokens(keys, potentials[1], key_y, grads.k, grads.key_log_a)

    if inputs.balance == "both":
        solve(queries, potentials[0], output_y, query_y)
    elif inputs.balance == "keys":
        # back through the normalisation in `keys_of`; what a sweep makes has the gradient of `log m'`, sign turned
        y = _of_log_m(inputs, keys.side.log_m, key_y)
        y = y - keys.side.log_m.exp() * y.sum(-1, keepdim=True)
        query_y[:, :, 1] = torch.where(log_sent(inputs, potentials[0]) >= least_log_mass(inputs), -y, 0.0)
    sums = tokens(queries, potentials[0], query_y, grads.q, grads.query_log_a)
    both = _of_log_m(inputs, inputs.log_m, query_y + key_y).sum(0) if inputs.balance == "both" else sums
    grads.log_m.copy_(both)


def _of_log_m(inputs: Inputs, log_m: Tensor, y: Tensor) -> Tensor:
    """The gradient `(B,H,R)` of the log masses that a side is solved for, from those of its potentials."""
    return y[:, :, 0] * log_m.exp() if inputs.newton else y.sum(2)
