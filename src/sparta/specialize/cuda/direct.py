"""Starting a compiled Triton kernel by the driver, without the launcher that Triton made for it.

Triton's launcher looks at every argument again at every call, asks the driver about every pointer and encodes every
tensor map, which takes the host longer than to start the kernel. What a kernel takes is a few numbers at known places,
so they are written there and the kernel is started; where the driver says that a kernel's parameters are not laid out
as we think, there is no :class:`DirectKernel`, and Triton starts it as ever.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_char, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from operator import itemgetter
from typing import Any

import torch

from sparta.errors import SpartaError, message
from sparta.specialize.cuda.launch_config import launch_config, overlap_attribute
from sparta.specialize.cuda.nvrtc import NO_CONTEXT, cuda_driver, driver_reason

__all__ = ["DirectKernel", "direct_kernel", "parameter_layout", "tensor_map", "tensor_map_of_sheets"]

_MAP_BYTES = 128  # of a tensor map
_MAP = f"{_MAP_BYTES}s"
_MAP_VALUES = 5  # a matrix is given by its tensor map, two sizes and two strides
_MAP_KINDS = {  # CUtensorMapDataType; it has no fp8, and bytes are moved alike
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 0,
    torch.int8: 0,
    torch.int32: 3,
}
_PROMOTE_TO_128, _PROMOTE_TO_256 = 2, 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B, _256B
_LAST_WITH_SMALL_MAPS = 13010  # up to this driver, a bit must be cleared in the maps of small tensors
_SMALL_BYTES = 128 * 1024
_MAPS = 256  # that are kept of each matrix
_MOST_SHARED = 228 * 1024  # above it a launch needs another attribute
_SCRATCH = 2  # pointers after the arguments, to memory that our kernels do not ask for
_CODES = {"i32": ("i",), "i64": ("q",), "fp32": ("f",)}


class _Record:
    """The memory of one launch, 0 where nothing is written; only one thread at a time uses it."""

    def __init__(self, places: Sequence[tuple[int, int]], threads: int, shared: int, *, early: bool) -> None:
        self.buffer = (c_char * sum(places[-1]))()
        self.pointers = (c_void_p * len(places))(*(addressof(self.buffer) + offset for offset, _ in places))
        self.attribute = overlap_attribute() if early else None
        self.config = launch_config((1, 1), threads, shared, self.attribute)
        self.grid = self.config.grid
        self.places = (addressof(self.config), addressof(self.pointers))


class DirectKernel:
    """A compiled Triton kernel on the device that is current, for given dtypes of its matrices.

    Parameters
    ----------
    compiled
        What Triton returned when it started the kernel.
    dtypes
        Of the matrices that the kernel takes as tensor descriptors, in their order; there may be more.

    Raises
    ------
    sparta.errors.SpartaError
        If the kernel is not one that this class can start; also AttributeError, KeyError or TypeError where Triton
        does not tell what it is expected to.
    """

    def __init__(self, compiled: Any, dtypes: Sequence[torch.dtype]) -> None:
        metadata, driver = compiled.metadata, cuda_driver()
        asks = (metadata.global_scratch_size, metadata.profile_scratch_size, metadata.launch_cooperative_grid)
        if any(asks) or metadata.num_ctas != 1 or metadata.shared > _MOST_SHARED:
            raise SpartaError(message("a kernel that asks for scratch memory or a cluster"))
        kinds = tuple(compiled.src.signature.values())
        self._handle, self._held = compiled.function, compiled  # which unloads the function when it goes away
        places = _places(driver, self._handle)
        self._format, self._pick = parameter_layout(kinds, places)
        self._record = functools.partial(
            _Record, places, metadata.num_warps * 32, metadata.shared, early=bool(metadata.launch_pdl)
        )
        self._free: list[_Record] = []
        self._launch, self._context = driver.cuLaunchKernelEx, c_void_p()
        driver.cuCtxGetCurrent(byref(self._context))
        descriptors = [kind for kind in kinds if kind.startswith("tensordesc")]
        described = list(metadata.tensordesc_meta) if descriptors else []
        odd = any(each.get("fp4_padded") or each.get("is_im2col") for each in described)
        if odd or len(described) != len(descriptors) or len(described) > len(dtypes):
            raise SpartaError(message("tensor descriptors that are not plain matrices"))
        self.maps = tuple(
            tensor_map(dtype, tuple(each["block_size"]), each["swizzle"], self._context)
            for dtype, each in zip(dtypes, described, strict=False)
        )
        """For each matrix a function from address, rows, columns and the stride of rows to its tensor map."""

    def start(self, programs: int, values: Sequence[int | bytes], stream: int) -> None:
        """Start the kernel on a stream of its device.

        Parameters
        ----------
        values
            Of all parameters in their order: numbers and addresses; for a matrix its map, its sizes and its strides.
            Those of parameters that are compiled into the kernel are there too, and are passed over.
        """
        try:
            record = self._free.pop()
        except IndexError:
            record = self._record()
        self._format.pack_into(record.buffer, 0, *self._pick(values))
        record.grid[0], record.config.stream = programs, stream
        config, pointers = record.places
        failed = self._launch(config, self._handle, pointers, None)
        if failed == NO_CONTEXT:  # a thread that has not used the GPU before
            cuda_driver().cuCtxSetCurrent(self._context)
            failed = self._launch(config, self._handle, pointers, None)
        self._free.append(record)
        if failed:
            raise SpartaError(message(f"the kernel did not start: {driver_reason(failed)}"))


def direct_kernel(compiled: Any, dtypes: Sequence[torch.dtype] = ()) -> DirectKernel | None:
    """Return the kernel for direct starts; None where only Triton's own launcher can start it."""
    try:
        return DirectKernel(compiled, dtypes)
    except (SpartaError, AttributeError, KeyError, TypeError):
        return None


