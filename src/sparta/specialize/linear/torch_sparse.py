"""PyTorch's own sparse kernels as implements: CSR for any mask, BSR for blocks. Libraries compete like all others."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparta.common.tuning import TunableItemCfg
from sparta.specialize.cpu.device import float32_here
from sparta.specialize.implement import Cause, Implement, Params, Support
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel, apply_epilogue
from sparta.tesa.formats import BCSR
from sparta.tesa.formats.block_index import BlockIndex

__all__ = ["TorchBSR", "TorchCSR"]

_DENSEST = 0.5  # above it an index of every element costs more than it saves, everywhere we measured


class _TorchSparseKernel(LinearKernel):
    """``W x^T`` with a sparse W in torch's CSR (blocks of 1×1) or BSR."""

    def __init__(self, spec: KernelSpec, block: tuple[int, int]) -> None:
        self._tesa, self._block, self._epilogue = spec["weight"], block, spec.epilogue
        self._index = BlockIndex.from_mask(self._tesa, block)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (BCSR.pack(operand, self._tesa, block=self._block).values.contiguous(),)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        shape = self._index.shape
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse|.*invariant", category=UserWarning)
            if self._block == (1, 1):
                weight = torch.sparse_csr_tensor(
                    self._index.row_ptr, self._index.col_idx, packed[0].flatten(), shape, check_invariants=False
                )
            else:
                weight = torch.sparse_bsr_tensor(
                    self._index.row_ptr, self._index.col_idx, packed[0], shape, check_invariants=False
                )
            y = torch.mm(weight, x.t().contiguous()).t()
        return apply_epilogue(y if bias is None else y + bias, self._epilogue, residual).contiguous()


class TorchCSR(Implement):
    """``torch.sparse`` CSR (MKL): any mask."""

    name = "torch-csr"
    op = "linear"
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Fp32 on the CPU, sparse enough that an index can pay."""
        answer = float32_here(spec)
        if answer and (spec["weight"].density > _DENSEST or spec["weight"].density == 0):
            given = f"a density of {spec['weight'].density:.2f}"
            return Support.no(f"{given}, where CSR takes up to {_DENSEST} and not 0", Cause.PATTERN)
        return answer and Support.yes("torch.sparse CSR")

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Build the index."""
        del params
        return _TorchSparseKernel(spec, (1, 1))


class TorchBSR(Implement):
    """``torch.sparse`` BSR: masks made of whole square blocks."""

    name = "torch-bsr"
    op = "linear"
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Fp32 on the CPU, whole square blocks that divide the weight."""
        answer = float32_here(spec)
        if answer and not _square_blocks(spec):
            reason = "its mask is not made of square blocks of 8 or more that divide the weight"
            return Support.no(reason, Cause.PATTERN)
        return answer and Support.yes("torch.sparse BSR")

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the block sizes that fit the mask."""
        return {"block": TunableItemCfg("choice", _value=_square_blocks(spec))}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the largest block that fits."""
        return {"block": _square_blocks(spec)[-1]}

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Build the index."""
        return _TorchSparseKernel(spec, (int(params["block"]), int(params["block"])))


def _square_blocks(spec: KernelSpec) -> list[int]:
    """Return the square blocks that cut the weight and its mask without a rest, smallest first."""
    weight = spec["weight"]
    if not 0 < weight.density < 1:
        return []
    return [
        size
        for size in (8, 16, 32, 64)
        if all(s % size == 0 for s in weight.shape) and all(b % size == 0 for b in weight.state.block)
    ]
