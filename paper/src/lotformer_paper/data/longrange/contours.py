"""Drawing Pathfinder's images: dashed contours that grow on a lattice, many images at once.

Parameters are those of the arena's 32×32 images in Linsley's generator: dashes of 2 pixels, half a pixel thick, with a
margin of one pixel; 14 dashes per contour, five distractors of 4; dots of radius 1.5; starts 7 apart. Most images
are given up because a contour gets stuck, as in the original; here that costs microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SIDE = 32

_CONTOUR, _DISTRACTOR, _DISTRACTORS = 14, 4, 5  # dashes, dashes, number
_DASH, _MARGIN, _THICKNESS, _DOT = 2.0, 1.0, 0.5, 1.5  # pixels
_SEED_DISTANCE = 7.0
_CONTRAST = 1.5  # of a dash, whose thin line covers half a pixel
_DRAWS, _DISTRACTOR_TRIALS, _SEED_DRAWS = 3, 5, 8
_AT_ONCE = 4_096

_REACH = 4  # a stamp reaches four pixels from its centre; the canvas is padded by as much
_WIDTH = SIDE + 2 * _REACH
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


def draw(rng: np.random.Generator, labels: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Images `(n, 32, 32)` with these labels (1 = one contour joins the dots)."""
    labels = np.asarray(labels)
    batches: list[_Contours] = []
    while sum(len(batch.heads) for batch in batches) < len(labels):
        batches.append(_draw_contours(rng, _AT_ONCE))
    return _image(rng, _joined(batches, len(labels)), labels)


# a dash ends three pixels from its pivot on one of 16 points of a ring; the next pivot lies a margin further
_RING = np.array(
    sorted(
        ((y, x) for y in range(-3, 4) for x in range(-3, 4) if 2.5 < np.hypot(y, x) < 3.5),
        key=lambda point: np.arctan2(*point),
    )
)
_ANGLE = np.arctan2(_RING[:, 0], _RING[:, 1])
_UNIT = np.stack([np.sin(_ANGLE), np.cos(_ANGLE)], 1)
_STEP = np.rint(_UNIT * (_DASH + 2 * _MARGIN)).astype(np.int64)
_TAIL = np.rint(_UNIT * _MARGIN).astype(np.int64)

# how likely a dash in one direction follows a dash in another: cos² of the turn up to a right angle
_TURN = np.clip(np.cos(_ANGLE[:, None] - _ANGLE[None]), 0, None) ** 2


def _flat(points: npt.NDArray[Any]) -> _Ints:
    """Offsets or positions `(…, 2)` on the padded canvas as flat indices."""
    return points[..., 0] * _WIDTH + points[..., 1]


def _stamp_grid(samples: int) -> npt.NDArray[np.float64]:
    """Sample points of a stamp `(9, 9, samples², 2)`, relative to the centre of its middle pixel."""
    fine = (np.arange(samples) + 0.5) / samples - 0.5
    centres = np.arange(-_REACH, _REACH + 1)
    y = centres[:, None, None, None] + fine[None, None, :, None]
    x = centres[None, :, None, None] + fine[None, None, None, :]
    grid = np.stack(np.broadcast_arrays(y, x), -1)
    return grid.reshape(2 * _REACH + 1, 2 * _REACH + 1, samples**2, 2)


def _distance_to_dash(points: npt.NDArray[np.float64], direction: int) -> npt.NDArray[np.float64]:
    """Distance to the dash that ends in the origin and comes from `-direction`."""
    along = np.clip(points @ -_UNIT[direction], 0, _DASH)
    return np.linalg.norm(points + along[..., None] * _UNIT[direction], axis=-1)


_FINE, _CENTRES = _stamp_grid(8), _stamp_grid(1)
_PATCH = _flat(_CENTRES[:, :, 0].astype(np.int64)).reshape(-1)
_LINES = np.stack([(_distance_to_dash(_FINE, d) <= _THICKNESS / 2).mean(-1).reshape(-1) for d in range(len(_RING))])
_DISC = (np.linalg.norm(_FINE, axis=-1) <= _DOT).mean(-1).reshape(-1)
_CROSS = _flat(np.array([(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)]))


def _keep_out() -> _Ints:
    """For each direction, the pixels around a dash that no other dash may touch, as offsets from its end.

    Rows are filled up with the first offset, which changes nothing where they are read or set.
    """
    near = [
        _PATCH[(_distance_to_dash(_CENTRES[:, :, 0], d) <= _THICKNESS / 2 + _MARGIN).reshape(-1)]
        for d in range(len(_RING))
    ]
    longest = max(map(len, near))
    return np.stack([np.pad(row, (0, longest - len(row)), constant_values=row[0]) for row in near])


