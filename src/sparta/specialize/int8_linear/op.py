"""The run-time op of quantised linear layers: how PyTorch reaches a built kernel of 8-bit integers.

``sparta::int8_linear`` takes plain tensors and the handle of an :class:`Int8State`, as ``sparta::linear`` does.
Integers have no gradients, so there is a fake implementation for graphs, and no backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparta.specialize.int8_linear.spec import Int8LinearKernel
from sparta.specialize.runtime.handles import KernelState, state_of
from sparta.tesa.attribute import TeSA

__all__ = ["Int8State", "int8_linear", "run_int8_linear", "run_real_linear"]


class Int8State(KernelState):
    """The kernel of one quantised linear layer with an output in fp32, and the packed weight of its last call."""

    forward: Int8LinearKernel

    def __init__(self, weight: TeSA, forward: Int8LinearKernel) -> None:
        super().__init__(weight, forward)


@torch.library.custom_op("sparta::int8_linear", mutates_args=())
def int8_linear(x: Tensor, weight: Tensor, multiplier: Tensor, offset: Tensor | None, handle: int) -> Tensor:
    """Return ``(x W^T) * multiplier + offset`` for x (M, K) and the weight (N, K), by the kernel with this handle."""
    state = state_of(handle, Int8State)
    return state.forward.run(state.packed(weight, keep=True), x, multiplier, offset)


@int8_linear.register_fake
def _(x: Tensor, weight: Tensor, multiplier: Tensor, offset: Tensor | None, handle: int) -> Tensor:
    del offset, handle
    return multiplier.new_empty(x.shape[0], weight.shape[0])


def run_int8_linear(x: Tensor, weight: Tensor, multiplier: Tensor, offset: Tensor | None, state: Int8State) -> Tensor:
    """Return the same as :func:`int8_linear`; the op, which costs time, is left out where nothing traces."""
    if type(x) is not Tensor or torch.compiler.is_compiling():
        y: Tensor = torch.ops.sparta.int8_linear(x, weight, multiplier, offset, state.handle)
        return y
    return state.forward.run(state.packed(weight, keep=True), x, multiplier, offset)


def run_real_linear(
    x: Tensor, weight: Tensor, scale: float, scales: tuple[Tensor, Tensor | None], state: Int8State
) -> Tensor | None:
    """Return the same for x (M, K) in real numbers, which the kernel rounds to its integers in the same pass.

    None where something traces, so that the graph shows the rounding, or where the kernel does not round.
    """
    if type(x) is not Tensor or not x.is_cpu or torch.compiler.is_compiling():
        return None
    return state.forward.run_real(state.packed(weight, keep=True), scale, x, *scales)
