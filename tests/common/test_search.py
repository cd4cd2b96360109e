"""The search: it finds the best point, keeps to its budgets, and survives whatever candidates do."""

import json
import math
import sys
import threading
import types

import pytest

from sparta.common import search as search_module
from sparta.common.tuning import (
    PrunedTrial,
    Trial,
    Tunable,
    TunableItemCfg,
    TuningResult,
    search,
)
from sparta.errors import MissingPackageError, NameNotFoundError, SpartaError, ValueRangeError

ALGORITHMS = sorted(Tunable.supported_tuners())
LINE = {"x": TunableItemCfg("randint", [0, 10])}
NESTED = TunableItemCfg(
    "choice",
    _is_nested=True,
    _value={
        "dense": {},
        "block": {
            "tile": TunableItemCfg("choice", [(8, 8), (16, 16), (32, 32)]),
            "unroll": TunableItemCfg("choice", [1, 2, 4]),
        },
    },
)


def latency(sample):
    if sample["_name"] == "dense":
        return 3.0
    return abs(sample["tile"][0] - 16) / 8 + abs(sample["unroll"] - 2) + 1.0


def tried(result):
    return [trial.params["x"] for trial in result.trials]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    fake = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(search_module, "perf_counter", lambda: fake.now)
    return fake


# ---------------------------------------------------------------------- finding


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_best_of_a_small_space_is_found_and_the_search_ends(algo):
    result = search(NESTED, latency, algo=algo)
    assert result.best == {"_name": "block", "tile": (16, 16), "unroll": 2}
    assert result.best_value == 1.0
    assert len(result.trials) == NESTED.size() == 10
    assert not result.interrupted
    assert result.reasons == {}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_same_seed_same_trials(algo):
    def params(seed):
        return [trial.params for trial in search(NESTED, latency, algo=algo, seed=seed, max_trials=8).trials]

    assert params(1) == params(1)


def test_a_plain_item_is_a_space_too():
    result = search(TunableItemCfg("quniform", [0, 1, 0.25]), lambda x: (x - 0.6) ** 2, algo="tpe")
    assert result.best == 0.5


def test_the_earliest_of_equals_is_the_best():
    assert search(LINE, lambda _: 1.0, algo="grid").best == {"x": 0}


def test_initial_points_come_first_and_only_once():
    result = search(LINE, lambda p: p["x"], algo="grid", initial=[{"x": 7}, {"x": 3}, {"x": 7}])
    assert tried(result) == [7, 3, 0, 1, 2, 4, 5, 6, 8, 9]
    result = search(NESTED, latency, initial=[{"_name": "block", "tile": [16, 16], "unroll": 2}], max_trials=1)
    assert result.best == {"_name": "block", "tile": (16, 16), "unroll": 2}


def test_an_initial_point_outside_the_space_is_refused():
    with pytest.raises(ValueRangeError, match="/x is 70"):
        search(LINE, lambda p: p["x"], initial=[{"x": 70}])


def test_an_objective_may_change_what_it_is_given():
    def greedy(sample):
        sample.clear()
        return 1.0

    assert tried(search(LINE, greedy, algo="grid", max_trials=3)) == [0, 1, 2]


# ---------------------------------------------------------------------- budgets


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_max_trials_is_for_all_alternatives_together(algo):
    calls = []
    result = search(NESTED, lambda p: calls.append(p) or 1.0, algo=algo, max_trials=4)
    assert len(calls) == len(result.trials) == 4


def test_max_trials_counts_pruned_and_failed_trials():
    def never(_):
        raise PrunedTrial("no")

    assert len(search(LINE, never, max_trials=3).trials) == 3


def test_max_trials_counts_what_the_study_has_already(tmp_path):
    kw = {"storage": tmp_path / "study", "study_name": "s", "algo": "grid"}
    first = search(LINE, lambda p: -p["x"], max_trials=4, **kw)
    again = search(LINE, lambda p: -p["x"], max_trials=4, **kw)
    assert again == first
    more = search(LINE, lambda p: -p["x"], max_trials=6, **kw)
    assert tried(more) == [0, 1, 2, 3, 4, 5]
    assert more.best == {"x": 5}


def test_no_point_is_chosen_after_max_seconds(clock):
    def slow(sample):
        clock.now += 2.0
        return sample["x"]

    result = search(LINE, slow, algo="grid", max_seconds=5.0)
    assert tried(result) == [0, 1, 2]
    assert [trial.seconds for trial in result.trials] == [2.0, 2.0, 2.0]


def test_time_spent_preparing_does_not_leave_the_search_without_a_result(clock):
    def compile_slowly(_):
        clock.now += 10.0

    def measure(sample, _):
        if sample["x"] == 0:
            raise PrunedTrial("wrong numbers")
        return sample["x"]

    result = search(LINE, measure, algo="grid", max_seconds=5.0, prepare=compile_slowly, workers=4)
    assert tried(result) == [0, 1]
    assert result.best == {"x": 1}


