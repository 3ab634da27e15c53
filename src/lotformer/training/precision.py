"""Training models in half precision: parameters through copies in fp32, losses in fp32.

A step of Adam moves a parameter by about its learning rate. Near 1, neighbouring bf16 numbers are 0.004 apart: smaller
steps would be rounded away, every one of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_HALF = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    """The tensor in fp32 if it is in half precision, where sums of squares overflow and small shares vanish."""
    return x.float() if x.dtype in _HALF else x


class Masters:
    """Parameters for the optimizer: fp32 copies of those in half precision, the others as they are.

    After `backward`, `take_gradients`; after the optimizer's step, `publish`. Wider parameters are their own masters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.copies = {p: nn.Parameter(p.detach().float()) for p in parameters if p.dtype in _HALF}
        for parameter in self.copies:
            parameter.grad = None  # the optimizer clears the gradients of masters only

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [self.copies.get(p, p) for p in parameters]

    def take_gradients(self) -> None:
        for parameter, master in self.copies.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        for parameter, master in self.copies.items():
            parameter.copy_(master)

    @torch.no_grad()
    def follow(self) -> None:
        """Take the values that the parameters were given."""
        for parameter, master in self.copies.items():
            master.copy_(parameter)

    def state(self) -> list[Tensor]:
        return [master.detach() for master in self.copies.values()]

    @torch.no_grad()
    def load(self, state: Iterable[Tensor]) -> None:
        for master, saved in zip(self.copies.values(), state, strict=True):
            master.copy_(saved)
        self.publish()
