"""The tuner keeps the fastest implement that is right; whatever a candidate does, dense is the floor."""

import json
import multiprocessing
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from sparta.common.tuning import TunableItemCfg
from sparta.errors import CheckError, FileFormatError, NameNotFoundError, SpartaError, ValueRangeError
from sparta.measure import machine
from sparta.specialize import implement as registry
from sparta.specialize.implement import Cause, Implement, Support, implements_of, register, search_space, supported
from sparta.specialize.linear.spec import LinearKernel, linear_spec
from sparta.specialize.tuning import select, significance
from sparta.specialize.tuning.select import Choice, Problem, build, choose, right_choice, tune_kernel
from sparta.specialize.tuning.significance import Pairs
from sparta.specialize.tuning.store import Entry, TuningStore, device_name, key_of
from sparta.tesa.attribute import TeSA
from sparta.testing import linear_reference

MASK = torch.rand(64, 96, generator=torch.Generator().manual_seed(0)) < 0.2


@pytest.fixture
def problem():
    weight, x = torch.randn(64, 96) * MASK, torch.randn(32, 96)
    spec = linear_spec(TeSA.from_mask(MASK), 32, torch.float32)
    return Problem(spec, weight, (x, None, None), linear_reference(x, weight, weight_mask=MASK), 96)


class Cheat(LinearKernel):
    """Returns a result that was computed before: faster than anything, and right or wrong as told."""

    def __init__(self, result):
        self.result = result

    def pack(self, operand) -> tuple[torch.Tensor, ...]:
        return (operand,)

    def run(self, packed: Sequence[torch.Tensor], *inputs) -> torch.Tensor:
        return self.result


@pytest.fixture
def candidate(problem, monkeypatch):
    """Put a candidate of a given behaviour beside dense, and nothing else."""
    dense = registry.implement_named("dense", "linear")
    monkeypatch.setattr(registry, "_REGISTRY", {("linear", "dense"): dense})

    def add(build_kernel, support=None):
        class Candidate(Implement):
            name, op, version = "candidate", "linear", 3

            def supports(self, spec):
                return Support.yes() if support is None else support

            def space(self, spec):
                return {"size": TunableItemCfg("choice", _value=[1, 2])}

            def default(self, spec):
                return {"size": 1}

            def build(self, spec, params):
                return build_kernel(params["size"])

        register(Candidate)

    return add


def raising(error):
    def build_kernel(size):
        raise error

    return build_kernel


def test_a_right_and_faster_candidate_wins(problem, candidate):
    candidate(lambda size: Cheat(problem.expected.float()))
    choice = tune_kernel(problem)
    assert choice.implement == "candidate"
    assert choice.entry.speedup > 1
    assert "x dense" in choice.reason
    assert choice.config["_name"] == "candidate"
    assert json.loads(json.dumps(choice.to_dict()))["config"] == choice.config


def test_a_wrong_candidate_never_wins_however_fast(problem, candidate):
    wrong = problem.expected.float()
    wrong[3, 4] += 1.0
    candidate(lambda size: Cheat(wrong))
    choice = tune_kernel(problem)
    assert choice.implement == "dense"
    assert any("wrong result" in reason for reason in choice.result.reasons)


@pytest.fixture
def wrong_dense(monkeypatch):
    """A library whose dense product is off by one."""
    kernel = type(build(linear_spec(TeSA.dense((8, 8)), 8, torch.float32), {"_name": "dense"}))
    right = kernel.run
    monkeypatch.setattr(kernel, "run", lambda self, packed, *inputs: right(self, packed, *inputs) + 1.0)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_where_dense_is_wrong_a_right_candidate_runs_however_slow(problem, candidate, wrong_dense, tmp_path, seconds):
    class Slow(Cheat):
        def run(self, packed, *inputs):
            time.sleep(seconds)
            return self.result

    candidate(lambda size: Slow(problem.expected.float()))
    store = TuningStore(tmp_path)
    choice = tune_kernel(problem, store=store)
    assert choice.implement == "candidate"
    assert "dense is wrong here" in choice.reason
    assert any("wrong result: dense differs" in reason for reason in choice.result.reasons)
    assert len(store) == 0


