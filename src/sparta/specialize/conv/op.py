"""The run-time op of convolutions: how PyTorch reaches a built kernel, in eager mode, under autograd and in a graph.

``sparta::conv`` takes plain tensors and the handle of a :class:`ConvState`, as ``sparta::linear`` does. Forward runs
the chosen kernel with its epilogue; backward is dense, and masks the gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import ValueRangeError, message
from sparta.specialize.conv.spec import ConvGeometry, ConvKernel, dense_conv
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.runtime.handles import KernelState, state_of

__all__ = ["ConvState", "conv", "run_conv"]

# How a gradient goes back through an activation, from the value before it.
_DERIVATIVES: dict[str | None, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, before: torch.ops.aten.threshold_backward(grad, before, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
    "relu6": lambda grad, before: torch.ops.aten.hardtanh_backward(grad, before, 0, 6),
}


class ConvState(KernelState):
    """The kernel of one convolution, and the packed weight of its last call.

    Parameters
    ----------
    spec
        The kernel spec; a residual must come after the activation.
    forward
        The kernel that was built for it.
    """

    def __init__(self, spec: KernelSpec, forward: ConvKernel) -> None:
        if spec.epilogue.residual_first:
            given = f"the epilogue {spec.epilogue}"
            raise ValueRangeError(message(given, "a residual after the activation", "apply the ReLU to the result"))
        super().__init__(spec["weight"], forward)
        self.epilogue, self.geometry = spec.epilogue, ConvGeometry.from_dict(spec.attributes)


@torch.library.custom_op("sparta::conv", mutates_args=())
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    handle: int,
    keep: bool,  # noqa: FBT001 - an op schema
) -> Tensor:
    """Return ``activation(conv(x, W) + bias) + residual`` for x (B, C, ...), by the kernel with this handle."""
    state = state_of(handle, ConvState)
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
    size = state_of(handle, ConvState).geometry.output_size(x.shape[2:], weight.shape[2:])
    return x.new_empty(x.shape[0], weight.shape[0], *size)


def run_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: ConvState, *, keep: bool) -> Tensor:
    """Return the same as :func:`conv`, without a residual; the op is left out where nothing needs it.

    Going through the dispatcher costs the host more than a small kernel takes, and is of use only to autograd and to
    tracing.
    """
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if recorded or type(x) is not Tensor or torch.compiler.is_compiling():
        y: Tensor = torch.ops.sparta.conv(x, weight, bias, None, state.handle, keep)
        return y
    packed = state.packed(weight, keep=keep)
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        state.bind(weight, bias, packed)
    return state.forward.run(packed, x, bias, None)


@torch.library.custom_op("sparta::conv_backward", mutates_args=())
def conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; that of the weight is exactly 0 where it is pruned."""
    state = state_of(handle, ConvState)
    if weight.requires_grad:
        state.forget()
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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, weight, bias, residual, ctx.handle, _ = inputs
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.save_for_backward(x, weight, *([bias] if ctx.has_bias else []))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, *bias = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = torch.ops.sparta.conv_backward(
        grad, x, weight, bias[0] if bias else None, ctx.handle
    )
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None, grad if ctx.has_residual else None, None, None


conv.register_autograd(_backward, setup_context=_setup_context)
