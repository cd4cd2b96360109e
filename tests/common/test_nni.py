"""Every tuner is a Tunable; tuners of NNI work where they are at hand; workers share a study through a journal."""

import subprocess
import sys

import pytest

from sparta.common.nni import NNITuner
from sparta.common.tuning import Tunable, TunableItemCfg, search
from sparta.errors import MissingPackageError, NameNotFoundError, ValueRangeError

NESTED = TunableItemCfg(
    "choice",
    _is_nested=True,
    _value={"dense": {}, "block": {"tile": TunableItemCfg("choice", _value=[16, 32])}},
)


class Remembering:
    """A tuner as NNI's are: it goes through the alternatives of a space in its own notation."""

    def __init__(self):
        self.results = []

    def update_search_space(self, space):
        self.space = space

    def generate_parameters(self, parameter_id, **_):
        (name,) = self.space
        chosen = self.space[name]["_value"][parameter_id]
        return {name: {key: value["_value"][0] if isinstance(value, dict) else value for key, value in chosen.items()}}

    def receive_trial_result(self, parameter_id, parameters, value, **_):
        self.results.append((parameter_id, parameters, value))


def test_every_tuner_is_a_tunable():
    tuner = Tunable.create_tuner("grid", NESTED)
    assert isinstance(tuner, Tunable)
    assert isinstance(NNITuner(Remembering(), NESTED), Tunable)


def test_a_tuner_of_nni_proposes_points_of_our_spaces():
    theirs = Remembering()
    tuner = NNITuner(theirs, NESTED)
    assert tuner.generate_parameters(0) == {"_name": "dense"}
    found = tuner.generate_parameters(1)
    assert found == {"_name": "block", "tile": 16}
    tuner.receive_trial_result(1, found, 2.5)
    assert theirs.results == [(1, {"space": found}, 2.5)]


def test_without_nni_the_error_names_what_there_is():
    with pytest.raises(MissingPackageError, match="evolution, grid, rand, tpe"):
        Tunable.create_tuner("nni:TPE", NESTED)
    with pytest.raises(NameNotFoundError, match="did you mean 'TPE'"):
        Tunable.create_tuner("nni:TPEE", NESTED)
    with pytest.raises(ValueRangeError, match="update_search_space"):
        NNITuner(object(), NESTED)


WORKER = """
import sys
from sparta.common.tuning import TunableItemCfg, search
space = {"x": TunableItemCfg("randint", [0, 12])}
search(space, lambda p: (p["x"] - 7) ** 2, algo="rand", seed=int(sys.argv[2]), storage=sys.argv[1], study_name="shared")
"""


def test_workers_share_a_study_through_a_journal_and_repeat_nothing(tmp_path):
    journal = tmp_path / "tuning.journal"
    command = [sys.executable, "-c", WORKER, str(journal)]
    workers = [subprocess.Popen([*command, str(seed)], stderr=subprocess.PIPE, text=True) for seed in (1, 2)]
    for worker in workers:
        assert worker.wait(timeout=120) == 0, worker.stderr.read()
        worker.stderr.close()
    space = {"x": TunableItemCfg("randint", [0, 12])}
    result = search(space, lambda _: 0.0, algo="rand", storage=journal, study_name="shared")
    tried = [trial.params["x"] for trial in result.trials if trial.value is not None]
    assert sorted(set(tried)) == list(range(12))
    assert result.best == {"x": 7}