def test_where_nothing_is_right_that_is_an_error(problem, candidate, wrong_dense):
    candidate(lambda size: Cheat(problem.expected.float() - 1))
    with pytest.raises(CheckError, match="no implement of linear"):
        tune_kernel(problem)


def test_a_stored_choice_that_is_wrong_is_measured_again(problem, candidate, tmp_path):
    result = problem.expected.float()
    candidate(lambda size: Cheat(result))
    store = TuningStore(tmp_path)
    assert tune_kernel(problem, store=store).implement == "candidate"
    result += 1.0
    again = tune_kernel(problem, store=store)
    assert again.implement == "dense"
    assert again.result is not None
    assert store.get(problem.spec).implement == "dense"


def test_what_is_built_is_right_or_replaced(problem, candidate):
    wrong = Choice("candidate", {"size": 1}, "built as given")
    result = problem.expected.float()
    candidate(lambda size: Cheat(result))
    assert right_choice(problem, wrong) is wrong
    result += 1.0
    other = right_choice(problem, wrong)
    assert other.implement == "dense"
    assert "candidate is wrong here, dense runs instead" in other.reason


@pytest.mark.parametrize("error", [SpartaError("does not compile"), RuntimeError("crash"), ZeroDivisionError("oops")])
def test_a_candidate_that_fails_to_build_is_a_trial_not_a_crash(problem, candidate, error):
    candidate(raising(error))
    choice = tune_kernel(problem)
    assert choice.implement == "dense"
    assert sum(choice.result.reasons.values()) == 2


def test_an_interrupt_keeps_the_best_so_far(problem, candidate, tmp_path, monkeypatch):
    monkeypatch.setattr(select.os, "cpu_count", lambda: 1)  # one after the other: the first is timed before the second
    calls = []

    def build_kernel(size):
        calls.append(size)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return Cheat(problem.expected.float())

    candidate(build_kernel)
    store = TuningStore(tmp_path)
    choice = tune_kernel(problem, store=store)
    assert choice.result.interrupted
    assert choice.implement == "candidate"
    assert len(store) == 0  # a search that was cut short is not the last word


def test_candidates_are_compiled_side_by_side_and_timed_alone(problem, candidate, monkeypatch):
    monkeypatch.setattr(select.os, "cpu_count", lambda: 4)
    together, compiling, overlaps = threading.Barrier(2, timeout=60), [0], []

    class Watched(Cheat):
        def run(self, packed, *inputs):
            overlaps.append(compiling[0])
            return super().run(packed, *inputs)

    def build_kernel(size):
        if len(overlaps) == 0:  # later it is built once more, alone, to be confirmed
            compiling[0] += 1
            together.wait()  # breaks, and prunes both, unless they meet
            compiling[0] -= 1
        return Watched(problem.expected.float())

    candidate(build_kernel)
    choice = tune_kernel(problem)
    assert choice.implement == "candidate"
    assert [trial.state for trial in choice.result.trials] == ["complete"] * 3
    assert set(overlaps) == {0}


