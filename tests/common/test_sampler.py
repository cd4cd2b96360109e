"""Samplers: they stay inside the space, repeat nothing, minimise, and are told results as NNI's tuners are."""

import warnings

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.spaces import finite_spaces, spaces
from sparta.common.space import coordinates, key_of
from sparta.common.tuning import (
    NoMoreTrial,
    Tunable,
    TunableItemCfg,
    Tuner,
    includes,
    samples_of,
)
from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError

ALGORITHMS = sorted(Tunable.supported_tuners())


def nested(**options):
    return TunableItemCfg("choice", _is_nested=True, _value=options)


NESTED = nested(
    dense={},
    block={"tile": TunableItemCfg("choice", [(8, 8), (16, 16)]), "unroll": TunableItemCfg("randint", [1, 4])},
    csr={"inner": nested(a={}, b={"k": TunableItemCfg("choice", [1, 2])})},
)


def cost(sample):
    """A made-up latency that depends on all of a sample."""
    return float(sum(map(ord, repr(sample)))) % 97


def run(tuner, trials, value=cost):
    """Ask and tell; returns the points in order, fewer if there are no more."""
    points = []
    for number in range(trials):
        try:
            points.append(tuner.generate_parameters(number))
        except NoMoreTrial:
            break
        tuner.receive_trial_result(number, points[-1], value(points[-1]))
    return points


def keys(space, points):
    return [key_of(coordinates(space, point)) for point in points]


def test_the_names_of_the_algorithms():
    assert Tunable.supported_tuners() == {"grid", "rand", "tpe", "evolution"}
    assert Tunable.create_tuner("random", NESTED).algo == "rand"
    assert Tunable.create_tuner("gridsearch", NESTED).algo == "grid"


@pytest.mark.parametrize("algo", ["rand", "tpe", "evolution"])
@given(space=spaces, seed=st.integers(0, 9))
@settings(max_examples=12)
def test_only_points_of_the_space_are_proposed(algo, space, seed):
    kw = {"seed": seed} | ({"n_startup_trials": 3} if algo == "tpe" else {})
    kw |= {"population_size": 3} if algo == "evolution" else {}
    points = run(Tunable.create_tuner(algo, space, kw), 8)
    assert points
    assert all(includes(space, point) for point in points)


@given(finite_spaces)
@settings(max_examples=25)
def test_a_grid_covers_the_space_once_in_order(space):
    limit = 60
    points = run(Tunable.create_tuner("grid", space), limit)
    expected = [sample for sample, _ in zip(samples_of(space), range(limit), strict=False)]
    assert points == expected


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_nothing_is_tried_twice_and_everything_is_tried(algo):
    points = run(Tunable.create_tuner(algo, NESTED), 100)
    assert len(points) == NESTED.size() == 10
    assert set(keys(NESTED, points)) == set(keys(NESTED, NESTED.samples()))


@pytest.mark.parametrize("algo", ["rand", "tpe", "evolution"])
def test_points_that_are_being_tried_are_not_proposed_again(algo):
    tuner = Tunable.create_tuner(algo, NESTED)
    points = [tuner.generate_parameters(number) for number in range(10)]
    assert len(set(keys(NESTED, points))) == 10
    with pytest.raises(NoMoreTrial, match="all 10 points"):
        tuner.generate_parameters(10)


def test_points_that_are_hard_to_draw_are_found_too():
    space = nested(last={})
    for depth in range(14):  # a random walk gets to the bottom once in 2**14 times
        space = nested(stop={}, deeper={f"level{depth}": space})
    assert len(run(Tunable.create_tuner("rand", space), 100)) == space.size() == 15


def test_a_continuous_range_that_is_hard_to_draw_is_used_before_anything_repeats():
    space = nested(last={"x": TunableItemCfg("uniform", [0, 1])})
    for depth in range(14):
        space = nested(stop={}, deeper={f"level{depth}": space})
    points = run(Tunable.create_tuner("rand", space), 40)
    assert len(set(keys(space, points))) == 40


def test_repeats_are_avoided_in_spaces_that_are_only_partly_continuous():
    space = nested(free={"x": TunableItemCfg("uniform", [0, 1])}, **{f"fixed{n}": {} for n in range(5)})
    points = run(Tunable.create_tuner("rand", space), 40)
    assert len(set(keys(space, points))) == 40


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_same_seed_same_points(algo):
    space = {"x": TunableItemCfg("quniform", [0, 5, 0.5]), "kind": NESTED}

    def points(seed):
        return run(Tunable.create_tuner(algo, space, {"seed": seed}), 25)

    assert points(3) == points(3)
    assert (points(3) != points(4)) == (algo != "grid")


