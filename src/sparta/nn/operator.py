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

import torch
from torch import Tensor, nn

from sparta.common.tuning import TunableItemCfg
from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.implement import Kernel, search_space
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.forgiving import ForgivingStore
from sparta.specialize.tuning.select import Choice, Problem, build, choose, right_choice, tune_kernel
from sparta.specialize.tuning.store import TuningStore, key_of
from sparta.tesa.attribute import TeSA
from sparta.tesa.mask import as_mask

__all__ = [
    "KernelOperator",
    "OperatorBase",
    "SampleInputs",
    "Store",
    "as_inputs",
    "as_optional_inputs",
    "checked_mask",
    "demand",
    "need_tensors",
    "rows_to_check",
    "store_of",
]

SampleInputs = Sequence[Tensor | None] | Tensor
"""What `tune` and `build` take: the inputs of one call, as they will be in use."""

Store = TuningStore | Literal[False] | None
"""Where results of tuning are kept: None for the user's store on disk, False for nowhere."""


class OperatorBase(nn.Module):
    """Base of the sparse modules.

    `tune` measures, and `build` takes what a `tune` found without measuring. Subclasses define `tune`, `forward`,
    `_spec`, `_problem` and `_install`, and `update_mask` where they have a mask.
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

    @abstractmethod
    def tune(self, inputs: SampleInputs, **options: Any) -> Choice:
        """Measure all implements on these inputs and keep the fastest."""

    @abstractmethod
    def _spec(self, inputs: SampleInputs, *, backward: bool = False) -> KernelSpec:
        """Return the kernel spec for inputs like these; raises for inputs that do not fit."""

    @abstractmethod
    def _problem(self, inputs: SampleInputs, *, backward: bool) -> Problem:
        """Return what is to be measured, and checked, on these inputs."""

    @abstractmethod
    def _install(self, spec: KernelSpec, choice: Choice) -> None:
        """Build what was chosen and run it from now on."""

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

    def get_search_space(self, inputs: SampleInputs) -> TunableItemCfg:
        """Return the nested choice over the implements that can run, for inputs like these."""
        return search_space(self._spec(inputs))

    def build(self, config: Mapping[str, Any] | None, sample_inputs: SampleInputs) -> None:
        """Build the implement and parameters of `config`, as ``tune(...).config`` gave them, without measuring.

        None takes what was tuned for such inputs, by this module or, as the store on disk tells, by any other; else
        what the package's table has, else dense. The kernel is checked on these inputs against float64; where it is
        wrong, another runs, with a warning. Values that are not finite count as 0 there: they prove nothing.
        """
        problem = self._problem(_finite(sample_inputs), backward=False)
        choice = self._found(problem.spec, sample_inputs) if config is None else _as_given(config, problem.spec)
        right = right_choice(problem, choice)
        if right is not choice:
            warnings.warn(right.reason, stacklevel=2)
        self._install(problem.spec, right)

    def _found(self, spec: KernelSpec, inputs: SampleInputs) -> Choice:
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


class KernelOperator(OperatorBase):
    """An operator whose kernels are plain PyTorch code made for a mask, or for no mask at all.

    Its sparse tensor is an input or a result, so what kernels pack is the index of the mask; it lies in buffers that
    are not saved, and autograd follows the kernel. Subclasses define `_spec`, `_problem` and `_dense`, and call
    `_reset` when they are made and whenever their mask changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._packed_tensors = 0

    @abstractmethod
    def _dense(self) -> Kernel:
        """Return the kernel that runs until something is tuned or built."""

    def _mask(self) -> Tensor | None:
        """Return the mask that kernels pack, or None where there is none."""
        return None

    # ------------------------------------------------------------------ choosing

    def tune(
        self,
        inputs: SampleInputs,
        *,
        backward: bool = False,
        store: Store = None,
        **options: Any,
    ) -> Choice:
        """Measure all implements on these inputs and keep the fastest; dense stays if nothing is faster.

        Parameters
        ----------
        inputs
            The inputs of one call, as they will be in use. Others run as well.
        backward
            Whether to measure forward and backward together; one choice serves both.
        store
            Where results are looked up and kept: None for the user's store on disk, False for nowhere.
        options
            ``algo``, ``max_trials``, ``max_seconds``, ``seed``, ``progress``, see
            :func:`sparta.specialize.tuning.select.tune_kernel`; and ``known``, a dict of what equal layers of this run
            chose.
        """
        problem = self._problem(inputs, backward=backward)
        choice = self._measured(problem, store=store, **options)
        self._install(problem.spec, choice)
        self._tuned_for = key_of(problem.spec)
        return choice

    def _install(self, spec: KernelSpec, choice: Choice) -> None:
        self._hold(build(spec, choice.config))
        self.choice = choice

    # ------------------------------------------------------------------ running

    def _run(self, *inputs: Tensor | None) -> Tensor:
        packed = [getattr(self, f"_packed_{number}") for number in range(self._packed_tensors)]
        return self._kernel.run(packed, *inputs)

    def _hold(self, kernel: Kernel) -> None:
        """Run this kernel from now on."""
        for number in range(self._packed_tensors):
            delattr(self, f"_packed_{number}")
        mask = self._mask()
        packed = () if mask is None else kernel.pack(mask)
        for number, tensor in enumerate(packed):
            self.register_buffer(f"_packed_{number}", tensor, persistent=False)
        self._kernel, self._packed_tensors = kernel, len(packed)

    def _reset(self) -> None:
        """Run dense: what was tuned was tuned for another mask."""
        self.choice = None
        self._hold(self._dense())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the mask; another one than the present undoes what was tuned for it."""
        mask = self._mask()
        before = None if mask is None else mask.clone()
        super()._load_from_state_dict(state_dict, prefix, *args)
        if before is not None and not torch.equal(before, cast("Tensor", self._mask()).to(before.device)):
            self._reset()


def _as_given(config: Mapping[str, Any], spec: KernelSpec) -> Choice:
    """Return the choice that a config says; raises where it is no point of the search space."""
    space = search_space(spec)
    if not isinstance(config, Mapping) or not space.includes(dict(config)):
        given = f"the config {dict(config) if isinstance(config, Mapping) else config!r}"
        raise ValueRangeError(message(given, f"a point of the search space {space}", "tune this module first"))
    params = {key: value for key, value in config.items() if key != "_name"}
    return Choice(str(config["_name"]), params, "built as given")


def _finite(inputs: SampleInputs) -> SampleInputs:
    if isinstance(inputs, Tensor):
        return torch.nan_to_num(inputs, 0.0, 0.0, 0.0) if inputs.is_floating_point() else inputs
    return [_finite(x) if isinstance(x, Tensor) else x for x in inputs] if isinstance(inputs, Sequence) else inputs  # type: ignore[misc]


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


def rows_to_check(x: Tensor, most: int = 256) -> tuple[Tensor | None, Tensor]:
    """Return which rows of an input have their results compared with float64, and those rows.

    None stands for all; of more than `most`, so many are taken, both ends among them.

    >>> checked, rows = rows_to_check(torch.arange(1000), most=3)
    >>> rows.tolist(), rows_to_check(torch.arange(3))[0]
    ([0, 499, 999], None)
    """
    if len(x) <= most:
        return None, x
    checked = torch.linspace(0, len(x) - 1, most, dtype=torch.float64).long().to(x.device)
    return checked, x[checked]


def need_tensors(**inputs: object) -> None:
    """Raise unless all inputs of a call, by name, are tensors.

    >>> need_tensors(x=[1.0])
    Traceback (most recent call last):
    sparta.errors.ValueRangeError: x of type list; allowed: a torch.Tensor.
    """
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise ValueRangeError(message(f"{name} of type {type(value).__name__}", "a torch.Tensor"))


def as_inputs(inputs: SampleInputs, count: int) -> tuple[Tensor, ...]:
    """Return sample inputs as a tuple; ``(A)`` is a tensor and not a tuple, and means the same."""
    return cast("tuple[Tensor, ...]", as_optional_inputs(inputs, count, 0))


def as_optional_inputs(inputs: SampleInputs, count: int, optional: int) -> tuple[Tensor | None, ...]:
    """Return `count` tensors and `optional` more that may be None or left out."""
    if not isinstance(inputs, (Tensor, Sequence)):
        raise ValueRangeError(message(f"sample inputs of type {type(inputs).__name__}", "a tensor or a tuple of them"))
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    right = count <= len(given) <= count + optional and all(isinstance(t, Tensor) for t in given[:count])
    if not right or not all(t is None or isinstance(t, Tensor) for t in given):
        allowed = f"a tuple of {count} tensors" + (f" and up to {optional} more" if optional else "")
        raise ValueRangeError(message(f"{len(given)} sample inputs", allowed, "inputs=(x,)"))
    return (*given, *[None] * (count + optional - len(given)))


def demand(holds: Tensor, numbers: Tensor, what: str) -> None:
    """Raise unless a condition on the values of an input holds everywhere.

    On a GPU nothing waits for the answer: the device itself stops, so that a kernel never reads what is not there. A
    compiled graph cannot stop to look at numbers, and does not.

    >>> demand(torch.tensor([True]), torch.tensor([1]), "it must be 1")
    """
    if torch.compiler.is_compiling():
        return
    if numbers.is_cuda:
        torch._assert_async(holds.all(), what)
    elif not bool(holds.all()):
        raise ValueRangeError(message(f"{what}, not from {int(numbers.min())} to {int(numbers.max())}"))


def checked_mask(mask: Tensor | TeSA, name: str) -> Tensor:
    """Return a copy of a mask of shape (..., rows, cols) as bool; raises for what is no such mask."""
    if not isinstance(mask, (Tensor, TeSA)):
        raise ValueRangeError(message(f"{name} of type {type(mask).__name__}", "a bool tensor or a TeSA"))
    kept = mask.mask() if isinstance(mask, TeSA) else as_mask(mask.detach()).clone()
    if kept.dim() < 2:
        raise ShapeError(message(f"{name} of shape {tuple(kept.shape)}", "(..., rows, cols)"))
    return kept.contiguous()
