"""SparseConv2d and SparseConv1d: convolutions with a masked weight, run by the fastest implement there is.

``SparseConv2d(dense, weight_mask=mask)`` takes the place of ``dense`` and shares its parameters. It is to a convolution
what :class:`~sparta.nn.linear.SparseLinear` is to a linear layer: dense until tuned, zero where pruned, and with a
weight gradient that is exactly zero there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.nn.inputs import ExampleInputs, as_inputs, need_tensors, rows_to_check
from sparta.nn.operator import Chosen
from sparta.nn.weight_operator import WeightOperator
from sparta.specialize.conv.op import ConvState, run_conv
from sparta.specialize.conv.spec import ConvGeometry, ConvKernel, conv_spec, dense_conv
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.tuning.select import Problem, build
from sparta.tesa.attribute import TeSA

__all__ = ["SparseConv1d", "SparseConv2d"]

_MOST_IMAGES = 8  # of a sample that results are compared with float64 for


class _SparseConv(WeightOperator):
    """What the sparse convolutions share; `_dims` says how many spatial dims there are."""

    _dims: ClassVar[int]
    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_mask: Tensor

    def __init__(self, raw_module: nn.Conv1d | nn.Conv2d, weight_mask: Tensor | TeSA) -> None:
        super().__init__()
        wanted = {1: nn.Conv1d, 2: nn.Conv2d}[self._dims]
        if not isinstance(raw_module, wanted) or is_lazy(raw_module.weight):
            raise ValueRangeError(
                message(f"a {type(raw_module).__name__}", f"a torch.nn.{wanted.__name__} with weights")
            )
        self.in_channels, self.out_channels = raw_module.in_channels, raw_module.out_channels
        self.kernel_size, self.padding_mode = tuple(raw_module.kernel_size), raw_module.padding_mode
        geometry = ConvGeometry.of(raw_module)
        self._explicit_padding: list[int] = []
        if self.padding_mode != "zeros":
            # Kernels know zeros only; what lies around the input otherwise is put there first.
            self._explicit_padding = [size for pair in reversed(geometry.padding) for size in pair]
            padding = tuple((0, 0) for _ in geometry.padding)
            geometry = ConvGeometry(geometry.stride, padding, geometry.dilation, geometry.groups)
        self.geometry = geometry
        self.weight = cast("nn.Parameter", raw_module.weight)
        self.register_parameter("bias", cast("nn.Parameter | None", raw_module.bias))
        self._state: ConvState | None = None
        self.update_mask(weight_mask)

    def update_mask(self, weight_mask: Tensor | TeSA) -> None:
        """Take another mask; the parameters stay the same tensors with the same values where they stay live.

        What was tuned was tuned for the old mask, so dense runs until it is tuned or built again.
        """
        self._hold_mask(weight_mask)
        self._reset()

    def _reset(self) -> None:
        self._state, self.choice = None, None

    # ------------------------------------------------------------------ running

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output ``(*batch, N, ...)`` for an input ``(*batch, C, ...)``."""
        y = self._fast(x)
        if y is not None:
            return y
        need_tensors(x=x)
        images, batch = self._images(x), x.shape[: -self._dims - 1]
        if self._state is None:
            weight = torch.where(self.weight_mask, self.weight, 0.0)
            y = dense_conv(images, weight, self.bias, self.geometry)
        else:
            y = run_conv(images, self.weight, self.bias, self._state, keep=not self.training)
        return y if x.dim() == self._dims + 2 else y.reshape(*batch, *y.shape[1:])

    def _fast(self, x: Tensor) -> Tensor | None:
        """Return what the short way of the last call gives, None where this call may not go it.

        It asks little, for all that a call touches is read from far away when other layers have filled the caches.
        """
        state = self._state
        if state is None or state.fast_path is None or type(x) is not Tensor or torch.compiler.is_compiling():
            return None
        shape, held = x.shape, self._parameters  # to ask the module for them takes longer than a small layer
        if self._explicit_padding or len(shape) != self._dims + 2 or shape[1] != self.in_channels:
            return None
        return state.fast_path(x, held.get("weight"), held.get("bias"))

    def _images(self, x: Tensor, what: str = "an input") -> Tensor:
        """Return inputs as (B, C, ...), with everything but zeros around them already there."""
        dims = self._dims
        if x.dim() <= dims or x.shape[-dims - 1] != self.in_channels:
            allowed = f"(*batch, {self.in_channels}, " + ", ".join("HW"[-dims:] if dims > 1 else "L") + ")"
            raise ShapeError(message(f"{what} of shape {tuple(x.shape)}", allowed))
        images = x if x.dim() == dims + 2 else x.reshape(-1, *x.shape[-dims - 1 :])
        if self._explicit_padding:
            images = functional.pad(images, self._explicit_padding, mode=self.padding_mode)
        return images

    # ------------------------------------------------------------------ choosing

    def _install(self, chosen: Sequence[Chosen]) -> None:
        spec, choice = chosen[0]
        self._state = ConvState(spec, cast("ConvKernel", build(spec, choice.config)))
        self.choice = choice

    def _spec(self, inputs: ExampleInputs, *, backward: bool = False) -> KernelSpec:
        del backward  # gradients are dense
        return self._spec_for(self._images(as_inputs(inputs, 1)[0], "an example input"))

    def _spec_for(self, images: Tensor) -> KernelSpec:
        return conv_spec(
            TeSA.from_mask(self.weight_mask),
            images.shape,
            images.dtype,
            self.geometry,
            epilogue=Epilogue(bias=self.bias is not None),
            device=images.device.type,
        )

    def _problem(self, inputs: ExampleInputs, *, backward: bool) -> Problem:
        del backward  # gradients are dense
        images = self._images(as_inputs(inputs, 1)[0].detach(), "an example input")
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        # References use their arguments in float64, on the device they are on.
        exact = torch.where(self.weight_mask, weight.double(), 0.0)
        checked, some = rows_to_check(images, _MOST_IMAGES)
        expected = dense_conv(some.double(), exact, None if bias is None else bias.double(), self.geometry)
        reduction = weight[0].numel() if len(weight) else 1
        return Problem(self._spec_for(images), weight, (images, bias, None), expected, reduction, checked=checked)

    def extra_repr(self) -> str:
        """Say the sizes, the mask and what runs."""
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, {self.geometry}"
        mode = "" if self.padding_mode == "zeros" else f", padding_mode={self.padding_mode!r}"
        density = self.weight_mask.float().mean().item()
        return f"{sizes}{mode}, bias={self.bias is not None}, density {density:.3g}, {super().extra_repr()}"


