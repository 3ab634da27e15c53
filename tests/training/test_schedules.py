"""Schedules rise to the peak, fall to their end, and never leave [0, 1]."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lotformer.training.loop import LoopSettings
from lotformer.training.schedules import SCHEDULES, cosine, inverse_sqrt, one_cycle

runs = st.integers(1, 300).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(0, steps)))


@pytest.mark.parametrize("name", SCHEDULES)
@given(run=runs, final=st.floats(0, 1))
def test_factors_are_shares_that_rise_during_warm_up_and_fall_after_it(name, run, final):
    steps, warmup = run
    factors = [SCHEDULES[name](step, steps, warmup, final) for step in range(steps)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_peak_is_reached_when_warm_up_ends(name):
    assert SCHEDULES[name](10, 100, 10, 0.0) == pytest.approx(1, abs=0.06)
    assert max(SCHEDULES[name](step, 100, 10, 0.0) for step in range(100)) == 1


def test_cosine_without_warm_up_is_half_a_cosine():
    assert [cosine(step, 4) for step in range(4)] == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    )


def test_inverse_sqrt_halves_when_the_step_quadruples():
    assert inverse_sqrt(4 * 100 - 1, 1000, 100) == pytest.approx(0.5)


def test_one_cycle_begins_at_a_25th_and_ends_at_final():
    assert one_cycle(0, 100, 30) == pytest.approx(1 / 25)
    assert one_cycle(99, 100, 30, 0.1) == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"steps": 0}, "steps must be at least 1, got 0"), ({"steps": 1, "schedule": "step"}, "schedule must be one of")],
    ids=["steps", "schedule"],
)
def test_bad_settings_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        LoopSettings(**settings)
