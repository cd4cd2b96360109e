"""The Triton kernel as an implement: ``triton-block`` for linear operators whose weight is pruned in blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparta.specialize.cuda.device import FORMATS, bulk_copies, itemsize, need_triton, takes, triton_here
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.triton_block.candidates import candidates, coverage
from sparta.specialize.linear.triton_block.layout import BlockLayout
from sparta.specialize.linear.triton_block.tile import BlockTile

__all__ = ["BlockKernel", "TritonBlock"]

_MOST_COVERED = 0.7  # above it no tile was ever faster than dense
_MOST_OF_A_GRADIENT = 0.5  # above it the dense product is as fast


class BlockKernel(LinearKernel):
    """What kernels on the layout of kept blocks share: packing, and the gradient of the weight."""

    def __init__(self, layout: BlockLayout) -> None:
        need_triton()
        from sparta.specialize.linear.cuda_block_gradient import MatrixGradient, gradient_tile
        from sparta.specialize.linear.triton_block.training import BlockGradient, BlockPacker

        self._layout = layout
        self._pack = BlockPacker(layout)
        self._gradient = BlockGradient(layout)
        tile = gradient_tile(layout.weight, self._gradient.density)
        self._matrix = None if tile is None else MatrixGradient(layout.weight, tile)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return kept blocks, their columns, the schedule."""
        index = self._layout.index(operand.device)
        return self._pack(operand), index.columns, index.schedule

    def pack_with_transpose(
        self, other: LinearKernel, operand: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]] | None:
        """Return both by one kernel, where the other has kept blocks too."""
        if not isinstance(other, BlockKernel):
            return None
        device = operand.device
        indices = self._layout.index(device), other._layout.index(device)
        both = self._pack.with_transpose(other._pack, operand)
        first, second = ((v, each.columns, each.schedule) for v, each in zip(both, indices, strict=True))
        return first, second

    def weight_gradient(
        self, grad: Tensor, x: Tensor, mask: Tensor, *, bias: bool = False
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the gradient in kept blocks and zeros elsewhere, unless most blocks are kept."""
        if self._gradient.density > _MOST_OF_A_GRADIENT:
            return None
        if self._matrix is not None and self._matrix.takes(x):
            return self._matrix(grad, x, mask, bias=bias)
        return self._gradient(grad, x, mask, bias=bias)


class _TritonKernel(BlockKernel):
    """Sums in float32 over the kept blocks of a row in one fixed order: equal inputs give equal bits."""

    def __init__(self, spec: KernelSpec, tile: BlockTile) -> None:
        super().__init__(BlockLayout(spec["weight"], tile))
        from sparta.specialize.linear.triton_block.launch import BlockLinearLauncher

        n, k = spec["weight"].shape
        self._launch = BlockLinearLauncher((n, k), tile, spec.epilogue.activation, whole=self._layout.whole)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return self._launch(packed, x, bias, residual)


class TritonBlock(TiledImplement):
    """Triton kernels on kept blocks of 16×16 to 128×128, for any mask that such blocks cover well."""

    name = "triton-block"
    op = "linear"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Fp32, bf16 and fp16 on CUDA, where kept blocks leave enough out."""
        answer = takes(spec, FORMATS)
        if not answer:
            return answer
        if min(spec["weight"].shape) < 1:
            return Support.no("the weight is empty", Cause.SHAPE)
        covered = coverage(spec["weight"], [(16, 16)])[16, 16]
        if covered > _MOST_COVERED:
            given = f"blocks of 16×16 with a live weight cover {covered:.2f} of the matrix"
            return Support.no(f"{given}; at most {_MOST_COVERED} pays", Cause.PATTERN)
        return triton_here() and Support.yes("Triton kernels on kept blocks")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return _tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the kept blocks; the kernel is compiled at its first run."""
        return _TritonKernel(spec, BlockTile.parse(params["tile"]))


def _tiles(spec: KernelSpec) -> list[BlockTile]:
    weight, size = spec["weight"], itemsize(spec["input"].format)
    tma = bulk_copies() and weight.shape[1] * size % 16 == 0
    return candidates(weight, spec["input"].shape[0], size, tma=tma)