def parameter_layout(
    kinds: Sequence[str], places: Sequence[tuple[int, int]]
) -> tuple[struct.Struct, Callable[[Sequence[Any]], tuple[Any, ...]]]:
    """Return how arguments are written, and what picks those that have a place out of all values.

    Parameters
    ----------
    kinds
        Triton's types of the parameters; ``constexpr`` has no place.
    places
        (offset, size) of each parameter in bytes, as the driver knows them; the last two are Triton's own.

    Examples
    --------
    >>> places = [(0, 8), (8, 4), (16, 8), (24, 8), (32, 8)]
    >>> layout, pick = parameter_layout(["*bf16", "constexpr", "i32", "i64"], places)
    >>> layout.format, pick((512, 1, 7, 9))
    ('<Qi4xq', (512, 7, 9))
    """
    codes: list[str] = []
    chosen: list[int] = []
    given = 0  # values so far
    for kind in kinds:
        found = _codes(kind)
        chosen += range(given, given + len(found))
        codes += found
        given += _MAP_VALUES if kind.startswith("tensordesc") else 1
    sizes = [struct.calcsize(f"<{code}") for code in (*codes, *["Q"] * _SCRATCH)]
    layout, end = "<", 0
    if sizes != [size for _, size in places] or len(codes) < 2:  # of one, `itemgetter` makes no tuple
        raise SpartaError(message(f"parameters of {[size for _, size in places]} bytes", f"{sizes}"))
    for (offset, size), code in zip(places, codes, strict=False):
        if offset < end:
            raise SpartaError(message("parameters that overlap"))
        layout += (f"{offset - end}x" if offset > end else "") + code
        end = offset + size
    return struct.Struct(layout), itemgetter(*chosen)


def _codes(kind: str) -> tuple[str, ...]:
    """Return the struct codes of a parameter of one of Triton's types."""
    if kind == "constexpr":
        return ()
    if kind.startswith("*"):
        return ("Q",)
    if kind.startswith("tensordesc"):
        return (_MAP, "i", "i", "q", "q")
    if kind not in _CODES:
        raise SpartaError(message(f"a parameter of type {kind}"))
    return _CODES[kind]


