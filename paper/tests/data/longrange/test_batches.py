"""Batches: padding is marked, lengths are grouped, an epoch is a pure function of its number."""

from __future__ import annotations

import numpy as np

from lotformer_paper.data.longrange.batches import by_length, collate
from lotformer_paper.data.longrange.store import Example


def example(*lengths: int, label: int = 0) -> Example:
    return Example(tuple(np.arange(1, length + 1, dtype=np.uint8) for length in lengths), label)


def test_padding_is_zero_and_masked():
    batch = collate([example(3, label=1), example(5, label=2)])
    assert batch["tokens"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert batch["mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert batch["labels"].tolist() == [1, 2]


def test_full_batches_need_no_mask():
    assert "mask" not in collate([example(4), example(4)])


def test_pairs_have_an_axis_of_their_own():
    batch = collate([example(3, 2), example(1, 4)])
    assert batch["tokens"].shape == batch["mask"].shape == (2, 2, 4)
    assert batch["tokens"][1].tolist() == [[1, 0, 0, 0], [1, 2, 3, 4]]


def test_an_epoch_holds_each_example_once_and_pads_little():
    lengths = np.random.default_rng(0).integers(1, 1000, 1000)
    batches = by_length(lengths, 10, seed=1, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(1000))
    padding = sum(10 * lengths[batch].max() - lengths[batch].sum() for batch in batches)
    assert padding < 0.05 * lengths.sum()


def test_incomplete_batches_are_left_out():
    assert all(len(batch) == 7 for batch in by_length(np.ones(100, int), 7, seed=0, epoch=0))


def test_epochs_differ_and_repeat_exactly():
    lengths = np.arange(1000)
    once, again, other = (by_length(lengths, 10, seed=3, epoch=epoch) for epoch in (2, 2, 3))
    assert once == again != other
