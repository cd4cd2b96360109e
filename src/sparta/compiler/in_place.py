"""`optimize`: the same model object, with sparse layers inside where they are faster.

For those who must keep the class of a model, its methods and its configuration: nothing is captured, only layers are
replaced by modules of the same parameters. :func:`sparta.compile` gains more, because it sees the whole graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparta.common.progress import Progress
from sparta.compiler.api import evaluating
from sparta.compiler.calls import runnable, several
from sparta.compiler.choose.timer import ROUNDS, Timer
from sparta.compiler.session import EFFORT, Session, Tune, in_words, shown
from sparta.compiler.verify import agree, tolerance_of
from sparta.errors import ValueRangeError, message
from sparta.measure.untouched import untouched
from sparta.modules import replace_module, unwrapped
from sparta.nn.operator import OperatorBase
from sparta.nn.swap import swap
from sparta.nn.tuning import build
from sparta.nn.tuning import tune as tune_modules
from sparta.propagation.capture import call_arguments
from sparta.specialize.tuning.select import DENSE
from sparta.spelling import also
from sparta.tesa.spec import Spec

__all__ = ["optimize"]

Model = TypeVar("Model", bound=nn.Module)


@also(inputs="example_inputs", sample_inputs="example_inputs")
def optimize(
    model: Model,
    example_inputs: Any,
    spec: Spec | None = None,
    *,
    tune: Tune = "quick",
    budget_s: float | None = None,
    progress: Progress | bool | None = None,
) -> Model:
    """Replace the layers of a model by sparse ones where these are faster, in place, and return the model.

    Parameters
    ----------
    model
        Its class, methods, configuration and parameters stay; so does the structure of its state dict.
    example_inputs
        As in :func:`sparta.compile`; of several calls the first is measured.
    spec
        What is pruned; None reads the zeros that are in the weights.
    tune
        ``"quick"`` and ``"full"`` measure every layer; ``"off"`` takes what earlier runs stored.
    budget_s
        Seconds for all layers together.
    progress
        As in :func:`sparta.compile`.

    Returns
    -------
    The model itself. What runs is told by ``print(model)``: each sparse layer says which kernel it has.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    >>> optimize(model, torch.randn(4, 16), tune="off") is model
    True
    """
    if not isinstance(model, nn.Module):
        raise ValueRangeError(message(f"a {type(model).__name__}", "a torch.nn.Module"))
    session = Session(tune=tune, budget_s=budget_s, show=shown(progress))
    inner = unwrapped(model)
    calls = several(example_inputs)
    with untouched(inner, tuple(calls)), evaluating(inner):
        example = runnable(inner, calls[0])
        work = _Layers(inner, example, spec)
        if work.swapped:
            work.choose(session)
            work.keep_what_pays(session)
    return model


class _Layers:
    """The layers of a model that were replaced, and what they were."""

    def __init__(self, model: nn.Module, example: Any, spec: Spec | None) -> None:
        self.model, self.example = model, example
        before = dict(model.named_modules())
        if spec is not None:
            spec.apply(model)
        self.expected = self._results()
        self.swapped: dict[str, OperatorBase] = swap(model, spec)
        self.dense = {name: before[name] for name in self.swapped}

    def choose(self, session: Session) -> None:
        """Tune the sparse layers, and put those back that dense runs faster."""
        trials, _ = EFFORT.get(session.tune, (0, 0.0))
        try:
            if session.tune == "off":
                build(self.model, self.example)
            else:
                tune_modules(self.model, self.example, budget_s=session.budget_s, progress=False, max_trials=trials)
        except Exception as error:  # noqa: BLE001 - whatever a kernel does, the dense layers are there
            session.show(f"no layer is sparse: {in_words(error)}")
            self._put_back(list(self.swapped))
            return
        self._put_back([n for n, m in self.swapped.items() if m.choice is None or m.choice.implement == DENSE])

    def keep_what_pays(self, session: Session) -> None:
        """Put all layers back where the whole is wrong or slower with them."""
        if not self.swapped:
            return
        try:
            agree(self.expected, self._results(), least=tolerance_of(self.model.parameters()))
        except Exception as error:  # noqa: BLE001 - wrong numbers, or code that asks for the dense layer's class
            session.show(f"no layer is sparse: {in_words(error)}")
            self._put_back(list(self.swapped))
            return
        if session.tune == "off" or session.left <= 0:
            return
        before = session.elapsed
        self._call()
        timer = Timer(session, session.measure, session.elapsed - before)
        sparse = dict(self.swapped)
        rounds = timer.rounds({"dense": lambda: self._with(self.dense), "sparse": lambda: self._with(sparse)}, ROUNDS)
        self._with(sparse)
        if rounds.ratio("dense", "sparse").value < 1:
            self._put_back(list(self.swapped))

    def _with(self, layers: Any) -> Any:
        for name, layer in layers.items():
            if name in self.swapped:
                replace_module(self.model, name, layer)
        return self._call()

    def _put_back(self, names: Sequence[str]) -> None:
        for name in names:
            replace_module(self.model, name, self.dense[name])
            del self.swapped[name]

    def _call(self) -> Any:
        args, kwargs = call_arguments(self.example)
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def _results(self) -> list[Any]:
        with untouched(self.model, self.example):
            torch.manual_seed(0)
            leaves = pytree.tree_leaves(self._call())
            return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
