"""Noise decides nothing: on a simulated busy machine the choices are those of a quiet one, and doubt is not stored.

The clock is moved by kernels alone: a call takes its own time, slowed by what else the machine does.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparta.common.tuning import TunableItemCfg
from sparta.measure import timing
from sparta.specialize import implement as registry
from sparta.specialize.implement import Implement, Kernel, Support
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning import select, significance
from sparta.specialize.tuning.roof import roof
from sparta.specialize.tuning.select import Problem, tune_kernel
from sparta.specialize.tuning.significance import Pairs, settled
from sparta.specialize.tuning.store import Entry, TuningStore
from sparta.tesa.attribute import TeSA

QUIET = "quiet"
DENSE_MILLISECONDS = 1.0
BUSY = ["bimodal", "drifting", "spikes"]
PREEMPTED = ["preempted", "every other call is preempted"]
SLICE = 0.0007  # seconds after which another process has a turn: about every call of dense meets one
# Gains over dense of the candidates of each layer: some all slower, some far and some little faster.
LAYERS = [
    (0.5, 0.7),
    (0.8, 0.6),
    (0.9, 0.9),
    (1.3, 0.8),
    (1.5, 2.2),
    (3.0, 1.2),
    (1.2, 0.5),
    (4.0, 6.0),
    (0.3, 1.4),
    (2.0, 0.9),
]


class Clock:
    """The time that only kernels move."""

    def __init__(self, noise, seed):
        self.now, self.rng, self.noise = 0.0, np.random.default_rng(seed), noise
        self.slow, self.own, self.calls = False, 0.0, 0

    def read(self):
        return self.now

    def run(self, milliseconds):
        self.calls += 1
        own = milliseconds * 1e-3 * self.factor()
        self.now += own + self.lost(own)
        self.own += own

    def lost(self, own):
        """Return the seconds in which others have the processor while a call runs that takes so long by itself."""
        slices = (self.own + own) // SLICE - self.own // SLICE
        if self.noise == "preempted":  # by eight others that take their turns
            return sum(0.024 * self.rng.random() for _ in range(int(slices)))
        if self.noise == "every other call is preempted" and self.calls % 2:
            return 0.004 * self.rng.exponential()
        return 0.0

    def factor(self):
        jitter = 1 + 0.05 * self.rng.exponential()
        if self.noise == "bimodal":  # another process comes and goes, for a few calls each time
            self.slow ^= self.rng.random() < 0.2
            return jitter * (4.0 if self.slow else 1.0)
        if self.noise == "drifting":  # the processor gets hot
            return jitter * (1 + 5 * self.now)
        if self.noise == "spikes":
            return jitter * (50.0 if self.rng.random() < 0.06 else 1.0)
        return jitter


class Timed(Kernel):
    """A kernel of a given speed that is always right."""

    def __init__(self, clock, milliseconds, result):
        self.clock, self.milliseconds, self.result = clock, milliseconds, result

    def pack(self, operand):
        return (operand,)

    def run(self, packed, *inputs):
        self.clock.run(self.milliseconds())
        return self.result


@pytest.fixture
def problem():
    torch.manual_seed(0)
    mask = torch.rand(32, 32) < 0.1
    weight, x = torch.randn(32, 32) * mask, torch.randn(16, 32)
    spec = linear_spec(TeSA.from_mask(mask), 16, torch.float32)
    return Problem(spec, weight, (x, None, None), x.double() @ weight.double().t(), 32)


@pytest.fixture
def machine(problem, monkeypatch):
    """Return what makes a machine of some noise with dense and candidates of given speeds, and returns its clock."""

    def make(noise, gains, seed=0, dense=lambda: DENSE_MILLISECONDS):
        clock, right = Clock(noise, seed), problem.expected.float()
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock.read, thread_time=lambda: clock.own))
        monkeypatch.setattr(timing, "waits", lambda: 0 if noise in PREEMPTED else None)  # None: the wall clock only
        monkeypatch.setattr(select, "perf_counter", clock.read)
        monkeypatch.setattr(significance, "perf_counter", clock.read)

        class Dense(Implement):
            name, op = "dense", "linear"

            def supports(self, spec):
                return Support.yes()

            def build(self, spec, params):
                return Timed(clock, dense, right)

        class Candidate(Implement):
            name, op = "candidate", "linear"

            def supports(self, spec):
                return Support.yes()

            def space(self, spec):
                return {"way": TunableItemCfg("choice", _value=list(range(len(gains))))}

            def default(self, spec):
                return {"way": 0}

            def build(self, spec, params):
                return Timed(clock, lambda: DENSE_MILLISECONDS / gains[params["way"]], right)

        monkeypatch.setattr(registry, "_REGISTRY", {("linear", each.name): each() for each in (Dense, Candidate)})
        problem.spec.__dict__.pop("_answers", None)
        return clock

    return make


def choices(machine, problem, noise, seed):
    found = []
    for gains in LAYERS:
        machine(noise, gains, seed)
        choice = tune_kernel(problem, algo="grid", max_seconds=None)
        found.append((choice.implement, dict(choice.params)))
    return found


@pytest.mark.parametrize("noise", [*BUSY, *PREEMPTED])
def test_nine_of_ten_choices_are_those_of_a_quiet_machine(machine, problem, noise):
    quiet = choices(machine, problem, QUIET, 0)
    best = [("dense", {}) if max(g) < 1 else ("candidate", {"way": int(np.argmax(g))}) for g in LAYERS]
    assert quiet == best
    for seed in range(3):
        busy = choices(machine, problem, noise, seed)
        assert sum(one == other for one, other in zip(quiet, busy, strict=True)) >= 9


@pytest.mark.parametrize("noise", [*BUSY, *PREEMPTED])
def test_gains_that_are_told_are_true(machine, problem, noise):
    for gains in LAYERS:
        machine(noise, gains, seed=5)
        choice = tune_kernel(problem, algo="grid", max_seconds=None)
        if choice.implement == "candidate" and choice.entry is not None:
            assert choice.entry.speedup == pytest.approx(gains[choice.params["way"]], rel=0.25)


# ---------------------------------------------------------------------- claims that cannot be


def test_the_roof_is_what_saved_work_allows():
    weight = TeSA.from_mask(torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.059)
    spec = linear_spec(weight, 8, torch.float32)
    assert 1 / weight.density < roof(spec) < 155
    assert roof(linear_spec(TeSA.dense((8, 8)), 8, torch.float32)) == math.inf
    assert roof(linear_spec(TeSA.from_mask(torch.zeros(8, 8, dtype=torch.bool)), 8, torch.float32)) == math.inf


def test_a_claim_above_the_roof_is_measured_again(machine, problem, tmp_path, monkeypatch):
    """Dense meets a busy machine whenever its turn comes, until the first longer run is over."""
    runs, confirm = [], significance.confirm

    def counted(*arguments, **options):
        runs.append(confirm(*arguments, **options))
        return runs[-1]

    monkeypatch.setattr(significance, "confirm", counted)
    machine(QUIET, (1.6,), dense=lambda: DENSE_MILLISECONDS * (1 if runs else 200))
    store = TuningStore(tmp_path)
    choice = tune_kernel(problem, algo="grid", max_seconds=None, store=store)
    assert runs[0].gain > 155
    assert choice.implement == "candidate"
    assert choice.entry.speedup == pytest.approx(1.6, rel=0.1)
    assert store.get(problem.spec) == choice.entry


def test_a_claim_above_the_roof_is_corrected_by_the_quickest_calls(machine, problem, tmp_path):
    """Dense waits for busy threads in seven of ten calls, as long as it is looked at."""
    rng = np.random.default_rng(0)
    machine(QUIET, (1.6,), dense=lambda: DENSE_MILLISECONDS * (70 if rng.random() < 0.7 else 1))
    assert roof(problem.spec) < 70
    store = TuningStore(tmp_path)
    choice = tune_kernel(problem, algo="grid", max_seconds=None, store=store)
    assert choice.implement == "candidate"
    assert choice.entry.speedup == pytest.approx(1.6, rel=0.2)


def test_a_true_gain_above_the_roof_is_believed_after_a_second_look(machine, problem, tmp_path):
    machine(QUIET, (300.0,))
    assert roof(problem.spec) < 300
    store = TuningStore(tmp_path)
    choice = tune_kernel(problem, algo="grid", max_seconds=None, store=store)
    assert choice.entry.speedup == pytest.approx(300, rel=0.1)
    assert len(store) == 1


def test_what_stays_unstable_is_neither_told_nor_stored(machine, problem, tmp_path, monkeypatch):
    machine(QUIET, (3.0,))
    spread = Pairs(tuple((1.5 * (n % 5) + 1, 1.0 if n % 2 else 0.5) for n in range(10)))
    assert spread.won
    assert not spread.stable
    monkeypatch.setattr(significance, "confirm", lambda *_, **__: spread)
    store = TuningStore(tmp_path)
    choice = tune_kernel(problem, algo="grid", max_seconds=None, store=store)
    assert (choice.implement, choice.reason) == ("candidate", "faster than dense, timing unstable")
    assert choice.entry is None
    assert len(store) == 0
    lost = Pairs(tuple((float(n % 5 + 1), 3.0 if n % 2 else 1.0) for n in range(10)))
    assert not lost.won
    monkeypatch.setattr(significance, "confirm", lambda *_, **__: lost)
    choice = tune_kernel(problem, algo="grid", max_seconds=None, store=store)
    assert (choice.implement, choice.reason) == ("dense", "dense: timing unstable")
    assert choice.entry is None
    assert len(store) == 0


def test_quickest_calls_that_disagree_are_unstable(monkeypatch):
    quarrel = Pairs(tuple((155.0 if n % 2 else 80.0, 1.0) for n in range(20)))
    monkeypatch.setattr(significance, "confirm", lambda *_, **__: quarrel)
    assert not settled(torch.zeros, torch.zeros, roof=60.0).stable
    monkeypatch.setattr(significance, "confirm", lambda *_, **__: Pairs(((155.0, 1.0),) * 20))
    assert settled(torch.zeros, torch.zeros, roof=60.0).stable
    few = Pairs(((155.0, 1.0),) * 3)
    monkeypatch.setattr(significance, "confirm", lambda *_, **__: few)
    assert not settled(torch.zeros, torch.zeros, roof=60.0).stable


# ---------------------------------------------------------------------- what is stored


@pytest.mark.parametrize(("stored", "believed"), [(1.0, True), (0.6, True), (1.8, True), (0.3, False), (4.0, False)])
def test_a_stored_result_is_believed_while_dense_takes_the_time_it_took(machine, problem, tmp_path, stored, believed):
    machine(QUIET, (2.0,))
    store = TuningStore(tmp_path)
    entry = Entry("candidate", {"way": 0}, stored / 9.0, stored, size=16)
    store.put(problem.spec, entry)
    choice = tune_kernel(problem, algo="grid", max_seconds=None, store=store)
    assert choice.reason == ("stored: 9.00x dense" if believed else f"{choice.entry.speedup:.2f}x dense")
    assert store.get(problem.spec).speedup == pytest.approx(9.0 if believed else 2.0, rel=0.1)


@pytest.mark.parametrize(
    ("size", "stored", "believed"), [(9, 0.55, True), (9, 0.3, True), (9, 0.2, False), (16, 0.3, False)]
)
def test_a_result_of_another_size_of_the_bucket_may_have_taken_less(machine, problem, tmp_path, size, stored, believed):
    machine(QUIET, (2.0,))
    store = TuningStore(tmp_path)
    store.put(problem.spec, Entry("candidate", {"way": 0}, stored / 9.0, stored, size=size))
    choice = tune_kernel(problem, algo="grid", max_seconds=None, store=store)
    assert choice.reason.startswith("stored") == believed


def test_an_entry_of_an_older_version_has_no_size():
    old = {"implement": "dense", "params": {}, "milliseconds": 1.0, "dense_milliseconds": 1.0}
    assert Entry.from_dict(old).size == 0
    for size in (-1, True, 0.5, "8"):
        with pytest.raises(ValueError, match="a count"):
            Entry.from_dict({**old, "size": size})
