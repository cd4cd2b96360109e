"""``tvm``: a sparse linear layer written in TVM's tensor IR, compiled by LLVM, scheduled by our tuner.

The other way to get a kernel beside writing one: the loop nest is stated once, and how it is cut and unrolled is what
the tuner tries. Outputs are taken in groups that share their input channels, and tokens lie in panels as wide as a
vector register, so the innermost statement is one multiply-add of a whole register. Needs the ``tvm`` extra.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.common.tuning import TunableItemCfg
from sparta.errors import MissingPackageError, ShapeError, ValueRangeError, message
from sparta.specialize.cpu.device import float32_here
from sparta.specialize.cpu.toolchain import chosen_isa
from sparta.specialize.implement import Cause, Implement, Params, Support, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel, apply_epilogue
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.blocks import pad_matrix

__all__ = ["TvmLinear", "loop_nest"]

_ROWS, _VECTORS = (1, 2, 4, 8), (1, 2, 4)
_REGISTERS = {"avx512": 32, "avx2": 16, "portable": 16}
_LANES = {"avx512": 16, "avx2": 8, "portable": 4}
_PROCESSORS = {"avx512": "skylake-avx512", "avx2": "haswell"}
_MOST_DENSE = 0.5  # above it no schedule was ever faster than dense


def loop_nest(rows: int, vectors: int, lanes: int, *, parallel: bool) -> str:
    """Return the kernel as TVMScript.

    Parameters
    ----------
    rows
        Outputs of a group, which share their input channels.
    vectors, lanes
        Registers of tokens that are multiplied at once, and tokens of a register.
    parallel
        Whether groups are shared among TVM's threads.

    Examples
    --------
    >>> "T.vectorized(16)" in loop_nest(4, 2, 16, parallel=False)
    True
    """
    loop = "T.parallel" if parallel else "range"
    return f"""
@T.prim_func
def sparse_linear(
    starts_: T.handle, columns_: T.handle, values_: T.handle, bias_: T.handle, x_: T.handle, y_: T.handle
):
    groups = T.int32()
    kept = T.int32()
    inputs = T.int32()
    panels = T.int32()
    starts = T.match_buffer(starts_, (groups + 1,), "int32")
    columns = T.match_buffer(columns_, (kept,), "int32")
    values = T.match_buffer(values_, (kept, {rows}), "float32")
    bias = T.match_buffer(bias_, (groups, {rows}), "float32")
    x = T.match_buffer(x_, (panels, inputs, {vectors}, {lanes}), "float32")
    y = T.match_buffer(y_, (panels, groups, {rows}, {vectors}, {lanes}), "float32")
    for each in {loop}(panels * groups):
        panel = each // groups
        group = each % groups
        total = T.alloc_buffer(({rows}, {vectors}, {lanes}), "float32")
        for r in T.unroll({rows}):
            for u in T.unroll({vectors}):
                for t in T.vectorized({lanes}):
                    total[r, u, t] = bias[group, r]
        for place in range(starts[group], starts[group + 1]):
            for r in T.unroll({rows}):
                for u in T.unroll({vectors}):
                    for t in T.vectorized({lanes}):
                        total[r, u, t] = total[r, u, t] + values[place, r] * x[panel, columns[place], u, t]
        for r in T.unroll({rows}):
            for u in T.unroll({vectors}):
                for t in T.vectorized({lanes}):
                    y[panel, group, r, u, t] = total[r, u, t]
