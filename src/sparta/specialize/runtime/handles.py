"""Handles: the one registry by which run-time ops find kernels, and the state that most of them find there.

Op schemas know no Python objects, so an op takes plain tensors and a number. An object is found by its number while it
lives, and only as the kind that the op asks for. Numbers are drawn at random, so that none that stands in a file or was
guessed ever means a live kernel.
"""

from __future__ import annotations

import copy
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from sparta.errors import SpartaError, message
from sparta.specialize.cuda.graphs import keep as keep_in_graph
from sparta.specialize.cuda.graphs import weight_packed
from sparta.specialize.cuda.nvrtc import raw_stream
from sparta.specialize.implement import Kernel
from sparta.tesa.attribute import TeSA

__all__ = ["KernelState", "find", "register", "state_of"]

_BITS = 62  # op schemas hold signed numbers of 64 bits
_found: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
FastPath = Callable[[Tensor, Tensor | None, Tensor | None], Tensor | None]
T = TypeVar("T")
S = TypeVar("S", bound="KernelState")


def register(held: object) -> int:
    """Return a handle of an object, by which it is found as long as it lives."""
    handle = secrets.randbits(_BITS)
    while handle in _found:
        handle = secrets.randbits(_BITS)
    _found[handle] = held
    return handle


def find(handle: int, kind: type[T], fix: str = "keep the module, or build it again") -> T:
    """Return the object of this kind that has this handle; raises where there is none.

    >>> state = {1, 2}
    >>> find(register(state), set) is state
    True
    """
    found = _found.get(handle)
    if not isinstance(found, kind):
        raise SpartaError(message(f"the kernels with the handle {handle} are gone", fix=fix))
    return found


class KernelState:
    """What the op of one operation finds by a handle; operations add what else they need.

    Parameters
    ----------
    weight
        TeSA of the weight; its mask is what gradients of the weight are masked with.
    forward
        The kernel that packs the weight and runs.
    """

    def __init__(self, weight: TeSA, forward: Kernel) -> None:
        self.weight, self.forward = weight, forward
        self._enter()

    def _enter(self) -> None:
        """Take a handle of its own, with nothing packed yet."""
        self.handle = register(self)
        self._packed: tuple[Any, ...] | None = None
        self._mask: Tensor | None = None
        self.fast_path: FastPath | None = None
        self._bound: tuple[Any, ...] = (None, None, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Kernels are immutable and shared; the copy's weight is another tensor, so it packs again.
        made = copy.copy(self)
        made._enter()
        return made

    def packed(self, weight: Tensor, *, keep: bool) -> Sequence[Tensor]:
        """Return the packed weight: the one of the last call if the weight has not changed since.

        Parameters
        ----------
        keep
            Whether the weight is used as it is, and not trained. What that decides is a CUDA graph that is recorded
            now: it holds the packed weight of this moment, or packs the weight in every replay. In training, each
            stream packs for itself.
        """
        on_cuda = weight.is_cuda
        recording = on_cuda and torch.cuda.is_current_stream_capturing()
        if weight.is_inference() or (recording and not keep):
            weight_packed()
            return self._pack(weight, keep=keep)
        stream = raw_stream(weight.device) if on_cuda and not (keep or recording) else 0
        key = (weight.data_ptr(), weight._version, weight.dtype, stream)
        if self._packed is None or self._packed[0] != key:
            weight_packed()
            packed: Sequence[Tensor] = self._pack(weight, keep=keep)
            if recording:
                return packed  # nothing is in this memory before the first replay
            if keep:
                packed = self.forward.shared(packed, weight)
            # Holding the storage keeps its address from being given to another weight.
            self._packed = (key, weight.untyped_storage(), packed)
        kept: Sequence[Tensor] = self._packed[2]
        return keep_in_graph(kept) if recording else kept

    def _pack(self, weight: Tensor, *, keep: bool) -> Sequence[Tensor]:
        """Return the weight as the kernel packs it; `keep` as in :meth:`packed`."""
        del keep
        return self.forward.pack(weight)

    def forget(self) -> None:
        """Pack the weight in the next call, whatever its version counter says.

        A gradient was computed, so the weight is about to change, and not everyone tells the counter: ``weight.data``
        has one of its own.
        """
        self._packed = None
        self.fast_path, self._bound = None, (None, None, 0)

    def bind(self, weight: Tensor, bias: Tensor | None, packed: Sequence[Tensor]) -> None:
        """Keep a short way to run again with this packed weight and bias, if the kernel has one, in `fast_path`."""
        of, by, at = self._bound
        place = 0 if bias is None else bias.data_ptr()
        if of is packed and by is bias and at == place:
            return
        self._bound = (packed, bias, place)
        run = None if weight.is_inference() else self.forward.fast_path(packed, bias)
        self.fast_path = None if run is None else _fast_path(weight, bias, run)

    def mask(self, device: torch.device) -> Tensor:
        """Return the mask of the weight on `device`."""
        if self._mask is None or self._mask.device != device:
            self._mask = self.weight.mask(device)
        return self._mask


def _fast_path(weight: Tensor, bias: Tensor | None, run: Callable[[Tensor], Tensor | None]) -> FastPath:
    """Return a call that gives None where `run` is not of the present weight and bias, or where gradients are asked."""
    version, storage = weight._version, weight.untyped_storage()  # which keeps the address from being given away
    address, place = weight.data_ptr(), 0 if bias is None else bias.data_ptr()
    recording, capturing = torch.is_grad_enabled, torch.cuda.is_current_stream_capturing

    def fast_path(x: Tensor, now: Tensor | None, bias_now: Tensor | None, _storage: Any = storage) -> Tensor | None:
        if (
            now is not weight
            or bias_now is not bias
            or type(x) is not Tensor
            or weight._version != version
            or weight.data_ptr() != address
            or (x.is_cuda and capturing())  # a graph must be given what it reads
            or (bias is not None and bias.data_ptr() != place)
            or (recording() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)))
        ):
            return None
        return run(x)

    return fast_path


def state_of(handle: int, kind: type[S]) -> S:
    """Return the state of this kind that has a handle.

    >>> from sparta.specialize.linear.dense import DenseLinear
    >>> from sparta.specialize.linear.spec import linear_spec
    >>> spec = linear_spec(TeSA.dense((8, 4)), 16, torch.float32)
    >>> state = KernelState(spec["weight"], DenseLinear().build(spec, {}))
    >>> state_of(state.handle, KernelState) is state
    True
    """
    return find(handle, kind)
