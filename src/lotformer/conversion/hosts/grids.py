"""The token grid of a vision transformer, for mechanisms with a 2-D part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...attention import Attention
from ...nn.depthwise import DepthwiseMixing
from ...nn.near_keys import NearKeys


class Grid:
    """`(rows, columns)` of the patches of the images that passed last, read off the convolution that cuts them.

    Hosts hand their attention a sequence and no shape. The shape depends on the image where models take any size, so
    it is read when the image passes, not when the model is converted.
    """

    def __init__(self, patches: nn.Conv2d) -> None:
        self.size: tuple[int, int] | None = None
        self.readers = 0
        self._handle = patches.register_forward_hook(self)

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self.size = (output.shape[-2], output.shape[-1])

    def dismiss(self) -> None:
        """One module fewer reads it; with the last one it stops listening."""
        self.readers -= 1
        if not self.readers:
            self._handle.remove()


class Grids:
    """Hands out the grid of each attention module of a model: one for each convolution that cuts patches."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._grids: dict[int, Grid] = {}

    def of(self, name: str, mechanism: Attention) -> Grid | None:
        """The grid of the module called `name`; None if its mechanism needs none or the host has none."""
        flat = (DepthwiseMixing, NearKeys)
        if not any(isinstance(part, flat) and part.kind == "2d" for part in mechanism.modules()):
            return None
        patches = patches_before(self._model, name)
        if patches is None:
            return None
        if id(patches) not in self._grids:
            self._grids[id(patches)] = Grid(patches)
        grid = self._grids[id(patches)]
        grid.readers += 1
        return grid


def patches_before(model: nn.Module, name: str) -> nn.Conv2d | None:
    """The convolution that makes the patches which reach the module called `name`: that of its nearest enclosure.

    A tower beside the module keeps its patches to itself.
    """
    while name:
        name = name.rpartition(".")[0]
        enclosure = model.get_submodule(name)
        for part_name, part in enclosure.named_modules():
            if part_name.rpartition(".")[2].startswith("patch_embed") and not _is_of_a_tower(enclosure, part_name):
                convolutions = [m for m in part.modules() if isinstance(m, nn.Conv2d)]
                if convolutions:
                    return convolutions[-1]
        if getattr(enclosure, "main_input_name", "pixel_values") != "pixel_values":
            return None  # the text half of a Hugging Face model; patches further out are not its own
    return None


def _is_of_a_tower(enclosure: nn.Module, part: str) -> bool:
    """Whether a part of a module lies in a child with attention of its own, which the patches are for."""
    child, _, inner = part.partition(".")
    return bool(inner) and any(
        "Attention" in type(module).__name__ for module in enclosure.get_submodule(child).modules()
    )
