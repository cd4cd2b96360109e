"""A pruned linear layer in the layout its kernel reads: ``activation(x W^T + bias) + residual``.

:class:`PackedLinear` is below operators and autograd: it packs a weight once and multiplies. The one idea to know: a
pruned weight is not multiplied at all, so where dense masked computation turns ``0 * inf`` into NaN, this gives what
the live weights alone give; NaN and inf that meet a live weight spread as they do in the dense layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.cpu.library import (
    STREAM_FORMS,
    PanelCall,
    PanelMatrix,
    StreamCall,
    StreamMatrix,
    activation_code,
    load,
)
from sparta.specialize.cpu.packing import Layout, pack_mask
from sparta.specialize.cpu.panel import Panel
from sparta.specialize.cpu.tile import AVX512_FORMS, Tile
from sparta.tesa.attribute import TeSA

__all__ = ["PackedLinear"]

# Computed in float32, returned in the dtype of the input.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedLinear:
    """A weight (N, K), packed without its pruned values, that multiplies activations.

    Sums are computed in float32. bfloat16 and float16 activations are converted on the way in and the result on the
    way out, so they save no time; other dtypes are refused. There is no autograd here.

    Parameters
    ----------
    weight
        (N, K), any float dtype; stored as float32. ``None`` packs the mask only, and every call must bring the
        ``values`` that :meth:`pack` returns.
    mask
        (N, K) bool, True = live, or a TeSA. ``None`` takes the nonzero weights as live.
    isa
        Instruction set; ``None`` for the best.
    tile
        Fields of :class:`~sparta.specialize.cpu.tile.Tile`, as :func:`~sparta.specialize.cpu.candidates` lists them.

    Examples
    --------
    >>> weight = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]])
    >>> packed = PackedLinear(weight, block=1, mv=1)
    >>> packed(torch.ones(2, 3), activation="relu")
    tensor([[3., 3.],
            [3., 3.]])
    """

    def __init__(
        self,
        weight: Tensor | None,
        mask: Tensor | TeSA | None = None,
        *,
        isa: str | None = None,
        **tile: Any,  # noqa: ANN401
    ) -> None:
        live = _live(weight, mask)
        self.tile = Tile(**tile)
        self.library = load(isa)
        if self.tile.form in AVX512_FORMS and self.library.isa != "avx512":
            given = f"the form {self.tile.form!r} with the instruction set {self.library.isa}"
            raise ValueRangeError(message(given, "avx512", "take the form 'rows'"))
        self.layout: Layout = pack_mask(live, self.tile, self.library.lanes)
        self.shape = self.layout.shape
        self.values: Tensor | None = None if weight is None else self.pack(weight)
        self._matrix = self._bound = self._describe()

    def pack(self, weight: Tensor) -> Tensor:
        """Return the values of a weight (N, K) with this mask, in the order the kernel reads."""
        if tuple(weight.shape) != self.shape:
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{self.shape}, as when packed"))
        return self.layout.values(weight)

    def update_values(self, weight: Tensor) -> None:
        """Take new values for the same mask, in place."""
        fresh = self.pack(weight)
        if self.values is None:
            self.values = fresh
            self._matrix.values = fresh.data_ptr()
        else:
            self.values.copy_(fresh)

    def __call__(
        self,
        x: Tensor | Panel,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        threads: int | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Return ``activation(x W^T + bias) + residual``.

        Parameters
        ----------
        x
            (..., K) with any strides; rows need unit stride, others are copied first. Or a :class:`Panel`.
        bias
            (N,).
        activation
            ``'relu'``, ``'gelu'`` (the exact one), ``'silu'`` or None.
        residual
            (..., N), of any strides.
        out
            (..., N), of the dtype of x: where the result goes.
        threads
            How many to use; by default as many as torch does.
        values
            Of another weight with the same mask, as :meth:`pack` returned them.
        """
        rows, tokens = self._inputs_of(x)
        outputs = self.shape[0]
        shape: tuple[int, ...] = (tokens, outputs)
        dtype = torch.float32
        if not isinstance(x, Panel):
            dtype = x.dtype
            if x.ndim != 2:
                shape = (*x.shape[:-1], outputs)
        if residual is not None:
            if residual.shape != shape:
                raise ShapeError(message(f"a residual of shape {tuple(residual.shape)}", f"{shape}, as the result"))
            residual = self._rows_of(residual, "residual", outputs)
        y = torch.empty(tokens, outputs) if out is None else _target(out, shape, dtype, rows, residual)
        self._run(rows, y, tokens, (bias, activation, residual), threads, values)
        if out is None:
            y = y if len(shape) == 2 else y.view(shape)
            return y if dtype == torch.float32 else y.to(dtype)
        if y.data_ptr() != out.data_ptr():
            out.copy_(y.view(out.shape))
        return out

    def to_panel(
        self,
        x: Tensor | Panel,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Panel | None = None,
        threads: int | None = None,
        values: Tensor | None = None,
    ) -> Panel:
        """Return the same as a panel, for a next layer with the same ``mv``; only in the form ``'panel'``.

        ``x`` is (M, K) or a panel, ``residual`` a panel.
        """
        if self.tile.form != "panel":
            given = f"a panel from the form {self.tile.form!r}"
            raise ValueRangeError(message(given, "the form 'panel'", "call the layer itself for a tensor"))
        rows, tokens = self._inputs_of(x)
        y = Panel.empty(tokens, self.shape[0], self.tile.mv * self.library.lanes)
        if residual is not None:
            self._checked_panel(residual, "residual", self.shape[0])
            if residual.tokens != tokens:
                raise ShapeError(message(f"a residual of {residual.tokens} tokens", f"{tokens}, as x has"))
        added = None if residual is None else residual.data
        self._run(rows, y.data, tokens, (bias, activation, added), threads, values)
        return y

    @property
    def nbytes(self) -> int:
        """Bytes that a call reads: the stored values and their indices."""
        return self.layout.nbytes

    def __repr__(self) -> str:
        outputs, inputs = self.shape
        return f"PackedLinear({inputs} -> {outputs}, {self.nbytes} bytes, {self.library.isa}, {self.tile})"

    def __getstate__(self) -> dict[str, Any]:
        # Addresses and the open library belong to this object in this process; a copy makes its own.
        return {name: value for name, value in vars(self).items() if name not in ("_matrix", "_bound", "library")} | {
            "isa": self.library.isa
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.library = load(state.pop("isa"))
        vars(self).update(state)
        self._matrix = self._bound = self._describe()

    def _run(
        self,
        x: Tensor,
        y: Tensor,
        tokens: int,
        epilogue: tuple[Tensor | None, str | None, Tensor | None],
        threads: int | None,
        values: Tensor | None,
    ) -> None:
        """Call the kernel with checked tensors: rows (M, C), or the data of panels, which have three dimensions."""
        bias, activation, residual = epilogue
        if bias is not None:
            bias = self._checked_bias(bias)
        threads = torch.get_num_threads() if threads is None else threads
        if threads < 1:
            raise ValueRangeError(message(f"threads is {threads}", "1 or more"))
        matrix = self._matrix_for(values)
        call = (
            x.data_ptr(),
            y.data_ptr(),
            tokens,
            x.stride(0),
            y.stride(0),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            activation_code(activation),
            threads,
        )
        if isinstance(matrix, PanelMatrix):
            self.library.multiply_panels(matrix, PanelCall(*call, x.ndim == 3, y.ndim == 3))
        else:
            self.library.multiply_stream(matrix, StreamCall(*call))

    def _describe(self) -> PanelMatrix | StreamMatrix:
        """Return the C structure of the packed weight; the tensors behind its addresses live in the layout."""
        tile, layout = self.tile, self.layout
        fields: dict[str, Any] = {name: array.data_ptr() for name, array in layout.arrays.items()}
        fields |= {"channels": self.shape[0], "inputs": self.shape[1], "groups": layout.groups}
        fields["prefetch"] = tile.prefetch
        if self.values is not None:
            fields["values"] = self.values.data_ptr()
        if tile.form == "panel":
            chunks = len(layout.arrays["chunk_columns"]) - 1
            return PanelMatrix(**fields, chunks=chunks, bn=tile.block, mv=tile.mv, interleave=tile.interleave)
        width = layout.arrays["indices"].element_size() if "indices" in layout.arrays else 0
        return StreamMatrix(**fields, form=STREAM_FORMS[tile.form], height=tile.block, index_bytes=width)

    def _matrix_for(self, values: Tensor | None) -> PanelMatrix | StreamMatrix:
        """Return the C structure with the values to use."""
        if values is None:
            if self.values is None:
                raise ValueRangeError(message("no values", "a packed weight", "pass values= or call update_values"))
            return self._matrix
        expected = self.layout.length
        if values.numel() != expected or values.dtype != torch.float32 or not values.is_contiguous():
            given = f"values of shape {tuple(values.shape)} and {values.dtype}"
            raise ShapeError(message(given, f"contiguous float32 ({expected},)", "take what pack() returned"))
        bound = self._bound
        if bound.values == values.data_ptr():
            return bound  # as in the last call
        # A copy, because another thread may be running with other values.
        matrix = type(self._matrix).from_buffer_copy(self._matrix)
        matrix.values = values.data_ptr()
        self._bound = matrix
        return matrix

    def _inputs_of(self, x: Tensor | Panel) -> tuple[Tensor, int]:
        """Return the activations as the kernel reads them, and how many tokens they are."""
        if isinstance(x, Panel):
            return self._checked_panel(x, "x", self.shape[1]).data, x.tokens
        rows = self._rows_of(x, "x", self.shape[1])
        return rows, rows.shape[0]

    def _rows_of(self, tensor: Tensor, name: str, width: int) -> Tensor:
        """Return a tensor as float32 rows (M, width) with unit stride, without a copy where that can be."""
        if not tensor.is_cpu:
            raise ValueRangeError(message(f"{name} is on {tensor.device}", "cpu", "move it with .cpu()"))
        plain = tensor.dtype == torch.float32 and tensor.ndim == 2 and tensor.is_contiguous() and not tensor.is_neg()
        if plain and tensor.shape[1] == width:
            return tensor  # the common case, and a call may take only a few microseconds
        if tensor.dtype not in _DTYPES:
            raise ValueRangeError(message(f"{name} is {tensor.dtype}", ", ".join(map(str, _DTYPES))))
        if tensor.ndim == 0 or tensor.shape[-1] != width:
            raise ShapeError(message(f"{name} of shape {tuple(tensor.shape)}", f"(..., {width})"))
        if tensor.numel() == 0:
            return torch.empty(tensor.shape[:-1].numel(), width)
        rows = tensor.detach().resolve_neg().to(torch.float32).reshape(-1, width)
        return rows if rows.stride(1) == 1 else rows.contiguous()

    def _checked_bias(self, bias: Tensor) -> Tensor:
        if bias.shape != (self.shape[0],) or bias.device.type != "cpu" or bias.dtype not in _DTYPES:
            given = f"a bias of shape {tuple(bias.shape)} and {bias.dtype} on {bias.device}"
            raise ShapeError(message(given, f"({self.shape[0]},), a float dtype, on cpu"))
        return bias.detach().to(torch.float32).contiguous()

    def _checked_panel(self, panel: Panel, name: str, channels: int) -> Panel:
        tile = self.tile.mv * self.library.lanes
        if self.tile.form != "panel" or panel.channels != channels or panel.tile != tile:
            given = f"{name} is a panel of {panel.channels} channels in tiles of {panel.tile}"
            raise ShapeError(message(given, f"{channels} channels in tiles of {tile}, in the form 'panel'"))
        return panel


def _live(weight: Tensor | None, mask: Tensor | TeSA | None) -> Tensor:
    """Return the mask (N, K) on the CPU."""
    if mask is None:
        if weight is None:
            raise ValueRangeError(message("neither a weight nor a mask", "one of them or both"))
        mask = weight.detach() != 0
    live = mask.mask("cpu") if isinstance(mask, TeSA) else mask
    if live.ndim != 2 or live.dtype != torch.bool:
        raise ShapeError(message(f"a mask of shape {tuple(live.shape)} and {live.dtype}", "bool (N, K)"))
    if weight is not None and weight.shape != live.shape:
        given = f"a weight of shape {tuple(weight.shape)} and a mask of shape {tuple(live.shape)}"
        raise ShapeError(message(given, "one shape (N, K)"))
    return live.cpu().contiguous()


def _target(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, x: Tensor, residual: Tensor | None) -> Tensor:
    """Return where the kernel writes: `out` itself as rows, or a buffer where it cannot."""
    if tuple(out.shape) != shape or out.dtype != dtype or out.device.type != "cpu":
        given = f"out of shape {tuple(out.shape)} and {out.dtype} on {out.device}"
        raise ShapeError(message(given, f"{shape}, {dtype}, on cpu"))
    rows = len(x) if x.ndim == 2 else shape[0]
    # Rows of x are read until the end, so a result in the same memory must wait. A residual is read just before its
    # place is written, so it may be the result itself, but not lie across it.
    memory = out.untyped_storage().data_ptr()
    shares = x.untyped_storage().data_ptr() == memory
    if residual is not None and residual.data_ptr() != out.data_ptr():
        shares |= residual.untyped_storage().data_ptr() == memory
    if out.dtype == torch.float32 and out.is_contiguous() and not shares and out.numel():
        return out.view(rows, shape[-1])
    return torch.empty(rows, shape[-1])
