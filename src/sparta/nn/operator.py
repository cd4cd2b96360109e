"""OperatorBase: what every sparse module is: a drop-in for a dense one that owns several implements.

Until it is tuned or built it runs dense, so it can be put in place first and made fast later. Its parameters are the
dense module's own, so optimizers, checkpoints and weight tying never notice. What `tune` measures is kept in the user's
store on disk, where `build` finds it.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from torch import nn

from sparta.common.tuning import TunableItemCfg
from sparta.errors import ValueRangeError, message
from sparta.nn.inputs import ExampleInputs, finite
from sparta.specialize.implement import search_space
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.forgiving import ForgivingStore
from sparta.specialize.tuning.select import Choice, Problem, choose, right_choice, tune_kernel
from sparta.specialize.tuning.store import TuningStore, key_of
from sparta.spelling import also

__all__ = ["Chosen", "OperatorBase", "Store", "store_of"]

Chosen = tuple[KernelSpec, Choice]
"""A kernel spec and what was chosen for it."""

Store = TuningStore | Literal[False] | None
"""Where results of tuning are kept: None for the user's store on disk, False for nowhere."""


class OperatorBase(nn.Module):
    """Base of the sparse modules.

    `tune` measures, and `build` takes what a `tune` found without measuring. Subclasses define `forward`, `_spec`,
    `_problem` and `_install`, and `update_mask` where they have a mask.
    """

    choice: Choice | None
    """What runs and why; None until tuned or built."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = None
        self._tuned_for = ""  # the key of the spec that was measured last

    @property
    def ready(self) -> bool:
        """Whether it was tuned or built; dense runs until then."""
        return self.choice is not None

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def _spec(self, inputs: ExampleInputs, *, backward: bool = False) -> KernelSpec:
        """Return the kernel spec for inputs like these; raises for inputs that do not fit."""

    @abstractmethod
    def _problem(self, inputs: ExampleInputs, *, backward: bool) -> Problem:
        """Return what is to be measured, and checked, on these inputs."""

    def _problems(self, inputs: ExampleInputs, *, backward: bool) -> tuple[Problem, ...]:
        """Return all that is to be measured on these inputs, the call itself first."""
        return (self._problem(inputs, backward=backward),)

    @abstractmethod
    def _install(self, chosen: Sequence[Chosen]) -> None:
        """Build what was chosen for each problem, or for the first alone, and run it from now on."""

    # ------------------------------------------------------------------ choosing

    def problem(self, example_inputs: ExampleInputs, *, backward: bool = False) -> Problem:
        """Return what `tune` measures on these inputs: kernel spec, operands and the right result."""
        return self._problem(example_inputs, backward=backward)

    @also(inputs="example_inputs", max_seconds="budget_s")
    def tune(
        self,
        example_inputs: ExampleInputs,
        *,
        backward: bool = False,
        store: Store = None,
        budget_s: float | None = 10.0,
        **options: Any,
    ) -> Choice:
        """Measure all implements on these inputs and keep the fastest; dense stays if nothing is faster.

        Parameters
        ----------
        example_inputs
            The inputs of one call, as they will be in use: sizes decide which implement wins. Others run as well. The
            documents call them ``inputs``.
        backward
            Whether to measure for training too: forward and backward together, or, for a sparse weight of a linear
            layer, a kernel for the gradient of its input. Modules without sparse gradients take it and ignore it.
        store
            Where results are looked up and kept: None for the user's store on disk, False for nowhere.
        budget_s
            Seconds for all of it; None sets no limit.
        options
            Of the search: ``algo``, ``max_trials``, ``seed``, ``progress``, see
            :func:`sparta.specialize.tuning.select.tune_kernel`; and ``known``, a dict of what equal layers of this run
            chose.
        """
        if budget_s is not None and not budget_s > 0:
            raise ValueRangeError(message(f"budget_s={budget_s}", "seconds above 0, or None for no limit"))
        problems = self._problems(example_inputs, backward=backward)
        share = None if budget_s is None else budget_s / len(problems)
        chosen = [
            (problem.spec, self._measured(problem, store=store, max_seconds=share, **options)) for problem in problems
        ]
        self._install(chosen)
        spec, choice = chosen[0]
        self._tuned_for = key_of(spec)
        return choice

    def _measured(
        self,
        problem: Problem,
        *,
        store: Store,
        known: dict[str, Choice] | None = None,
        **options: Any,
    ) -> Choice:
        """Return the tuner's choice, or the one that is `known` of an equal layer; `known` takes what is found."""
        key, kept = key_of(problem.spec), store_of(store)
        if known is None or key not in known:
            choice = tune_kernel(problem, store=kept, **options)
            if known is not None and not (choice.result is not None and choice.result.interrupted):
                known[key] = choice
            return choice
        found = known[key]
        return right_choice(problem, replace(found, reason=f"{found.reason}, as for an equal layer", result=None))

    @also(inputs="example_inputs")
    def get_search_space(self, example_inputs: ExampleInputs) -> TunableItemCfg:
        """Return the nested choice over the implements that can run, for inputs like these."""
        return search_space(self._spec(example_inputs))

    @also(inputs="example_inputs", sample_inputs="example_inputs")
    def build(self, example_inputs: ExampleInputs, config: Mapping[str, Any] | None = None) -> None:
        """Build the implement and parameters of `config`, as ``tune(...).config`` gave them, without measuring.

        None takes what was tuned for such inputs, by this module or, as the store on disk tells, by any other; else
        what the package's table has, else dense. The kernel is checked on these inputs against float64; where it is
        wrong, another runs, with a warning. Values that are not finite count as 0 there: they prove nothing. The order
        of the original, config first, is understood too: inputs are never a mapping.
        """
        if example_inputs is None or isinstance(example_inputs, Mapping):
            self._build(cast("ExampleInputs", config), example_inputs)
        else:
            self._build(example_inputs, config)

    def _build(self, inputs: ExampleInputs, config: Mapping[str, Any] | None) -> None:
        problem = self._problem(finite(inputs), backward=False)
        choice = self._found(problem.spec, inputs) if config is None else _as_given(config, problem.spec)
        right = right_choice(problem, choice)
        if right is not choice:
            warnings.warn(right.reason, stacklevel=4)
        self._install([(problem.spec, right)])

    def _found(self, spec: KernelSpec, inputs: ExampleInputs) -> Choice:
        """Return what was tuned for these inputs, here or elsewhere, forward or with gradients; else a guess."""
        for tuned in (spec, self._spec(inputs, backward=True)):
            stored = choose(tuned, ForgivingStore())
            if stored.entry is not None:
                return stored
            if self.choice is not None and self._tuned_for == key_of(tuned):
                return self.choice  # tuned by this module, and kept nowhere else
        return choose(spec)

    def extra_repr(self) -> str:
        """Say what runs."""
        return str(self.choice) if self.choice is not None else "dense until tuned"


def _as_given(config: Mapping[str, Any], spec: KernelSpec) -> Choice:
    """Return the choice that a config says; raises where it is no point of the search space."""
    space = search_space(spec)
    if not isinstance(config, Mapping) or not space.includes(dict(config)):
        given = f"the config {dict(config) if isinstance(config, Mapping) else config!r}"
        raise ValueRangeError(message(given, f"a point of the search space {space}", "tune this module first"))
    params = {key: value for key, value in config.items() if key != "_name"}
    return Choice(str(config["_name"]), params, "built as given")


def store_of(store: object) -> TuningStore | None:
    """Return where results are looked up and kept: the store, the user's own on disk for None, nothing for False.

    >>> store_of(False) is None, isinstance(store_of(None), TuningStore)
    (True, True)
    """
    if store is None:
        return ForgivingStore()
    if store is False:
        return None
    if isinstance(store, TuningStore):
        return store
    allowed = "a TuningStore, None for the store on disk, False to keep nothing"
    raise ValueRangeError(message(f"a store of type {type(store).__name__}", allowed))
