"""Leaving dense needs proof: whatever the noise, a candidate that is no faster does not get away with it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.measure import timing
from sparta.specialize.tuning.significance import LEAST_GAIN, LOWEST_GAIN, Pairs, confirm


class Machine:
    """A clock that only kernels move: each call takes its time, a common load and a jitter of its own."""

    def __init__(self, monkeypatch, load=lambda now: 1.0, jitter=0.0, seed=0):
        self.now, self.load, self.jitter, self.calls = 0.0, load, jitter, 0
        self.rng = np.random.default_rng(seed)
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(timing, "waits", lambda: None)  # the wall clock is all there is

    def kernel(self, milliseconds):
        def call():
            self.calls += 1
            self.now += milliseconds * 1e-3 * self.load(self.now) * (1 + self.jitter * self.rng.exponential())
            return torch.zeros(())

        return call


@given(
    gain=st.floats(0.2, 5.0),
    milliseconds=st.floats(0.01, 40.0),
    jitter=st.floats(0.0, 0.3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_what_wins_is_faster_and_what_is_much_faster_wins(gain, milliseconds, jitter, seed):
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch, jitter=jitter, seed=seed)
        pairs = confirm(machine.kernel(milliseconds), machine.kernel(milliseconds / gain))
    if pairs.won:
        assert gain > LOWEST_GAIN
    if gain > 1.6:
        assert pairs.won
        assert pairs.gain == pytest.approx(gain, rel=0.35)


@given(seed=st.integers(0, 1000), milliseconds=st.floats(0.05, 5.0), factor=st.floats(1.5, 20.0))
@settings(max_examples=30, deadline=None)
def test_a_load_that_comes_and_goes_slows_both_alike(seed, milliseconds, factor):
    """Bursts as long as several pairs move both medians, and not the ratios."""
    period = 20 * milliseconds * 1e-3
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch, load=lambda now: factor if (now / factor) % period < period / 2 else 1.0, seed=seed)
        equal = confirm(machine.kernel(milliseconds), machine.kernel(milliseconds))
        better = confirm(machine.kernel(milliseconds), machine.kernel(milliseconds / 1.5))
    assert not equal.won
    assert better.won
    assert better.gain == pytest.approx(1.5, rel=0.05)


def test_a_close_race_gets_more_pairs_than_a_clear_one(monkeypatch):
    machine = Machine(monkeypatch, jitter=0.1)
    clear = confirm(machine.kernel(1.0), machine.kernel(0.3))
    close = confirm(machine.kernel(1.0), machine.kernel(1.0 / LEAST_GAIN))
    assert clear.decided
    assert len(close.milliseconds) > 2 * len(clear.milliseconds)


def test_slow_kernels_are_judged_by_several_pairs(monkeypatch):
    machine = Machine(monkeypatch)
    assert len(confirm(machine.kernel(400.0), machine.kernel(100.0)).milliseconds) >= 3
    assert len(confirm(machine.kernel(400.0), machine.kernel(380.0)).milliseconds) >= 7


def test_one_lucky_pair_decides_nothing():
    assert not Pairs(((1.0, 0.1),)).decided
    assert not Pairs(((1.0, 0.1), (1.0, 0.1), (1.0, 0.9))).decided
    assert not Pairs(((1.0, 0.1), *[(1.0, 1.0)] * 8)).won


def test_a_wide_spread_is_no_win_even_with_a_good_median():
    pairs = Pairs(tuple((1.0, 0.9) if n % 2 else (0.8, 1.0) for n in range(9)))
    assert pairs.gain < LEAST_GAIN or pairs.interval[0] < LOWEST_GAIN
    assert not pairs.won


def test_a_clock_too_coarse_for_a_call_is_no_win(monkeypatch):
    machine = Machine(monkeypatch)
    pairs = confirm(machine.kernel(0.0), machine.kernel(0.0))
    assert pairs.gain == 1.0
    assert not pairs.won
