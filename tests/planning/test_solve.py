"""The solver: its front is what trying everything finds."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparta.planning.solve import front_of

number = st.floats(0.0, 100.0, allow_nan=False)
groups = st.lists(st.lists(st.tuples(number, number), min_size=1, max_size=4), min_size=1, max_size=5)


def everything(options):
    return [
        (sum(t for t, _ in combination), sum(c for _, c in combination)) for combination in itertools.product(*options)
    ]


@given(groups, number)
def test_the_cheapest_within_a_time_is_what_trying_everything_finds(options, time):
    front = front_of(options)
    place = front.within(time)
    possible = [cost for total, cost in everything(options) if total <= time]
    if place is None:
        assert not [cost for total, cost in everything(options) if total <= time * (1 - 1e-9)]
    else:
        assert front.costs[place] == pytest.approx(min(possible, default=front.costs[place]), abs=1e-9)


@given(groups, number)
def test_the_fastest_within_a_cost_is_what_trying_everything_finds(options, cost):
    front = front_of(options)
    place = front.costing(cost)
    possible = [total for total, found in everything(options) if found <= cost * (1 - 1e-9)]
    if place is None:
        assert not possible
    else:
        assert front.times[place] <= min(possible, default=np.inf) + 1e-9


@given(groups)
def test_what_was_chosen_sums_up_to_the_point(options):
    front = front_of(options)
    for place in range(len(front)):
        chosen = [group[pick] for group, pick in zip(options, front.chosen(place), strict=True)]
        assert sum(t for t, _ in chosen) == pytest.approx(front.times[place])
        assert sum(c for _, c in chosen) == pytest.approx(front.costs[place])


@given(groups)
def test_times_grow_and_costs_fall(options):
    front = front_of(options)
    assert np.all(np.diff(front.times) > 0)
    assert np.all(np.diff(front.costs) < 0)


def test_a_thinned_front_is_near_the_whole_one_and_keeps_both_ends():
    generator = np.random.default_rng(0)
    options = [sorted(zip(generator.random(8), generator.random(8), strict=True)) for _ in range(12)]
    whole, thin = front_of(options, 200_000), front_of(options, 2_000)
    assert thin.times[0] == pytest.approx(whole.times[0])
    assert thin.costs[-1] == pytest.approx(whole.costs[-1])
    for time in np.linspace(whole.times[0], whole.times[-1], 20):
        best, found = whole.costs[whole.within(time)], thin.costs[thin.within(time)]
        assert best - 1e-9 <= found <= best + 0.05
