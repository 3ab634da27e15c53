"""The weight files of Hugging Face models: checksums when they are written, compared with the recipe when read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from . import hosts
from .hosts.sites import MECHANISM, Site, converted, recipe, record_of
from .saving import same_kind
from .sealing import require_undamaged, sealed

if TYPE_CHECKING:  # `pretrained` needs this module while transformers is being imported
    from transformers import PreTrainedModel

_FRESH = "_lotformer_fresh"
_is_ours: ContextVar[bool] = ContextVar("_is_ours", default=False)


@contextmanager
def sealing() -> Iterator[None]:
    """While inside, the weight files that transformers writes carry checksums."""
    before = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(before)


def seal_saved_files() -> None:
    """Let transformers write its weight files through us; `save_pretrained` takes no metadata."""

    from transformers import modeling_utils
    from transformers.modeling_utils import safe_save_file

    def write_sealed(
        tensors: dict[str, Tensor], filename: Any, metadata: dict[str, str] | None = None, **kwargs: Any
    ) -> None:
        safe_save_file(tensors, filename, sealed(tensors, metadata) if _is_ours.get() else metadata, **kwargs)

    modeling_utils.safe_save_file = write_sealed


def expect_fresh(model: nn.Module) -> None:
    """Note that mechanisms were asked for by name: no file holds their weights."""
    model.__dict__[_FRESH] = True


def require_fitting_files(model: PreTrainedModel, files: Iterable[Any], *, any_dtype: bool) -> None:
    """The files are as they were saved, and their tensors of the kinds that the model has.

    Raises:
        ValueError: with the names of file and tensor; nothing has been read into the model.
    """
    state, prefix = model.state_dict(), model.base_model_prefix
    for path in map(str, files):
        if not path.endswith(".safetensors"):
            continue
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError):
            continue  # transformers reads it next and says what is wrong
        with file:
            names = list(file.keys())
            require_undamaged(path, file.metadata() or {}, names, file.get_tensor)
            for name in () if any_dtype else names:
                here = _DTYPES.get(file.get_slice(name).get_dtype(), torch.float32)
                there = _dtype_of(name, state, prefix)
                if there is not None and not same_kind(here, there):
                    raise ValueError(f"{path} does not fit: {name} is {here} in it, {there} in the model.")


def require_complete(model: PreTrainedModel, info: Any) -> None:
    """Require that transformers has read what the recipe asks for: all tensors of its mechanisms, in their shapes.

    Those that were not in the files have no memory yet, whatever the recipe says of their size.

    Raises:
        ValueError: with the name of the tensor.
    """
    state: Mapping[str, Tensor] = model.state_dict()
    disagree = f"recipe and weights in {model.config.name_or_path or type(model).__name__} disagree"

    def is_empty(name: str) -> bool:
        return f".{MECHANISM}." in name and name in state and state[name].is_meta

    for name, there, here in sorted(info.mismatched_keys):
        if is_empty(name):
            raise ValueError(
                f"{disagree}: {name} has the shape {tuple(there)} in the file, but {tuple(here)} by the recipe."
            )
    left = _left_to_softmax(model)
    for name in sorted(info.unexpected_keys):
        layer = name.partition(f".{MECHANISM}.")[0]
        if layer != name and any(_is_tail(other, layer) or _is_tail(layer, other) for other in left):
            raise ValueError(f"{disagree}: the file holds {name}, but the recipe does not name its layer.")
    if any(_FRESH in module.__dict__ for module in model.modules()):
        return
    missing = sorted(filter(is_empty, info.missing_keys))
    if missing:
        raise ValueError(
            f"{disagree}: the files do not hold {missing[0]}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}, which the recipe needs. Were they replaced by "
            "those of another model?"
        )


def _dtype_of(name: str, expected: Mapping[str, Tensor], prefix: str) -> torch.dtype | None:
    """Of a tensor of a file in the model. Where transformers renames on loading, of those with the same last name."""
    for mine in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if mine in expected:
            return expected[mine].dtype
    last = name.rpartition(".")[2]
    alike = {x.dtype for other, x in expected.items() if other.rpartition(".")[2] == last}
    return alike.pop() if len(alike) == 1 else None


def _left_to_softmax(model: nn.Module) -> list[str]:
    """Names of attention modules that could have been converted."""
    found = hosts.find(model, frozenset(recipe(model).layers if converted(model) else ()))
    return [item.name for _, item in found if isinstance(item, Site) and record_of(item.module) is None]


def _is_tail(end: str, name: str) -> bool:
    return name == end or name.endswith(f".{end}")


_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
"""Those that are not floats."""
