"""Checkpoints on disk: where they are, and saving one with everything that came with it. Nothing is downloaded."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

from ..files import new_folder
from .checkpoint_files import companions, module_folders, modules_beside, require_own_files

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def checkpoint_root(source: str | Path) -> Path:
    """The folder of a Hugging Face or sentence-transformers checkpoint: a path, or a package with a `MODEL_DIR`.

    Raises:
        ValueError: there is none; for what may be an id of the Hugging Face Hub, with how to download it. Or it leads
            to files outside of its folder.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        name = str(source)
        if name.isidentifier() and importlib.util.find_spec(name) is not None:
            path = Path(getattr(importlib.import_module(name), "MODEL_DIR", ""))
        elif _HUB_ID.fullmatch(name):
            raise ValueError(
                f"{name} is neither a folder nor an installed package. If it is on the Hugging Face Hub, download it "
                f"first: `hf download {name} --local-dir {name.split('/')[-1]}`, then give that folder."
            )
        else:
            raise ValueError(f"{name} is neither a folder nor an installed package.")
    if not (path / encoder_part(path) / "config.json").is_file():
        raise ValueError(f"there is no config.json in {path}: not a Hugging Face checkpoint.")
    require_own_files(path)
    return path


def checkpoint_folder(source: str | Path) -> Path:
    """The folder with the encoder's weights: the root, but in older sentence-transformers checkpoints."""
    root = checkpoint_root(source)
    return root / encoder_part(root)


def encoder_part(root: Path) -> str:
    """The folder of the encoder inside a sentence-transformers checkpoint; "" for the root itself."""
    return module_folders(root)[0]


def save_like(root: Path, model: Any, folder: Path) -> None:
    """Save a Hugging Face model with all that came with the checkpoint it is from, `root`.

    The folder appears whole, and takes the place of an older one.
    """
    with new_folder(folder) as draft:
        fill_like(root, model, draft)


def fill_like(root: Path, model: Any, draft: Path) -> None:
    """Save a Hugging Face model into a folder, with tokenizer and processors of the checkpoint it came from, `root`.

    They are copied as they are: one that has been used remembers how it padded and cut. So is what makes a sentence
    encoder of a checkpoint: modules.json, pooling, normalisation, maximal length.
    """
    require_own_files(root)
    model.save_pretrained(draft / encoder_part(root))
    for path in companions(root):
        place = draft / path.relative_to(root)
        if not place.exists():  # the model knows its own generation config
            shutil.copyfile(path, place)
    for folder in modules_beside(root):
        shutil.copytree(folder, draft / folder.relative_to(root), copy_function=shutil.copyfile)