@pytest.mark.parametrize("algo", ["tpe", "evolution"])
@pytest.mark.parametrize("mode", ["minimize", "maximize"])
def test_what_is_learnt_points_in_the_right_direction(algo, mode):
    space = {name: TunableItemCfg("randint", [0, 8]) for name in "abcd"}

    def value(sample):
        return float(sum(sample.values()))

    tuner = Tunable.create_tuner(algo, space, {} if mode == "minimize" else {"optimize_mode": mode})
    values = [value(point) for point in run(tuner, 90, value)]
    early, late = sum(values[:15]) / 15, sum(values[-15:]) / 15
    assert late < early - 3 if mode == "minimize" else late > early + 3
    assert tuner.best.value == (min(values) if mode == "minimize" else max(values))


# ---------------------------------------------------------------------- the protocol


def test_results_may_come_in_any_order_and_as_nni_reports_them():
    tuner = Tunable.create_tuner("grid", {"x": TunableItemCfg("choice", [1, 2, 3])})
    points = {number: tuner.generate_parameters(number) for number in (7, 8, 9)}
    tuner.receive_trial_result(9, points[9], {"default": 1.5, "memory": 3})
    tuner.receive_trial_result(7, points[7], float("nan"))
    tuner.trial_end(9, success=True)
    tuner.trial_end(8, success=False)
    assert [(trial.params["x"], trial.value, trial.state) for trial in tuner.trials] == [
        (3, 1.5, "complete"),
        (1, None, "failed"),
        (2, None, "failed"),
    ]
    assert [trial.reason for trial in tuner.trials] == ["", "the value is nan", "the trial ended without a result"]


def test_results_of_something_else_are_refused():
    tuner = Tunable.create_tuner("grid", {"x": TunableItemCfg("choice", [1, 2, 3])})
    point = tuner.generate_parameters(0)
    with pytest.raises(NameNotFoundError, match="parameter_id 1; allowed: 0"):
        tuner.receive_trial_result(1, point, 1.0)
    with pytest.raises(ValueRangeError, match=r"the result of \{'x': 2\}"):
        tuner.receive_trial_result(0, {"x": 2}, 1.0)
    with pytest.raises(ValueRangeError, match="tell its result first"):
        tuner.generate_parameters(0)
    tuner.receive_trial_result(0, point, 1.0)
    with pytest.raises(NameNotFoundError, match="allowed: none"):
        tuner.receive_trial_result(0, point, 1.0)


@pytest.mark.parametrize(
    ("algo", "kw", "error", "text"),
    [
        ("tpee", {}, NameNotFoundError, "did you mean 'tpe'"),
        (None, {}, NameNotFoundError, "unknown tuning algorithm"),
        ("rand", {"sede": 1}, NameNotFoundError, "did you mean 'seed'"),
        ("rand", {"population_size": 4}, NameNotFoundError, "setting of the tuner 'rand'"),
        ("evolution", {"population_size": 0}, ValueRangeError, "population_size is 0"),
        ("tpe", {"n_startup_trials": 2.5}, ValueRangeError, "n_startup_trials is 2.5"),
        ("rand", {"seed": -1}, ValueRangeError, "seed is -1"),
        ("rand", {"optimize_mode": "minimise"}, NameNotFoundError, "did you mean 'minimize'"),
        ("rand", {"storage": "tuning.journal"}, ValueRangeError, "without a study_name"),
    ],
)
def test_bad_tuners_are_refused(algo, kw, error, text):
    with pytest.raises(error, match=text):
        Tunable.create_tuner(algo, NESTED, kw)


def test_a_grid_needs_a_finite_space():
    with pytest.raises(ValueRangeError, match="a grid over a space with a continuous range"):
        Tunable.create_tuner("grid", {"x": TunableItemCfg("uniform", [0, 1])})


def test_a_space_must_be_one():
    with pytest.raises(SpartaError, match="TunableItemCfg"):
        Tunable.create_tuner("rand", {"x": [1, 2, 3]})


# ---------------------------------------------------------------------- storage


