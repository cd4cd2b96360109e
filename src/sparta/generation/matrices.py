"""Packed matrices of language models: a weight as the decode kernels read it, in fp32 or in int8 with a scale per row.

:func:`packed` chooses one of three forms by the bytes that a token has to read: every value, live values with a
bitmap, or columns of blocks with an index each. One packed matrix serves single tokens and long prompts, so there is
one copy of the weights. A live weight that rounds to zero in int8 stays live: the form follows the mask.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparta.errors import FileFormatError, ShapeError, ValueRangeError, message
from sparta.specialize.cpu.library import Library, load, raise_for

__all__ = ["FORMS", "MatrixStruct", "PackedMatrix", "best_form", "packed", "quantized", "restored"]

FORMS = ("dense", "bitmap", "columns:4", "columns:8", "columns:16")
_CODES = {"dense": 0, "bitmap": 1, "columns": 2}
_HEIGHTS = (16, 8, 4)
_BEYOND = 64  # bytes that kernels may read after the last value
_MOST_INPUTS = 1 << 16  # of columns, whose indices have 16 bits
_FILLED = 1.25  # how many times the live weights the columns of blocks may hold
_FEW = 0.3  # the share of live weights from which on a bitmap is read faster, where bytes expand under a mask
_WORTH = 0.9  # the share of the dense bytes from which on zeros are not skipped


class MatrixStruct(Structure):
    """A packed weight as ``native/decode_matrix.h`` sees it."""

    _fields_ = (
        ("channels", c_int64),
        ("inputs", c_int64),
        ("values", c_void_p),
        ("starts", c_void_p),
        ("marks", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("costs", c_void_p),
        ("form", c_int32),
        ("value_bytes", c_int32),
        ("height", c_int32),
        ("unused", c_int32),
    )


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight (N, K) as int8 and a scale per row, symmetric around zero.

    >>> integers, scales = quantized(torch.tensor([[1.27, -0.5], [0.0, 0.0]]))
    >>> integers.tolist(), [round(s, 6) for s in scales.tolist()]
    ([[127, -50], [0, 0]], [0.01, 1.0])
    """
    most = weight.detach().abs().amax(1).to(torch.float32)
    scales = torch.where(most > 0, most / 127, 1.0)
    integers = (weight.detach().to(torch.float32) / scales[:, None]).round_().clamp_(-127, 127)
    return integers.to(torch.int8), scales


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A packed weight (N, K), with the tensors that its structure points into.

    Attributes
    ----------
    values, starts, marks
        As the form lays them out; see ``native/decode_matrix.h``.
    scales
        (N,) where values are int8.
    bias
        (N,) in fp32, or None.
    costs
        Running sums over groups of rows, by which threads share the work.
    """

    shape: tuple[int, int]
    form: str
    values: Tensor
    starts: Tensor | None = None
    marks: Tensor | None = None
    scales: Tensor | None = None
    bias: Tensor | None = None
    costs: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what it computes."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values.device

    @property
    def height(self) -> int:
        """Rows of a group."""
        return int(self.form.partition(":")[2] or 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors but the costs."""
        held = (self.values, self.starts, self.marks, self.scales, self.bias)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def struct(self) -> MatrixStruct:
        """Return the structure that kernels take; the matrix must outlive it."""
        given = (self.values, self.starts, self.marks, self.scales, self.bias, self.costs)
        addresses = [None if t is None else t.data_ptr() for t in given]
        code = _CODES[self.form.partition(":")[0]]
        return MatrixStruct(*self.shape, *addresses, code, self.values.element_size(), self.height, 0)

    def multiply(self, x: Tensor, library: Library | None = None) -> Tensor:
        """Return x (..., K) times the transposed weight, plus the bias, in fp32.

        >>> matrix = packed(torch.eye(3))
        >>> matrix.multiply(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[1., 2., 3.]])
        """
        rows, inputs = self.shape
        if x.shape[-1:] != (inputs,):
            raise ShapeError(message(f"an input of shape {tuple(x.shape)}", f"(..., {inputs})"))
        flat = x.detach().to(torch.float32).reshape(-1, inputs).contiguous()
        y = torch.empty(flat.shape[0], rows)
        if y.numel():
            handle = (library or load()).handle
            struct = self.struct()
            threads = torch.get_num_threads()
            raise_for(
                handle.sparta_multiply_decoded(
                    ctypes.byref(struct), flat.data_ptr(), inputs, flat.shape[0], y.data_ptr(), rows, threads
                )
            )
        return y.reshape(*x.shape[:-1], rows)

    def weight(self) -> Tensor:
        """Return the weight, dense in fp32.

        >>> bool((packed(torch.eye(5), form="columns:4").weight() == torch.eye(5)).all())
        True
        """
        rows, inputs = self.shape
        if self.form == "dense":
            found = self.values[: rows * inputs].to(torch.float32).reshape(rows, inputs)
        elif self.form == "bitmap":
            mask = _mask_of(self)
            found = torch.zeros(rows, inputs).masked_scatter_(mask, self.values[: self._stored()].to(torch.float32))
        else:
            found = _from_columns(self)
        return found if self.scales is None else found * self.scales[:, None]

    def mask(self) -> Tensor:
        """Return which weights are stored, bool (N, K)."""
        if self.form == "bitmap":
            return _mask_of(self)
        if self.form == "dense":
            return torch.ones(self.shape, dtype=torch.bool)
        ones = replace(self, values=torch.ones_like(self.values), scales=None)
        return ones.weight() != 0

    def plain(self) -> Tensor | None:
        """Return the weight itself where it is stored as PyTorch stores it, dense in fp32; else None."""
        rows, inputs = self.shape
        if self.form != "dense" or self.scales is not None:
            return None
        return self.values[: rows * inputs].view(rows, inputs)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a file holds of it: all tensors by name, but what follows from the others."""
        names = ("values", "marks", "scales", "bias")
        found = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        found["values"] = self.values[: self._stored()]
        if self.starts is not None and self.form != "bitmap":
            found["starts"] = self.starts
        return found

    def _stored(self) -> int:
        """Return how many values there are, without the room after them."""
        return self.values.numel() - -(-_BEYOND // self.values.element_size())


def best_form(mask: Tensor, value_bytes: int, *, expands: bool = False) -> str:
    """Return the form that reads the fewest bytes for a mask (N, K), with columns first where weights come in blocks.

    Parameters
    ----------
    expands
        Whether the processor expands bytes under a mask: 64 weights of a bitmap then cost what 16 of a column do, so
        that columns are worth it for few live weights only.

    >>> best_form(torch.ones(8, 8, dtype=torch.bool), 4)
    'dense'
    >>> best_form((torch.arange(64) % 4 == 0).repeat(8, 1), 4)
    'columns:8'
    """
    rows, inputs = mask.shape
    live, dense = int(mask.sum()), rows * inputs * value_bytes
    if not dense:
        return "dense"
    for height in () if expands and live > _FEW * mask.numel() else _HEIGHTS:
        if rows < height or inputs >= _MOST_INPUTS:
            continue
        entries = int(_grouped(mask, height).any(1).sum())
        if entries * height <= _FILLED * live and entries * (height * value_bytes + 2) < _WORTH * dense:
            return f"columns:{height}"
    return "bitmap" if live * value_bytes + mask.numel() // 8 < _WORTH * dense else "dense"


def packed(
    weight: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    int8: bool = False,
    form: str | None = None,
) -> PackedMatrix:
    """Pack a weight (N, K).

    Parameters
    ----------
    weight
        Of any floating-point dtype; its zeros outside the mask are not stored.
    mask
        What is live; None for all that is not zero.
    int8
        Store integers with a scale per row.
    form
        One of :data:`FORMS`; None for the one that reads the fewest bytes.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ShapeError(message(f"a weight of shape {tuple(weight.shape)} in {weight.dtype}", "a matrix of floats"))
    if form is not None and form not in FORMS:
        raise ValueRangeError(message(f"form={form!r}", ", ".join(FORMS)))
    live = ((weight.detach() != 0) if mask is None else mask).contiguous()
    form = form or best_form(live, 1 if int8 else 4)
    if form.startswith("columns") and weight.shape[1] >= _MOST_INPUTS:
        raise ValueRangeError(message(f"{form} for {weight.shape[1]} inputs", f"fewer than {_MOST_INPUTS}"))
    values, factors = quantized(weight) if int8 else (weight.detach().to(torch.float32), None)
    shift = None if bias is None else bias.detach().to(torch.float32).contiguous().clone()
    shape = (weight.shape[0], weight.shape[1])
    parts: dict[str, Any] = {"scales": factors, "bias": shift}
    if form == "dense":
        whole = values if mask is None else torch.where(live, values, torch.zeros((), dtype=values.dtype))
        return _with_costs(PackedMatrix(shape, form, _padded(whole.reshape(-1)), **parts))
    if form == "bitmap":
        bits = np.packbits(live.numpy(), axis=1, bitorder="little")
        starts = _running(live.sum(1))
        matrix = PackedMatrix(shape, form, _padded(values[live]), starts, torch.from_numpy(bits), **parts)
        return _with_costs(matrix)
    height = int(form.partition(":")[2])
    columns = _grouped(live, height).any(1)
    taken = _grouped(torch.where(live, values, torch.zeros((), dtype=values.dtype)), height).transpose(1, 2)[columns]
    marks = torch.from_numpy(columns.nonzero()[:, 1].numpy().astype(np.uint16))
    matrix = PackedMatrix(shape, form, _padded(taken.reshape(-1)), _running(columns.sum(1)), marks, **parts)
    return _with_costs(matrix)


