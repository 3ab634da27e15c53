"""The learned parts of LOT, made from its configuration."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ..nn.depthwise import DepthwiseMixing
from ..nn.found_pivots import FoundPivots
from ..nn.key_masses import KeyMasses
from ..nn.near_keys import NearKeys
from ..nn.pivot_pooling import PivotPooling
from ..nn.pivots import PivotMeasure
from ..nn.prefix import DEFAULT_POWERS, PrefixRows
from ..nn.undecayed import Undecayed
from ..ops import Grouping, Solve
from .base import Attention
from .config import LOTConfig


class LOTParts(Attention):
    """The parts of LOT: pivots and their pooling, ε, key masses, the rows of a prefix, a window, a convolution.

    An option that is off has no part: None, and for ε and uniform masses no parameter. Pivots that are found in the
    sample take the place of learned ones and of the window's learned share; `pivots` does not exist then.
    """

    pivots: PivotMeasure

    def __init__(self, head_dim: int, num_heads: int, config: LOTConfig) -> None:
        super().__init__(head_dim, num_heads)
        self.config = config
        pivots, prefix, local_conv, window = config.pivots, config.prefix, config.local_conv, config.window
        self.found = _found(num_heads, head_dim, config) if pivots.kind == "found" else None
        if self.found is None:
            self.pivots = PivotMeasure(
                num_heads,
                config.rank,
                head_dim,
                learn_masses=pivots.learn_masses,
                mass_temperature=pivots.mass_temperature,
                init=pivots.init,
                unit=config.eps * (1.0 if config.scale is None else head_dim**-0.5 / abs(config.scale)),
            )
        aware = pivots.kind == "input-aware"
        self.pooling = PivotPooling(num_heads, config.rank, head_dim, pull=config.eps) if aware else None
        self.log_eps = Undecayed(num_heads) if config.learn_eps else None
        self.key_masses = KeyMasses(num_heads, head_dim, config.key_masses)
        self.prefix_tokens = config.prefix_tokens
        self.prefix = (
            None
            if prefix is None
            else PrefixRows(prefix.beta, polarize=prefix.polarize, powers=prefix.powers or DEFAULT_POWERS)
        )
        self.local = None
        if local_conv is not None:
            filters = head_dim if local_conv.sharing == "heads" else num_heads * head_dim
            self.local = DepthwiseMixing(filters, local_conv.kind, local_conv.size, sharing=local_conv.sharing)
        near = window is not None and self.found is None
        self.near = NearKeys(num_heads, head_dim, window.kind, window.size) if window is not None and near else None
        self.reset_parameters()

    def extra_repr(self) -> str:
        return repr(self.config)

    def reset_parameters(self) -> None:
        """Start ε where it was told to; the parts start themselves."""
        if self.log_eps is not None:
            nn.init.constant_(self.log_eps.bias, math.log(self.config.eps))

    @property
    def eps(self) -> float | Tensor:
        """The regularisation in force: the constructor's, or the learned one per head."""
        return self.config.eps if self.log_eps is None else self.log_eps.bias.exp()

    def require_prefix(self, length: int) -> None:
        """Refuse a sequence that is shorter than its prefix."""
        if length < self.prefix_tokens:
            raise ValueError(f"prefix_tokens={self.prefix_tokens}, but the sequence has {length} tokens.")

    def solve(self, scale: float | None) -> Solve:
        """Options of the operator's solve; `scale` is the factor of the scores."""
        return Solve(self.eps, scale=scale, balance=self.config.balance, **self.config.solver.arguments())

    def _sees_all(self, tokens: int, grid: tuple[int, int] | None) -> bool:
        """True if every token after the prefix has all keys in its window, of so many tokens in all."""
        near = self.near or self.found
        return near is not None and near.sees_all(tokens - self.prefix_tokens, grid)


def _found(num_heads: int, head_dim: int, config: LOTConfig) -> FoundPivots:
    window, content, steps = config.window, config.content, config.pivots.steps
    assert steps is not None
    read = (0, 0) if content is None else (content.groups, content.most)
    special = 0 if config.balance == "both" else config.prefix_tokens  # plans are among the tokens after the prefix
    grouping = Grouping(config.rank, steps, special, *read)
    near = () if window is None else (window.kind, window.size)
    return FoundPivots(num_heads, head_dim, grouping, *near)
