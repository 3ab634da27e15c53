"""Makes torchvision importable beside a CPU build of PyTorch.

PyPI's torchvision wheel is built against CUDA. Beside a CPU-only torch its compiled operators do not load, and
`import torchvision` (which timm and parts of transformers do) dies with "operator torchvision::nms does not
exist", because it registers fake kernels for operators that were never defined. Defining their schemas first is
enough: transforms, models and datasets then work; only the compiled operators themselves (nms, roi_align) do not.

`import lotformer` only waits: the schemas are defined when torchvision is imported, by whomever. So `import lotformer`
comes before `import timm` where the two wheels do not match.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

_MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_library: torch.library.Library | None = None  # schemas live as long as this object


def prepare() -> None:
    """Define the missing schemas, once, if a CUDA build of torchvision sits beside a CPU build of torch.

    To be called before torchvision is imported. Where the two builds match it does nothing: torchvision then defines
    its own operators.
    """
    global _library
    if _library is None and torch.version.cuda is None and _is_cuda_build():
        _library = torch.library.Library("torchvision", "DEF")
        for schema in _MISSING:
            _library.define(schema)


def _is_cuda_build() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    if not version.is_file():
        return False
    return re.search(r"^__version__ = .*\+cu\d", version.read_text(), re.MULTILINE) is not None
