"""Images with labels, from whatever timm can read: folders, tar files, Hugging Face, web-datasets, torchvision."""

from ... import _torchvision

_torchvision.prepare()  # before timm, which cannot be imported without it beside a CPU build of torch
