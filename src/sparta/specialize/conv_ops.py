"""The run-time op of convolutions: how PyTorch reaches a built kernel, in eager mode, under autograd and in a graph.

``sparta::conv`` takes plain tensors and the handle of a :class:`ConvState`, as ``sparta::linear`` does. The one idea to
know: forward runs the chosen kernel with its epilogue; backward is dense, and masks the gradient of the weight.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import SpartaError, message
from sparta.specialize.conv import ConvGeometry, ConvKernel, dense_conv
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["ConvState", "conv"]

# How a gradient goes back through an activation, from the value before it.
_DERIVATIVES: dict[str | None, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, before: torch.ops.aten.threshold_backward(grad, before, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
}
_handles = itertools.count(1)
_states: weakref.WeakValueDictionary[int, ConvState] = weakref.WeakValueDictionary()


class ConvState:
    """The kernel of one convolution, and the packed weight of its last call.

    Parameters
    ----------
    spec
        The kernel spec; the mask of its weight is what gradients of the weight are masked with.
    forward
        The kernel that was built for it.
    """

    def __init__(self, spec: KernelSpec, forward: ConvKernel) -> None:
        self.spec, self.forward = spec, forward
        self.geometry = ConvGeometry.from_dict(spec.attributes)
        self.handle = next(_handles)
        _states[self.handle] = self
        self._packed: tuple[Any, ...] | None = None
        self._mask: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvState:
        # Kernels are immutable and shared; the copy's weight is another tensor, so it packs anew.
        return ConvState(self.spec, self.forward)

    @property
    def weight(self) -> TeSA:
        """TeSA of the weight."""
        return self.spec["weight"]

    @property
    def epilogue(self) -> Epilogue:
        """What is fused behind the convolution."""
        return self.spec.epilogue

    def packed(self, weight: Tensor, *, keep: bool) -> Sequence[Tensor]:
        """Return the packed weight; with `keep`, the one of the last call if the weight has not changed since."""
        if not keep or weight.is_inference():
            return self.forward.pack(weight)
        # Holding the storage keeps its address from being given to another weight.
        storage = weight.untyped_storage()
        key = (storage._cdata, weight.storage_offset(), weight._version, weight.dtype)
        if self._packed is None or self._packed[0] != key:
            self._packed = (key, storage, self.forward.pack(weight))
        kept: Sequence[Tensor] = self._packed[2]
        return kept

    def mask(self, device: torch.device) -> Tensor:
        """Return the mask of the weight on `device`."""
        if self._mask is None or self._mask.device != device:
            self._mask = self.weight.mask(device)
        return self._mask


def _state(handle: int) -> ConvState:
    found = _states.get(handle)
    if found is None:
        raise SpartaError(
            message(f"the kernels behind handle {handle} are gone", fix="keep the sparse module, or build it again")
        )
    return found


@torch.library.custom_op("sparta::conv", mutates_args=())
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    handle: int,
    keep: bool,  # noqa: FBT001 - an op schema
) -> Tensor:
    """Return ``activation(conv(x, W) + bias) + residual`` for x (B, C, ...), by the kernel behind `handle`."""
    state = _state(handle)
    return state.forward.run(state.packed(weight, keep=keep), x, bias, residual)


@conv.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    handle: int,
    keep: bool,  # noqa: FBT001
) -> Tensor:
    del bias, residual, keep
    size = _state(handle).geometry.output_size(x.shape[2:], weight.shape[2:])
    return x.new_empty(x.shape[0], weight.shape[0], *size)


@torch.library.custom_op("sparta::conv_backward", mutates_args=())
def conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; that of the weight is exactly 0 where it is pruned."""
    state = _state(handle)
    geometry, masked = state.geometry, state.weight.apply(weight)
    derivative = _DERIVATIVES.get(state.epilogue.activation)
    if derivative is not None:
        grad = derivative(grad, dense_conv(x, masked, bias, geometry))
    # Unequal padding is put around x, as in the forward direction, and cut off its gradient.
    equal = all(before == after for before, after in geometry.padding)
    around = [0] * (2 * len(geometry.padding)) if equal else [s for pair in reversed(geometry.padding) for s in pair]
    grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad.contiguous(),
        functional.pad(x, around),
        masked,
        [weight.shape[0]],
        geometry.stride,
        [before if equal else 0 for before, _ in geometry.padding],
        geometry.dilation,
        False,  # noqa: FBT003 - an op of PyTorch, not transposed
        [0] * len(geometry.padding),
        geometry.groups,
        [True, True, True],
    )
    zero = torch.zeros((), dtype=grad_weight.dtype, device=grad_weight.device)
    grad_weight = torch.where(state.mask(weight.device), grad_weight, zero)
    return functional.pad(grad_x, [-size for size in around]).contiguous(), grad_weight.contiguous(), grad_bias


@conv_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, handle: int) -> tuple[Tensor, Tensor, Tensor]:
    del grad, bias, handle
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401 - PyTorch's protocol
    del output
    x, weight, bias, residual, ctx.handle, _ = inputs
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.save_for_backward(x, weight, *([bias] if ctx.has_bias else []))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - PyTorch's protocol
    x, weight, *bias = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = torch.ops.sparta.conv_backward(
        grad, x, weight, bias[0] if bias else None, ctx.handle
    )
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None, grad if ctx.has_residual else None, None, None


conv.register_autograd(_backward, setup_context=_setup_context)
