"""profile and compare: who is called how often, what is returned, what comes through. Never how long."""

import gc
import json
import time

import pytest
import torch

from sparta.errors import CheckError, NameNotFoundError, ValueRangeError
from sparta.measure import Comparison, Timing, compare, profile


class Counter:
    """A function that counts its calls and logs its name."""

    def __init__(self, name="f", log=None, result=None):
        self.name, self.log, self.result = name, [] if log is None else log, result

    def __call__(self, *args, **kwargs):
        self.log.append(self.name)
        self.last = (args, kwargs)
        return self.result


def test_the_samples_are_the_timed_calls():
    function = Counter()
    timing = profile(function, warmup=3, iters=7)
    assert len(timing.samples) == 7
    assert len(function.log) == 3 + 7
    assert all(sample >= 0 for sample in timing.samples)
    assert timing.device == "cpu"


class Clock:
    """A clock that only a call of ``advance`` moves."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def advance(self, seconds):
        self.now += seconds


def test_a_time_is_in_milliseconds(monkeypatch):
    clock = Clock(monkeypatch)
    durations = iter([9.0, 0.25, 0.5])
    assert profile(lambda: clock.advance(next(durations)), warmup=1, iters=2).samples == (250.0, 500.0)


def test_one_call_is_made_before_any_is_timed():
    function = Counter()
    profile(function, warmup=0, iters=1)
    assert len(function.log) == 2


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [((1, 2), (1, 2), {}), ([3], (3,), {}), ({"a": 1}, (), {"a": 1}), ((), (), {})],
)
def test_inputs_are_arguments_or_keywords(inputs, args, kwargs):
    function = Counter()
    profile(function, inputs, iters=1)
    assert function.last == (args, kwargs)


def test_a_single_tensor_is_one_argument():
    function, x = Counter(), torch.ones(2, 2)
    profile(function, x, iters=1)
    assert len(function.last[0]) == 1
    assert function.last[0][0] is x


def test_functions_take_turns_and_everyone_goes_first():
    log = []
    compare({name: Counter(name, log) for name in "abc"}, warmup=1, iters=6)
    rounds = ["".join(log[start : start + 3]) for start in range(3, len(log), 3)]
    assert sorted(turn[0] for turn in rounds) == list("aabbcc")
    assert rounds == ["abc", "cba", "bca", "acb", "cab", "bac"]  # b follows a as often as c


def test_a_mapping_of_functions_is_a_comparison():
    result = profile({"dense": Counter(), "sparse": Counter()}, iters=2)
    assert isinstance(result, Comparison)
    assert list(result.timings) == ["dense", "sparse"]


def test_time_that_is_up_ends_the_calls_but_everyone_is_timed(monkeypatch):
    clock = Clock(monkeypatch)
    functions = {"a": lambda: clock.advance(1.0), "b": lambda: clock.advance(3.0)}
    result = compare(functions, warmup=10**9, iters=10**9, max_seconds=100.0)
    assert result["a"].samples == (1000.0,) * 25
    assert result["b"].samples == (3000.0,) * 25
    assert clock.now < 150
    for warmup in (0, 5):
        result = compare(functions, warmup=warmup, iters=100, max_seconds=0.5)
        assert len(result["a"].samples) == len(result["b"].samples) == 1


def test_right_outputs_are_timed():
    x = torch.rand(8, 8)
    timing = profile(torch.matmul, (x, x), x.double() @ x.double(), iters=2, reduction=8)
    assert len(timing.samples) == 2


def test_wrong_outputs_are_not_timed():
    function = Counter(result=torch.zeros(2))
    with pytest.raises(CheckError, match="output of sparse differs"):
        compare({"sparse": function}, (), torch.ones(2))
    assert len(function.log) == 1


def test_what_the_function_raises_comes_through():
    with pytest.raises(ZeroDivisionError):
        profile(lambda: 1 / 0)


def test_the_garbage_collector_is_left_as_it_was():
    def observe():
        seen.append(gc.isenabled())

    seen = []
    profile(observe, warmup=1, iters=1)
    assert seen == [True, False]
    assert gc.isenabled()
    failing = iter([1, 0])
    with pytest.raises(ZeroDivisionError):
        profile(lambda: 1 / next(failing), warmup=1, iters=1)
    assert gc.isenabled()
    gc.disable()
    try:
        profile(observe, iters=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_cpu_needs_nothing_of_cuda(monkeypatch):
    def fail(*_args, **_kwargs):
        pytest.fail("a CUDA call without a CUDA device")

    for name in ("synchronize", "Event", "is_available", "current_stream", "init"):
        monkeypatch.setattr(torch.cuda, name, fail)
    assert profile(torch.add, (torch.ones(2), 1), iters=2).device == "cpu"


def test_a_device_that_cannot_be_timed_is_an_error():
    with pytest.raises(ValueRangeError, match="device 'meta'; allowed: 'cpu' and 'cuda'"):
        profile(torch.add, (torch.ones(2, device="meta"), 1))
    with pytest.raises(ValueRangeError, match="device 'meta'"):
        profile(lambda: [{"y": torch.ones(2, device="meta")}])
    assert profile(torch.add, (torch.ones(2, device="meta"), 1), iters=1, device="cpu").device == "cpu"


@pytest.mark.parametrize("counts", [{"warmup": -1}, {"iters": 0}, {"max_seconds": 0.0}, {"max_seconds": float("nan")}])
def test_counts_must_make_sense(counts):
    with pytest.raises(ValueRangeError, match="warmup >= 0, iters >= 1, max_seconds > 0"):
        profile(Counter(), **counts)


def test_there_must_be_something_to_time():
    with pytest.raises(ValueRangeError, match="no functions to time"):
        compare({})
    with pytest.raises(ValueRangeError, match="without samples"):
        Timing((), "cpu")


def test_statistics_of_a_timing():
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0), "cpu")
    assert (timing.median, timing.min, timing.spread, float(timing)) == (3.0, 1.0, 2.0, 3.0)
    assert Timing((5.0,), "cpu").spread == 0
    assert json.loads(json.dumps(timing.to_dict()))["unit"] == "ms"


def test_speedup_is_relative_to_the_first():
    both = Comparison({"dense": Timing((3.0, 6.0, 9.0), "cpu"), "sparse": Timing((2.0,), "cpu")})
    assert both.speedup("dense") == 1
    assert both.speedup("sparse") == 3
    assert both.fastest == "sparse"
    assert json.loads(json.dumps(both.to_dict()))["sparse"]["speedup"] == 3
    assert "3.00x" in str(both)
    assert both["dense"].median == 6


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(NameNotFoundError, match="did you mean 'dense'"):
        Comparison({"dense": Timing((1.0,), "cpu")})["dens"]