def test_points_left_when_time_is_up_are_tried_by_the_next_search(clock, tmp_path):
    kw = {"algo": "grid", "prepare": lambda _: None, "workers": 3, "storage": tmp_path / "study", "study_name": "s"}

    def slow(sample, _):
        clock.now += 2.0
        return sample["x"]

    assert tried(search(LINE, slow, max_seconds=3.0, **kw)) == [0, 1]
    assert tried(search(LINE, slow, max_seconds=3.0, **kw)) == [0, 1, 2, 3]


def test_a_continuous_space_needs_a_budget(clock):
    space = {"x": TunableItemCfg("loguniform", [0.1, 10])}
    with pytest.raises(ValueRangeError, match="without an end"):
        search(space, lambda p: p["x"])

    def slow(sample):
        clock.now += 1.0
        return sample["x"]

    assert len(search(space, slow, max_trials=5).trials) == 5
    assert len(search(space, slow, max_seconds=5.0).trials) == 5


@pytest.mark.parametrize(
    ("kw", "text"),
    [
        ({"max_trials": 0}, "max_trials is 0"),
        ({"max_trials": 2.0}, "max_trials is 2.0"),
        ({"max_seconds": 0}, "max_seconds is 0"),
        ({"max_seconds": math.nan}, "max_seconds is nan"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": 2}, "nothing to prepare"),
        ({"storage": "file"}, "without a study_name"),
    ],
)
def test_bad_arguments_are_refused(kw, text):
    with pytest.raises(ValueRangeError, match=text):
        search(LINE, lambda p: p["x"], **kw)


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(NameNotFoundError, match="did you mean 'grid'"):
        search(LINE, lambda p: p["x"], algo="gird")


# ---------------------------------------------------------------------- candidates that misbehave


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_nothing_a_candidate_does_ends_the_search(algo):
    def moody(sample):
        outcomes = {
            0: lambda: math.nan,
            1: lambda: math.inf,
            2: lambda: 1 / 0,
            3: lambda: "text",
            4: lambda: None,
        }
        if sample["x"] == 5:
            raise PrunedTrial("does not compile")
        if sample["x"] == 6:
            raise PrunedTrial
        return outcomes.get(sample["x"], lambda: float(sample["x"]))()

    result = search(LINE, moody, algo=algo)
    assert result.best == {"x": 7}
    outcome = {trial.params["x"]: (trial.state, trial.reason) for trial in result.trials}
    assert outcome[0] == ("failed", "the value is nan")
    assert outcome[1] == ("failed", "the value is inf")
    assert outcome[2] == ("failed", "ZeroDivisionError: division by zero")
    assert outcome[3][0] == outcome[4][0] == "failed"
    assert outcome[5] == ("pruned", "does not compile")
    assert outcome[6] == ("pruned", "pruned without a reason")
    assert all(outcome[x] == ("complete", "") for x in (7, 8, 9))
    assert sum(result.reasons.values()) == 7


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_search_of_which_nothing_works_says_why(algo):
    def broken(sample):
        if sample["x"] < 7:
            raise PrunedTrial("relative error 0.3,\n  allowed 0.01")
        raise RuntimeError("out of registers " + "!" * 5000)

    result = search(LINE, broken, algo=algo)
    assert result.best is None
    assert result.best_value is None
    assert list(result.reasons.values()) == [7, 3]
    first, second = result.reasons
    assert first.startswith("relative error 0.3")
    assert second.startswith("RuntimeError: out of registers")


def test_an_interrupt_keeps_the_best_so_far(tmp_path):
    kw = {"algo": "grid", "storage": tmp_path / "study", "study_name": "s"}

    def interrupted(sample):
        if sample["x"] == 3:
            raise KeyboardInterrupt
        return -sample["x"]

    result = search(LINE, interrupted, **kw)
    assert result.interrupted
    assert result.best == {"x": 2}
    assert tried(result) == [0, 1, 2]
    # The point that was interrupted is not lost: the next search begins with it.
    assert tried(search(LINE, lambda p: -p["x"], **kw)) == list(range(10))


def test_an_interrupt_before_the_first_trial():
    def interrupted(_):
        raise KeyboardInterrupt

    result = search(LINE, interrupted)
    assert result.interrupted
    assert result.best is None


def test_an_exit_is_not_swallowed():
    def leaving(_):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        search(LINE, leaving)


def test_without_optuna_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingPackageError, match="pip install optuna"):
        search(LINE, lambda p: p["x"])


# ---------------------------------------------------------------------- preparing


@pytest.mark.parametrize("workers", [1, 3])
def test_the_objective_gets_what_was_prepared(workers):
    def prepare(sample):
        if sample["x"] == 0:
            raise PrunedTrial("does not compile")
        if sample["x"] == 1:
            raise OSError("no compiler")
        return f"kernel {sample['x']}"

    def measure(sample, kernel):
        assert kernel == f"kernel {sample['x']}"
        return sample["x"]

    result = search(LINE, measure, algo="grid", prepare=prepare, workers=workers)
    assert tried(result) == list(range(10))
    assert result.reasons == {"does not compile": 1, "OSError: no compiler": 1}
    assert result.best == {"x": 2}


