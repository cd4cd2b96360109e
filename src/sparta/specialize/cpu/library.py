"""The kernel library as Python sees it: C structures, typed functions, error codes turned into errors.

:func:`load` compiles (or finds) a library and opens it once for each instruction set. The one idea to know: structures
only hold addresses, so whoever fills one must keep the tensors alive.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass

from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError, did_you_mean, message
from sparta.specialize.cpu.toolchain import build, chosen_isa

__all__ = [
    "ACTIVATIONS",
    "ConvCall",
    "Int8Call",
    "Library",
    "PanelCall",
    "PanelMatrix",
    "StreamCall",
    "StreamMatrix",
    "load",
]

ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}
# Numbers of the forms that weights for few tokens are stored in.
STREAM_FORMS = {"columns": 0, "permuted": 1, "rows": 2, "bitmap": 3}
_UNKNOWN_TILE, _NO_MEMORY = 1, 2


class PanelMatrix(Structure):
    """A weight packed for many tokens; see ``native/spmm.h``."""

    _fields_ = (
        ("channels", c_int64),
        ("inputs", c_int64),
        ("groups", c_int64),
        ("chunks", c_int64),
        ("starts", c_void_p),
        ("offsets", c_void_p),
        ("values", c_void_p),
        ("rows", c_void_p),
        ("costs", c_void_p),
        ("chunk_columns", c_void_p),
        ("bn", c_int32),
        ("mv", c_int32),
        ("interleave", c_int32),
        ("prefetch", c_int32),
    )


class PanelCall(Structure):
    """The activations of one call for many tokens; see ``native/spmm.h``."""

    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("tokens", c_int64),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("activation", c_int32),
        ("threads", c_int32),
        ("x_is_panel", c_int32),
        ("y_is_panel", c_int32),
    )


class ConvCall(Structure):
    """The images of one convolution; see ``native/conv.h``."""

    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("slot_rows", c_void_p),
        ("slot_columns", c_void_p),
        ("used", c_void_p),
        ("images", c_int64),
        ("x_strides", c_int64 * 4),
        ("in_channels", c_int64),
        ("in_rows", c_int64),
        ("in_columns", c_int64),
        ("out_rows", c_int64),
        ("out_columns", c_int64),
        ("stride_rows", c_int64),
        ("stride_columns", c_int64),
        ("slots", c_int64),
        ("row_width", c_int64),
        ("band_tokens", c_int64),
        ("reach", c_int64),
        ("plane", c_int64),
        ("direct", c_int32),
        ("activation", c_int32),
        ("threads", c_int32),
    )


class Int8Call(Structure):
    """The activations of one call of 8-bit integers; see ``native/int8.h``."""

    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("tokens", c_int64),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("multiplier", c_void_p),
        ("offset", c_void_p),
        ("row_sums", c_void_p),
        ("floor", c_float),
        ("x_is_unsigned", c_int32),
        ("x_zero", c_int32),
        ("output", c_int32),
        ("y_zero", c_int32),
        ("threads", c_int32),
    )


class StreamMatrix(Structure):
    """A weight packed for one token or a few; see ``native/gemv.h``."""

    _fields_ = (
        ("channels", c_int64),
        ("inputs", c_int64),
        ("groups", c_int64),
        ("starts", c_void_p),
        ("indices", c_void_p),
        ("values", c_void_p),
        ("step_starts", c_void_p),
        ("step_lanes", c_void_p),
        ("step_advances", c_void_p),
        ("costs", c_void_p),
        ("form", c_int32),
        ("height", c_int32),
        ("index_bytes", c_int32),
        ("prefetch", c_int32),
    )


class StreamCall(Structure):
    """The activations of one call for a few tokens; see ``native/gemv.h``."""

    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("tokens", c_int64),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("activation", c_int32),
        ("threads", c_int32),
    )


@dataclass(frozen=True)
class Library:
    """An open kernel library: its instruction set, the floats in one of its vectors, its functions."""

    isa: str
    lanes: int
    handle: ctypes.CDLL

    def has_tile(self, bn: int, mv: int, interleave: int, prefetch: int) -> bool:
        """Tell whether there is a kernel for that tile, and for the narrower ones at a ragged end."""
        return bool(self.handle.sparta_has_tile(bn, mv, interleave, prefetch))

    def multiply_panels(self, matrix: PanelMatrix, call: PanelCall) -> None:
        """Run the kernel for many tokens."""
        _raise_for(self.handle.sparta_multiply_panels(matrix, call))

    def multiply_conv(self, matrix: PanelMatrix, call: ConvCall) -> None:
        """Run the kernel for images."""
        _raise_for(self.handle.sparta_multiply_conv(matrix, call))

    def multiply_int8(self, matrix: PanelMatrix, call: Int8Call) -> None:
        """Run the kernel for 8-bit integers; the matrix has four of them in every value."""
        _raise_for(self.handle.sparta_multiply_int8(matrix, call))

    def multiply_generated(
        self, groups: ctypes.Array[c_int64], shape: tuple[int, int], values: int, call: PanelCall
    ) -> None:
        """Run the generated functions of a table, for a weight (N, K) with its values at this address."""
        count = len(groups) // 3
        _raise_for(self.handle.sparta_multiply_generated(ctypes.addressof(groups), count, *shape, values, call))

    def multiply_stream(self, matrix: StreamMatrix, call: StreamCall) -> None:
        """Run the kernel for a few tokens."""
        _raise_for(self.handle.sparta_multiply_stream(matrix, call))


def load(isa: str | None = None) -> Library:
    """Return the kernel library for an instruction set, compiled at the first use on this machine.

    Raises
    ------
    sparta.errors.MissingPackageError
        If there is no C++ compiler; callers then run dense.

    Examples
    --------
    >>> library = load("portable")
    >>> library.lanes
    4
    """
    sanitize = os.environ.get("SPARTA_CPU_SANITIZE", "")
    return _loaded(chosen_isa(isa), os.environ.get("SPARTA_CACHE", ""), sanitize)


@functools.cache
def _loaded(isa: str, cache: str, sanitize: str) -> Library:
    """Open a library once; the other arguments are what the build reads from the environment."""
    del cache, sanitize
    path = build(isa)
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        given = f"the compiled CPU kernels do not load: {error}"
        raise SpartaError(message(given, fix=f"delete {path} to build them again")) from error
    handle.sparta_lanes.restype = c_int
    handle.sparta_has_tile.argtypes = (c_int, c_int, c_int, c_int)
    handle.sparta_multiply_panels.argtypes = (POINTER(PanelMatrix), POINTER(PanelCall))
    handle.sparta_multiply_conv.argtypes = (POINTER(PanelMatrix), POINTER(ConvCall))
    handle.sparta_multiply_int8.argtypes = (POINTER(PanelMatrix), POINTER(Int8Call))
    handle.sparta_multiply_generated.argtypes = (
        *(c_void_p, c_int64, c_int64, c_int64, c_void_p),
        POINTER(PanelCall),
    )
    handle.sparta_multiply_stream.argtypes = (POINTER(StreamMatrix), POINTER(StreamCall))
    handle.sparta_pack.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int)
    handle.sparta_unpack.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int)
    handle.sparta_pack.restype = handle.sparta_unpack.restype = None
    return Library(isa, int(handle.sparta_lanes()), handle)


def activation_code(name: str | None) -> int:
    """Return the number of an activation.

    >>> activation_code("relu"), activation_code(None)
    (1, 0)
    """
    code = ACTIVATIONS.get(name or "none")
    if code is None:
        raise NameNotFoundError(did_you_mean(str(name), ACTIVATIONS, "activation"))
    return code


def _raise_for(code: int) -> None:
    if code == _UNKNOWN_TILE:
        raise ValueRangeError(message("a tile this library has no kernel for", fix="take one of candidates()"))
    if code == _NO_MEMORY:
        raise SpartaError(message("not enough memory for the tiles of a call", fix="use fewer threads"))
