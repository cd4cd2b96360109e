"""The operations ``conv2d`` and ``conv1d``: ``activation(conv(x, W) + bias) + residual`` with a sparse weight W.

This file holds what every implement of them shares: the geometry, how a kernel spec is made, the kernel's calling
convention. Batch and image sizes are the spec's dynamic dims, so a kernel runs on any of them; a geometry says
everything else, with padding written out as (before, after) for each spatial dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.implement import Kernel
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["ConvGeometry", "ConvKernel", "conv_spec", "dense_conv"]

_OPS = {3: "conv1d", 4: "conv2d"}
_CONVOLUTIONS = {3: functional.conv1d, 4: functional.conv2d}


@dataclass(frozen=True)
class ConvGeometry:
    """How a convolution walks over its input; make one with :meth:`make` or :meth:`of`.

    Attributes
    ----------
    stride, dilation
        One number for each spatial dim.
    padding
        Zeros (before, after) each spatial dim.
    groups
        Groups of channels that see only each other.

    Examples
    --------
    >>> geometry = ConvGeometry.make(2, stride=2, padding=1)
    >>> geometry.output_size((56, 56), (3, 3))
    (28, 28)
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        lengths = {len(self.stride), len(self.padding), len(self.dilation)}
        if len(lengths) != 1 or min((*self.stride, *self.dilation, self.groups), default=0) < 1:
            given = f"stride {self.stride}, dilation {self.dilation}, padding {self.padding}, groups {self.groups}"
            raise ValueRangeError(message(given, "1 or more each, and as many paddings as strides"))
        if any(len(pair) != 2 or min(pair) < 0 for pair in self.padding):
            raise ValueRangeError(message(f"padding {self.padding}", "(before, after) of 0 or more for each dim"))

    @staticmethod
    def make(
        dims: int,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int | Sequence[int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> ConvGeometry:
        """Return the geometry for `dims` spatial dims; a single number stands for all of them.

        >>> ConvGeometry.make(2, padding=(1, 0)).padding
        ((1, 1), (0, 0))
        """
        pads = [padding] * dims if isinstance(padding, int) else list(padding)
        pairs = [(p, p) if isinstance(p, int) else tuple(p) for p in pads]
        return ConvGeometry(
            stride=(stride,) * dims if isinstance(stride, int) else tuple(stride),
            padding=tuple((int(pair[0]), int(pair[-1])) for pair in pairs),
            dilation=(dilation,) * dims if isinstance(dilation, int) else tuple(dilation),
            groups=groups,
        )

    @staticmethod
    def of(module: nn.Conv1d | nn.Conv2d) -> ConvGeometry:
        """Return the geometry of a dense layer, its padding written out; a mode other than zeros counts as well.

        >>> ConvGeometry.of(nn.Conv1d(3, 4, 2, padding="same")).padding
        ((0, 1),)
        """
        padding: list[tuple[int, int]] = []
        for dim, (kernel, dilation) in enumerate(zip(module.kernel_size, module.dilation, strict=True)):
            if isinstance(module.padding, str):
                total = dilation * (kernel - 1) if module.padding == "same" else 0
                padding.append((total // 2, total - total // 2))
            else:
                padding.append((module.padding[dim], module.padding[dim]))
        return ConvGeometry(tuple(module.stride), tuple(padding), tuple(module.dilation), module.groups)

    def output_size(self, size: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Return the spatial size of the output for an input and a kernel of these sizes."""
        fields = zip(size, kernel, self.stride, self.padding, self.dilation, strict=True)
        out = tuple((s + sum(p) - d * (k - 1) - 1) // step + 1 for s, k, step, p, d in fields)
        if min(out, default=0) < 1:
            given = f"an input of size {tuple(size)} for a kernel of {tuple(kernel)} with {self}"
            raise ShapeError(message(given, "an input that holds the kernel once, padding included"))
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            name: [list(v) if isinstance(v, tuple) else v for v in value] if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> ConvGeometry:
        """Return the geometry that :meth:`to_dict` wrote."""
        return ConvGeometry.make(
            len(fields["stride"]), **{name: fields[name] for name in ("stride", "padding", "dilation", "groups")}
        )


class ConvKernel(Kernel):
    """A built kernel of ``conv2d`` or ``conv1d``."""

    @abstractmethod
    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the live values of the weight (N, C / groups, ...) in this kernel's layout."""

    @abstractmethod
    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (B, N, ...) for the inputs x (B, C, ...), bias (N,) or None, residual like the result or None."""


def conv_spec(
    weight: TeSA,
    input_shape: Sequence[int],
    dtype: torch.dtype,
    geometry: ConvGeometry | None = None,
    *,
    epilogue: Epilogue | None = None,
    device: str = "cpu",
) -> KernelSpec:
    """Return the kernel spec of a convolution.

    Parameters
    ----------
    weight
        TeSA of the weight: (N, C / groups, KH, KW) for ``conv2d``, (N, C / groups, K) for ``conv1d``.
    input_shape
        (B, C, H, W) or (B, C, L) that is measured; other batches and sizes run as well.
    geometry
        Strides, padding, dilation and groups; None for ones, and no padding.

    Examples
    --------
    >>> geometry = ConvGeometry.make(2, padding=1)
    >>> spec = conv_spec(TeSA.dense((16, 8, 3, 3)), (1, 8, 14, 14), torch.float32, geometry)
    >>> spec.op, spec.attributes["padding"]
    ('conv2d', [[1, 1], [1, 1]])
    """
    if weight.ndim not in _OPS:
        raise ShapeError(message(f"a convolution's weight of shape {weight.shape}", "3 or 4 dims"))
    geometry = geometry or ConvGeometry.make(weight.ndim - 2)
    shape = tuple(input_shape)
    channels, each = weight.shape[0], weight.shape[1]
    fits = len(shape) == weight.ndim == len(geometry.stride) + 2 and shape[1] == each * geometry.groups
    if not fits or channels % geometry.groups:
        given = f"an input of shape {shape} for a weight of shape {weight.shape} in {geometry.groups} groups"
        raise ShapeError(message(given, "(B, C, ...) with C = groups * weight.shape[1], N in whole groups"))
    geometry.output_size(shape[2:], weight.shape[2:])
    return KernelSpec(
        _OPS[weight.ndim],
        {
            "input": TeSA.dense(shape, format=dtype, dynamic=[0, *range(2, len(shape))]),
            "weight": weight.with_format(dtype),
        },
        epilogue=epilogue or Epilogue(),
        attributes=geometry.to_dict(),
        device=device,
    )


def dense_conv(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry) -> Tensor:
    """Return PyTorch's own convolution with this geometry; unequal padding is put around x first.

    >>> dense_conv(torch.ones(1, 1, 4), torch.ones(2, 1, 3), None, ConvGeometry.make(1, padding=1)).shape
    torch.Size([1, 2, 4])
    """
    padding = [before for before, _ in geometry.padding]
    if any(before != after for before, after in geometry.padding):
        x = functional.pad(x, [size for pair in reversed(geometry.padding) for size in pair])
        padding = [0] * len(padding)
    return _CONVOLUTIONS[weight.dim()](x, weight, bias, geometry.stride, padding, geometry.dilation, geometry.groups)
