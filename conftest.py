"""What every test starts from: the same numbers, memory that is NaN until it is written."""

from __future__ import annotations

import signal

import hypothesis
import pytest
import torch

from lotformer.conversion import defaults

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # as a job in the background of a script we were told to ignore Ctrl-C; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seeded_and_poisoned():
    """Every test draws the same numbers, and uninitialised tensors are filled with NaN."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(autouse=True)
def _break_even(monkeypatch):
    """Conversions read inputs of every length by LOT: no test depends on a measurement, or is one of softmax."""
    monkeypatch.setattr(defaults, "break_even", lambda *_: 0)


@pytest.fixture(autouse=True)
def _windows(request, monkeypatch):
    """Tests marked `small_windows` convert small models: within a window that holds it all nothing could be learned."""
    if request.node.get_closest_marker("small_windows"):
        for tokens in defaults.WINDOW_SIZES:
            monkeypatch.setitem(defaults.WINDOW_SIZES, tokens, 5)
        monkeypatch.setitem(defaults.SOUND, "window_size", 5)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `long` run first: a worker that starts one at the end leaves the other idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
