"""Tuners of NNI, where a copy of it is installed: their points in our notation, and our results in theirs.

NNI was archived in 2024 and its work goes on in Optuna, which the tuners here use. What it left behind is a notation
for search spaces, which is the one of :class:`~sparta.common.space.TunableItemCfg`, and an interface of three methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from sparta.common.sampler import Tunable
from sparta.common.space import Sample, Space, TunableItemCfg, normalize, to_nni_search_space
from sparta.errors import MissingPackageError, NameNotFoundError, ValueRangeError, did_you_mean, message

__all__ = ["NNITuner", "nni_tuner"]

_TUNERS = {
    "TPE": ("nni.algorithms.hpo.tpe_tuner", "TpeTuner"),
    "Random": ("nni.algorithms.hpo.random_tuner", "RandomTuner"),
    "GridSearch": ("nni.algorithms.hpo.gridsearch_tuner", "GridSearchTuner"),
    "Evolution": ("nni.algorithms.hpo.evolution_tuner", "EvolutionTuner"),
    "Anneal": ("nni.algorithms.hpo.hyperopt_tuner", "HyperoptTuner"),
}
_ONE = "space"  # what a space that is one item is called over there, where spaces are mappings


class NNITuner(Tunable):
    """A tuner of NNI as one of ours.

    Parameters
    ----------
    tuner
        An object with ``update_search_space``, ``generate_parameters`` and ``receive_trial_result``.
    space
        What may be tried.
    """

    def __init__(self, tuner: Any, space: Space) -> None:
        needed = ("update_search_space", "generate_parameters", "receive_trial_result")
        missing = [name for name in needed if not callable(getattr(tuner, name, None))]
        if missing:
            given = f"a {type(tuner).__name__} without {', '.join(missing)}"
            raise ValueRangeError(message(given, "a tuner of NNI"))
        self.tuner, self.space = tuner, space
        self._is_one = isinstance(space, TunableItemCfg)
        written = to_nni_search_space(space)
        tuner.update_search_space({_ONE: written} if self._is_one else written)

    def generate_parameters(self, parameter_id: int) -> Sample:
        """Return a point to try, in our notation."""
        found = self.tuner.generate_parameters(parameter_id)
        return normalize(self.space, found[_ONE] if self._is_one else found)

    def receive_trial_result(self, parameter_id: int, parameters: Sample, value: float) -> None:
        """Hand a result over."""
        self.tuner.receive_trial_result(parameter_id, {_ONE: parameters} if self._is_one else parameters, value)


def nni_tuner(name: str, space: Space, settings: Mapping[str, Any]) -> NNITuner:
    """Return a tuner of NNI by its name; every one minimises unless `settings` say otherwise."""
    if name not in _TUNERS:
        raise NameNotFoundError(did_you_mean(name, _TUNERS, "tuner of NNI"))
    module, made = _TUNERS[name]
    try:
        kind = getattr(import_module(module), made)
    except ImportError as error:
        fix = "pip install nni, or take one of " + ", ".join(sorted(Tunable.supported_tuners()))
        raise MissingPackageError(message(f"the tuner nni:{name} without NNI", fix=fix)) from error
    given = {"optimize_mode": "minimize", **settings} if name not in {"Random", "GridSearch"} else dict(settings)
    return NNITuner(kind(**given), space)
