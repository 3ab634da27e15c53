"""Sources of sentence pairs: public corpora in their own layouts, or any aligned files."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lotformer.reading import decoded_lines, decoding, read_lines, require_file, shown

from .lines import Pair, read_pairs, require_text

SPLITS = ("train", "valid", "test")

_NOT_WORDS = re.compile(r"[\W_]+")
_TATOEBA_NAMES = {"de": "deu", "fr": "fra", "es": "spa", "it": "ita", "nl": "nld", "pt": "por", "ru": "rus"}


@dataclass(frozen=True)
class Corpus:
    """Pairs to learn from, to choose by and to be scored on."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]


Reader = Callable[[Path, str, str], Corpus]
"""From a data folder and the two languages, e.g. "de" and "en", to the corpus."""


def multi30k(folder: Path, source: str, target: str) -> Corpus:
    """Multi30k, task 1: `task1/raw/{train,val,test_2016_flickr}.<language>[.gz]` in the folder or in folders of it.

    The files of two languages may lie in different folders: their lines agree.
    """
    files = multi30k_files(folder, source, target)
    train, valid, test = (read_pairs(ours, theirs) for ours, theirs in zip(files[::2], files[1::2], strict=True))
    return Corpus(train, valid, test)


def multi30k_files(folder: Path, source: str, target: str) -> list[Path]:
    """Files of `multi30k`: source and target of train, then of validation, then of test."""
    places = [folder / "task1" / "raw", folder / "data" / "task1" / "raw"]
    places += sorted(place for pattern in ("*/task1/raw", "*/data/task1/raw") for place in folder.glob(pattern))
    splits = ("train", "val", "test_2016_flickr")
    return [_present(places, f"{split}.{name}", "Multi30k") for split in splits for name in (source, target)]


def iwslt14(folder: Path, source: str, target: str) -> Corpus:
    """IWSLT'14 as fairseq's script prepares it: `iwslt14.tokenized.de-en/tmp/{train,valid,test}.<language>`.

    Where a split is not in `tmp`, the one after BPE is taken and its joints (`@@ `) are undone.
    """
    roots = sorted({*folder.glob("iwslt14.tokenized.*"), *folder.glob("*/iwslt14.tokenized.*")})
    places = [place for root in roots for place in (root / "tmp", root, *sorted(root.rglob("*"))) if place.is_dir()]

    def pairs(split: str) -> list[Pair]:
        files = [_present(places, f"{split}.{language}", "IWSLT'14 in fairseq's layout") for language in names]
        return [(_joined(ours), _joined(theirs)) for ours, theirs in read_pairs(*files)]

    names = (source, target)
    return Corpus(pairs("train"), pairs("valid"), pairs("test"))


def tatoeba(folder: Path, source: str, target: str) -> Corpus:
    """Tatoeba as manythings.org packs it: `deu.txt` or a zip file with it, lines `English<tab>other language`.

    The list has many paraphrases, so it is split by its English sentences, told apart by their words alone: 1 % of
    them are for validation, 1 % for the test, as a hash of the sentence decides.
    """
    other = target if source == "en" else source
    if "en" not in (source, target) or other not in _TATOEBA_NAMES:
        known = ", ".join(_TATOEBA_NAMES)
        raise ValueError(f"Tatoeba has English and one of {known}; got {source} and {target}.")
    parts: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    name, lines = _tatoeba_lines(folder, f"{_TATOEBA_NAMES[other]}.txt")
    for number, line in enumerate(lines, 1):
        columns = line.split("\t")
        if len(columns) < 2 or not all(text.strip() for text in columns[:2]):
            raise ValueError(f"{name}, line {number}: expected English, a tab and a translation, got {shown(line)}.")
        english, translation = columns[:2]
        pair = (english, translation) if source == "en" else (translation, english)
        parts[part_of(english)].append(pair)
    return Corpus(parts["train"], parts["valid"], parts["test"])


def part_of(english: str) -> str:
    """The part that an English sentence belongs to, whatever its case and punctuation."""
    digest = hashlib.sha256(_words(english).encode()).digest()
    return {0: "valid", 1: "test"}.get(int.from_bytes(digest[:8], "big") % 100, "train")


def files(train: Path, valid: Path, test: Path) -> Reader:
    """Any aligned files, named by what comes before the language, as for fairseq: `<prefix>.<language>[.gz]`."""

    def read(folder: Path, source: str, target: str) -> Corpus:
        parts = []
        for prefix in (train, valid, test):
            place = folder / prefix  # an absolute prefix stays what it is
            found = [_present([place.parent], f"{place.name}.{language}", "one side") for language in (source, target)]
            parts.append(read_pairs(*found))
        return Corpus(*parts)

    return read


READERS: dict[str, Reader] = {"multi30k": multi30k, "tatoeba": tatoeba, "iwslt14": iwslt14}


def read_corpus(readers: Iterable[Reader], folder: Path, source: str, target: str) -> Corpus:
    """One corpus, or the training pairs of several with the validation and test pairs of the first.

    Training pairs whose target sentence occurs in the validation or test set of a mix are left out.

    Raises:
        ValueError: a pair that would be scored lacks a side.
    """
    first, *others = [reader(folder, source, target) for reader in readers]
    for split in ("valid", "test"):
        require_text(getattr(first, split), (f"{split}, {source} side", f"{split}, {target} side"))
    if not others:
        return first
    scored = {_words(pair[1]) for pair in (*first.valid, *first.test)}
    more = [pair for corpus in others for pair in corpus.train if _words(pair[1]) not in scored]
    return Corpus(first.train + more, first.valid, first.test)


def _words(text: str) -> str:
    return _NOT_WORDS.sub(" ", text.casefold()).strip()


def _joined(text: str) -> str:
    return (text + " ").replace("@@ ", "").rstrip()


def _present(places: list[Path], name: str, what: str) -> Path:
    for place in places:
        for ending in ("", ".gz"):
            if (path := place / f"{name}{ending}").is_file():
                return path
    shown = ", ".join(map(str, places[:3])) or "no folder has its layout"
    raise FileNotFoundError(f"no {name} of {what}: {f'looked in {shown}' if places else shown}.")


def _tatoeba_lines(folder: Path, name: str) -> tuple[str, list[str]]:
    for path in sorted({*folder.glob(name), *folder.glob(f"*/{name}")}):
        return str(path), read_lines(path)
    archives = sorted(folder.glob("*.zip"))
    for path in archives:
        require_file(path)
        with decoding(path, "a zip file"), zipfile.ZipFile(path) as archive:
            content = archive.read(name) if name in archive.namelist() else None
        if content is not None:
            return f"{path}, {name}", decoded_lines(content, f"{path}, {name}")
    looked = f"; {', '.join(map(str, archives))} do not hold it" if archives else ""
    raise FileNotFoundError(f"no {name} of Tatoeba in {folder}, in a folder of it, or in a zip file there{looked}.")
