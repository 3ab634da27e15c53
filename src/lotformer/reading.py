"""Files read as what they claim to be; whatever is wrong with one is a single error with its name."""

from __future__ import annotations

import contextlib
import gzip
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def require_file(path: Path) -> None:
    """Refuse what is missing, and what is not a regular file: opening a pipe would wait forever.

    Raises:
        FileNotFoundError: there is nothing. OSError: it is a folder, a pipe or a device.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing.") from error
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is not a regular file but a {'folder' if stat.S_ISDIR(mode) else 'pipe or device'}.")


@contextlib.contextmanager
def decoding(name: str | Path, kind: str) -> Iterator[None]:
    """Turn whatever a decoder raises on damaged bytes into one error; `kind` is what the file should be.

    Decoders document few of their exceptions (zipfile alone raises nine kinds), so all of them are meant. What the
    file system says of a file by name, e.g. that it may not be read, passes as it is.

    Raises:
        ValueError: with the name, what was expected and what the decoder said.
    """
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(f"{name} is not {kind}, or is damaged: {reason}.") from error


def read_bytes(path: Path) -> bytes:
    """The content of a regular file, unpacked if its name ends in `.gz`.

    Raises:
        OSError: as `require_file`. ValueError: the gzip file is damaged.
    """
    require_file(path)
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    with decoding(path, "a gzip file"):
        return gzip.decompress(content)


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, gzipped if its name says so, without their ends.

    Lines end at line feeds only: texts may hold carriage returns and other separators of Unicode's.

    Raises:
        OSError: as `require_file`. ValueError: it is damaged, empty or not UTF-8; the message names the line.
    """
    return decoded_lines(read_bytes(path), str(path))


def decoded_lines(content: bytes, name: str) -> list[str]:
    """The lines of a file's content; `name` is the file's, for errors."""
    raw = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if raw[-1] == b"":
        raw.pop()  # the end of the last line, not a line
    if not raw:
        raise ValueError(f"{name} is empty: expected text in its line 1.")
    lines = []
    for number, line in enumerate(raw, 1):
        try:
            lines.append(line.decode("utf-8").removesuffix("\r"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1}). "
                "Convert the file to UTF-8."
            ) from error
    return lines


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: as `require_file`. ValueError: it is not JSON.
    """
    content = read_bytes(path)
    with decoding(path, "a JSON file"):
        return json.loads(content)


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of each line of a file of JSON lines; blank ones are passed over.

    Raises:
        OSError: as `require_file`. ValueError: a line is not a JSON object, with its number.
    """
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            with decoding(f"{path}, line {number}", "a JSON object"):
                row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected a JSON object, got {shown(line)}.")
            yield number, row


def table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and columns of each line of a tab-separated file, in which nothing is quoted.

    Raises:
        OSError, ValueError: as `read_lines`.
    """
    for number, line in enumerate(read_lines(path), 1):
        yield number, line.split("\t")


def shown(text: str, most: int = 60) -> str:
    """The beginning of a text, for a message about it."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}…"