@pytest.fixture(params=["sqlite", "journal", "object"])
def storage(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tuning.db'}"
    if request.param == "journal":
        return tmp_path / "tuning.journal"
    return optuna.storages.InMemoryStorage()


@pytest.mark.parametrize("algo", ["grid", "rand", "evolution"])
def test_a_resumed_study_goes_on_as_if_it_had_never_stopped(algo, tmp_path):
    kw = {"seed": 5} | ({"population_size": 3} if algo == "evolution" else {})
    whole = run(Tuner(NESTED, algo, **kw), 10)
    parts = []
    for _ in range(2):
        tuner = Tuner(NESTED, algo, storage=tmp_path / "study", study_name="s", **kw)
        parts += run(tuner, 5)
        tuner.close()
    assert parts == whole


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_machines_that_share_a_study_share_the_work(algo, storage):
    tuners = [Tuner(NESTED, algo, seed=seed, storage=storage, study_name="shared") for seed in (0, 1)]
    points = []
    for number in range(10):
        tuner = tuners[number % 2]
        points.append(tuner.generate_parameters(number))
        tuner.receive_trial_result(number, points[-1], cost(points[-1]))
    assert len(points) == len(set(keys(NESTED, points))) == 10
    for tuner in tuners:
        with pytest.raises(NoMoreTrial):
            tuner.generate_parameters(10)
        assert len(tuner.trials) == 10
        assert tuner.best.value == min(map(cost, points))
        tuner.close()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_points_of_a_process_that_died_come_last_but_come(algo, tmp_path):
    kw = {"storage": tmp_path / "study", "study_name": "s"}
    dead = Tuner(NESTED, algo, **kw)
    lost = [dead.generate_parameters(number) for number in range(3)]
    points = run(Tuner(NESTED, algo, seed=1, **kw), 100)
    assert len(points) == 10
    assert set(keys(NESTED, points[-3:])) == set(keys(NESTED, lost))


def test_a_trial_that_another_process_finished_first_is_no_error():
    storage = optuna.storages.InMemoryStorage()
    tuner = Tuner(NESTED, "grid", storage=storage, study_name="s")
    points = [tuner.generate_parameters(number) for number in range(2)]
    for number in range(2):
        optuna.load_study(storage=storage, study_name="s").tell(number, 5.0)
    tuner.receive_trial_result(0, points[0], 1.0)
    tuner.close()
    assert [trial.value for trial in tuner.trials] == [1.0]


def test_points_that_were_dropped_are_tried_later(tmp_path):
    kw = {"storage": tmp_path / "study", "study_name": "s"}
    first = Tuner(NESTED, "grid", **kw)
    dropped = first.generate_parameters(0)
    first.close()
    second = Tuner(NESTED, "grid", **kw)
    assert second.trials == ()
    assert second.generate_parameters(0) == dropped


def test_trials_of_other_programs_in_the_study_count():
    storage = optuna.storages.InMemoryStorage()
    space = {"x": TunableItemCfg("choice", [1, 2, 3, 4, 5])}
    Tuner(space, "grid", storage=storage, study_name="s").close()
    study = optuna.load_study(storage=storage, study_name="s")

    def foreign(point, value=None, state=None):
        study.enqueue_trial({"/x": str(point)})
        trial = study.ask()
        trial.suggest_categorical("/x", ["1", "2", "3", "4", "5"])
        study.tell(trial, value, state)

    foreign(1, 0.5)
    foreign(2, float("inf"))
    foreign(3, state=optuna.trial.TrialState.PRUNED)
    foreign(4, state=optuna.trial.TrialState.FAIL)
    study.tell(study.ask(), 7.0)  # of no parameters: not a point of this space
    tuner = Tuner(space, "grid", storage=storage, study_name="s")
    states = {trial.params["x"]: trial.state for trial in tuner.trials}
    assert states == {1: "complete", 2: "failed", 3: "pruned"}
    assert [point["x"] for point in run(tuner, 9)] == [4, 5]


def test_a_study_of_another_space_or_direction_is_refused(storage):
    Tuner(NESTED, storage=storage, study_name="s").close()
    with pytest.raises(ValueRangeError, match="searches another space"):
        Tuner({"x": TunableItemCfg("choice", [1])}, storage=storage, study_name="s")
    with pytest.raises(ValueRangeError, match="is to minimize; allowed: a study to maximize"):
        Tuner(NESTED, storage=storage, study_name="s", optimize_mode="maximize")


@pytest.mark.parametrize("bad", ["sqlite:////no/such/folder/tuning.db", "/no/such/folder/tuning", "magic://x", 3])
def test_a_storage_that_cannot_be_opened_is_named(bad):
    with pytest.raises(ValueRangeError, match="cannot open the storage"):
        Tuner(NESTED, storage=bad, study_name="s")


def test_optuna_is_silent_and_left_as_it_was(capfd, tmp_path):
    verbosity = optuna.logging.get_verbosity()
    filters = list(warnings.filters)
    run(Tuner(NESTED, "tpe", n_startup_trials=2, storage=tmp_path / "study", study_name="s"), 20)
    assert optuna.logging.get_verbosity() == verbosity
    assert warnings.filters == filters
    assert capfd.readouterr() == ("", "")
