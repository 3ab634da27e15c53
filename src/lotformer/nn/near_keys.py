"""The few keys that a token is known to need, read by softmax: what no matrix of low rank can carry."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops import Reach
from ..ops.precision import no_autocast
from .key_masses import mean_of_real
from .undecayed import Undecayed
from .windows import WindowKind, reach_of, require_window, sees_all


class NearKeys(nn.Module):
    """Softmax over the prefix and the neighbours of a token, and the share of its row that they deserve.

    Heads of trained models look at the token itself, at the tokens beside it and at the special tokens in front. The
    first two are a band along the diagonal, which has full rank; the third is a sink. For query i let S_i be the real
    ones of these keys,

        out_i = Σ_{j∈S_i} softmax_j(q_i·k_j / √D) v_j,        λ_i = σ(log Σ_{j∈S_i} exp(q_i·k_j / √D) − ρ_i),
        ρ_i = w_h·q_i + α_h q_i·k̄ / √D + b_h + log n_i,

    k̄ the mean of the real keys after the prefix and n_i how many of them are not in S_i. λ_i is softmax's own share for
    S_i if ρ_i is the log-sum over all other keys. That one would take a pass over all of them, so it is learned: w and
    b start at 0 and α at 1, where every other key is like the mean one. A token that sees every key has nothing left to
    learn: its λ is 1, and its row softmax's.

    Args:
        kind: neighbours along the sequence ("1d") or on the grid of the tokens after the prefix ("2d").
        size: width of the window, odd; 1 is the token alone.
    """

    def __init__(self, num_heads: int, head_dim: int, kind: WindowKind, size: int = 3) -> None:
        super().__init__()
        require_window(kind, size)
        self.kind = kind
        self.size = size
        self.direction = Undecayed(num_heads, head_dim)
        self.mean_weight = Undecayed(num_heads)
        self.offset = Undecayed(num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.direction.bias)
        nn.init.ones_(self.mean_weight.bias)
        nn.init.zeros_(self.offset.bias)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        key_mask: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        query_mask: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """The values read `(B, H, N, Dv)`, None without values, and λ `(B, H, N)`; for the queries after the prefix.

        Padded queries read zeros, as do queries without a real key, whose λ is 0; that of padding is any number.

        Args:
            q: `(B, H, N, D)`, the queries after the prefix. k, v: `(B, H, P + N, ·)`, with the P tokens of the prefix
                in front. key_mask: `(B, P + N)`. grid: of the N tokens. query_mask: `(B, N)`.
        """
        with no_autocast(q.device.type):
            length, prefix = q.shape[2], k.shape[2] - q.shape[2]
            direction, offset = self._rest(k[:, :, prefix:], None if key_mask is None else key_mask[:, prefix:])
            reach = reach_of(self.kind, self.size, length, grid)
            near, share = ops.window(q, k, v, direction, offset, query_mask, key_mask, reach, backend=backend)
            return near, _beside(share, _far(length, reach, key_mask, share))

    def sees_all(self, length: int, grid: tuple[int, int] | None = None) -> bool:
        """True if every window on a sequence of this length holds all of it."""
        return sees_all(self.kind, self.size, length, grid)

    def _rest(self, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """ρ as if all n keys were far away, as a function of the query: what it is multiplied by, `(B, H, D)`, and
        what is added to that, `(B, H)`."""
        mean_key = mean_of_real(k, key_mask)
        direction = self.direction(k) + self.mean_weight(k)[:, None] * k.shape[-1] ** -0.5 * mean_key
        count = k.new_full((1,), k.shape[2]) if key_mask is None else key_mask.sum(-1)
        offset = self.offset(k) + count.clamp_min(1).to(direction.dtype).log()[:, None]
        return direction, offset.expand(k.shape[0], -1)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, size={self.size}"


def _far(length: int, reach: Reach, key_mask: Tensor | None, like: Tensor) -> Tensor:
    """The part of all real keys after the prefix that is outside the window of each token, `(B or 1, 1, N)`.

    1 for a token without a real key.
    """
    rows, columns = reach.grid or (1, length)
    above, around = reach.rows_around, reach.columns_around
    if key_mask is None:
        inside = _within(rows, above, like)[:, None] * _within(columns, around, like)
        return ((length - inside.flatten()) / max(length, 1))[None, None]
    size = (2 * above + 1, 2 * around + 1)
    body = key_mask[:, key_mask.shape[1] - length :]
    real = body.to(like.dtype).unflatten(1, (1, rows, columns))
    inside = F.avg_pool2d(real, size, stride=1, padding=(above, around)) * (size[0] * size[1])
    count = real.sum((2, 3))
    outside = (count - inside.round().flatten(2)[:, 0]) / count.clamp_min(1)
    return outside.where(key_mask.any(-1, keepdim=True), 1.0)[:, None]


def _within(length: int, around: int, like: Tensor) -> Tensor:
    """The number of places in a row at most `around` from each."""
    place = torch.arange(length, device=like.device, dtype=like.dtype)
    return place.clamp_max(around) + place.flip(0).clamp_max(around) + 1


def _beside(share: Tensor, far: Tensor) -> Tensor:
    """`σ(x − log far)` from `σ(x)`: the share of near keys if only the part `far` of all keys competes with them."""
    nothing = far <= 0
    some = far.masked_fill(nothing, 1.0)
    return torch.where(nothing, 1.0, share / (share + (1 - share) * some))