class SparseConv2d(_SparseConv):
    """A 2-d convolution with a sparse weight: any mask, stride, padding (in any mode), dilation and groups.

    Parameters
    ----------
    raw_module
        The dense layer; its parameters are shared, and pruned weights are set to zero in place.
    weight_mask
        A bool or 0/1 mask, or a TeSA, of the weight's shape (N, C / groups, KH, KW).

    Examples
    --------
    >>> dense = nn.Conv2d(8, 16, 3, padding=1)
    >>> sparse = SparseConv2d(dense, torch.rand(16, 8, 3, 3) < 0.1)
    >>> sparse(torch.randn(2, 8, 14, 14)).shape
    torch.Size([2, 16, 14, 14])
    >>> sparse.weight is dense.weight
    True
    """

    _dims = 2

    def __init__(self, raw_module: nn.Conv2d, weight_mask: Tensor | TeSA) -> None:
        super().__init__(raw_module, weight_mask)


class SparseConv1d(_SparseConv):
    """A 1-d convolution with a sparse weight: any mask, stride, padding (in any mode), dilation and groups.

    Parameters
    ----------
    raw_module
        The dense layer; its parameters are shared, and pruned weights are set to zero in place.
    weight_mask
        A bool or 0/1 mask, or a TeSA, of the weight's shape (N, C / groups, K).

    Examples
    --------
    >>> sparse = SparseConv1d(nn.Conv1d(8, 16, 3), torch.rand(16, 8, 3) < 0.1)
    >>> sparse(torch.randn(8, 100)).shape
    torch.Size([16, 98])
    """

    _dims = 1

    def __init__(self, raw_module: nn.Conv1d, weight_mask: Tensor | TeSA) -> None:
        super().__init__(raw_module, weight_mask)