_KEEP_OUT = _keep_out()


_FREE, _BORDER = 0, 1


@dataclass
class _Board:
    """`n` images in the making: for each pixel the number of the dash that keeps it free of others, or `_FREE`."""

    owner: npt.NDArray[np.uint8]  # (n, canvas)

    @staticmethod
    def empty(count: int) -> _Board:
        canvas = np.full((_WIDTH, _WIDTH), _BORDER, np.uint8)
        canvas[_REACH + 1 : -_REACH - 1, _REACH + 1 : -_REACH - 1] = _FREE
        return _Board(np.repeat(canvas.reshape(1, -1), count, 0))

    def only(self, rows: _Bools | _Ints) -> _Board:
        return _Board(self.owner[rows])

    def is_free(self, places: _Ints, ignored: int) -> _Bools:
        """True where nothing but the dash `ignored` owns any of the places `(n, …, k)`."""
        rows = np.arange(len(places)).reshape(-1, *[1] * (places.ndim - 1))
        owners = self.owner[rows, places]
        return ((owners == _FREE) | (owners == ignored)).all(-1)

    def put(self, number: int, head: _Ints, direction: _Ints) -> None:
        """Let a dash own the pixels around it that nobody owns."""
        places = (np.arange(len(head))[:, None], head[:, None] + _KEEP_OUT[direction])
        owners = self.owner[places]
        self.owner[places] = np.where(owners == _FREE, number, owners)


@dataclass
class _Snakes:
    """One growing contour per image: its dashes so far, as end points and directions."""

    pivot: _Ints  # (n,) flat position from which the next dash starts
    heads: list[_Ints]
    directions: list[_Ints]
    last: int  # number of the last dash on the board: the next one may touch it

    @staticmethod
    def seed(board: _Board, number: int, pivot: _Ints, direction: _Ints) -> _Snakes:
        head = pivot + _flat(_RING)[direction]
        board.put(number, head, direction)
        return _Snakes(pivot + _flat(_STEP)[direction], [head], [direction], number)

    def extend(self, rng: np.random.Generator, board: _Board, number: int) -> _Bools:
        """Add a dash to each contour; where there is no room for it, the answer is False."""
        rows = np.arange(len(self.pivot))
        heads = self.pivot[:, None] + _flat(_RING)
        free = board.is_free(heads[:, :, None] + _CROSS, self.last)
        likely = np.cumsum(free * _TURN[self.directions[-1]], 1)
        done = np.zeros(len(rows), dtype=bool)
        direction, head = np.zeros_like(rows), heads[:, 0].copy()
        for _ in range(_DRAWS):
            drawn = (likely > rng.random(len(rows))[:, None] * likely[:, -1:]).argmax(1)
            end = heads[rows, drawn]
            new = ~done & (likely[:, -1] > 1e-4) & board.is_free(end[:, None] + _KEEP_OUT[drawn], self.last)
            direction[new], head[new] = drawn[new], end[new]
            done |= new
        board.put(number, head, direction)
        self.pivot = self.pivot + _flat(_STEP)[direction]
        self.heads.append(head)
        self.directions.append(direction)
        self.last = number
        return done

    def only(self, kept: _Bools) -> _Snakes:
        heads, directions = ([part[kept] for part in parts] for parts in (self.heads, self.directions))
        return _Snakes(self.pivot[kept], heads, directions, self.last)


@dataclass(frozen=True)
class _Contours:
    """The two contours of `n` images: dashes `(n, 28)` with their directions, both ends `(n, 2 contours)`."""

    board: _Board
    heads: _Ints
    directions: _Ints
    starts: _Ints
    ends: _Ints


