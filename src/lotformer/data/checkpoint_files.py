"""Files of a checkpoint beside the model. `modules.json` comes from a stranger and is checked before it is believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

MODULES = "modules.json"
_WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_OF_TRANSFORMERS = (
    # tokenizers
    "*tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*vocab*.json", "*vocab*.txt", "merges.txt",
    "*.spm", "*.model", "*.tokenizer", "*.codes", "normalizer.json", "emoji.json", "dict.txt", "byte_maps.json",
    "word_shape.json", "word_pronunciation.json", "*.tiktoken",
    # processors of images, sound and video, and what they are told
    "*preprocessor_config.json", "*processor_config.json", "chat_template.*", "generation_config.json",
)  # fmt: skip
_OF_SENTENCE_TRANSFORMERS = (MODULES, "config_sentence_transformers.json", "sentence_*_config.json")
_OF_A_MODULE = ("*.json", "*.txt", *_WEIGHTS)
_OF_A_CONVERSION = ("config.json", "conversion.md", *_WEIGHTS, *_OF_TRANSFORMERS, *_OF_SENTENCE_TRANSFORMERS)


def module_folders(root: Path) -> list[str]:
    """Folders below the root of a sentence-transformers checkpoint: first the encoder's, "" for the root itself.

    Raises:
        ValueError: modules.json is no list of modules, or one of its paths leads out of the root or into another's.
    """
    file = root / MODULES
    if not file.is_file():
        return [""]
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(written, list) or not written:
        raise ValueError(f"{file}: expected a list of modules, the encoder first, got {_short(written)}.")
    folders: list[str] = []
    for module in written:
        path = module.get("path") if isinstance(module, dict) else None
        if not isinstance(path, str):
            raise ValueError(f"{file}: expected the `path` of every module, a text, got {_short(module)}.")
        parts = PureWindowsPath(path)  # knows both kinds of separators, and drives
        if parts.drive or parts.root or ".." in parts.parts or "\0" in path:
            raise ValueError(f"{file}: the path {path!r} leads out of the checkpoint; expected one below its folder.")
        _require_inside(root / path, root)
        folders.append("/".join(parts.parts))
    for i, folder in enumerate(folders):
        for other in folders[i + 1 :]:
            if other and (f"{other}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{other}/")):
                raise ValueError(f"{file}: the modules in {folder!r} and {other!r} share a folder; give each its own.")
    return folders


def companions(root: Path) -> Iterator[Path]:
    """Files that make a model usable, in the root and in the encoder's folder: tokenizer, processors, modules.json."""
    for folder in dict.fromkeys((root, root / module_folders(root)[0])):
        for path in sorted(folder.iterdir()):
            if path.is_file() and _matches(path, _OF_TRANSFORMERS + _OF_SENTENCE_TRANSFORMERS):
                yield path


def modules_beside(root: Path) -> list[Path]:
    """The folders of pooling, normalisation and the like."""
    return [root / part for part in module_folders(root)[1:] if part and (root / part).is_dir()]


def require_own_files(root: Path) -> None:
    """Refuse to copy what is not in the checkpoint, but where a link in it leads.

    Raises:
        ValueError: with the name of the link. A cache of the Hugging Face Hub may link to its own blobs.
    """
    for path in companions(root):
        _require_inside(path, root)
    for folder in modules_beside(root):
        for path in folder.rglob("*"):
            _require_inside(path, root)
            if not path.is_file() and (path.is_symlink() or not path.is_dir()):
                raise ValueError(f"{path} is neither a file nor a folder of its own, which a checkpoint consists of.")


def foreign(root: Path) -> Path | None:
    """Something in a folder that is no part of a converted checkpoint; None if there is nothing."""
    parts = module_folders(root)
    top = {root, root / parts[0]}
    modules = {root / part for part in parts if part}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            return path
        if path.is_dir():
            if not any(path == module or path in module.parents or module in path.parents for module in modules):
                return path
        elif path.parent in top:
            if not _matches(path, _OF_A_CONVERSION):
                return path
        elif not _matches(path, _OF_A_MODULE):
            return path
    return None


def _require_inside(path: Path, root: Path) -> None:
    target, home = path.resolve(), root.resolve()
    in_cache = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if not (target.is_relative_to(home) or in_cache):
        raise ValueError(
            f"{path} leads to {target}, out of the checkpoint: if it belongs there, put the file itself there."
        )


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(path.match(pattern) for pattern in patterns)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