"""


class _TvmKernel(LinearKernel):
    """Packs groups of outputs by the input channels that any of them uses."""

    def __init__(self, spec: KernelSpec, rows: int, vectors: int) -> None:
        self._weight, self._epilogue = spec["weight"], spec.epilogue
        self._rows, self._vectors, self._lanes = rows, vectors, _LANES[chosen_isa()]
        compiled(rows, vectors, self._lanes, parallel=False)  # what cannot be compiled is known now
        self._starts, self._columns, self._places = _index(spec["weight"], rows)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        n, k = self._weight.shape
        if tuple(operand.shape) != (n, k):
            raise ShapeError(message(f"a weight of shape {tuple(operand.shape)}", f"({n}, {k}), as when built"))
        padded = pad_matrix(self._weight.apply(operand.detach()), (-(-n // self._rows) * self._rows, k))
        groups = torch.unflatten(padded, 0, (-1, self._rows)).transpose(1, 2).reshape(-1, self._rows)
        return groups[self._places].contiguous(), self._starts, self._columns

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        (x,) = present(x)
        values, starts, columns = packed
        n, k = self._weight.shape
        if x.dim() != 2 or x.shape[1] != k:
            raise ShapeError(message(f"an input of shape {tuple(x.shape)}", f"(M, {k})"))
        tokens, wide, groups = x.shape[0], self._vectors * self._lanes, starts.shape[0] - 1
        panels = -(-tokens // wide)
        padded = functional.pad(x, (0, 0, 0, panels * wide - tokens))
        laid = padded.view(panels, self._vectors, self._lanes, k).permute(0, 3, 1, 2).contiguous()
        start = x.new_zeros(groups * self._rows)
        if bias is not None:
            start[:n] = bias
        y = x.new_empty(panels, groups, self._rows, self._vectors, self._lanes)
        if y.numel():
            parallel = torch.get_num_threads() > 1
            run = compiled(self._rows, self._vectors, self._lanes, parallel=parallel)
            run(starts, columns, values, start.view(groups, self._rows), laid, y)
        flat = y.permute(0, 3, 4, 1, 2).reshape(panels * wide, groups * self._rows)[:tokens, :n]
        return apply_epilogue(flat.contiguous(), self._epilogue, residual)


class TvmLinear(Implement):
    """LLVM code for a loop nest in TVM's tensor IR."""

    name = "tvm"
    op = "linear"
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Fp32 on the CPU, for weights that are sparse enough."""
        answer = float32_here(spec)
        if not answer:
            return answer
        if min(spec["weight"].shape) < 1:
            return Support.no("the weight is empty", Cause.SHAPE)
        if spec["weight"].density > _MOST_DENSE:
            given = f"density {spec['weight'].density:.2f}"
            return Support.no(f"{given}; at most {_MOST_DENSE} pays", Cause.PATTERN)
        if importlib.util.find_spec("tvm") is None:
            return Support.no("TVM is not installed: pip install 'sparta-torch[tvm]'", Cause.MISSING_TOOL)
        return Support.yes("LLVM code for a loop nest in TVM's IR")

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the groups of outputs that cover the mask well, and how many registers of tokens to take at once."""
        return {
            "rows": TunableItemCfg("choice", _value=_heights(spec["weight"])),
            "vectors": TunableItemCfg("choice", _value=_widths(spec["input"].shape[0], 1)),
        }

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the highest groups, and registers of tokens as far as they fit."""
        rows = max(_heights(spec["weight"]))
        return {"rows": rows, "vectors": max(_widths(spec["input"].shape[0], rows))}

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Compile the loop nest for these numbers."""
        rows, vectors = params["rows"], params["vectors"]
        if rows not in _ROWS or vectors not in _VECTORS:
            raise ValueRangeError(message(f"rows={rows}, vectors={vectors}", f"rows of {_ROWS}, vectors of {_VECTORS}"))
        return _TvmKernel(spec, rows, vectors)


@functools.lru_cache(maxsize=64)
def compiled(rows: int, vectors: int, lanes: int, *, parallel: bool) -> Callable[..., None]:
    """Return the compiled loop nest; it takes tensors as they are."""
    if importlib.util.find_spec("tvm") is None:
        raise MissingPackageError(message("TVM is not installed", fix="pip install 'sparta-torch[tvm]'"))
    import tvm
    import tvm.script

    module = tvm.IRModule({"sparse_linear": tvm.script.from_source(loop_nest(rows, vectors, lanes, parallel=parallel))})
    target = {"kind": "llvm", "opt-level": 3}
    if chosen_isa() in _PROCESSORS:
        target["mcpu"] = _PROCESSORS[chosen_isa()]
    run: Callable[..., None] = tvm.compile(module, target=tvm.target.Target(target)).jit()["sparse_linear"]
    return run


def _index(weight: TeSA, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each group's channels start, the channels, and their places among all groups × channels."""
    kept = weight.kept_blocks((min(rows, weight.shape[0]), 1)).cpu()
    starts = functional.pad(kept.sum(1).cumsum(0), (1, 0))
    group, column = kept.nonzero(as_tuple=True)
    return starts.to(torch.int32), column.to(torch.int32), group * weight.shape[1] + column


def _heights(weight: TeSA) -> list[int]:
    """Return the heights of groups that store at most half as much again as single outputs do."""
    kept = [float(weight.kept_blocks((min(rows, weight.shape[0]), 1)).float().mean()) for rows in _ROWS]
    return [rows for rows, covered in zip(_ROWS, kept, strict=True) if covered <= 1.5 * kept[0]]


def _widths(tokens: int, rows: int) -> list[int]:
    """Return how many registers of tokens a group of outputs can take: half of all registers hold sums."""
    most = max(1, -(-tokens // _LANES[chosen_isa()]))
    return [v for v in _VECTORS if v == 1 or (v <= most and v * rows <= _REGISTERS[chosen_isa()] // 2)]
