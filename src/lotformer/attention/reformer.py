"""Reformer's LSH attention: softmax among tokens that a random hash sorts next to each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn.checks import require_count, require_moderate
from ..ops.precision import no_autocast
from .base import Attention, Cost, Entry
from .inputs import Inputs
from .masking import require_equal_lengths, shared_mask, zero_padding

_SELF_SCORE = -1e5  # a token attends to itself only when it has no other company
_NEVER = -1e9


class Reformer(Attention):
    """Shared query–key attention `softmax(scale · q_i · q_j / |q_j|)` among tokens of near buckets; `k` is not used.

    Each of `num_hashes` rounds sorts the tokens by bucket, `argmax [qR; -qR]` with a random rotation R, cuts the
    order into chunks, and lets a token attend to its chunk and the `chunks_before` and `chunks_after` next to it.
    Rounds are averaged with their softmax normalisers as weights. A pair that meets in several rounds counts in each.

    With the defaults this is Hugging Face's `LSHSelfAttention` but for three things: the chunks at the ends of a round
    see nothing beyond them (there, the first looks back at the last of the round before); half as many buckets by
    default; and rotations that are drawn once and kept, where public code draws them anew in every call.

    Args:
        scale: factor of the scores; some public code has `D^-1/2`, which leaves softmax nearly uniform.
        across_buckets: attend to all of the neighbourhood, as public code does. False keeps to the own bucket within
            it, as the paper's formula does.
        num_buckets: a power of two; by default the smallest with chunk-sized buckets, at most `max_buckets`.
        seed: of the rotations.
    """

    rotations: Tensor

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        num_hashes: int = 2,
        chunk_size: int = 64,
        num_buckets: int | None = None,
        max_buckets: int = 256,
        chunks_before: int = 1,
        chunks_after: int = 0,
        scale: float = 1.0,
        across_buckets: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(head_dim, num_heads)
        for name, value, least in (
            ("num_hashes", num_hashes, 1),
            ("chunk_size", chunk_size, 1),
            ("chunks_before", chunks_before, 0),
            ("chunks_after", chunks_after, 0),
        ):
            require_count(name, value, least)
        for name, value in (("num_buckets", num_buckets or 1), ("max_buckets", max_buckets)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}.")
        require_moderate("scale", scale, signed=True)
        self.scale = scale
        self.across_buckets = across_buckets
        self.num_hashes = num_hashes
        self.chunk_size = chunk_size
        self.num_buckets = num_buckets
        self.chunks_before = chunks_before
        self.chunks_after = chunks_after
        most = max(num_buckets or max_buckets, 2)
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("rotations", torch.randn(num_heads, num_hashes, head_dim, most // 2, generator=generator))

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        require_equal_lengths(q, k, "reformer")
        mask = shared_mask(key_mask, query_mask)
        dtype = torch.promote_types(q.dtype, torch.float32)
        with no_autocast(q.device.type):
            out = self._rounds(zero_padding(q, mask).to(dtype), zero_padding(v, mask).to(dtype), mask)
        return zero_padding(out.to(q.dtype), mask)

    def _rounds(self, q: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        length = q.shape[2]
        bucket, order = self.buckets(q.detach(), mask).sort(dim=-1, stable=True)  # (B, H, rounds, N)
        place = torch.empty_like(order).scatter_(-1, order, torch.arange(length, device=q.device).expand_as(order))

        keys = F.normalize(q, dim=-1) * self.scale
        sorted_q, sorted_k, sorted_v = (_take(x, order) for x in (q, keys, v))
        near_bucket, near_order = (self._neighbours(x[..., None], -1).squeeze(-1) for x in (bucket, order))
        scores = self._chunks(sorted_q, 0.0) @ self._neighbours(sorted_k, 0.0).mT
        own_bucket, own_order = (self._chunks(x[..., None], -1) for x in (bucket, order))
        scores = scores.masked_fill(own_order == near_order[..., None, :], _SELF_SCORE)
        if self.across_buckets:
            elsewhere = ((near_bucket < 0) | (near_bucket == self._padding_bucket))[..., None, :]
        else:
            elsewhere = own_bucket != near_bucket[..., None, :]
        scores = scores.masked_fill(elsewhere, _NEVER)

        normaliser = torch.logsumexp(scores, -1, keepdim=True)
        mixed = (scores - normaliser).exp() @ self._neighbours(sorted_v, 0.0)
        mixed, normaliser = (_untake(x.flatten(3, 4)[:, :, :, :length], place) for x in (mixed, normaliser))
        return (normaliser.softmax(2) * mixed).sum(2)

    @torch.no_grad()
    def buckets(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """Bucket of every token in every round, `(B, H, rounds, N)`; padding comes after all buckets."""
        length = q.shape[2]
        real = torch.full((1,), length, device=q.device) if mask is None else mask.sum(-1)
        used = self._half_buckets(real)[:, None, None, None]
        side = q[:, :, None] @ self.rotations[..., : self._columns(length)].to(q.dtype)
        unused = torch.arange(side.shape[-1], device=q.device) >= used[..., None]
        column = side.abs().masked_fill(unused, -1.0).argmax(-1)
        negative = torch.take_along_dim(side, column[..., None], -1).squeeze(-1) < 0
        found = (column + used * negative) * (used > 0)
        return found if mask is None else found.masked_fill(~mask[:, None, None, :], self._padding_bucket)

    @property
    def _padding_bucket(self) -> int:
        return 2 * self.rotations.shape[-1]

    def _half_buckets(self, lengths: Tensor) -> Tensor:
        """Half the number of buckets for every length: a bucket for each direction of a rotation and its opposite."""
        if self.num_buckets is not None:
            return torch.full_like(lengths, self.num_buckets // 2)
        doublings = (2 * self.rotations.shape[-1]).bit_length() - 1
        sizes = self.chunk_size * 2 ** torch.arange(doublings, device=lengths.device)
        return 2 ** (lengths[:, None] > sizes).sum(-1) // 2

    def _columns(self, length: int) -> int:
        """Directions that a sequence of this length can need; at least one."""
        most = self.rotations.shape[-1]
        if self.num_buckets is not None:
            return most
        columns = 1
        while columns < most and 2 * columns * self.chunk_size < length:
            columns *= 2
        return columns

    def _chunks(self, x: Tensor, fill: float) -> Tensor:
        """`(B, H, rounds, N, D)` in chunks, `(B, H, rounds, T, chunk, D)`."""
        return F.pad(x, (0, 0, 0, -x.shape[3] % self.chunk_size), value=fill).unflatten(3, (-1, self.chunk_size))

    def _neighbours(self, x: Tensor, fill: float) -> Tensor:
        """Tokens seen by each chunk: `(B, H, rounds, T, (before + 1 + after)·chunk, D)`; nothing beyond the ends."""
        chunks = self._chunks(x, fill)
        count = chunks.shape[3]
        wide = F.pad(chunks, (0, 0, 0, 0, self.chunks_before, self.chunks_after), value=fill)
        return torch.cat([wide[:, :, :, i : i + count] for i in range(self.chunks_before + 1 + self.chunks_after)], 4)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Tokens `(B, H, N, D)` in the order of every round, `(B, H, rounds, N, D)`."""
    index = order.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, index).unflatten(2, order.shape[2:])


