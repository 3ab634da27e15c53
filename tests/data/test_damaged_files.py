"""Whatever happens to a file, it is read as it was or refused in one error with its name; nothing hangs."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lotformer.models  # noqa: F401  makes torchvision importable

# isort: split
from lotformer.data import glue
from lotformer.data.images import open_image
from lotformer.data.vision.sources import open_images
from lotformer.reading import read_bytes, read_json, read_lines, require_file
from lotformer_paper.data import retrieval
from lotformer_paper.data.longrange.listops import read_tsv
from lotformer_paper.data.longrange.text import ReviewFiles
from lotformer_paper.data.translation.corpora import tatoeba
from support.image_folder import CLASSES, make_image_folder

DAMAGES = 300


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Some bytes flipped, overwritten, inserted or left out, or the end cut off."""
    made = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 4, 32])):
        kind, at = rng.randrange(5), rng.randrange(len(made)) if made else 0
        if not made:
            break
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            made[at : at + 8] = rng.randbytes(8)
        elif kind == 2:
            made[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 3:
            del made[at : at + rng.randrange(1, 64)]
        else:
            del made[at:]
    return bytes(made)


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["Haus", "grün", "läuft", "über", "das", "nicht", "Ding"]) for _ in range(count))


def a_gz(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "train.de.gz"
    path.write_bytes(gzip.compress("".join(f"{words(i, 9)}\n" for i in range(60)).encode()))
    return path, lambda: read_lines(path)


def a_zip(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "deu-eng.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_about.txt", "about")
        archive.writestr("deu.txt", "".join(f"{words(i, 5)} {i}\t{words(-i, 6)}\n" for i in range(60)))
    return path, lambda: tatoeba(folder, "de", "en")


def a_png(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 30, 3), dtype=np.uint8)).save(path)
    return path, lambda: open_image(path).tobytes()


