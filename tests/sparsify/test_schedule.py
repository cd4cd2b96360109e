"""Schedules: pure functions with exact ends, and events that neither repeat nor get lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, ValueRangeError
from sparta.sparsify import Schedule, level_starts

CURVES = ["linear", "cubic", "inverse_cubic", "cosine"]


@pytest.mark.parametrize("curve", CURVES)
@given(
    st.floats(0, 1), st.floats(0, 1), st.integers(0, 50), st.integers(1, 100), st.integers(1, 30), st.integers(0, 200)
)
def test_a_ramp_starts_and_ends_exactly_and_stays_between(curve, initial, final, begin, length, every, position):
    ramp = Schedule(curve, final, initial, begin, begin + length, every)
    assert ramp.at(begin) == pytest.approx(initial)
    assert ramp.at(begin + length) == final == ramp.at(begin + length + 1000)
    low, high = sorted((initial, final))
    if position >= begin:
        assert low - 1e-12 <= ramp.at(position) <= high + 1e-12
    else:
        assert ramp.at(position) == 0
        assert not ramp.is_event(position)


@given(st.integers(0, 20), st.integers(0, 60), st.integers(1, 9))
def test_events_are_at_the_start_every_so_often_and_at_the_end(begin, length, every):
    ramp = Schedule("linear", 0.5, 0.0, begin, begin + length, every)
    events = [position for position in range(begin + length + 50) if ramp.is_event(position)]
    assert events == sorted({*range(begin, begin + length, every), begin + length})


def test_cubic_prunes_early():
    ramp = Schedule.cubic(0.8, end=100)
    assert ramp.at(50) == pytest.approx(0.8 * (1 - 0.5**3))
    gradual = Schedule.cubic(0.8, initial=0.05, end=10)
    assert [gradual.at(e) for e in (0, 1, 2, 5, 10)] == pytest.approx([0.05, 0.2532, 0.4160, 0.7063, 0.8], abs=1e-4)
    assert ramp.at(25) > Schedule.linear(0.8, end=100).at(25) > Schedule.cosine(0.8, end=100).at(25)


def test_constant_has_one_event():
    once = Schedule.constant(0.5, at=3)
    assert [position for position in range(10) if once.is_event(position)] == [3]
    assert once.at(2) == 0
    assert once.at(3) == once.at(99) == 0.5


@given(st.integers(1, 60), st.lists(st.floats(0, 0.99), min_size=1, max_size=7), st.integers(0, 5))
def test_levels_share_the_positions_equally(total, table, begin):
    if total < len(table):
        with pytest.raises(ValueRangeError, match="levels over"):
            Schedule.levels(table, total, begin)
        return
    stairs = Schedule.levels(table, total, begin)
    starts = [begin + n * total // len(table) for n in range(len(table))]
    assert [position for position in range(begin + total + 9) if stairs.is_event(position)] == starts
    assert [stairs.at(start) for start in starts] == table
    assert stairs.at(begin + total + 100) == table[-1]
    assert level_starts(total, len(table))[0] == 0


@given(st.sampled_from([0.5, 1, 0.1, 1 / 3]), st.integers(1, 12))
def test_epochs_become_steps(every, steps_per_epoch):
    in_epochs = Schedule.linear(0.5, begin=1, end=3, every=every)
    in_steps = in_epochs.in_steps(steps_per_epoch)
    for step in range(5 * steps_per_epoch):
        assert in_steps.at(step) == pytest.approx(in_epochs.at(step / steps_per_epoch))
    events = [step for step in range(5 * steps_per_epoch) if in_steps.is_event(step)]
    assert events[0] == steps_per_epoch
    assert events[-1] == 3 * steps_per_epoch


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Schedule("cubik", 0.5), NameNotFoundError, "did you mean 'cubic'"),
        (lambda: Schedule.linear(1.5, end=1), ValueRangeError, "sparsity is 1.5"),
        (lambda: Schedule.linear(0.5, begin=3, end=1), ValueRangeError, "begin <= end"),
        (lambda: Schedule.linear(0.5, end=1, every=0), ValueRangeError, "every is 0"),
        (lambda: Schedule.levels([], 10), ValueRangeError, "without levels"),
    ],
)
def test_bad_schedules_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()
