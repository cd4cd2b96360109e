"""KernelOperator: an operator whose kernels are plain PyTorch code made for a mask, or for no mask at all.

Its sparse tensor is an input or a result, so what kernels pack is the index of the mask; it lies in buffers that move
with the module and are not saved, and autograd follows the kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparta.nn.operator import Chosen, OperatorBase
from sparta.specialize.implement import Kernel
from sparta.specialize.tuning.select import build

__all__ = ["KernelOperator", "PackedIndex"]


class PackedIndex(nn.Module):
    """What holds a built kernel together with the index of a mask that it packed."""

    _packed_tensors = 0
    _instead: Callable[..., Tensor] | None = None

    @contextmanager
    def run_by(self, function: Callable[..., Tensor]) -> Iterator[None]:
        """Let a function run instead of the kernel within the block; it gets the inputs that the kernel would get."""
        before, self._instead = self._instead, function
        try:
            yield
        finally:
            self._instead = before

    def _hold(self, kernel: Kernel, mask: Tensor | None) -> None:
        """Run this kernel from now on."""
        self._release()
        packed = () if mask is None else kernel.pack(mask)
        for number, tensor in enumerate(packed):
            self.register_buffer(f"_packed_{number}", tensor, persistent=False)
        self._kernel, self._packed_tensors = kernel, len(packed)

    def _release(self) -> None:
        """Hold nothing."""
        for number in range(self._packed_tensors):
            delattr(self, f"_packed_{number}")
        self._packed_tensors = 0

    def _run(self, *inputs: Tensor | None) -> Tensor:
        if self._instead is not None:
            return self._instead(*inputs)
        packed = [getattr(self, f"_packed_{number}") for number in range(self._packed_tensors)]
        return self._kernel.run(packed, *inputs)


class KernelOperator(PackedIndex, OperatorBase):
    """Base of the operators that hold no weight of their own.

    Subclasses define `_spec`, `_problem` and `_dense`, and call `_reset` when they are made and whenever their mask
    changes.
    """

    @abstractmethod
    def _dense(self) -> Kernel:
        """Return the kernel that runs until something is tuned or built."""

    def _mask(self) -> Tensor | None:
        """Return the mask that kernels pack, or None where there is none."""
        return None

    def _install(self, chosen: Sequence[Chosen]) -> None:
        spec, choice = chosen[0]
        self._hold(build(spec, choice.config), self._mask())
        self.choice = choice

    def _reset(self) -> None:
        """Run dense: what was tuned was tuned for another mask."""
        self.choice = None
        self._hold(self._dense(), self._mask())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the mask; another one than the present undoes what was tuned for it."""
        mask = self._mask()
        before = None if mask is None else mask.clone()
        super()._load_from_state_dict(state_dict, prefix, *args)
        if before is not None and not torch.equal(before, cast("Tensor", self._mask()).to(before.device)):
            self._reset()