def _joined(batches: list[_Contours], count: int) -> _Contours:
    """The first `count` images of all batches."""

    def join(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate(parts)[:count]

    return _Contours(
        _Board(join([batch.board.owner for batch in batches])),
        *(join([getattr(batch, name) for batch in batches]) for name in ("heads", "directions", "starts", "ends")),
    )


def _draw_contours(rng: np.random.Generator, count: int) -> _Contours:
    """Two contours in each image, from two starts seven pixels apart; images in which one gets stuck are dropped."""
    start = rng.integers(SIDE // 2 - 2, SIDE // 2 + 2, (count, 2))
    turn = rng.uniform(0, 2 * np.pi, count)
    other = np.rint(start + _SEED_DISTANCE * np.stack([np.sin(turn), np.cos(turn)], 1)).astype(np.int64)
    board, number = _Board.empty(count), _BORDER
    snakes: list[_Snakes] = []
    tips: list[_Ints] = []
    alive = np.ones(count, dtype=bool)
    for pivot in (start, other):
        number += 1
        direction = rng.integers(len(_RING), size=count)
        place = _flat(pivot + _REACH)
        alive &= board.is_free((place + _flat(_RING)[direction])[:, None] + _KEEP_OUT[direction], _FREE)
        snakes.append(_Snakes.seed(board, number, place, direction))
        tips.append(place + _flat(_TAIL)[direction])
    for _ in range(_CONTOUR - 1):
        for turn_of in (0, 1):
            board, snakes, tips = board.only(alive), [snake.only(alive) for snake in snakes], [t[alive] for t in tips]
            number += 1
            alive = snakes[turn_of].extend(rng, board, number)
    board, snakes, tips = board.only(alive), [snake.only(alive) for snake in snakes], [t[alive] for t in tips]
    return _Contours(
        board,
        heads=np.stack([head for snake in snakes for head in snake.heads], 1),
        directions=np.stack([direction for snake in snakes for direction in snake.directions], 1),
        starts=np.stack(tips, 1),
        ends=np.stack([snake.heads[-1] for snake in snakes], 1),
    )


def _image(rng: np.random.Generator, contours: _Contours, labels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Contours, distractors and the two dots, as grey values."""
    everyone = np.arange(len(labels))
    canvas = np.zeros((len(labels), _WIDTH**2), np.float32)
    for head, direction in zip(contours.heads.T, contours.directions.T, strict=True):
        _stamp(canvas, everyone, head, _CONTRAST * _LINES[direction])
    _draw_distractors(rng, canvas, contours.board)
    first = rng.integers(2, size=len(labels))
    last = np.where(labels == 1, first, 1 - first)
    for tips, which in ((contours.starts, first), (contours.ends, last)):
        _stamp(canvas, everyone, tips[everyone, which], np.broadcast_to(_DISC, (len(labels), len(_DISC))))
    inside = canvas.reshape(-1, _WIDTH, _WIDTH)[:, _REACH:-_REACH, _REACH:-_REACH]
    return np.rint(255 * np.minimum(inside, 1)).astype(np.uint8)


def _draw_distractors(rng: np.random.Generator, canvas: npt.NDArray[np.float32], board: _Board) -> None:
    """Up to five short contours where there is room."""
    number = int(board.owner.max())
    for _ in range(_DISTRACTORS):
        missing = np.arange(len(canvas))
        for _ in range(_DISTRACTOR_TRIALS):
            trial = board.only(missing)
            pivot, direction, found = _seat(rng, trial)
            trial, rows = trial.only(found), missing[found]
            snake = _Snakes.seed(trial, number + 1, pivot[found], direction[found])
            for dash in range(2, _DISTRACTOR + 1):
                grown = snake.extend(rng, trial, number + dash)
                trial, snake, rows = trial.only(grown), snake.only(grown), rows[grown]
            board.owner[rows] = trial.owner
            for head, way in zip(snake.heads, snake.directions, strict=True):
                _stamp(canvas, rows, head, _CONTRAST * _LINES[way])
            missing = np.setdiff1d(missing, rows)
        number += _DISTRACTOR


def _seat(rng: np.random.Generator, board: _Board) -> tuple[_Ints, _Ints, _Bools]:
    """A pivot and a direction for a first dash that touches nothing, and where one was found."""
    count = len(board.owner)
    pivot, direction, found = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, dtype=bool)
    for _ in range(_SEED_DRAWS):
        way = rng.integers(len(_RING), size=count)
        head = _flat(rng.integers(0, SIDE, (count, 2)) + _REACH)
        new = ~found & board.is_free(head[:, None] + _KEEP_OUT[way], _FREE)
        pivot[new], direction[new] = (head - _flat(_RING)[way])[new], way[new]
        found |= new
    return pivot, direction, found


def _stamp(canvas: npt.NDArray[np.float32], rows: _Ints, centre: _Ints, stamps: npt.NDArray[Any]) -> None:
    """Draw the stamp where it is brighter than the image."""
    places = (rows[:, None], centre[:, None] + _PATCH)
    canvas[places] = np.maximum(canvas[places], stamps)
