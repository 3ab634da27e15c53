"""Files and folders that appear whole or not at all, with the permissions of the user's umask."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

_HOST = f"{zlib.crc32(platform.node().encode()):08x}"  # process ids mean nothing on another machine
_OLD = "replaced"


def write_text(text: str, path: Path) -> None:
    write_bytes(text.encode(), path)


def write_bytes(content: bytes, path: Path) -> None:
    with new_file(path) as draft, open(draft, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write to; what is written takes the place of `path` when the block ends, and is dropped if that fails.

    A reader never sees half a file, nor do two writers mix. Other libraries may write it: it gets the permissions of
    the umask all the same, and what they put beside it on the way goes.
    """
    with _workshop(path) as place:
        draft = place / path.name
        yield draft
        draft.chmod(_mode(place))
        os.replace(draft, path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it takes the place of `path` when the block ends, and is dropped if the block fails.

    Other libraries may write into it: their files get the permissions of the umask too. Replacing takes two renames;
    a process that is killed between them leaves no `path`, and the next to write it finds the old folder put back.

    Raises:
        FileExistsError: `path` is something else than a folder, or a link to one.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise FileExistsError(f"{path} is {_kind(path)}, which no folder will replace: give another path.")
    with _workshop(path) as place:
        draft, old = place / path.name, place / _OLD
        draft.mkdir()
        yield draft
        mode = _mode(place)
        for file in draft.rglob("*"):
            if file.is_file():
                file.chmod(mode)
        try:
            if path.exists():
                path.rename(old)
            draft.rename(path)
        except BaseException:
            _put_back(place, path)
            raise


def require_writable(folder: Path) -> None:
    """Find out before the work begins, not after it, that a result could not be stored.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    try:
        with _workshop(folder / "writable") as place:
            _mode(place)
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror or error}. Choose another --out.") from error


@contextlib.contextmanager
def _workshop(path: Path) -> Iterator[Path]:
    """A hidden folder beside `path` to prepare it in, gone afterwards; those of killed processes go first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    place = path.with_name(f".{path.name}.{_HOST}-{os.getpid()}-{secrets.token_hex(4)}")
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Remove the workshops of processes of this machine that are gone; what one of them had moved aside comes back."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.{_HOST}-(\d+)-[0-9a-f]{{8}}")
    for place in list(path.parent.iterdir()):
        found = ours.fullmatch(place.name)
        if found and not _is_alive(int(found[1])):
            with contextlib.suppress(OSError):
                _put_back(place, path)
                shutil.rmtree(place, ignore_errors=True)


def _put_back(place: Path, path: Path) -> None:
    if (place / _OLD).exists() and not path.exists():
        (place / _OLD).rename(path)


def _is_alive(process: int) -> bool:
    if os.name != "posix":
        return True  # asking would be a signal
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True  # somebody else's, or a number that cannot be asked about: its drafts stay
    return True


def _kind(path: Path) -> str:
    return f"a link to {os.readlink(path)}" if path.is_symlink() else "a file"


def _mode(folder: Path) -> int:
    """The permissions of a new file; asking the umask itself would mean changing it, for all threads."""
    probe = folder / f".mode-{secrets.token_hex(4)}"
    probe.touch(0o666)
    try:
        return probe.stat().st_mode & 0o777
    finally:
        probe.unlink()
