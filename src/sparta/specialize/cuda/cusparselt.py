"""cuSPARSELt as a library implement: 2:4 weights for many tokens, with everything but the product prepared once.

PyTorch's own call builds descriptors and a plan anew each time, which costs the host half a millisecond; here a plan is
kept for each number of tokens. The one idea to know: which of the library's algorithms is fastest differs from shape to
shape, and their numbers from release to release, so they are measured, and each is checked before it is kept.
"""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.common.tuning import TunableItemCfg
from sparta.errors import MissingPackageError, ShapeError, SpartaError, ValueRangeError, message
from sparta.specialize.cuda.nvrtc import raw_stream
from sparta.specialize.cuda.two_four import is_two_four
from sparta.specialize.implement import Implement, Params, Support, present, register
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear import LinearKernel, apply_epilogue

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
_ONE, _ZERO = c_float(1.0), c_float(0.0)


class _Opaque(ctypes.Structure):
    """Memory for one structure of the library."""

    _fields_ = (("words", c_int64 * (_OPAQUE // 8)),)


@dataclass(frozen=True)
class _Plan:
    """A prepared product; what it was made from must live as long."""

    plan: _Opaque
    workspace: int
    held: tuple[_Opaque, ...]


class _Library:
    """The library on one device."""

    def __init__(self) -> None:
        self._lib = _load()
        self._handle = _Opaque()
        self._check(self._lib.cusparseLtInit(byref(self._handle)), "init")

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
        return _Plan(plan, size.value, (weight, x, y, product, selection))

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
        space = torch.empty(plan.workspace, dtype=torch.uint8, device=x.device) if plan.workspace else None
        stream = c_void_p(raw_stream(x.device))
        place = c_void_p(y.data_ptr())
        self._check(
            self._lib.cusparseLtMatmul(
                byref(self._handle), byref(plan.plan), byref(_ONE), c_void_p(packed.data_ptr()), c_void_p(x.data_ptr()),
                byref(_ZERO), place, place, None if space is None else c_void_p(space.data_ptr()), byref(stream),
                c_int32(1),
            ), "the product",
        )  # fmt: skip

    def _check(self, status: int, what: str) -> None:
        if status:
            raise SpartaError(message(f"cuSPARSELt refuses {what}: status {status}"))


class _LibraryKernel(LinearKernel):
    """The library's product for one weight; plans are kept for the numbers of tokens that were met last."""

    def __init__(self, spec: KernelSpec, algorithm: int) -> None:
        self._shape = (spec["weight"].shape[0], spec["weight"].shape[1])
        self._epilogue = Epilogue(activation=spec.epilogue.activation, residual=spec.epilogue.residual)
        self._algorithm, self._weight = algorithm, spec["weight"]
        self._plans: OrderedDict[tuple[Any, ...], _Plan] = OrderedDict()

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        if tuple(operand.shape) != self._shape:
            raise ShapeError(message(f"a weight of shape {tuple(operand.shape)}", f"{self._shape}, as when built"))
        with torch.cuda.device(operand.device):
            pruned = self._weight.apply(operand.detach()).contiguous()
            # The library takes -0.0 for a kept value, so a group could seem to have three.
            return (_on(operand.device).compress(torch.where(pruned == 0, 0, pruned)),)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        (x,) = present(x)
        n, k = self._shape
        if x.dim() != 2 or x.shape[1] != k:
            raise ShapeError(message(f"an input of shape {tuple(x.shape)}", f"(M, {k})"))
        rows, padded = x.shape[0], -(-x.shape[0] // _STEP) * _STEP
        if not rows:
            return x.new_empty(0, n)
        whole = x.contiguous() if rows == padded else functional.pad(x, (0, 0, 0, padded - rows))
        if whole.data_ptr() % _ALIGNED:
            whole = whole.clone()
        bias = None if bias is None else bias.contiguous()
        y = x.new_empty(padded, n)
        self._multiply(packed[0], whole, bias, y)
        return apply_epilogue(y if rows == padded else y[:rows], self._epilogue, residual)

    def _multiply(self, packed: Tensor, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        if x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                self._multiply(packed, x, bias, y)
            return
        _on(x.device).multiply(self._plan(x.device, x.shape[0], x.dtype, bias), packed, x, y)

    def _plan(self, device: torch.device, tokens: int, dtype: torch.dtype, bias: Tensor | None) -> _Plan:
        address = 0 if bias is None else bias.data_ptr()
        key = (device, tokens, dtype, address)
        if key not in self._plans:
            self._plans[key] = _on(device).plan(self._shape, tokens, dtype, self._algorithm, address)
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]


@register
class CuSparseLt(Implement):
    """NVIDIA's cuSPARSELt on 2:4 weights, for many tokens."""

    name = "cusparselt"
    op = "linear"

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 on CUDA, 2:4 weights whose sides are multiples of 16, many tokens."""
        if spec.device != "cuda":
            return Support.no(f"it runs on CUDA, not on {spec.device}")
        if str(spec["input"].format) != "bf16":
            # In fp16 some of the library's algorithms end in an illegal instruction, which no one can recover from.
            return Support.no(f"it is used for bf16, not {spec['input'].format}")
        if spec["input"].shape[0] < _FEWEST_TOKENS:
            return Support.no(f"{spec['input'].shape[0]} tokens; below {_FEWEST_TOKENS} it was never faster than dense")
        if not all(side > 0 and side % _STEP == 0 for side in spec["weight"].shape):
            return Support.no(f"sides {tuple(spec['weight'].shape)} are not multiples of {_STEP}")
        if not is_two_four(spec["weight"]):
            return Support.no("more than 2 of some 4 neighbouring inputs are live")
        reason = _obstacle()
        return Support.no(reason) if reason else Support.yes("the library's 2:4 product")

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the library's algorithms."""
        rows = -(-spec["input"].shape[0] // _STEP) * _STEP
        shape = (spec["weight"].shape[0], spec["weight"].shape[1])
        device = torch.device("cuda", torch.cuda.current_device())
        count = _on(device).algorithms(shape, rows, torch.bfloat16)
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
def _obstacle() -> str:
    """Return why the library cannot be used here; empty when it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    try:
        _on(torch.device("cuda", torch.cuda.current_device()))
    except SpartaError as error:
        return str(error)
    return ""
