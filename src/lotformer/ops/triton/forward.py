"""Forward: from queries, keys and values to the output, fused or pass by pass."""

from __future__ import annotations

from torch import Tensor

from . import fused, passes
from .arguments import given_or, mass_stride, pivot_strides, precision, value_strides
from .inputs import Inputs
from .launch import Launcher, Passes, launch
from .sides import Tokens, keys_of, queries_of
from .sizes import BLOCK_K, NEWTON_RANK, Blocks, Strategy, block


def forward(
    inputs: Inputs, strategy: Strategy, run: Launcher = launch
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output `(B,H,N,Dv)`, query and key potentials `(B,H,slots,R)`, `u = Wᵀ v` `(B,H,R,Dv)`."""
    out, query_g, key_g, u = outputs(inputs)
    if strategy == "fused" and not inputs.newton:
        _fused_forward(inputs, out, query_g, key_g, u, run)
    else:
        _passes_forward(inputs, strategy, out, query_g, key_g, u, run)
    return out, query_g, key_g, u


def outputs(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs of `forward`."""
    batch, heads, n, _ = inputs.q.shape
    width, rank = inputs.v.shape[3], inputs.rank
    query_g, key_g = (inputs.z.new_empty(batch, heads, slots, rank) for slots in inputs.slots)
    return inputs.q.new_empty(batch, heads, n, width), query_g, key_g, inputs.z.new_empty(batch, heads, rank, width)


def _fused_forward(inputs: Inputs, out: Tensor, query_g: Tensor, key_g: Tensor, u: Tensor, run: Launcher) -> None:
    queries = Tokens(inputs.q, inputs.query_log_a, inputs.query_valid)
    keys = Tokens(inputs.k, inputs.key_log_a, inputs.key_valid)
    z, blocks = inputs.z, Blocks.of(inputs.rank)
    strides = queries.strides("q", masses="query_a", valid="query_valid")
    strides |= keys.strides("k", masses="key_a", valid="key_valid") | value_strides(inputs.v)
    del strides["query_valid_h"]  # queries are masked for all heads alike
    arguments = {
        "q": inputs.q, "k": inputs.k, "v": inputs.v, "z": z, "log_m": inputs.log_m,
        "query_log_a": given_or(queries.log_a, z), "key_log_a": given_or(keys.log_a, z),
        "query_valid": given_or(queries.valid, z), "key_valid": given_or(keys.valid, z),
        "out": out, "query_g": query_g, "key_g": key_g, "u": u,
        **strides, **pivot_strides(z), **mass_stride(inputs.log_m),
        "heads": inputs.q.shape[1], "n": queries.tokens, "m": keys.tokens, "rank": inputs.rank,
        "depth": inputs.depth, "width": inputs.v.shape[3], "iters": inputs.iters,
        "query_uniform": queries.uniform, "key_uniform": keys.uniform, "BALANCE": inputs.balance,
        "QUERY_MASS": queries.log_a is not None, "KEY_MASS": keys.log_a is not None,
        "QUERY_VALID": queries.valid is not None, "KEY_VALID": keys.valid is not None,
        "QUERY_TILE": block(queries.tokens), "KEY_TILE": block(keys.tokens),
        "BLOCK_N": blocks.n, "BLOCK_R": blocks.r, "BLOCK_K": BLOCK_K, "BLOCK_D": blocks.d(inputs.v.shape[3]),
        "PRECISION": precision(),
    }  # fmt: skip
    run(fused.forward_kernel, (inputs.heads,), arguments, blocks.options)


def _passes_forward(
    inputs: Inputs, strategy: Strategy, out: Tensor, query_g: Tensor, key_g: Tensor, u: Tensor, run: Launcher
) -> None:
    queries = Passes(inputs, queries_of(inputs), run)
    if inputs.balance == "keys":
        queries.send(query_g)
    elif inputs.balance == "none":
        query_g[:, :, 0] = inputs.log_m
    keys = Passes(inputs, keys_of(inputs, query_g), run)
    read = [query_g, key_g]  # what is left to reduce, if anything
    for i, (side, g) in enumerate(((queries, query_g), (keys, key_g))):
        if side.side.solved and not inputs.newton:
            read[i] = side.sinkhorn(g, keys=side is keys)
        elif side.side.solved:
            in_one = strategy == "fused" and inputs.rank <= NEWTON_RANK
            (side.newton_in_one if in_one else side.newton)(g)
    width, rank = inputs.v.shape[3], inputs.rank
    block_d = keys.blocks.d(width)
    blocks = -(-width // block_d)
    sums, u_partials = keys.buffer(2, rank), keys.buffer(rank, width)
    arguments = {
        "v": inputs.v, "potentials": key_g, "partials_in": read[1], "partials_out": sums, "u_partials": u_partials,
        "width": width, "REDUCE": read[1] is not key_g, "BLOCK_D": block_d, **value_strides(inputs.v),
    }  # fmt: skip
    keys.over_tokens(passes.values_kernel, arguments, x="k", depth_blocks=blocks)
    arguments = {"partials": sums, "u_partials": u_partials, "potentials": key_g, "u": u}
    keys.over_heads(passes.combine_kernel, {**arguments, "width": width, "BLOCK_D": block_d}, depth_blocks=blocks)
    arguments = {"potentials": query_g, "partials": read[0], "u": u, "out": out, "width": width}
    queries.over_tokens(passes.output_kernel, {**arguments, "REDUCE": read[0] is not query_g}, x="q")
