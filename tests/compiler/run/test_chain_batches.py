"""Which way a large batch goes through a chain: by measurement, in which a first, cold run rules nothing out."""

from __future__ import annotations

import pytest
import torch

from sparta.compiler.run.chain import batches
from sparta.compiler.run.chain.batches import quicker_of


class _Timed:
    """Stands in for a program: each call takes as long as the next of `seconds` says."""

    def __init__(self, clock: _Clock, *seconds: float) -> None:
        self.clock, self.seconds, self.calls = clock, list(seconds), 0

    def __call__(self, leaves: object) -> None:
        self.clock.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1


class _Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(batches, "time", made)
    return made


def test_a_cold_first_run_of_the_whole_batch_decides_nothing(clock):
    whole, part = _Timed(clock, 26.0, 8.0, 8.0), _Timed(clock, 10.0, 9.0, 9.0)
    assert quicker_of(whole, [part], [torch.zeros(2)]) is whole


def test_parts_that_are_clearly_faster_are_taken(clock):
    whole, part = _Timed(clock, 8.0), _Timed(clock, 10.0, 5.0)
    assert quicker_of(whole, [part], [torch.zeros(2)]) is part


def test_what_stays_much_slower_is_not_run_to_the_end(clock):
    whole, slow = _Timed(clock, 5.0), _Timed(clock, 50.0)
    assert quicker_of(whole, [slow], [torch.zeros(2)]) is whole
    assert slow.calls < whole.calls