def test_what_compiles_at_its_first_run_is_run_once_before_it_is_timed(problem, candidate, monkeypatch):
    threads = []

    class Lazy(Cheat):
        def run(self, packed, *inputs):
            threads.append(threading.current_thread())
            return super().run(packed, *inputs)

    candidate(lambda size: Lazy(problem.expected.float()))
    monkeypatch.setattr(select.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(type(registry.implement_named("candidate", "linear")), "first_run_compiles", True)
    assert tune_kernel(problem).implement == "candidate"
    assert [thread is threading.main_thread() for thread in threads[:3]] == [False, False, True]
    assert all(thread is threading.main_thread() for thread in threads[2:])


def test_an_interrupt_of_the_longer_run_keeps_the_best_so_far(problem, candidate, tmp_path, monkeypatch):
    def interrupted(dense, other, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(significance, "confirm", interrupted)
    candidate(lambda size: Cheat(problem.expected.float()))
    store = TuningStore(tmp_path)
    choice = tune_kernel(problem, store=store)
    assert choice.result.interrupted
    assert choice.implement == "candidate"
    assert "interrupted" in choice.reason
    assert len(store) == 0


@pytest.mark.parametrize("gain", [0.99, 1.02, 1.04])
def test_the_longer_run_has_the_last_word(problem, candidate, tmp_path, monkeypatch, gain):
    monkeypatch.setattr(significance, "confirm", lambda dense, other, seconds: Pairs(((gain, 1.0),) * 20))
    candidate(lambda size: Cheat(problem.expected.float()))
    choice = tune_kernel(problem, store=TuningStore(tmp_path))
    assert choice.implement == ("candidate" if gain > 1.03 else "dense")
    assert f"{gain:.2f}x" in choice.reason
    assert TuningStore(tmp_path).get(problem.spec).speedup == pytest.approx(gain if gain > 1.03 else 1.0)


@pytest.mark.parametrize("seconds", [1e-6, 0.5])
def test_what_was_not_decided_in_time_is_not_kept(problem, candidate, tmp_path, monkeypatch, seconds):
    def undecided(dense, other, left):
        time.sleep(max(0.0, left))
        return Pairs(((1.01, 1.0),))

    monkeypatch.setattr(significance, "confirm", undecided)
    candidate(lambda size: Cheat(problem.expected.float()))
    choice = tune_kernel(problem, store=TuningStore(tmp_path), max_seconds=seconds)
    assert choice.implement == "dense"
    assert "when the time was up" in choice.reason
    assert len(TuningStore(tmp_path)) == 0


def test_the_runner_up_wins_where_the_first_was_only_lucky(problem, candidate, monkeypatch):
    asked = []

    def second_only(dense, other, seconds):
        asked.append(other)
        return Pairs(((1.0 if len(asked) == 1 else 2.0, 1.0),) * 20)

    monkeypatch.setattr(significance, "confirm", second_only)
    candidate(lambda size: Cheat(problem.expected.float()))
    choice = tune_kernel(problem)
    assert choice.implement == "candidate"
    assert len(asked) == 2


def test_the_best_of_a_search_are_put_in_order_once_more(problem, candidate, monkeypatch):
    class Slow(Cheat):
        def run(self, packed, *inputs):
            time.sleep(0.002)
            return self.result

    def lucky(times):  # in the search, the slow one looks as fast as the other and comes first
        return Pairs(((3.0 if times["candidate"].median > 1.0 else 2.9, 1.0),) * 20)

    monkeypatch.setattr(select, "pairs_of", lucky)
    monkeypatch.setattr(significance, "confirm", lambda dense, other, seconds: Pairs(((2.0, 1.0),) * 20))
    candidate(lambda size: (Cheat if size == 2 else Slow)(problem.expected.float()))
    assert tune_kernel(problem).params == {"size": 2}


def test_where_putting_in_order_fails_the_order_of_the_search_stays(problem, candidate, monkeypatch):
    def breaks(dense, candidates, seconds):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(select, "ranked", breaks)
    candidate(lambda size: Cheat(problem.expected.float()))
    assert tune_kernel(problem).implement == "candidate"


def test_a_candidate_that_fails_only_in_the_longer_run_is_passed_over(problem, candidate, monkeypatch):
    def breaks(dense, other, seconds):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(significance, "confirm", breaks)
    candidate(lambda size: Cheat(problem.expected.float()))
    assert tune_kernel(problem).implement == "dense"


def test_refusals_carry_their_reason(problem, candidate):
    no = Support.no("needs a tensor core", Cause.CAPABILITY)
    candidate(raising(AssertionError), no)
    able, refused = supported(problem.spec)
    assert [i.name for i in able] == ["dense"]
    assert refused == {"candidate": no}
    choice = tune_kernel(problem)
    assert choice.refused == refused
    assert choice.to_dict()["refused"] == {"candidate": {"reason": "needs a tensor core", "cause": "capability"}}
    with pytest.raises(SpartaError, match="needs a tensor core"):
        build(problem.spec, {"_name": "candidate", "size": 1})


def test_the_search_space_is_the_nested_choice_over_implements(problem):
    space = search_space(problem.spec)
    assert space.includes({"_name": "dense"})
    assert {"dense", "torch-csr"} <= {sample["_name"] for sample in space.samples()}


def test_unknown_names_teach():
    with pytest.raises(NameNotFoundError, match="register an Implement"):
        implements_of("linaer")
    with pytest.raises(NameNotFoundError, match="did you mean 'dense'"):
        registry.implement_named("dence", "linear")
    with pytest.raises(ValueRangeError, match="registered already"):
        register(type(registry.implement_named("dense", "linear")))


# ---------------------------------------------------------------------- the store


def test_what_was_tuned_is_not_tuned_again(problem, candidate, tmp_path):
    candidate(lambda size: Cheat(problem.expected.float()))
    store = TuningStore(tmp_path)
    assert choose(problem.spec, store).reason == "not tuned"
    first = tune_kernel(problem, store=store)
    again = tune_kernel(problem, store=TuningStore(tmp_path))
    assert again.config == first.config
    assert again.result is None
    assert "stored" in again.reason


def test_a_new_version_of_an_implement_is_measured_anew(problem, candidate, tmp_path, monkeypatch):
    candidate(lambda size: Cheat(problem.expected.float()))
    store = TuningStore(tmp_path)
    tune_kernel(problem, store=store)
    monkeypatch.setattr(type(registry.implement_named("candidate", "linear")), "version", 4)
    assert store.get(problem.spec) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"version": 1}', b"\xff\xfe"])
def test_a_damaged_entry_is_dropped_with_a_warning(problem, tmp_path, damage):
    store = TuningStore(tmp_path)
    store.put(problem.spec, Entry("dense", {}, 1.0, 1.0))
    next(tmp_path.glob("*.json")).write_bytes(damage)
    with pytest.warns(UserWarning, match="damaged"):
        assert store.get(problem.spec) is None
    assert len(store) == 0


def test_export_and_import(problem, tmp_path):
    store, other = TuningStore(tmp_path / "a"), TuningStore(tmp_path / "b")
    entry = Entry("cpu", {"tile": "panel:4:4:1:0:0"}, 1.0, 3.0)
    store.put(problem.spec, entry)
    assert store.export(tmp_path / "shared.json") == 1
    assert other.load(tmp_path / "shared.json") == 1
    assert other.get(problem.spec) == entry
    (tmp_path / "bad.json").write_text('{"version": 1, "entries": [{"key": "k", "entry": {"implement": "x"}}]}')
    with pytest.raises(FileFormatError, match="not an exported"):
        other.load(tmp_path / "bad.json")
    (tmp_path / "newer.json").write_text('{"version": 99, "entries": []}')
    with pytest.raises(FileFormatError, match="version 99"):
        other.load(tmp_path / "newer.json")


def _write_many(folder, number):
    store = TuningStore(folder)
    for rows in range(1, 20):
        spec = linear_spec(TeSA.from_mask(MASK), 2**rows, torch.float32)
        store.put(spec, Entry("dense", {}, float(number), float(number)))


def test_several_processes_write_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_many, args=(tmp_path, n)) for n in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    store = TuningStore(tmp_path)
    assert len(store) == 19
    for rows in range(1, 20):
        entry = store.get(linear_spec(TeSA.from_mask(MASK), 2**rows, torch.float32))
        assert entry.milliseconds in {1.0, 2.0}


def test_the_default_folder_is_the_users_own(problem, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "cache"))
    store = TuningStore()
    store.put(problem.spec, Entry("dense", {}, 1.0, 1.0))
    assert (tmp_path / "cache" / "tuning").is_dir()
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(FileFormatError, match="others may write"):
        store.get(problem.spec)


def test_keys_name_device_and_versions(problem):
    assert device_name("cpu") in key_of(problem.spec)
    assert "dense.1" in key_of(problem.spec)


def test_generations_of_one_name_are_different_machines(monkeypatch):
    names = []
    for family in ("25", "26"):
        found = {"model name": "AMD EPYC", "cpu family": family, "model": "17", "flags": "avx2"}
        monkeypatch.setattr(machine, "_cpuinfo", lambda found=found: found)
        names.append(device_name("cpu"))
    assert names[0] != names[1]
    assert all(name.startswith("AMD EPYC, family 2") for name in names)
    monkeypatch.setattr(machine, "_cpuinfo", dict)
    assert "family" not in device_name("cpu")
