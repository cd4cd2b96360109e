"""cuSPARSELt as a library implement: 2:4 weights for many tokens, with everything but the product prepared once.

PyTorch's own call builds descriptors and a plan each time, which costs the host half a millisecond; here a plan is
kept for each number of tokens. Which of the library's algorithms is fastest differs from shape to shape, and their
numbers from release to release, so they are measured, and each is checked before it is kept.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from ctypes import addressof, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.common.tuning import TunableItemCfg
from sparta.errors import MissingPackageError, ShapeError, SpartaError, ValueRangeError, message
from sparta.specialize.cuda.device import cuda_here, on_cuda
from sparta.specialize.cuda.nvrtc import current_device, raw_stream
from sparta.specialize.implement import Cause, Implement, Params, Support
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.cuda_24 import is_two_four
from sparta.specialize.linear.spec import LinearKernel, apply_epilogue
from sparta.specialize.runtime.masked import Masked

__all__ = ["CuSparseLt"]

_CUDA_TYPES = {torch.bfloat16: 14}
_ROW, _COLUMN = 2, 1  # cusparseOrder_t
_PLAIN, _TRANSPOSED = 0, 1  # cusparseOperation_t
_FLOAT32 = 2  # cusparseComputeType
_BIAS_POINTER = 8  # cusparseLtMatmulDescAttribute_t
_ALGORITHM, _ALGORITHMS = 0, 1  # cusparseLtMatmulAlgAttribute_t
_OPAQUE = 16384  # bytes; the library's structures have had between 512 and 11024
_ALIGNED = 16
_STEP = 16  # tokens and sides of the weight are multiples of it, as the library wants
_FEWEST_TOKENS = 128
_PLANS = 64
_PlanKey = tuple[torch.device, int, torch.dtype, int]  # with the tokens and the address of the bias
_ONE, _ZERO = c_float(1.0), c_float(0.0)


class _Opaque(ctypes.Structure):
    """Memory for one structure of the library."""

    _fields_ = (("words", c_int64 * (_OPAQUE // 8)),)


@dataclass(frozen=True)
class _Plan:
    """A prepared product; what it was made from must live as long."""

    plan: _Opaque
    address: int  # of the plan
    workspace: int
    held: tuple[_Opaque, ...]


class _Stream:
    """What products on one stream share; `memory` is theirs in turn."""

    def __init__(self, stream: int) -> None:
        self._handle = c_void_p(stream)
        self.place = addressof(self._handle)
        self.memory: Tensor | None = None
        self.size, self.address = 0, 0  # of the memory


class _Library:
    """The library on one device.

    Callers hold its `lock`: two threads inside it at once got wrong results, or an illegal memory access.
    """

    def __init__(self) -> None:
        self._lib = _load()
        self._handle = _Opaque()
        self._check(self._lib.cusparseLtInit(byref(self._handle)), "init")
        # What every product takes, as plain numbers: the host must keep up with the GPU.
        self._multiply, self._place = self._lib.cusparseLtMatmul, addressof(self._handle)
        self._multiply.argtypes = [*[c_void_p] * 10, c_int32]
        self._one, self._zero = addressof(_ONE), addressof(_ZERO)
        self.lock = threading.Lock()
        self._streams: dict[int, _Stream] = {}

    def weight(self, shape: tuple[int, int], dtype: torch.dtype) -> _Opaque:
        """Return the descriptor of a 2:4 weight (N, K), row by row."""
        descriptor = _Opaque()
        self._check(
            self._lib.cusparseLtStructuredDescriptorInit(
                byref(self._handle), byref(descriptor), c_int64(shape[0]), c_int64(shape[1]), c_int64(shape[1]),
                c_uint32(_ALIGNED), _CUDA_TYPES[dtype], _ROW, 0,
            ), "the weight's descriptor",
        )  # fmt: skip
        return descriptor

    def dense(self, rows: int, columns: int, dtype: torch.dtype, order: int) -> _Opaque:
        """Return the descriptor of a dense matrix without gaps."""
        descriptor = _Opaque()
        leading = columns if order == _ROW else rows
        self._check(
            self._lib.cusparseLtDenseDescriptorInit(
                byref(self._handle), byref(descriptor), c_int64(rows), c_int64(columns), c_int64(leading),
                c_uint32(_ALIGNED), _CUDA_TYPES[dtype], order,
            ), "a matrix's descriptor",
        )  # fmt: skip
        return descriptor

    def plan(self, shape: tuple[int, int], tokens: int, dtype: torch.dtype, algorithm: int, bias: int) -> _Plan:
        """Return the plan of ``W x^T`` for x (tokens, K), whose result by columns is y (tokens, N) by rows."""
        n, k = shape
        weight, x = self.weight(shape, dtype), self.dense(tokens, k, dtype, _ROW)
        y = self.dense(n, tokens, dtype, _COLUMN)
        product, selection, plan = _Opaque(), _Opaque(), _Opaque()
        handle, size = byref(self._handle), c_size_t()
        self._check(
            self._lib.cusparseLtMatmulDescriptorInit(
                handle, byref(product), _PLAIN, _TRANSPOSED, byref(weight), byref(x), byref(y), byref(y), _FLOAT32
            ),
            "the product's descriptor",
        )
        if bias:
            address = c_void_p(bias)
            self._check(
                self._lib.cusparseLtMatmulDescSetAttribute(
                    handle, byref(product), _BIAS_POINTER, byref(address), c_size_t(8)
                ),
                "the bias",
            )
        self._check(
            self._lib.cusparseLtMatmulAlgSelectionInit(handle, byref(selection), byref(product), 0), "the algorithms"
        )
        chosen = c_int(algorithm)
        self._check(
            self._lib.cusparseLtMatmulAlgSetAttribute(handle, byref(selection), _ALGORITHM, byref(chosen), c_size_t(4)),
            f"algorithm {algorithm}",
        )
        self._check(self._lib.cusparseLtMatmulPlanInit(handle, byref(plan), byref(product), byref(selection)), "a plan")
        self._check(self._lib.cusparseLtMatmulGetWorkspace(handle, byref(plan), byref(size)), "the workspace")
        return _Plan(plan, addressof(plan), size.value, (weight, x, y, product, selection))

    def algorithms(self, shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> int:
        """Return how many algorithms there are for a shape."""
        selection, count = self.plan(shape, tokens, dtype, 0, 0).held[4], c_int()
        self._check(
            self._lib.cusparseLtMatmulAlgGetAttribute(
                byref(self._handle), byref(selection), _ALGORITHMS, byref(count), c_size_t(4)
            ),
            "the number of algorithms",
        )
        return max(1, count.value)

    def compress(self, weight: Tensor) -> Tensor:
        """Return the packed weight as bytes."""
        descriptor, size, buffer_size = (
            self.weight((weight.shape[0], weight.shape[1]), weight.dtype),
            c_size_t(),
            c_size_t(),
        )
        handle = byref(self._handle)
        self._check(
            self._lib.cusparseLtSpMMACompressedSize2(handle, byref(descriptor), byref(size), byref(buffer_size)),
            "sizes",
        )
        packed, buffer = (torch.empty(s.value, dtype=torch.uint8, device=weight.device) for s in (size, buffer_size))
        self._check(
            self._lib.cusparseLtSpMMACompress2(
                handle, byref(descriptor), 1, _PLAIN, c_void_p(weight.data_ptr()), c_void_p(packed.data_ptr()),
                c_void_p(buffer.data_ptr()), c_void_p(torch.cuda.current_stream().cuda_stream),
            ), "packing",
        )  # fmt: skip
        return packed

    def multiply(self, plan: _Plan, packed: Tensor, x: Tensor, y: Tensor) -> None:
        """Start the product on the current stream of the current device, which is x's."""
        place, number = y.data_ptr(), raw_stream(x.device)
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = _Stream(number)
        size, memory = plan.workspace, None
        # A graph may be replayed beside other work, so it gets memory of its own; stream 0 is never recorded.
        if size and number and torch.cuda.is_current_stream_capturing():
            memory = torch.empty(size, dtype=torch.uint8, device=x.device)
        elif size > stream.size:
            stream.memory = torch.empty(size, dtype=torch.uint8, device=x.device)
            stream.size, stream.address = size, stream.memory.data_ptr()
        status = self._multiply(
            self._place, plan.address, self._one, packed.data_ptr(), x.data_ptr(), self._zero, place, place,
            stream.address if memory is None else memory.data_ptr(), stream.place, 1,
        )  # fmt: skip
        if status:
            self._check(status, "the product")

    def _check(self, status: int, what: str) -> None:
        if status:
            raise SpartaError(message(f"cuSPARSELt refuses {what}: status {status}"))


