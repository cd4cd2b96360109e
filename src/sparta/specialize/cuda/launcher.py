"""Starting any Triton kernel with little work on the host: a compiled kernel is looked up by what Triton compiles for.

Triton's own call looks at every argument and binds it by name, which takes longer than to start the kernel. A
:class:`Launcher` keeps compiled kernels by dtype and alignment of tensors, by the few facts of numbers that count, and
by constants, and has the driver start them. This module imports nothing of Triton itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparta.specialize.cuda.direct import DirectKernel, direct_kernel
from sparta.specialize.cuda.nvrtc import current_device, raw_stream

__all__ = ["Launcher"]

_MOST_KERNELS = 256
_Known = tuple[DirectKernel, int, list[Any], tuple[int, ...], Sequence[Any]]


class Launcher:
    """Starts one Triton function on one-dimensional grids.

    Parameters
    ----------
    function
        Decorated by ``triton.jit``; all its parameters are given by position.
    interpreted
        Whether Triton's interpreter runs it.
    """

    def __init__(self, function: Any, *, interpreted: bool) -> None:
        self._function, self._interpreted = function, interpreted
        self._direct: dict[tuple[Any, ...], DirectKernel] = {}
        self._alike: dict[tuple[torch.device, Hashable], _Known] = {}
        self._constants = None if interpreted else [bool(each.is_constexpr) for each in function.params]

    def again(self, device: torch.device, like: Hashable, moved: Sequence[Tensor | None]) -> bool:
        """Start what an earlier call with an equal `like` started; False, and nothing is done, where there was none.

        Parameters
        ----------
        moved
            The tensors that stand at the places that the earlier call named as moving, in their order.
        """
        known = self._alike.get((device, like))
        if known is None or device.index != current_device():
            return False
        kernel, programs, numbers, moving, _ = known
        values = numbers.copy()
        for place, tensor in zip(moving, moved, strict=True):
            values[place] = tensor if tensor is None else tensor.data_ptr()
        kernel.start(programs, values, raw_stream(device))
        return True

    def __call__(
        self,
        programs: int,
        arguments: Sequence[Any],
        device: torch.device,
        options: Mapping[str, Any] | None = None,
        like: Hashable = None,
        moving: Sequence[int] = (),
    ) -> None:
        """Start `programs` programs.

        Parameters
        ----------
        arguments
            Tensors, None, numbers and constants in the function's order.
        options
            For Triton's compiler, such as ``num_warps``.
        like
            What programs, numbers, constants, options, dtypes and alignments all follow from, if the caller knows it:
            :meth:`again` then starts the same with other tensors.
        moving
            With `like`: the places of those arguments that may be other tensors, or other memory, in the next call.
        """
        if self._constants is None:
            self._function[(programs,)](*arguments)
            return
        if device.index != current_device():
            with torch.cuda.device(device):
                self(programs, arguments, device, options, like, moving)
            return
        chosen = dict(options or {})
        facts = [_fact(value, constant) for value, constant in zip(arguments, self._constants, strict=True)]
        key = (device, *facts, *chosen.items())
        found = self._direct.get(key)
        numbers = [_number(value) for value in arguments]
        if found is None:
            found = direct_kernel(self._function[(programs,)](*arguments, **chosen))
            if found is not None:
                _keep(self._direct, key, found)
        else:
            found.start(programs, numbers, raw_stream(device))
        if found is not None and like is not None:
            # What does not move is held, so that its memory is not given to others.
            held = [value for place, value in enumerate(arguments) if place not in moving]
            _keep(self._alike, (device, like), (found, programs, numbers, tuple(moving), held))


def _keep(kernels: dict[Any, Any], key: Hashable, kernel: Any) -> None:
    if len(kernels) >= _MOST_KERNELS:
        kernels.clear()
    kernels[key] = kernel


def _fact(value: Any, constant: bool) -> Any:  # noqa: FBT001 - a pair of a zip
    """Return all that Triton compiles for of an argument."""
    if constant or value is None:
        return value
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return float
    return value == 1, value % 16 == 0, value.bit_length() > 31


def _number(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value