def test_preparing_is_parallel_and_measuring_is_alone():
    everyone = threading.Barrier(2, timeout=60)
    preparing, during = set(), []

    def prepare(sample):
        preparing.add(sample["x"])
        everyone.wait()  # passes only if two candidates are prepared at the same time
        everyone.wait()
        preparing.discard(sample["x"])

    def measure(sample, _):
        during.append((threading.current_thread() is threading.main_thread(), set(preparing)))
        return sample["x"]

    search(LINE, measure, algo="rand", prepare=prepare, workers=2, max_trials=6)
    assert during == [(True, set())] * 6


def test_workers_do_not_overrun_max_trials():
    prepared = []
    result = search(LINE, lambda _p, _k: 1.0, prepare=prepared.append, workers=4, max_trials=6, algo="rand")
    assert len(prepared) == len(result.trials) == 6


def test_seconds_include_preparing(clock):
    def prepare(_):
        clock.now += 1.0

    def measure(_sample, _kernel):
        clock.now += 2.0
        return 1.0

    assert [t.seconds for t in search(LINE, measure, prepare=prepare, max_trials=2).trials] == [3.0, 3.0]


# ---------------------------------------------------------------------- storage and progress


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_study_on_disk_is_resumed(algo, tmp_path):
    kw = {"algo": algo, "storage": f"sqlite:///{tmp_path / 'tuning.db'}", "study_name": "layer 1"}

    def partly(sample):
        if sample["x"] == 4:
            raise PrunedTrial("no")
        return abs(sample["x"] - 6.0)

    first = search(LINE, partly, max_trials=4, **kw)
    calls = []
    second = search(LINE, lambda p: calls.append(p) or partly(p), **kw)
    assert second.trials[:4] == first.trials
    assert len(calls) == 6
    assert sorted(tried(second)) == list(range(10))
    assert second.best == {"x": 6}
    assert second.reasons == {"no": 1}


def test_progress_gets_a_step_for_each_trial():
    seen = []
    result = search(LINE, lambda p: abs(p["x"] - 2), algo="grid", progress=seen.append)
    assert [step.outcome for step in seen] == list(result.trials)
    assert [step.name for step in seen][::9] == ["trial 1/10", "trial 10/10"]
    assert str(seen[0]) == "trial 1/10: 2 with x=0"


def test_the_best_so_far_is_shown(capsys):
    search(LINE, lambda p: abs(p["x"] - 2), algo="grid", progress=True)
    best = [line.rpartition("=")[2] for line in capsys.readouterr().err.splitlines()]
    assert best == list("0122222222")


def outcomes(sample):
    if sample["x"] == 0:
        raise PrunedTrial("does not compile")
    return float(sample["x"])


def test_progress_on_a_pipe_is_plain_lines(capsys):
    search(LINE, outcomes, algo="grid", max_trials=2, progress=True)
    assert capsys.readouterr().err == (
        "trial 1/2: pruned (does not compile), nothing works so far\ntrial 2/2: 1, best 1 with x=1\n"
    )
    search({"x": TunableItemCfg("uniform", [0, 1])}, lambda _: 1.0, max_seconds=1e-9, progress=True)
    assert capsys.readouterr().err.startswith("trial 1: 1, best 1 with x=0.")


def test_progress_in_a_terminal_is_one_live_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    search(LINE, outcomes, algo="grid", max_trials=3, progress=True)
    shown = capsys.readouterr().err
    assert "tuning" in shown
    assert "3/3" in shown


# ---------------------------------------------------------------------- the result


def example():
    return TuningResult(
        (
            Trial(0, {"_name": "block", "tile": (16, 32)}, 2.5, "complete", 0.5),
            Trial(1, {"_name": "dense"}, 0.5, "complete", 0.25),
            Trial(2, {"a": {"_name": "x", "k": 1}, "b": 2}, None, "pruned", 0.1, "error:\n  too many resources"),
            Trial(3, 7, None, "failed", 0.1, "long " * 100),
        ),
        interrupted=True,
    )


def test_a_result_prints_itself():
    lines = str(example()).splitlines()
    assert lines[0] == "4 trials (2 complete, 1 pruned, 1 failed), interrupted"
    assert lines[3].split() == ["1", "0.5", "complete", "0.25", "dense"]
    assert "block tile=(16, 32)" in lines[4]
    assert "a=(x k=1) b=2" in lines[5]
    assert "error: too many resources" in lines[5]
    assert len(lines[6]) < 150
    assert str(TuningResult()).startswith("0 trials\n")
    many = TuningResult(tuple(Trial(n, n, float(n), "complete") for n in range(50)))
    assert str(many).splitlines()[0] == "50 trials (50 complete), the best 20"
    assert len(str(many).splitlines()) == 23


def test_a_result_is_plain_data():
    data = json.loads(json.dumps(example().to_dict()))
    assert list(data) == ["trials", "interrupted"]
    assert list(data["trials"][0]) == ["number", "params", "value", "state", "seconds", "reason"]


def test_verdicts_are_errors_of_this_package():
    assert issubclass(PrunedTrial, SpartaError)
