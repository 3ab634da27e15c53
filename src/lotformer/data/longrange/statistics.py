"""Statistics of images from which a label should not be readable: brightness, and how much is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def image_statistics(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Numbers `(n, k)` that describe images `(n, rows, columns)` as a whole.

    Mean and deviation of the brightness, its histogram in 8 bins, the number of lit pixels (the total length of what is
    drawn), lit pixels that have 0, 1, 2, … lit neighbours (line ends and corners), and brightness by quadrant.
    """
    values = images.astype(np.float64)
    lit = images > 0
    around = sum(_shifted(lit, dy, dx).astype(int) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx)
    rows, columns = images.shape[1] // 2, images.shape[2] // 2
    quadrants = [values[:, y : y + rows, x : x + columns].mean((1, 2)) for y in (0, rows) for x in (0, columns)]
    bins = [((images >= low) & (images < low + 32)).mean((1, 2)) for low in range(0, 256, 32)]
    neighbours = [(lit & (around == count)).mean((1, 2)) for count in range(9)]
    return np.stack([values.mean((1, 2)), values.std((1, 2)), lit.mean((1, 2)), *bins, *neighbours, *quadrants], axis=1)


def _shifted(lit: npt.NDArray[np.bool_], dy: int, dx: int) -> npt.NDArray[Any]:
    padded = np.pad(lit, ((0, 0), (1, 1), (1, 1)))
    return padded[:, 1 + dy : padded.shape[1] - 1 + dy, 1 + dx : padded.shape[2] - 1 + dx]
