"""Drift that no limit sees: what is one, at the boundary, and what noise must not be taken for one."""

from __future__ import annotations

import random

import pytest

from fidelity.trend import GREY, SAME_DRIFT, SAME_SHARE, Series, drift, least


def series(*values: float | None, **about: object) -> Series:
    return Series(**{"case": "c", "name": "rmse", "unit": GREY, "better": "lower", "values": values,
                     "floor": 0.1, "limit": 4.0, **about})  # type: ignore[arg-type]  # fmt: skip


def kind(*values: float | None, **about: object) -> str | None:
    found = drift(series(*values, **about))
    return None if found is None else found.kind


def test_a_creep_of_steps_that_each_lie_within_the_floor_is_seen():
    found = drift(series(1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4))
    assert (found.kind, found.runs, found.since) == ("creep", 9, 1)
    assert (found.before, found.after) == pytest.approx((1.05, 1.35))
    assert found.rise == pytest.approx(0.3)
    assert found.limit == 4.0


def test_three_runs_are_enough_and_two_are_not():
    assert kind(1.0, 1.06, 1.12) == "creep"
    assert kind(1.0, 1.5) is None


@pytest.mark.parametrize(("rise", "said"), [(0.124, None), (0.125, None), (0.126, "step")])
def test_a_step_is_more_than_the_floor(rise, said):
    assert kind(1.0, 1.0, 1.0, 1.0 + rise, floor=0.125) == said


def test_a_step_is_placed_where_the_level_changed():
    found = drift(series(1.0, 1.02, 1.01, 1.5, 1.52, 1.49))
    assert (found.kind, found.since, found.before, found.after) == ("step", 3, 1.01, 1.5)
    assert kind(1.0, 1.0, 1.5) == "step", "the newest run alone shows it"
    assert kind(1.0, 1.5, 1.5) == "step", "the oldest alone was better"
    assert kind(1.0, 1.5, 1.0) is None, "it came back"


def test_what_goes_up_and_down_is_no_creep():
    assert kind(1.0, 1.3, 0.9, 1.0, 1.25) is None
    assert kind(0.9, 1.0, 1.0, 1.3, 1.25) == "step"


def test_better_is_no_drift_whichever_way_better_is():
    falling = (1.4, 1.3, 1.2, 1.1, 1.0)
    assert kind(*falling) is None
    assert kind(*falling, better="higher", limit=None) == "creep"
    assert kind(*falling[::-1], better="higher", limit=None) is None
    found = drift(series(0.99, 0.99, 0.90, better="higher", unit="", floor=0.01, limit=0.5))
    assert (found.before, found.after, found.kind) == (0.99, 0.90, "step")


def test_what_is_over_its_limit_is_the_gates_to_say():
    assert kind(1.0, 1.0, 1.5, limit=1.5) == "step", "a limit is met when equal"
    assert kind(1.0, 1.0, 1.5, limit=1.49) is None
    assert kind(1.0, 1.0, 1.5, limit=None) == "step"
    assert kind(0.9, 0.9, 0.7, better="higher", limit=0.8) is None


def test_gaps_count_for_nothing_but_the_newest_run_must_be_there():
    found = drift(series(1.0, None, 1.0, None, 1.5))
    assert (found.kind, found.runs, found.since) == ("step", 3, 4)
    assert kind(1.0, 1.0, 1.5, None) is None
    assert kind(None, None, None) is None


@pytest.mark.parametrize(
    ("unit", "level", "smallest"), [(GREY, 5.0, SAME_DRIFT), ("", 5.0, 5 * SAME_SHARE), ("", 0.0, 1e-6)]
)
def test_no_floor_is_taken_below_what_a_repeated_decode_may_differ_by(unit, level, smallest):
    assert least(unit, level) == smallest
    about = {"unit": unit, "floor": None, "limit": None}
    assert kind(level, level, level + smallest * 0.9, **about) is None
    assert kind(level, level, level + smallest * 1.1, **about) == "step"
    assert kind(level, level, level + smallest * 1.1, **{**about, "floor": 0.0}) == "step"


def test_noise_within_its_floor_is_never_a_drift():
    """The floor is the most that rounding moved a value, so values lie within it of each other."""
    dice = random.Random(7)
    for _ in range(2000):
        values = [1.0 + dice.random() * 0.1 for _ in range(dice.randrange(3, 21))]
        assert drift(series(*values)) is None


def test_noise_twice_as_wide_as_its_floor_is_seldom_one():
    dice = random.Random(7)
    found = sum(drift(series(*(dice.gauss(1.0, 0.05) for _ in range(12)))) is not None for _ in range(2000))
    assert found / 2000 < 0.01, "a floor of two standard deviations"


def test_a_creep_under_noise_is_seen():
    dice = random.Random(7)
    found = sum(
        drift(series(*(1.0 + 0.02 * run + dice.uniform(-0.03, 0.03) for run in range(15)))) is not None
        for _ in range(500)
    )
    assert found == 500, "a fifth of the floor a run"
