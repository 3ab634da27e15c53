"""Checkpoints on disk: where they are, and saving one with everything that came with it. Nothing is downloaded."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

from .._files import new_folder

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_*_config.json")


def checkpoint_root(source: str | Path) -> Path:
    """The folder of a Hugging Face or sentence-transformers checkpoint: a path, or a package with a `MODEL_DIR`.

    Raises:
        ValueError: there is none; for what may be an id of the Hugging Face Hub, with how to download it.
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
    return path


def checkpoint_folder(source: str | Path) -> Path:
    """The folder with the encoder's weights: the root, but in older sentence-transformers checkpoints."""
    root = checkpoint_root(source)
    return root / encoder_part(root)


def encoder_part(root: Path) -> str:
    """Where below its root a sentence-transformers checkpoint keeps the encoder; "" for the root itself."""
    modules = root / "modules.json"
    return json.loads(modules.read_text(encoding="utf-8"))[0]["path"] if modules.is_file() else ""


def save_like(root: Path, model: Any, folder: Path) -> None:
    """Save a Hugging Face model with the tokenizer of the checkpoint it came from, `root`.

    What makes a sentence encoder of a checkpoint is kept: modules.json, pooling, normalisation, maximal length. The
    folder appears whole, and takes the place of an older one.
    """
    from transformers import AutoTokenizer

    part = encoder_part(root)
    with new_folder(folder) as draft:
        model.save_pretrained(draft / part)
        # read again: one that has been used remembers how it padded and cut
        AutoTokenizer.from_pretrained(str(root / part)).save_pretrained(draft / part)
        for pattern in _SENTENCE_FILES:
            for path in (*root.glob(pattern), *(root / part).glob(pattern)):
                shutil.copyfile(path, draft / path.relative_to(root))
        if (root / "modules.json").is_file():
            for module in json.loads((root / "modules.json").read_text(encoding="utf-8"))[1:]:
                if module["path"] and (root / module["path"]).is_dir():
                    shutil.copytree(root / module["path"], draft / module["path"], copy_function=shutil.copyfile)
