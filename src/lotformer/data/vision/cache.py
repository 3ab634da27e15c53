"""A small set, decoded once and held in memory, so that decoding does not limit training."""

from __future__ import annotations

import numpy as np

from .sources import Images, Progress, Sample


def decoded(images: Images, progress: Progress | None = None) -> Images:
    """The same images from memory, as `uint8`: three bytes per pixel, shared with worker processes that fork.

    What is broken is found on the way, so `broken` is complete when this returns.
    """
    from PIL import Image

    pixels: list[np.ndarray] = []
    labels: list[int] = []
    for index in range(len(images)):
        image, label = images[index]
        pixels.append(np.asarray(image))
        labels.append(label)
        if progress is not None:
            progress(index + 1, len(images))

    def load(index: int) -> Sample:
        return Image.fromarray(pixels[index]), labels[index]

    return images.moved(load)