def restored(shape: tuple[int, int], form: str, tensors: Mapping[str, Tensor]) -> PackedMatrix:
    """Return a matrix from the tensors of a file, all checked: kernels read where these say, without asking.

    >>> matrix = packed(torch.eye(3), form="bitmap")
    >>> bool((restored((3, 3), "bitmap", matrix.tensors()).weight() == torch.eye(3)).all())
    True
    """
    rows, inputs = shape
    values, marks, starts = tensors["values"].contiguous(), tensors.get("marks"), tensors.get("starts")
    scales, bias = tensors.get("scales"), tensors.get("bias")
    _demand(form in FORMS and (form == "dense") == (marks is None), "a known form with its marks")
    _demand(values.dtype == (torch.float32 if scales is None else torch.int8) and values.dim() == 1, "values")
    for each in (scales, bias):
        _demand(each is None or (each.dtype == torch.float32 and each.shape == (rows,)), "a number per row")
    count = rows * inputs
    if form == "bitmap" and marks is not None:
        _demand(marks.dtype == torch.uint8 and tuple(marks.shape) == (rows, -(-inputs // 8)), "a bit per weight")
        marks = marks.contiguous()
        bits = torch.from_numpy(np.unpackbits(marks.numpy(), axis=1, bitorder="little"))
        _demand(not bool(bits[:, inputs:].any()), "no bits beyond the last input")
        starts = _running(bits.sum(1, dtype=torch.int64))
        count = int(starts[-1])
    elif marks is not None:
        height = int(form.partition(":")[2])
        _demand(
            starts is not None and starts.dtype == torch.int64 and starts.shape == (-(-rows // height) + 1,), "starts"
        )
        assert starts is not None  # noqa: S101 - as was demanded
        _demand(marks.dtype == torch.uint16 and marks.dim() == 1 and inputs < _MOST_INPUTS, "16-bit indices")
        marks, starts = marks.contiguous(), starts.contiguous()
        grows = int(starts[0]) == 0 and bool((starts.diff() >= 0).all()) and int(starts[-1]) == marks.numel()
        _demand(grows, "groups one after the other")
        _demand(not marks.numel() or int(marks.to(torch.int64).max()) < inputs, "indices of inputs")
        _demand(bool((starts.diff() <= inputs).all()), "no more columns than inputs")
        count = marks.numel() * height
    _demand(values.numel() == count, f"{count} values")
    return _with_costs(PackedMatrix(shape, form, _padded(values), starts, marks, _whole(scales), _whole(bias)))


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _demand(condition: bool, wanted: str) -> None:  # noqa: FBT001 - a condition
    if not condition:
        raise FileFormatError(message("a packed matrix that does not fit together", wanted, "save it again"))


def _with_costs(matrix: PackedMatrix) -> PackedMatrix:
    """Return a matrix with what its groups cost: the bytes and steps of each."""
    rows, inputs = matrix.shape
    groups = -(-rows // matrix.height)
    if matrix.starts is None:
        costs = torch.full((groups,), max(1, inputs), dtype=torch.int64)
    else:
        each = matrix.starts.diff() * matrix.height
        costs = each + (inputs if matrix.form == "bitmap" else 8)
    return PackedMatrix(
        matrix.shape,
        matrix.form,
        matrix.values,
        matrix.starts,
        matrix.marks,
        matrix.scales,
        matrix.bias,
        _running(costs),
    )


def _running(counts: Tensor) -> Tensor:
    """Return running sums of counts, with 0 before them."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.to(torch.int64).cumsum(0)])


def _padded(values: Tensor) -> Tensor:
    """Return values with room after the last one, which vector loads may read."""
    room = torch.zeros(-(-_BEYOND // values.element_size()), dtype=values.dtype)
    return torch.cat([values, room])


def _grouped(tensor: Tensor, height: int) -> Tensor:
    """Return (N, K) as (groups, height, K), with zeros where the last group is not full."""
    rows, inputs = tensor.shape
    missing = -rows % height
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros(missing, inputs)])
    return tensor.reshape(-1, height, inputs)


def _mask_of(matrix: PackedMatrix) -> Tensor:
    assert matrix.marks is not None  # noqa: S101 - a bitmap has them
    bits = np.unpackbits(matrix.marks.numpy(), axis=1, count=matrix.shape[1], bitorder="little")
    return torch.from_numpy(bits).bool()


def _from_columns(matrix: PackedMatrix) -> Tensor:
    assert matrix.marks is not None  # noqa: S101 - columns have both
    assert matrix.starts is not None  # noqa: S101
    (rows, inputs), height = matrix.shape, matrix.height
    groups = matrix.starts.numel() - 1
    places = torch.from_numpy(matrix.marks.numpy().astype(np.int64))
    group = torch.repeat_interleave(torch.arange(groups), matrix.starts.diff())
    found = torch.zeros(groups, inputs, height)
    found[group, places] = matrix.values[: len(places) * height].to(torch.float32).reshape(-1, height)
    return found.transpose(1, 2).reshape(-1, inputs)[:rows]
