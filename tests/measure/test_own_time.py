"""Own time leaves out what other processes do, and nothing that a call has to wait for."""

import threading
import time
from types import SimpleNamespace

import pytest

from sparta.errors import ValueRangeError
from sparta.measure import timing
from sparta.measure.processor_time import waits
from sparta.measure.timing import compare_own_time


class Machine:
    """A machine on which calls work, wait, or lose the processor to others, as a test says."""

    def __init__(self, monkeypatch, *, tells=True):
        self.wall, self.own, self.waited = 0.0, 0.0, 0
        clocks = SimpleNamespace(perf_counter=lambda: self.wall, thread_time=lambda: self.own)
        monkeypatch.setattr(timing, "time", clocks)
        monkeypatch.setattr(timing, "waits", lambda: self.waited if tells else None)

    def work(self, seconds):
        self.wall += seconds
        self.own += seconds

    def lose(self, seconds):
        self.wall += seconds

    def wait(self, seconds):
        self.wall += seconds
        self.waited += 1


def test_time_of_others_does_not_count(monkeypatch):
    machine, turns = Machine(monkeypatch), iter(range(10**6))

    def preempted_every_third():
        machine.work(0.25)
        if next(turns) % 3 == 0:
            machine.lose(7.0)

    found = compare_own_time({"one": preempted_every_third}, warmup=1, iters=9, max_seconds=100)
    assert found["one"].samples == (250.0,) * 9


def test_what_a_call_waits_for_counts_and_all_of_the_round_is_told_by_one_clock(monkeypatch):
    machine = Machine(monkeypatch)

    def by_another_thread():
        machine.work(0.25)
        machine.wait(1.0)

    def alone():
        machine.work(1.0)
        machine.lose(1.0)

    found = compare_own_time({"threads": by_another_thread, "alone": alone}, warmup=1, iters=4)
    assert found["threads"].samples == (1250.0,) * 4
    assert found["alone"].samples == (2000.0,) * 4


def test_without_word_of_the_system_the_wall_clock_tells(monkeypatch):
    machine = Machine(monkeypatch, tells=False)

    def call():
        machine.work(0.25)
        machine.lose(0.75)

    assert compare_own_time({"one": call}, warmup=1, iters=2)["one"].samples == (1000.0,) * 2


def test_a_clock_that_is_too_coarse_is_not_believed(monkeypatch):
    machine, turns = Machine(monkeypatch), iter(range(10**6))

    def call():  # ticks of 10 s
        machine.wall += 4.0
        machine.own += 10.0 if next(turns) % 3 == 0 else 0.0

    assert compare_own_time({"one": call}, warmup=1, iters=6, max_seconds=1e9)["one"].samples == (4000.0,) * 6


def test_patience_gives_calls_their_seconds_and_ends(monkeypatch):
    machine = Machine(monkeypatch)

    def call():
        machine.work(1.0)
        machine.lose(1.0)

    def samples(patience):
        return len(compare_own_time({"one": call}, warmup=1, max_seconds=10, patience=patience)["one"].samples)

    assert samples(1.0) == 5
    assert samples(1.5) == 8
    assert samples(4.0) == 10  # then they have had ten seconds


def test_the_system_tells_a_wait_from_work():
    before = waits()
    if before is None:
        pytest.skip("this system does not count the waits of a thread")
    time.sleep(0.001)
    after_sleep = waits()
    assert after_sleep > before
    done = threading.Event()
    threading.Timer(0.01, done.set).start()
    done.wait()
    assert waits() > after_sleep


def test_a_sleep_is_timed_as_one_although_the_thread_does_nothing():
    assert compare_own_time({"sleep": lambda: time.sleep(0.002)}, warmup=1, iters=3)["sleep"].min >= 2.0


@pytest.mark.parametrize(
    "wrong", [{"iters": 0}, {"warmup": -1}, {"max_seconds": 0}, {"patience": 0.5}, {"patience": float("nan")}]
)
def test_wrong_counts_are_refused(wrong):
    with pytest.raises(ValueRangeError, match="allowed"):
        compare_own_time({"one": int}, **wrong)
