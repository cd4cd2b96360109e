"""The run-time op of quantised linear layers: how PyTorch reaches a built kernel of 8-bit integers.

``sparta::int8_linear`` takes plain tensors and the handle of an :class:`Int8State`, as ``sparta::linear`` does.
Integers have no gradients, so there is a fake implementation for graphs, and no backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.runtime.handles import KernelState, state_of
from sparta.tesa.attribute import TeSA

__all__ = ["Int8State", "int8_linear", "run_int8_linear"]


class Int8State(KernelState):
    """The kernel of one quantised linear layer with an output in fp32, and the packed weight of its last call."""

    forward: LinearKernel

    def __init__(self, weight: TeSA, forward: LinearKernel) -> None:
        super().__init__(weight, forward)


@torch.library.custom_op("sparta::int8_linear", mutates_args=())
def int8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, handle: int) -> Tensor:
    """Return the layer for x (M, K), in real numbers or integers, and the weight's integers (N, K), by its kernel."""
    state = state_of(handle, Int8State)
    return state.forward.run(state.packed(weight, keep=True), x, bias, None)


@int8_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, handle: int) -> Tensor:
    del bias, handle
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


def run_int8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: Int8State) -> Tensor:
    """Return the same as :func:`int8_linear`; the op, which costs time, is left out where nothing traces."""
    if type(x) is not Tensor or torch.compiler.is_compiling():
        y: Tensor = torch.ops.sparta.int8_linear(x, weight, bias, state.handle)
        return y
    return state.forward.run(state.packed(weight, keep=True), x, bias, None)