def _untake(x: Tensor, place: Tensor) -> Tensor:
    """Sorted tokens `(B, H, rounds, N, D)` back in their places."""
    return x.gather(3, place[..., None].expand(-1, -1, -1, -1, x.shape[-1]))


def cost(
    n: int,
    d: int,
    *,
    num_hashes: int = 2,
    chunk_size: int = 64,
    num_buckets: int | None = None,
    max_buckets: int = 256,
    chunks_before: int = 1,
    chunks_after: int = 0,
    **_: object,
) -> Cost:
    """Hashing, sorting, and every chunk against its neighbourhood, in every round; scores are kept."""
    buckets = num_buckets or min(max_buckets, max(n // chunk_size, 1))
    seen = min((chunks_before + 1 + chunks_after) * chunk_size, n)
    return Cost(
        flops=num_hashes * (n * buckets * d + n * max(1, n - 1).bit_length() + 4.0 * n * seen * d),
        bytes=16.0 * n * d + num_hashes * (24.0 * n * d + 8.0 * n * seen),
    )


ENTRY = Entry(
    name="reformer",
    build=Reformer,
    summary="LSH attention: softmax among tokens that a random hash sorts next to each other; shared q and k.",
    citation="Kitaev et al. 2020, Reformer: The Efficient Transformer",
    cost=cost,
    time="n log n",
    needs_equal_lengths=True,
)
