"""The kernel library as Python sees it: C structures, typed functions, error codes turned into errors.

:func:`load` compiles (or finds) a library and opens it once for each instruction set. Structures only hold addresses,
so the code that fills one must keep the tensors alive.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from ctypes import Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass

from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError, did_you_mean, message
from sparta.specialize.cpu.toolchain import build, chosen_isa
from sparta.specialize.kernel_spec import Epilogue

__all__ = [
    "ACTIVATIONS",
    "BF16_CONV_CALL",
    "CONV_CALL",
    "DENSE_CONV_CALL",
    "DEPTHWISE_CALL",
    "INT8_CALL",
    "INT8_CONV_CALL",
    "PANEL_CALL",
    "STREAM_CALL",
    "WINOGRAD_PLAN",
    "Library",
    "PanelMatrix",
    "ShortMatrix",
    "StreamMatrix",
    "load",
]

ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3, "relu6": 4, "relu_last": 5}
"""Numbers of the activations; ``relu_last`` comes after the residual, all others before it."""
# Numbers of the forms that weights for few tokens are stored in.
STREAM_FORMS = {"columns": 0, "permuted": 1, "rows": 2, "bitmap": 3}
_UNKNOWN_TILE, _NO_MEMORY = 1, 2


# The activations of one call, as bytes: for few tokens and for many. Filling these in one go touches far less code than
# a structure field by field, which is most of a call's cost beside the kernel when other work has filled the caches.
# x, y, tokens, strides of x and y, bias, residual, its stride, activation, threads; and whether x and y are panels.
STREAM_CALL = struct.Struct("@PPqqqPPqii")
PANEL_CALL = struct.Struct("@PPqqqPPqiiii")
# x, y, tokens, strides of x and y, multiplier, offset, row sums, floor; whether x is unsigned, its zero, the dtype of
# the output, its zero, threads; the inverse scale and the channels of x where it is fp32, whether x and y are panels;
# residual, its stride, activation, whether x is dynamic, the output's inverse scale, whether no weight is -128.
INT8_CALL = struct.Struct("@PPqqqPPPfiiiiifiiiPqiifi")
# x, y, bias, residual, rows and columns of slots, what is used; images, four strides of x, twelve numbers of the plan
# and `direct`, in the order of native/bands.h; activation, threads, the gap between two channels of the result, the
# columns of a grid, whether chunks are phases.
CONV_CALL = struct.Struct("@7P17q6i")
# The same without a gap and over places; image, multiplier, offset, row sums; channels, inverse scale, whether x is
# unsigned, its zero, whether no weight is -128; whether x and y are places; of the latter the inverse scale, whether
# they are unsigned, the zero; the result in real numbers beside; of the residual the kind, inverse scale, scale,
# whether it is unsigned, the zero.
INT8_CONV_CALL = struct.Struct("@7P17q3i12x4PqfiiiiifiiPiffii4x")

# The same over images in bf16; the image and the result in real numbers; channels and outputs; whether x, y and the
# residual are bf16.
BF16_CONV_CALL = struct.Struct("@7P17q3i12x2P2q3i4x")

# The same for a dense weight; values, offsets; groups, outputs, columns, those of a chunk, tiles of an image and of a
# band; rows and vectors of a tile; a plan with fewer products, and its values.
DENSE_CONV_CALL = struct.Struct("@7P17q3i12x2P6q2i2P")
# That plan: the copies of its tiles, the channels of a chunk, where the 16 values of a tile lie.
WINOGRAD_PLAN = struct.Struct("@7P17q3i12xq16I")
# x, y, bias, residual, values; planes, channels, multiplier, rows and columns of both; kernel, stride, padding,
# dilation; activation, threads; a second result, and how the first is in bytes: see native/depthwise.h.
DEPTHWISE_CALL = struct.Struct("@5P15q2iPf3i")


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


class ShortMatrix(Structure):
    """A weight in a short format, packed for one token or a few; see ``native/short_stream.h``."""

    _fields_ = (
        ("channels", c_int64),
        ("inputs", c_int64),
        ("groups", c_int64),
        ("starts", c_void_p),
        ("bits", c_void_p),
        ("deltas", c_void_p),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("costs", c_void_p),
        ("form", c_int32),
        ("height", c_int32),
        ("format", c_int32),
        ("prefetch", c_int32),
        ("x_step", c_float),
        ("unused", c_int32),
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

    def multiply_panels(self, matrix: int, call: bytes) -> None:
        """Run the kernel for many tokens: the address of a :class:`PanelMatrix`, and a ``PANEL_CALL``."""
        code = self.handle.sparta_multiply_panels(matrix, call)
        if code:
            raise_for(code)

    def multiply_conv(self, matrix: int, call: bytes) -> None:
        """Run the kernel for images: the address of a :class:`PanelMatrix`, and a ``CONV_CALL``."""
        code = self.handle.sparta_multiply_conv(matrix, call)
        if code:
            raise_for(code)

    def multiply_int8(self, matrix: int, call: bytes) -> None:
        """Run the kernel for 8-bit integers; the :class:`PanelMatrix` there has four of them in every value."""
        code = self.handle.sparta_multiply_int8(matrix, call)
        if code:
            raise_for(code)

    def multiply_bf16(self, matrix: int, call: bytes) -> None:
        """Run the kernel for bf16: a :class:`PanelMatrix` as ``native/bf16.h`` has it, and a ``PANEL_CALL``."""
        code = self.handle.sparta_multiply_bf16(matrix, call)
        if code:
            raise_for(code)

    @property
    def bf16_units(self) -> frozenset[str]:
        """What the processor computes in bf16 by instructions of its own: ``'pairs'``, ``'blocks'``."""
        found = int(self.handle.sparta_bf16_units())
        return frozenset(name for bit, name in ((1, "pairs"), (2, "blocks")) if found & bit)

    @property
    def byte_products(self) -> bool:
        """Whether the processor expands bytes under a mask and adds their products: see ``native/decode_bytes.h``."""
        return bool(self.handle.sparta_byte_products())

    @property
    def byte_tiles(self) -> bool:
        """Whether the processor multiplies tiles of bytes: see ``native/int8_tiles.h``."""
        return bool(self.handle.sparta_byte_tiles())

    def multiply_short(self, matrix: int, call: bytes) -> None:
        """Run the kernel for short formats: the address of a :class:`ShortMatrix`, and a ``STREAM_CALL``."""
        code = self.handle.sparta_multiply_short(matrix, call)
        if code:
            raise_for(code)

    def multiply_generated(
        self, groups: ctypes.Array[c_int64], shape: tuple[int, int], values: int, call: bytes
    ) -> None:
        """Run the generated functions of a table, for a weight (N, K) with its values at this address."""
        count = len(groups) // 3
        raise_for(self.handle.sparta_multiply_generated(ctypes.addressof(groups), count, *shape, values, call))

    def multiply_stream(self, matrix: int, call: bytes) -> None:
        """Run the kernel for a few tokens: the address of a :class:`StreamMatrix`, and a ``STREAM_CALL``."""
        code = self.handle.sparta_multiply_stream(matrix, call)
        if code:
            raise_for(code)


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
        _declare(handle)
    except (OSError, AttributeError) as error:  # no library at all, or one without our functions
        given = f"the compiled CPU kernels do not load: {error}"
        raise SpartaError(message(given, fix=f"delete {path} to build them again")) from error
    return Library(isa, int(handle.sparta_lanes()), handle)


def _declare(handle: ctypes.CDLL) -> None:
    """Say what the functions of an open library take and return; raises AttributeError where one is not there."""
    handle.sparta_lanes.restype = c_int
    handle.sparta_has_tile.argtypes = (c_int, c_int, c_int, c_int)
    handle.sparta_multiply_panels.argtypes = (c_void_p, c_char_p)
    handle.sparta_multiply_conv.argtypes = (c_void_p, c_char_p)
    handle.sparta_dense_conv.argtypes = (c_char_p,)
    handle.sparta_depthwise.argtypes = (c_char_p,)
    handle.sparta_int8_depthwise.argtypes = (c_char_p,)
    handle.sparta_multiply_int8.argtypes = (c_void_p, c_char_p)
    handle.sparta_multiply_int8_conv.argtypes = (c_void_p, c_char_p)
    handle.sparta_multiply_bf16.argtypes = (c_void_p, c_char_p)
    handle.sparta_multiply_bf16_conv.argtypes = (c_void_p, c_char_p)
    handle.sparta_bf16_depthwise.argtypes = (c_char_p,)
    handle.sparta_bf16_units.restype = c_int
    handle.sparta_multiply_short.argtypes = (c_void_p, c_char_p)
    handle.sparta_multiply_generated.argtypes = (
        *(c_void_p, c_int64, c_int64, c_int64, c_void_p),
        c_char_p,
    )
    handle.sparta_multiply_stream.argtypes = (c_void_p, c_char_p)
    handle.sparta_max_pool.argtypes = (c_char_p,)
    handle.sparta_multiply_decoded.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int)
    handle.sparta_decode_buffer.argtypes = (c_void_p, c_int64)
    handle.sparta_decode_buffer.restype = c_int64
    handle.sparta_decode.argtypes = (c_void_p, c_char_p)
    handle.sparta_decode_greedy.argtypes = (c_void_p, c_void_p)
    handle.sparta_byte_products.restype = c_int
    handle.sparta_byte_tiles.restype = c_int
    handle.sparta_run_chain.argtypes = (c_void_p, c_int64, c_char_p, c_int)
    handle.sparta_run_chains.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int)
    handle.sparta_pack.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int)
    handle.sparta_unpack.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int)
    handle.sparta_pack_int8.argtypes = (c_char_p, c_int64, c_int64, c_void_p)
    handle.sparta_unpack_int8.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p)
    for function in ("pack", "unpack", "pack_int8", "unpack_int8"):
        getattr(handle, f"sparta_{function}").restype = None


def activation_code(name: str | None) -> int:
    """Return the number of an activation.

    >>> activation_code("relu"), activation_code(None)
    (1, 0)
    """
    code = ACTIVATIONS.get(name or "none")
    if code is None:
        raise NameNotFoundError(did_you_mean(str(name), ACTIVATIONS, "activation"))
    return code


def fused_activation(epilogue: Epilogue) -> str | None:
    """Return the name that the kernels have for an epilogue's activation and its place.

    >>> fused_activation(Epilogue(activation="relu", residual=True, residual_first=True))
    'relu_last'
    """
    return "relu_last" if epilogue.residual_first else epilogue.activation


def raise_for(code: int) -> None:
    """Raise what a code of the kernels other than 0 means.

    >>> raise_for(0)
    """
    if code == _UNKNOWN_TILE:
        raise ValueRangeError(message("a tile this library has no kernel for", fix="take one of candidates()"))
    if code == _NO_MEMORY:
        raise SpartaError(message("not enough memory for the tiles of a call", fix="use fewer threads"))
