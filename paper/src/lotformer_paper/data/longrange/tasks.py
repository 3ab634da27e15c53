"""The tasks of the Long Range Arena, and where each finds its examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import image, text
from .listops import SYMBOLS, ListOps, ListOpsFiles
from .pathfinder import Pathfinder, PathfinderFiles
from .prepare import OnShard, Source, prepare
from .retrieval import FilmPairs, PaperPairs
from .store import PreparedSet
from .text import ReviewFiles


@dataclass(frozen=True)
class Task:
    """A task as a model sees it. Token 0 is padding in text and ListOps, and a black pixel in images."""

    name: str
    vocabulary: int
    max_length: int
    classes: int
    documents: int = 1
    grid: tuple[int, int] | None = None


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("text", vocabulary=256, max_length=4000, classes=2),
        Task("listops", vocabulary=len(SYMBOLS), max_length=2000, classes=10),
        Task("retrieval", vocabulary=256, max_length=4000, classes=2, documents=2),
        Task("film-pairs", vocabulary=256, max_length=4000, classes=2, documents=2),
        Task("pathfinder", vocabulary=256, max_length=1024, classes=2, grid=(32, 32)),
        Task("image", vocabulary=256, max_length=1024, classes=10, grid=(32, 32)),
    )
}
"""In the order of the paper's table. `film-pairs` is not of the arena: it stands in where AAN cannot be had."""


def source(task: str, folder: Path, *, seed: int = 0, brackets: bool = True, released: bool = False) -> Source:
    """The source of a task's examples.

    Args:
        folder: of unpacked public sets; generated tasks need none of them.
        seed: of what is generated, paired or split here.
        brackets: ListOps with its closing brackets; without them as the published pipelines read it.
        released: the arena's own files for ListOps and Pathfinder, instead of generating them.
    """
    if task == "listops":
        if released:
            return ListOpsFiles(_release(folder, "listops-1000", "basic_train.tsv"), brackets)
        return ListOps(seed=seed, brackets=brackets)
    if task == "pathfinder":
        if released:
            return PathfinderFiles(_release(folder, "pathfinder32/curv_contour_length_14", "metadata"), seed)
        return Pathfinder(seed=seed)
    if task == "text":
        return text.reviews(folder)
    if task == "image":
        return image.cifar(folder)
    if task == "retrieval":
        return PaperPairs(_release(folder, "tsv_data", "new_aan_pairs.train.tsv"))
    if task == "film-pairs":
        places = [folder / "aclImdb", folder / "urls" / "aclImdb"]
        urls = _first(places, Path("train/urls_pos.txt"), "the film addresses of IMDB's archive")
        return FilmPairs(ReviewFiles(folder / "aclImdb"), urls, seed)
    raise ValueError(f"unknown task {task!r}: known are {', '.join(TASKS)}.")


def prepared(
    chosen: Source, folder: Path, *, workers: int | None = None, listener: OnShard = lambda done, total: None
) -> PreparedSet:
    """The set of a source, kept in the data folder beside the public ones; made now unless it is there."""
    return prepare(chosen, folder / "longrange", workers=workers, listener=listener)


def _release(folder: Path, name: str, contents: str) -> Path:
    """A folder of the arena's release, unpacked here or in its own folders."""
    places = [folder / name, folder / "lra_release" / name, folder / "lra_release" / "lra_release" / name]
    return _first(places, Path(contents), "the arena's release")


def _first(places: Sequence[Path], contents: Path, what: str) -> Path:
    for place in places:
        if (place / contents).exists():
            return place
    raise FileNotFoundError(f"no {contents}: expected {what} in {' or '.join(map(str, places))}.")