class _LibraryKernel(LinearKernel):
    """The library's product for one weight; plans are kept for the numbers of tokens that were met last."""

    def __init__(self, spec: KernelSpec, algorithm: int) -> None:
        self._shape = (spec["weight"].shape[0], spec["weight"].shape[1])
        self._epilogue = Epilogue(activation=spec.epilogue.activation, residual=spec.epilogue.residual)
        self._algorithm, self._masked, self._plain = algorithm, Masked(spec["weight"]), spec.epilogue.activation is None
        self._plans: OrderedDict[_PlanKey, _Plan] = OrderedDict()

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        if tuple(operand.shape) != self._shape:
            raise ShapeError(message(f"a weight of shape {tuple(operand.shape)}", f"{self._shape}, as when built"))
        with torch.cuda.device(operand.device):
            pruned = self._masked(operand.detach()).contiguous()
            # The library takes -0.0 for a kept value, so a group could seem to have three.
            pruned, library = torch.where(pruned == 0, 0, pruned), _on(operand.device)
            with library.lock:
                return (library.compress(pruned),)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        n, k = self._shape
        shape = x.shape
        if len(shape) != 2 or shape[1] != k:
            raise ShapeError(message(f"an input of shape {tuple(shape)}", f"(M, {k})"))
        rows = shape[0]
        padded = -(-rows // _STEP) * _STEP
        if not rows:
            return x.new_empty(0, n)
        whole = x.contiguous() if rows == padded else functional.pad(x, (0, 0, 0, padded - rows))
        if whole.data_ptr() % _ALIGNED:
            whole = whole.clone()
        bias = None if bias is None else bias.contiguous()
        y = x.new_empty(padded, n)
        self._multiply(packed[0], whole, bias, y)
        result = y if rows == padded else y[:rows]
        return result if self._plain and residual is None else apply_epilogue(result, self._epilogue, residual)

    def _multiply(self, packed: Tensor, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        device, tokens = x.device, x.shape[0]
        if device.index != current_device():
            with torch.cuda.device(device):
                self._multiply(packed, x, bias, y)
            return
        library = _on(device)
        key = (device, tokens, x.dtype, 0 if bias is None else bias.data_ptr())
        with library.lock:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = library.plan(self._shape, tokens, x.dtype, self._algorithm, key[3])
                if len(self._plans) > _PLANS:
                    self._plans.popitem(last=False)
            else:
                self._plans.move_to_end(key)
            library.multiply(plan, packed, x, y)


def _once_packed(spec: KernelSpec) -> Support:
    """Say whether a weight is packed once and then used again and again."""
    if spec.attributes.get("trained"):
        return Support.no("compressing a weight in every step takes it longer than the product saves", Cause.OTHER)
    return Support.yes()


class CuSparseLt(Implement):
    """NVIDIA's cuSPARSELt on 2:4 weights, for many tokens."""

    name = "cusparselt"
    op = "linear"

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 on CUDA, 2:4 weights whose sides are multiples of 16, many tokens; not in training."""
        answer = on_cuda(spec.device) and _once_packed(spec)
        if not answer:
            return answer
        if str(spec["input"].format) != "bf16":
            # In fp16 some of the library's algorithms end in an illegal instruction, which no one can recover from.
            return Support.no(f"it is used for bf16, not {spec['input'].format}", Cause.DTYPE)
        if spec["input"].shape[0] < _FEWEST_TOKENS:
            given = f"{spec['input'].shape[0]} tokens"
            return Support.no(f"{given}; below {_FEWEST_TOKENS} it was never faster than dense", Cause.SHAPE)
        if not all(side > 0 and side % _STEP == 0 for side in spec["weight"].shape):
            return Support.no(f"sides {tuple(spec['weight'].shape)} are not multiples of {_STEP}", Cause.SHAPE)
        if not is_two_four(spec["weight"]):
            return Support.no("more than 2 of some 4 neighbouring inputs are live", Cause.PATTERN)
        return _library_here() and Support.yes("the library's 2:4 product")

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the library's algorithms."""
        rows = -(-spec["input"].shape[0] // _STEP) * _STEP
        shape = (spec["weight"].shape[0], spec["weight"].shape[1])
        device = torch.device("cuda", torch.cuda.current_device())
        library = _on(device)
        with library.lock:
            count = library.algorithms(shape, rows, torch.bfloat16)
        return {"algorithm": TunableItemCfg("choice", _value=list(range(count)))}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the library's own first choice."""
        del spec
        return {"algorithm": 0}

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Keep the algorithm; plans are made at the first run with a number of tokens."""
        if not isinstance(params["algorithm"], int) or params["algorithm"] < 0:
            raise ValueRangeError(message(f"algorithm {params['algorithm']!r}", "a number of 0 or more"))
        return _LibraryKernel(spec, params["algorithm"])


@functools.cache
def _on(device: torch.device) -> _Library:
    """Return the library on a device."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes PyTorch's context current
        return _Library()


@functools.cache
def _load() -> ctypes.CDLL:
    packages = Path(torch.__file__).parents[1] / "nvidia"
    for name in ("libcusparseLt.so.0", *map(str, sorted(packages.glob("*/lib/libcusparseLt.so.0")))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingPackageError(message("cuSPARSELt was not found", fix="it comes with CUDA builds of PyTorch"))


@functools.cache
def _library_here() -> Support:
    """Say whether the library can be used here, or why not."""
    answer = cuda_here()
    if not answer:
        return answer
    try:
        _on(torch.device("cuda", torch.cuda.current_device()))
    except SpartaError as error:
        return Support.no(str(error), Cause.MISSING_TOOL)
    return Support.yes()