def a_jpeg(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "a.jpeg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 30, 3), dtype=np.uint8)).save(path)
    return path, lambda: open_image(path).tobytes()


def a_json(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "manifest.json"
    content = {"format": 1, "aliases": {"dev": "test"}, "checksums": {f"file {i}": words(i, 2) for i in range(40)}}
    path.write_text(json.dumps(content, indent=1))
    return path, lambda: read_json(path)


def a_jsonl(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "corpus.jsonl"
    rows = ({"_id": f"d{i}", "title": words(-i, 3), "text": words(i, 12)} for i in range(40))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "ask"}\n')
    (folder / "qrels").mkdir()
    for split in ("train", "test"):
        (folder / "qrels" / f"{split}.tsv").write_text("q\td1\t1\n")
    return path, lambda: retrieval.load(folder)


def a_tsv(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "glue" / "STS-B" / "dev.tsv"
    path.parent.mkdir(parents=True)
    rows = (f"{i}\t{words(i, 7)}\t{words(-i, 7)}\t{i % 51 / 10}\n" for i in range(40))
    path.write_text("index\tsentence1\tsentence2\tscore\n" + "".join(rows))
    return path, lambda: glue.load(glue.TASKS["stsb"], "dev", folder)


def a_listops_table(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "basic_test.tsv"
    path.write_text("Source\tTarget\n" + "".join(f"[MAX {i} [MIN 2 9 ] {i} ]\t{max(i, 2)}\n" for i in range(10)))
    return path, lambda: list(read_tsv(path))


def a_tar(folder: Path) -> tuple[Path, Callable[[], Any]]:
    images = make_image_folder(folder / "images", train=2, val=1)
    path = folder / "train.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(images / "train", arcname="train")

    def read() -> list[int]:
        opened = open_images("", path, "train")
        return [opened[index][1] for index in range(len(opened))]

    return path, read


def error_of(read: Callable[[], Any], expected: Any) -> Exception | None:
    try:
        found = read()
    except Exception as error:
        return error
    assert expected is None or found == expected
    return None


KINDS = (a_gz, a_zip, a_png, a_jpeg, a_json, a_jsonl, a_tsv, a_listops_table, a_tar)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[2:])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
def test_damage_is_one_error_with_the_name_of_the_file(tmp_path: Path, kind: Any) -> None:
    path, read = kind(tmp_path)
    whole, rng, expected = path.read_bytes(), random.Random(0), read()
    refused = 0
    for _ in range(DAMAGES):
        path.write_bytes(damaged(whole, rng))
        error = error_of(read, expected if kind in (a_gz, a_zip) else None)  # those have checksums
        if error is not None:
            assert type(error) in (ValueError, OSError, FileNotFoundError), repr(error)
            assert str(path) in str(error)
            assert "\n" not in str(error)
            refused += 1
    assert refused > DAMAGES // 10


@pytest.mark.timeout(60)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "x.png"
    os.mkfifo(pipe)
    for read in (open_image, read_bytes, read_json, read_lines, require_file):
        with pytest.raises(OSError, match=r"x\.png is not a regular file but a pipe or device"):
            read(pipe)
    with pytest.raises(OSError, match=r"is not a regular file but a folder"):
        require_file(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_in_a_folder_of_images_or_texts_is_skipped_or_named(tmp_path: Path) -> None:
    folder = make_image_folder(tmp_path / "images")
    (folder / "train" / "grey" / "3.png").unlink()
    os.mkfifo(folder / "train" / "grey" / "3.png")
    images = open_images("", folder, "train")
    assert images[11][1] == 1
    assert [images.name(index) for index in images.broken] == ["grey/3.png"]
    images.fingerprint()
    place = tmp_path / "aclImdb" / "train" / "neg"
    place.mkdir(parents=True)
    (tmp_path / "aclImdb" / "train" / "pos").mkdir()
    os.mkfifo(place / "0_1.txt")
    with pytest.raises(OSError, match=r"0_1\.txt is not a regular file"):
        ReviewFiles(tmp_path / "aclImdb").make("train", 0)


def bomb(path: Path, side: int = 50_000) -> Path:
    """A small PNG that says it has 2.5 thousand million pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b""))
    return path


def test_a_bomb_is_refused_and_in_a_set_skipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bomb\.png is not an image, or is damaged: Image size .* exceeds limit"):
        open_image(bomb(tmp_path / "bomb.png"))
    folder = make_image_folder(tmp_path / "images")
    bomb(folder / "train" / "grey" / "3.png")
    images = open_images("", folder, "train")
    assert images[11][1] == 1
    assert [images.name(index) for index in images.broken] == ["grey/3.png"]


@pytest.mark.parametrize("damage", ["header", "cut within a header", "cut between files"])
def test_damage_does_not_end_a_tar_file_early(tmp_path: Path, damage: str) -> None:
    path, _ = a_tar(tmp_path)
    with tarfile.open(path) as archive:
        place = archive.getmembers()[4].offset
    whole = path.read_bytes()
    made = {
        "header": whole[: place + 10] + b"?" + whole[place + 11 :],
        "cut within a header": whole[: place + 100],
        "cut between files": whole[:place],
    }[damage]
    path.write_bytes(made)
    with pytest.raises(ValueError, match=rf"train\.tar is not a tar file, or is damaged: .* at byte {place}"):
        open_images("", path, "train")
    path.write_bytes(whole)
    images = open_images("", path, "train")
    assert len(images) == 6
    assert images.classes == list(CLASSES)
    assert images.fingerprint() == open_images("", tmp_path / "images", "train").fingerprint()


def test_a_nested_json_file_does_not_exhaust_the_stack(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"deep\.json is not a JSON file"):
        read_json(tmp_path / "deep.json")


def test_the_texts_of_convert_end_at_line_feeds(tmp_path: Path) -> None:
    from lotformer.cli.subjects import _texts

    (tmp_path / "texts.txt").write_bytes("one\u2028two\x85three\n\nfour\r\n".encode())
    assert _texts(tmp_path / "texts.txt")[0] == ["one\u2028two\x85three", "four"]
    (tmp_path / "texts.txt").write_bytes(b"one\n\xff\n")
    with pytest.raises(ValueError, match=r"texts\.txt, line 2: not UTF-8"):
        _texts(tmp_path / "texts.txt")


def test_an_image_in_memory_is_named_too() -> None:
    from lotformer.data.images import decoded_image

    with pytest.raises(ValueError, match="the third is not an image"):
        decoded_image(io.BytesIO(b"nothing"), "the third")
