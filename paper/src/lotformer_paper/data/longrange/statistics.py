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


def dot_distance(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Distance `(n,)` in pixels between the two brightest 3×3 spots that do not touch."""
    padded = np.pad(images.astype(np.int64), ((0, 0), (1, 1), (1, 1)))
    side = images.shape[2]
    spots = sum(padded[:, y : y + images.shape[1], x : x + side] for y in range(3) for x in range(3))
    first = _brightest(np.asarray(spots))
    away = np.abs(np.indices(images.shape[1:])[None] - first[:, :, None, None]).max(1) > 2
    second = _brightest(np.where(away, spots, -1))
    return np.linalg.norm(first - second, axis=1)


def _brightest(spots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Row and column `(n, 2)` of the largest value of each image."""
    return np.stack(np.unravel_index(spots.reshape(len(spots), -1).argmax(1), spots.shape[1:]), 1)


def _shifted(lit: npt.NDArray[np.bool_], dy: int, dx: int) -> npt.NDArray[Any]:
    padded = np.pad(lit, ((0, 0), (1, 1), (1, 1)))
    return padded[:, 1 + dy : padded.shape[1] - 1 + dy, 1 + dx : padded.shape[2] - 1 + dx]
