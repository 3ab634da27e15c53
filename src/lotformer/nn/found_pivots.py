"""Pivots found in the sample: nothing to train, the centres of groups of its own keys."""

from __future__ import annotations

from torch import Tensor, nn

from .. import ops
from ..ops import Coupling, Found, Grouping, Solve
from .undecayed import Undecayed
from .windows import WindowKind, reach_of, sees_all


class FoundPivots(nn.Module):
    """Softmax in which keys that are not near count as the centre of their group (`ops.found_attention`).

    A trained head tells by itself where its pivots belong: at the barycentres of the sample's keys, queries seeing
    them at softmax's own temperature. What can be learned are corrections of these centres, `γ_h c_t + w_h`, and of
    their weight, `exp(b_h)`: γ starts at 1, w and b at 0.

    Args:
        grouping: how many groups, found how, and which keys are exact; its prefix are the special tokens in front.
        kind, size: of the window (`Window`); None without one.
    """

    def __init__(
        self, num_heads: int, head_dim: int, grouping: Grouping, kind: WindowKind | None = None, size: int = 1
    ) -> None:
        super().__init__()
        self.grouping, self.kind, self.size = grouping, kind, size
        self.gain = Undecayed(num_heads)
        self.shift = Undecayed(num_heads, head_dim)
        # where no key is exact, all weights would grow alike
        exact = kind is not None or grouping.heaviest or grouping.prefix
        self.offset = Undecayed(num_heads) if exact else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain.bias)
        nn.init.zeros_(self.shift.bias)
        if self.offset is not None:
            nn.init.zeros_(self.offset.bias)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        query_mask: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> Found:
        """The output, and the part of each row that was exact.

        Args:
            q: `(B, H, N, D)`, the queries after the prefix. k, v: `(B, H, P + M, ·)`, with the P tokens of the prefix
                in front. key_mask: `(B, P + M)`. grid: of the N tokens. query_mask: `(B, N)`.
        """
        reach = None if self.kind is None else reach_of(self.kind, self.size, q.shape[2], grid)
        return ops.found_attention(
            q,
            k,
            v,
            self.grouping,
            reach,
            gain=self.gain(k),
            shift=self.shift(k),
            offset=None if self.offset is None else self.offset(k),
            query_mask=query_mask,
            key_mask=key_mask,
            backend=backend,
        )

    def coupling(
        self,
        q: Tensor,
        k: Tensor,
        solve: Solve,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> Coupling:
        """The plans through all groups, as if no key were read exactly."""
        return ops.found_coupling(
            q, k, self.grouping, solve, gain=self.gain(k), shift=self.shift(k),
            query_mask=query_mask, key_mask=key_mask, backend=backend,
        )  # fmt: skip

    def balanced(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        solve: Solve,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> Tensor:
        """The output of plans that send every group its mass: doubly stochastic, with no key read exactly."""
        return ops.found_transport(
            q, k, v, self.grouping, solve, gain=self.gain(k), shift=self.shift(k),
            query_mask=query_mask, key_mask=key_mask, backend=backend,
        )  # fmt: skip

    def sees_all(self, length: int, grid: tuple[int, int] | None = None) -> bool:
        """True if every key of a sequence of this length is within every window."""
        return self.kind is not None and sees_all(self.kind, self.size, length, grid)

    def extra_repr(self) -> str:
        return f"{self.grouping}" if self.kind is None else f"{self.grouping}, kind={self.kind!r}, size={self.size}"
