"""OperatorBase: what every sparse module is: a drop-in for a dense one that owns several implements.

Until it is tuned or built it runs dense, so it can be put in place first and made fast later. The one idea to know: its
parameters are the dense module's own, so optimizers, checkpoints and weight tying never notice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparta.common.tuning import TunableItemCfg
from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.implement import Kernel, search_space
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.store import TuningStore
from sparta.specialize.tuner import Choice, Problem, build, choose, tune_kernel
from sparta.tesa.attribute import TeSA
from sparta.tesa.mask import as_mask

__all__ = [
    "KernelOperator",
    "OperatorBase",
    "SampleInputs",
    "as_inputs",
    "as_optional_inputs",
    "checked_mask",
    "demand",
]

SampleInputs = Sequence[Tensor | None] | Tensor
"""What `tune` and `build` take: the inputs of one call, as they will be in use."""


class OperatorBase(nn.Module):
    """Base of the sparse modules.

    `tune` measures, and `build` takes what a `tune` returned (its ``config``) without measuring. Subclasses define
    `tune`, `forward`, `_spec` and `_install`, and `update_mask` where they have a mask.
    """

    choice: Choice | None
    """What runs and why; None until tuned or built."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = None

    @property
    def ready(self) -> bool:
        """Whether it was tuned or built; dense runs until then."""
        return self.choice is not None

    @abstractmethod
    def tune(self, inputs: SampleInputs, **options: Any) -> Choice:  # noqa: ANN401 - the tuner's
        """Measure all implements on these inputs and keep the fastest."""

    @abstractmethod
    def _spec(self, inputs: SampleInputs, *, backward: bool = False) -> KernelSpec:
        """Return the kernel spec for inputs like these; raises for inputs that do not fit."""

    @abstractmethod
    def _install(self, spec: KernelSpec, choice: Choice) -> None:
        """Build what was chosen and run it from now on."""

    def get_search_space(self, inputs: SampleInputs) -> TunableItemCfg:
        """Return the nested choice over the implements that can run, for inputs like these."""
        return search_space(self._spec(inputs))

    def build(self, config: Mapping[str, Any] | None, sample_inputs: SampleInputs) -> None:
        """Build the implement and parameters of `config`, as ``tune(...).config`` gave them, without measuring.

        None takes what the tuning store has for such inputs, else what the package's table has, else dense.
        """
        spec = self._spec(sample_inputs)
        if config is None:
            self._install(spec, choose(spec, TuningStore()))
            return
        space = search_space(spec)
        if not space.includes(dict(config)):
            raise ValueRangeError(
                message(f"the config {dict(config)}", f"a point of the search space {space}", "tune this module first")
            )
        params = {key: value for key, value in config.items() if key != "_name"}
        self._install(spec, Choice(str(config["_name"]), params, "built as given"))

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
    def _problem(self, inputs: SampleInputs, *, backward: bool) -> Problem:
        """Return what is to be measured on these inputs."""

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
        store: TuningStore | None = None,
        **options: Any,  # noqa: ANN401 - passed on to `tune_kernel`
    ) -> Choice:
        """Measure all implements on these inputs and keep the fastest; dense stays if nothing is faster.

        Parameters
        ----------
        inputs
            The inputs of one call, as they will be in use. Others run as well.
        backward
            Whether to measure forward and backward together; one choice serves both.
        store
            Where results are kept for the next time; None keeps nothing.
        options
            ``algo``, ``max_trials``, ``max_seconds``, ``seed``, ``progress``; see
            :func:`sparta.specialize.tuner.tune_kernel`.
        """
        problem = self._problem(inputs, backward=backward)
        choice = tune_kernel(problem, store=store, **options)
        self._install(problem.spec, choice)
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # noqa: ANN401
        """Load the mask; another one than the present undoes what was tuned for it."""
        mask = self._mask()
        before = None if mask is None else mask.clone()
        super()._load_from_state_dict(state_dict, prefix, *args)
        if before is not None and not torch.equal(before, cast("Tensor", self._mask()).to(before.device)):
            self._reset()


def as_inputs(inputs: SampleInputs, count: int) -> tuple[Tensor, ...]:
    """Return sample inputs as a tuple; ``(A)`` is a tensor and not a tuple, and means the same."""
    return cast("tuple[Tensor, ...]", as_optional_inputs(inputs, count, 0))


def as_optional_inputs(inputs: SampleInputs, count: int, optional: int) -> tuple[Tensor | None, ...]:
    """Return `count` tensors and `optional` more that may be None or left out."""
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
