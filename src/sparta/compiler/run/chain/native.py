"""Calls of a graph as steps of a chain: one function for each operation, registered by its overload.

A function is given the call's arguments as values and returns what it needs as a :class:`NativeCall`, or None where the
library does not take them; Python runs the call then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparta.compiler.run.chain.values import Constant, Value, rows_of
from sparta.specialize.cpu.chain import COPY_DIMS, Step, attention_call, copy_call, gather_call, map_call, norm_call

__all__ = ["NATIVE", "NativeCall", "constant_of", "is_real", "native_call", "native_for", "result_of"]

_aten = torch.ops.aten
_MOST_TABLE_DIMS = 2


@dataclass(frozen=True)
class NativeCall:
    """One step and what it reads, in the order of its places after the result: ``x, (result), *others``.

    Attributes
    ----------
    result
        The result on the device "meta", with the strides that the step writes.
    activation
        The activation of x that it is, if it is nothing else.
    adds
        Whether it is the sum of two tensors of one shape and nothing else.
    in_bytes
        From the dtype, the same step for images that are kept in short numbers, where it does not matter how they were
        rounded; None where there is none.
    """

    step: Step
    x: Value
    others: tuple[Value | None, ...]
    result: Tensor
    activation: str | None = None
    adds: bool = False
    in_bytes: Callable[[torch.dtype], Step] | None = None


_Maker = Callable[..., NativeCall | None]
NATIVE: dict[object, _Maker] = {}
"""The functions by overload."""


def native_call(target: object, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> NativeCall | None:
    """Return a call as a step; `result` is what it returns on the device "meta"."""
    maker = NATIVE.get(target)
    if maker is None or result.device.type != "meta":
        return None
    try:
        return maker(result, *args, **kwargs)
    except TypeError:  # an argument that it does not name
        return None


_SAME_SHAPE = (_aten.layer_norm.default, _aten.gelu.default, _aten.relu.default, _aten.silu.default)


def result_of(target: object, args: Sequence[Any]) -> Tensor | None:
    """Return what a common call returns on the device "meta", where PyTorch takes long to tell; None for others."""
    if not args or not all(is_real(each) for each in args[:3] if isinstance(each, Value)) or not is_real(args[0]):
        return None
    metas = [each.meta for each in args[:3] if isinstance(each, Value)]
    shape = metas[0].shape
    if target in _SAME_SHAPE:
        return torch.empty(shape, device="meta")
    if target is _aten.linear.default and metas[1].dim() == 2 and metas[1].shape[1] == shape[-1]:
        return torch.empty(*shape[:-1], metas[1].shape[0], device="meta")
    attention = target is _aten.scaled_dot_product_attention.default and all(each.dim() == 4 for each in metas)
    if attention and len({each.shape[0] for each in metas}) == 1:
        return torch.empty(*shape[:-1], metas[2].shape[-1], device="meta")
    return None


def native_for(*targets: object) -> Callable[[_Maker], _Maker]:
    """Register a function for calls of these overloads."""

    def register(maker: _Maker) -> _Maker:
        NATIVE.update(dict.fromkeys(targets, maker))
        return maker

    return register


def is_real(value: object, *, constant: bool = False) -> bool:
    """Whether an argument is a float32 tensor; `constant` ones are contiguous too."""
    if not isinstance(value, Value) or value.meta.dtype != torch.float32 or not value.meta.numel():
        return False
    return not constant or (isinstance(value.source, Constant) and value.meta.is_contiguous())


def constant_of(value: Value | None) -> Tensor | None:
    """Return the tensor of a constant value, as it is viewed there."""
    if value is None or not isinstance(value.source, Constant):
        return None
    held, meta = value.source.tensor, value.meta
    return torch.as_strided(held, meta.shape, meta.stride(), held.storage_offset() + meta.storage_offset())


@native_for(_aten.layer_norm.default)
def _layer_norm(
    result: Tensor,
    x: Value,
    shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    _cudnn: bool = True,  # noqa: FBT001, FBT002 - PyTorch's arguments
) -> NativeCall | None:
    width = math.prod(shape)
    ends = (weight, bias)
    if not is_real(x) or any(e is not None and not is_real(e, constant=True) for e in ends):
        return None
    rows = rows_of(x.meta, width) if len(shape) == 1 else None
    if rows is None:
        return None
    step = norm_call(rows[0], width, (rows[1], width), constant_of(weight), constant_of(bias), eps)
    return NativeCall(step, x, (), torch.empty(result.shape, device="meta"))


@native_for(_aten.scaled_dot_product_attention.default)
def _attention(  # noqa: PLR0913 - PyTorch's arguments
    result: Tensor,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - PyTorch's arguments
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> NativeCall | None:
    if dropout_p or not all(is_real(each) and each.meta.stride(-1) == 1 for each in (q, k, v)):
        return None
    qm, km, vm = (each.meta if each.meta.dim() == 4 else each.meta.unsqueeze(-3) for each in (q, k, v))
    if qm.dim() != 4 or not qm.shape[0] == km.shape[0] == vm.shape[0] or km.shape[:3] != vm.shape[:3]:
        return None
    heads, kv_heads = qm.shape[1], km.shape[1]
    if heads % kv_heads or (heads != kv_heads and not enable_gqa) or qm.shape[3] != km.shape[3]:
        return None
    mask = None
    if attn_mask is not None:
        mask = attn_mask.meta if result.dim() == 4 or attn_mask.meta.dim() < 3 else attn_mask.meta.unsqueeze(1)
        if mask.dtype not in (torch.bool, torch.float32) or mask.dim() > 4:
            return None
        mask = mask.expand(qm.shape[0], heads, qm.shape[2], km.shape[2])
    batch, _, queries, width = qm.shape
    # Tokens first, as the next layer reads them.
    y = torch.empty(batch, queries, heads, vm.shape[3], device="meta").transpose(1, 2)
    step = attention_call(qm, km, vm, y, mask, 1.0 / math.sqrt(width) if scale is None else scale, causal=is_causal)
    return NativeCall(step, q, (k, v, attn_mask), y if result.dim() == 4 else y.squeeze(1))


def _mapped(
    result: Tensor, x: Value, activation: str | None, kind: str = "add", number: float = 0.0, other: Value | None = None
) -> NativeCall | None:
    """Return an activation of x, of its sum with a number or a tensor, or of its product."""
    if not is_real(x) or result.dtype != torch.float32 or result.shape != x.meta.shape or not result.dim():
        return None
    width = result.shape[-1]
    metas = [x.meta] if other is None else [x.meta, other.meta.expand(result.shape)]
    if all(meta.is_contiguous() for meta in metas):
        width = result.numel()
        found = [(1, width) for _ in metas]
    else:
        rows = [_equal_rows(meta, width) for meta in metas]
        if any(each is None for each in rows):
            return None
        found = [each for each in rows if each is not None]
    strides = (found[0][1], found[-1][1], width)
    step = map_call(
        found[0][0], width, strides, kind=kind, number=number, other=other is not None, activation=activation
    )
    alone, fresh = other is None and not number and kind == "add", torch.empty(result.shape, device="meta")
    adds = other is not None and kind == "add" and number == 1 and other.meta.shape == x.meta.shape
    others = () if other is None else (other,)
    return NativeCall(step, x, others, fresh, activation if alone else None, adds and activation is None)


def _equal_rows(meta: Tensor, width: int) -> tuple[int, int] | None:
    """Return rows and their stride, which is 0 for one row that all share."""
    if meta.dim() > 1 and not any(meta.stride()[:-1]) and (meta.stride(-1) == 1 or width == 1):
        return meta.shape[:-1].numel(), 0
    return rows_of(meta, width)


@native_for(_aten.sub.Tensor)
def _subtract(result: Tensor, x: Any, other: Any, *, alpha: float = 1) -> NativeCall | None:
    return _add(result, x, other, alpha=-alpha)


@native_for(_aten.add.Tensor)
def _add(result: Tensor, x: Any, other: Any, *, alpha: float = 1) -> NativeCall | None:
    if isinstance(other, (int, float)) and isinstance(x, Value):
        return _mapped(result, x, None, number=float(other) * alpha)
    if not is_real(x) or not is_real(other):
        return None
    if alpha == 1 and x.meta.shape != result.shape:
        x, other = other, x
    return _mapped(result, x, None, number=float(alpha), other=other)


@native_for(_aten.mul.Tensor)
def _multiply(result: Tensor, x: Any, other: Any) -> NativeCall | None:
    if isinstance(other, (int, float)) and isinstance(x, Value):
        return _mapped(result, x, None, "multiply", float(other))
    if not is_real(x) or not is_real(other):
        return None
    if x.meta.shape != result.shape:
        x, other = other, x
    return _mapped(result, x, None, "multiply", other=other)


@native_for(_aten.relu.default)
def _relu(result: Tensor, x: Value) -> NativeCall | None:
    return _mapped(result, x, "relu")


@native_for(_aten.silu.default)
def _silu(result: Tensor, x: Value) -> NativeCall | None:
    return _mapped(result, x, "silu")


@native_for(_aten.gelu.default)
def _gelu(result: Tensor, x: Value, *, approximate: str = "none") -> NativeCall | None:
    return _mapped(result, x, "gelu") if approximate == "none" else None


@native_for(_aten.relu6.default)
def _relu6(result: Tensor, x: Value) -> NativeCall | None:
    return _mapped(result, x, "relu6")


@native_for(_aten.hardtanh.default)
def _hardtanh(result: Tensor, x: Value, low: float = -1, high: float = 1) -> NativeCall | None:
    return _mapped(result, x, "relu6") if (low, high) == (0, 6) else None


@native_for(_aten.embedding.default)
def _embedding(result: Tensor, weight: Value, ids: Value, _padding: int = -1, *_rest: bool) -> NativeCall | None:
    table = constant_of(weight) if is_real(weight, constant=True) else None
    plain = isinstance(ids, Value) and ids.meta.dtype == torch.int64 and ids.meta.is_contiguous() and ids.meta.numel()
    if table is None or not plain or table.dim() != _MOST_TABLE_DIMS:
        return None
    return NativeCall(gather_call(ids.meta.numel(), table), ids, (), torch.empty(result.shape, device="meta"))


@native_for(_aten.contiguous.default, _aten.clone.default, _aten.reshape.default, _aten.flatten.using_ints)
def _copy(result: Tensor, x: Value, *_rest: Any, **_more: Any) -> NativeCall | None:
    """Return a copy: on the device "meta" these calls gave memory of their own, so x is not contiguous."""
    if not isinstance(x, Value) or not result.is_contiguous() or result.dtype != x.meta.dtype:
        return None
    dims = [(size, stride) for size, stride in zip(x.meta.shape, x.meta.stride(), strict=True) if size != 1]
    if not dims or not result.numel() or len(dims) > COPY_DIMS or x.meta.element_size() not in (1, 4, 8):
        return None
    step = copy_call([size for size, _ in dims], [stride for _, stride in dims], x.meta.element_size())
    return NativeCall(step, x, (), torch.empty(result.shape, dtype=result.dtype, device="meta"))
