"""Run-time ops: how PyTorch reaches a built kernel, in eager mode, under autograd and under `torch.compile`.

``sparta::linear`` takes plain tensors and the handle of a :class:`LinearState`, which holds the chosen kernels. The
weight stays one dense parameter that any optimizer may own; its live values are packed inside the op, once per change
of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparta.specialize.cuda.device import triton_here
from sparta.specialize.cuda.graphs import weight_packed
from sparta.specialize.cuda.nvrtc import raw_stream
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.runtime.handles import KernelState, state_of
from sparta.tesa.attribute import TeSA

__all__ = ["LinearState", "linear", "run_linear"]

_SUMMED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes whose sums may be in float32


class LinearState(KernelState):
    """The kernels of one linear operator, and the packed weight of its last call.

    Parameters
    ----------
    weight
        TeSA of the weight (N, K).
    forward
        Kernel for ``x W^T + bias``.
    backward
        Kernel for ``grad W``, which is the linear operator of the transposed weight; None multiplies densely.
    """

    forward: LinearKernel

    def __init__(self, weight: TeSA, forward: LinearKernel, backward: LinearKernel | None = None) -> None:
        super().__init__(weight, forward)
        self.backward = backward

    def _enter(self) -> None:
        super()._enter()
        self._pruned: Tensor | None = None
        self._transposed: tuple[Any, Sequence[Tensor]] | None = None

    def forget(self) -> None:
        """Pack the weight in the next call, whatever its version counter says."""
        super().forget()
        self._transposed = None

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, *, of: tuple[bool, bool, bool] = (True, True, False)
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, of the weight, exactly 0 where that is pruned, and of the bias.

        Parameters
        ----------
        of
            Which of them are asked for.
        """
        of_x, of_weight, of_bias = of
        known = self._transposed
        if weight.requires_grad:
            self.forget()
        grad_x = grad_weight = grad_bias = None
        if of_weight:
            found = self.forward.weight_gradient(grad, x, self.mask(weight.device), bias=of_bias)
            grad_weight, grad_bias = found or self._dense_gradient(grad, x, bias=of_bias)
        if of_bias and grad_bias is None:
            grad_bias = grad.sum(0)
        if of_x and self.backward is None:
            grad_x = grad @ weight.detach().masked_fill(self._dead(weight.device), 0)
        elif of_x and self.backward is not None:
            fits = known is not None and known[0] == _identity(weight)
            weight_packed()  # now, or for the product before
            packed = known[1] if known is not None and fits else self.backward.pack(weight.t())
            grad_x = self.backward.run(packed, grad.contiguous(), None, None)
        return grad_x, grad_weight, grad_bias

    def _dense_gradient(self, grad: Tensor, x: Tensor, *, bias: bool) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the weight by the dense product, and that of the bias where a kernel gives both."""
        dead = self._dead(x.device)
        if x.is_cuda and x.dtype == grad.dtype and x.dtype in _SUMMED and grad.stride(1) == 1 and triton_here():
            from sparta.specialize.linear.dense_gradient import dense_gradient

            return dense_gradient(grad, x, dead, bias=bias)
        return (grad.t() @ x).masked_fill_(dead, 0), None

    def _pack(self, weight: Tensor, *, keep: bool) -> Sequence[Tensor]:
        """Pack the weight; one that is trained also as its gradient will read it, where a kernel does both at once."""
        if not keep and self.backward is not None and not weight.is_inference():
            both = self.forward.pack_with_transpose(self.backward, weight)
            if both is not None:
                packed, transposed = both
                self._transposed = _identity(weight), transposed
                return packed
        return super()._pack(weight, keep=keep)

    def _dead(self, device: torch.device) -> Tensor:
        """Return where the weight is pruned, on `device`."""
        if self._pruned is None or self._pruned.device != device:
            self._pruned = (~self.mask(device)).contiguous()
        return self._pruned


def _identity(weight: Tensor) -> tuple[Any, ...]:
    """Return what tells whether a weight is the one that was packed, and for the present stream."""
    stream = raw_stream(weight.device) if weight.is_cuda else 0
    return weight.data_ptr(), weight._version, weight.dtype, stream


@torch.library.custom_op("sparta::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, handle: int, keep: bool) -> Tensor:  # noqa: FBT001 - an op schema
    """Return ``x W^T + bias`` for x (M, K) and the masked weight (N, K), by the kernel with this handle."""
    state = state_of(handle, LinearState)
    return state.forward.run(state.packed(weight, keep=keep), x, bias, None)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, handle: int, keep: bool) -> Tensor:  # noqa: FBT001
    del bias, handle, keep
    return x.new_empty(x.shape[0], weight.shape[0])


def run_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: LinearState, *, keep: bool) -> Tensor:
    """Return ``x W^T + bias`` as :func:`linear` does; the op is left out where nothing needs it.

    Going through the dispatcher costs the host more than a small kernel takes, and is of use only to code that traces.
    """
    if type(x) is not Tensor or torch.compiler.is_compiling() or _is_traced():
        y: Tensor = torch.ops.sparta.linear(x, weight, bias, state.handle, keep)
        return y
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        recorded: Tensor = _Recorded.apply(x, weight, bias, state, keep)  # type: ignore[no-untyped-call]
        return recorded
    packed = state.packed(weight, keep=keep)
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        state.bind(weight, bias, packed)
    return state.forward.run(packed, x, bias, None)


def _is_traced() -> bool:
    """Whether calls are watched: by a mode that traces or fakes them, or by a transform such as vmap."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.maybe_current_level() is not None


class _Recorded(torch.autograd.Function):
    """The layer as autograd records it in eager mode: what the op does, with less work for the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: LinearState, keep: bool) -> Tensor:  # noqa: FBT001
        ctx.save_for_backward(x, weight)
        ctx.state, ctx.has_bias = state, bias is not None
        return state.forward.run(state.packed(weight, keep=keep), x, bias, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        asked = (wanted[0], wanted[1], wanted[2] and ctx.has_bias)
        return *ctx.state.gradients(grad.contiguous(), x, weight, of=asked), None, None


@torch.library.custom_op("sparta::linear_backward", mutates_args=())
def linear_backward(grad: Tensor, x: Tensor, weight: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight; the latter is exactly 0 where the weight is pruned."""
    grad_x, grad_weight, _ = state_of(handle, LinearState).gradients(grad, x, weight)
    assert grad_x is not None and grad_weight is not None  # noqa: PT018, S101 - both were asked for
    return grad_x, grad_weight


@linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    del grad, handle
    return torch.empty_like(x), torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, weight, bias, ctx.handle, _ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grad_x, grad_weight = torch.ops.sparta.linear_backward(grad.contiguous(), x, weight, ctx.handle)
    return grad_x, grad_weight, grad.sum(0) if ctx.has_bias else None, None, None


linear.register_autograd(_backward, setup_context=_setup_context)