def _places(driver: ctypes.CDLL, handle: int) -> list[tuple[int, int]]:
    """Return offset and size of each parameter of a loaded function, in bytes."""
    found: list[tuple[int, int]] = []
    offset, size = c_size_t(), c_size_t()
    while not driver.cuFuncGetParamInfo(c_void_p(handle), c_size_t(len(found)), byref(offset), byref(size)):
        found.append((offset.value, size.value))
    return found


def tensor_map(
    dtype: torch.dtype, box: tuple[int, ...], swizzle: int, context: c_void_p
) -> Callable[[int, int, int, int], bytes]:
    """Return a function that encodes the map of a matrix, and keeps the last ones.

    Parameters
    ----------
    box
        Rows and columns that are copied at once.
    swizzle
        How they lie in shared memory, as the driver numbers it (CUtensorMapSwizzle).
    context
        The one to use in a thread that has not used the GPU before.
    """
    height, width = box

    @functools.lru_cache(maxsize=_MAPS)
    def encode(address: int, rows: int, columns: int, stride: int) -> bytes:
        return _encoded(
            dtype, address, (columns, rows), (stride,), (width, height), (swizzle, _PROMOTE_TO_128), context
        )

    return encode


def tensor_map_of_sheets(
    dtype: torch.dtype, box: tuple[int, int, int], context: c_void_p
) -> Callable[[int, int, int], bytes]:
    """Return a function that encodes the map of matrices one after another, and keeps the last ones.

    Their rows are as wide as the box, and lie in shared memory as in memory. The function takes an address, the number
    of matrices and the rows of each.

    Parameters
    ----------
    box
        Matrices, and rows and columns of each, that are copied at once.
    """
    sheets, height, width = box

    @functools.lru_cache(maxsize=_MAPS)
    def encode(address: int, count: int, rows: int) -> bytes:
        sizes, strides = (width, rows, count), (width, rows * width)
        return _encoded(dtype, address, sizes, strides, (width, height, sheets), (0, _PROMOTE_TO_256), context)

    return encode


def _encoded(
    dtype: torch.dtype,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    how: tuple[int, int],
    context: c_void_p,
) -> bytes:
    """Return a tensor map; sizes, strides in elements and the box begin with what is innermost.

    Parameters
    ----------
    how
        The swizzle and the promotion of reads in the L2 cache, as the driver numbers them.
    """
    driver, rank, size = cuda_driver(), len(sizes), dtype.itemsize
    memory = (c_char * (_MAP_BYTES + 64))()
    place = -(-addressof(memory) // 64) * 64  # the driver wants it aligned
    given = (
        c_void_p(place), _MAP_KINDS[dtype], rank, c_void_p(address), (c_uint64 * rank)(*sizes),
        (c_uint64 * (rank - 1))(*(stride * size for stride in strides)), (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*[1] * rank), 0, *how, 0,
    )  # fmt: skip
    failed = driver.cuTensorMapEncodeTiled(*given)
    if failed == NO_CONTEXT:
        driver.cuCtxSetCurrent(context)
        failed = driver.cuTensorMapEncodeTiled(*given)
    if failed:
        raise SpartaError(message(f"a matrix cannot be described: {driver_reason(failed)}"))
    spanned = sum((count - 1) * stride for count, stride in zip(sizes, (1, *strides), strict=True)) * size + 1
    if spanned < _SMALL_BYTES and _mends_small():
        c_uint64.from_address(place + 8).value &= ~(1 << 21)
    return ctypes.string_at(place, _MAP_BYTES)


@functools.cache
def _mends_small() -> bool:
    """Whether this driver is one that needs a bit cleared in the maps of small tensors."""
    version = c_int()
    cuda_driver().cuDriverGetVersion(byref(version))
    return version.value <= _LAST_WITH_SMALL_MAPS
