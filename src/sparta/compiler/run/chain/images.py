"""Dense layers of images as steps of a chain: convolutions, BatchNorms, poolings, and what they do besides.

A network of dense and sparse convolutions is one chain so, in one layout: contiguous images, as the sparse kernels read
and write them. What these functions do not take (other dtypes, weights that are computed) Python runs as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparta.batch_norms import scale_and_shift
from sparta.compiler.run.chain.native import NativeCall, constant_of, is_real, native_for
from sparta.compiler.run.chain.values import Value
from sparta.errors import SpartaError
from sparta.specialize.conv.cpu_dense import dense_images
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.chain import ImageProduct, mean_call
from sparta.specialize.cpu.packing import is_float
from sparta.specialize.cpu.pool import pool_step

__all__ = ["IMAGE_LAYERS", "image_layer"]

_aten = torch.ops.aten
_IMAGE_DIMS = 4
_Packed = dict[Any, Any]
_Product = Callable[[tuple[int, ...], int], ImageProduct | None]
_Maker = Callable[..., _Product | None]
IMAGE_LAYERS: dict[object, _Maker] = {}
"""Functions by overload: from packed weights and the call's arguments after x, the layer as a product."""


def image_layer(target: object, packed: _Packed, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Product | None:
    """Return a call as a product of images; None where the library does not take it.

    Parameters
    ----------
    packed
        Layers that were packed for other sizes; new ones are added.
    """
    maker = IMAGE_LAYERS.get(target)
    if maker is None or not args or not is_real(args[0]):
        return None
    try:
        return maker(packed, *args, **kwargs)
    except (TypeError, SpartaError):  # an argument that it does not name, or a geometry that the kernels do not take
        return None


def _for(*targets: object) -> Callable[[_Maker], _Maker]:
    def register(maker: _Maker) -> _Maker:
        IMAGE_LAYERS.update(dict.fromkeys(targets, maker))
        return maker

    return register


@_for(_aten.conv2d.default, _aten.conv1d.default)
def _convolution(
    packed: _Packed,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Sequence[int] | int = 1,
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    groups: int = 1,
) -> _Product | None:
    fixed, shift = constant_of(weight), constant_of(bias)
    plain = fixed is not None and fixed.dtype == torch.float32 and not fixed.is_neg() and fixed.dim() == x.meta.dim()
    if fixed is None or not plain or (bias is not None and (shift is None or not is_float(shift))):
        return None
    dims = fixed.dim() - 2
    numbers = [_spread(each, dims) for each in (stride, padding, dilation)]
    geometry = ConvGeometry.make(dims, stride=numbers[0], padding=numbers[1], dilation=numbers[2], groups=groups)
    return _packed_layer(packed, ("conv", fixed.data_ptr(), fixed.stride()), fixed, shift, geometry)


def _packed_layer(
    packed: _Packed, key: tuple[Any, ...], weight: Tensor, bias: Tensor | None, geometry: ConvGeometry
) -> _Product | None:
    """Return a dense layer, packed once for all sizes."""
    full = (*key, tuple(weight.shape), geometry)
    if full not in packed:
        conv = dense_images(tuple(weight.shape), geometry)
        packed[full] = (conv, conv.pack(weight), weight)  # which keeps its address
    conv, values, _ = packed[full]
    found: _Product | None = conv.product(values, bias)
    return found


@_for(_aten.batch_norm.default)
def _batch_norm(
    packed: _Packed,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool = False,  # noqa: FBT001, FBT002 - PyTorch's arguments
    _momentum: float = 0.1,
    eps: float = 1e-5,
    _cudnn: bool = True,  # noqa: FBT001, FBT002
) -> _Product | None:
    given = [constant_of(each) for each in (weight, bias, mean, variance)]
    if training or given[2] is None or given[3] is None or not 3 <= x.meta.dim() <= _IMAGE_DIMS:
        return None
    if any(one is None and two is not None for one, two in zip(given, (weight, bias, mean, variance), strict=True)):
        return None
    channels, dims = x.meta.shape[1], x.meta.dim() - 2
    key = ("norm", *(None if each is None else each.data_ptr() for each in given), eps, dims)
    if key not in packed:
        factor, shift = scale_and_shift(given[2], given[3], eps, given[0], given[1])
        packed[key] = (factor.float().reshape(channels, *[1] * (1 + dims)), shift.float().contiguous(), given)
    factor, shift, _ = packed[key]
    return _packed_layer(packed, key, factor, shift, ConvGeometry.make(dims, groups=channels))


@_for(_aten.avg_pool2d.default)
def _average(
    packed: _Packed,
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,  # noqa: FBT001, FBT002 - PyTorch's arguments
    count_include_pad: bool = True,  # noqa: FBT001, FBT002
    divisor_override: int | None = None,
) -> _Product | None:
    kernel, around = _spread(kernel_size, 2), _spread(padding, 2)
    # Windows that hold different numbers of values are not weighted alike.
    if ceil_mode or x.meta.dim() != _IMAGE_DIMS or (any(around) and not count_include_pad and divisor_override is None):
        return None
    channels, count = x.meta.shape[1], divisor_override or kernel[0] * kernel[1]
    geometry = ConvGeometry.make(2, stride=_spread(stride or kernel, 2), padding=around, groups=channels)
    weight = torch.full((channels, 1, *kernel), 1.0 / count)
    return _packed_layer(packed, ("average", count), weight, None, geometry)


def _spread(value: Sequence[int] | int, dims: int) -> list[int]:
    """Return a number for each spatial dim."""
    numbers = [value] * dims if isinstance(value, int) else list(value)
    return numbers * dims if len(numbers) == 1 else numbers


@native_for(_aten.max_pool2d.default)
def _max_pool(result: Tensor, x: Value, kernel_size: Sequence[int], *rest: Any) -> NativeCall | None:
    stride, padding, dilation = (list(rest[:3]) + [None] * 3)[:3]
    if not is_real(x) or x.meta.dim() != _IMAGE_DIMS or not x.meta.is_contiguous():
        return None
    kernel = _spread(kernel_size, 2)
    sizes = (kernel, _spread(stride or kernel, 2), _spread(padding or 0, 2), _spread(dilation or 1, 2))
    of_shape = partial(pool_step, tuple(x.meta.shape), tuple(result.shape), *sizes)
    fresh = torch.empty(result.shape, device="meta")
    return NativeCall(of_shape(), x, (), fresh, in_bytes=lambda dtype: of_shape(dtype=dtype))


@native_for(_aten.adaptive_avg_pool2d.default, _aten.mean.dim)
def _mean(result: Tensor, x: Value, size: Sequence[int], *_rest: Any, **more: Any) -> NativeCall | None:
    """Return the mean of planes: of all pixels, or over the last dims."""
    if not is_real(x) or not x.meta.is_contiguous() or more.get("dtype") not in (None, torch.float32):
        return None
    planes = result.numel()
    if result.dim() == x.meta.dim() and list(result.shape[-2:]) == [1, 1] and list(size) in ([1, 1], [1]):
        return NativeCall(mean_call(planes, x.meta.numel() // planes), x, (), torch.empty(result.shape, device="meta"))
    dims = sorted(dim % x.meta.dim() for dim in size) if size else list(range(x.meta.dim()))
    if not planes or dims != list(range(x.meta.dim() - len(dims), x.meta.dim())):
        return None
    return NativeCall(mean_call(planes, x.meta.numel() // planes), x, (), torch.empty(result.shape, device="meta"))
