"""The Triton product as an implement: ``triton-block`` for batched products with one sparse matrix.

All three modes and every transposition, whole or compressed, with gradients. A product with the sparse matrix on the
right is the transpose of one with it on the left, so a mode is only a way to read and write.
"""

# ruff: noqa: N806 -- A, B and C are the operands' names

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.specialize.blocks.sparse_plan import ProductTile
from sparta.specialize.blocks.tile_lists import tile_lists
from sparta.specialize.cuda.device import FORMATS, bulk_copies, need_triton, on_cuda, triton_here
from sparta.specialize.implement import Cause, Params, Support, TiledImplement, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.matmul.op import FLIPPED, TURNED, sampled_product, sparse_product
from sparta.specialize.matmul.spec import MatmulKernel, Product
from sparta.tesa.attribute import TeSA

__all__ = ["GroupTable", "TritonBlockMatmul", "covered", "tiles_pay"]

_FINEST = 16
_LEAST_BLOCK = 4  # compressed blocks with a shorter side need a table about as large as the matrix
_MOST_COVERED = 0.95
_TRIED = 6
_COVERS = 3

# Speed on kept tiles relative to each other, by (height, width); products are large enough to fill the matrix units.
_SPEEDS = {
    (128, 128): 1.0, (128, 64): 0.95, (64, 128): 0.9, (64, 64): 0.8, (128, 32): 0.65, (32, 128): 0.55, (64, 32): 0.55,
    (32, 64): 0.5, (32, 32): 0.38, (64, 16): 0.3, (16, 64): 0.25, (32, 16): 0.22, (16, 32): 0.2, (16, 16): 0.12,
}  # fmt: skip
# Float32 without TF32 is multiplied in unrolled code that must stay short.
_FLOAT32_SPEEDS = {(64, 32): 1.0, (32, 64): 1.0, (32, 32): 0.9, (32, 16): 0.7, (16, 32): 0.7, (16, 16): 0.5}
# The same of a sparse operand whose tiles the copy engine moves, by (owned, met): the sum takes owned × free.
_COPIED_SPEEDS = {
    (128, 64): 1.0, (128, 128): 0.8, (64, 64): 0.75, (64, 128): 0.7, (128, 32): 0.65, (32, 128): 0.55, (64, 32): 0.55,
    (32, 64): 0.55, (32, 32): 0.5, (64, 16): 0.3, (16, 64): 0.25, (32, 16): 0.22, (16, 32): 0.2, (16, 16): 0.12,
}  # fmt: skip
_SHARED_ROOM = 105 * 1024  # bytes on chip for a pipeline, so that two programs fit on a processor
_TABLED = 0.5  # how much slower a tile is that is found through the table


class _ProductKernel(MatmulKernel):
    """Sums in float32 over the tiles of a list in one fixed order: equal inputs give equal bits."""

    def __init__(self, spec: KernelSpec, tile: ProductTile) -> None:
        need_triton()
        product = self._product = Product.of(spec)
        mask = spec[product.sparse].mask()
        self._mask_shape = tuple(mask.shape)
        self._groups = GroupTable(self._mask_shape[:-2])
        block = product.block if product.compressed else None
        masks = mask.reshape(math.prod(mask.shape[:-2]), *mask.shape[-2:])
        self._lists, self._matrix = tile_lists(masks, block, (tile.height, tile.width))
        self._plan = f"{self._matrix};{tile}"

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(operand.device) for tensor in self._lists)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        A, B = present(*inputs[:2])
        bias = inputs[2] if len(inputs) > 2 else None
        if A.dtype != B.dtype or (bias is not None and bias.dtype != A.dtype):
            given = f"A in {A.dtype} and B in {B.dtype}" + ("" if bias is None else f" and a bias in {bias.dtype}")
            raise ValueRangeError(message(given, "one dtype", "cast one"))
        product, lists = self._product, list(packed)
        lead = product.batch(self._mask_shape, A, B, self._matrix.kept)
        if product.sparse == "B" and self._alone(B):
            return self._one_weight(A, B, bias, lists)
        groups = self._groups.of(lead, A.device)
        if product.sparse == "C":
            left, right = (_turned(x, turn=turn) for x, turn in ((A, product.transpose_A), (B, product.transpose_B)))
            values: Tensor = sampled_product(
                _flat(left, lead, 2), _flat(right, lead, 2), bias, lists, groups, self._plan
            )
        elif product.sparse == "A":
            dense = _flat(_turned(B, turn=product.transpose_B), lead, 2)
            way = TURNED if product.transpose_A else 0
            values = sparse_product(self._sparse(A, lead), dense, bias, lists, groups, self._plan, way)
        else:  # (A B) is the transpose of (B^T A^T)
            dense = _flat(_turned(A, turn=not product.transpose_A), lead, 2)
            way = FLIPPED + (0 if product.transpose_B else TURNED)
            values = sparse_product(self._sparse(B, lead), dense, bias, lists, groups, self._plan, way)
        return values.reshape(*lead, *values.shape[1:])

    def _alone(self, sparse: Tensor) -> bool:
        """Return whether one sparse matrix serves the whole batch."""
        return self._groups.single and sparse.dim() == (1 if self._product.compressed else 2)

    def _one_weight(self, A: Tensor, B: Tensor, bias: Tensor | None, lists: list[Tensor]) -> Tensor:  # noqa: N803
        """Return A B for a B without a batch: all rows of A make one tall matrix."""
        rows = _turned(A, turn=self._product.transpose_A)
        tall = rows.reshape(1, math.prod(rows.shape[:-1]), rows.shape[-1])
        way = FLIPPED + (0 if self._product.transpose_B else TURNED)
        values: Tensor = sparse_product(B[None], tall.mT, bias, lists, None, self._plan, way)
        return values.reshape(*self._mask_shape[:-2], *rows.shape[:-1], values.shape[-1])

    def _sparse(self, stored: Tensor, lead: tuple[int, ...]) -> Tensor:
        return _flat(stored, lead, 1 if self._product.compressed else 2)


class TritonBlockMatmul(TiledImplement):
    """Triton kernels on kept tiles of 16×16 to 128×128: one of A, B and C sparse, whole or compressed."""

    name = "triton-block"
    op = "batch_matmul"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Fp32, bf16 and fp16 on CUDA, where kept tiles leave something out."""
        product = Product.of(spec)
        block = product.block if product.compressed else None
        return tiles_pay(spec, ("A", "B"), block, spec[product.sparse]) and Support.yes("Triton kernels on kept tiles")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return _tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> MatmulKernel:
        """Make the lists; kernels are compiled at their first run."""
        return _ProductKernel(spec, ProductTile.parse(params["tile"]))


# ---------------------------------------------------------------------- batches


class GroupTable:
    """Which mask each batch has, for masks with leading dims.

    >>> GroupTable((2, 1)).of((2, 3), torch.device("cpu")).tolist()
    [0, 0, 0, 1, 1, 1]
    >>> GroupTable((1,)).of((4,), torch.device("cpu")) is None
    True
    """

    def __init__(self, mask_lead: tuple[int, ...]) -> None:
        self._mask_lead = mask_lead
        self._made: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    @property
    def single(self) -> bool:
        """Whether all batches have one mask."""
        return math.prod(self._mask_lead) == 1

    def of(self, lead: tuple[int, ...], device: torch.device) -> Tensor | None:
        """Return int32 (batches,); None where all have one mask."""
        if self.single:
            return None
        key = (lead, device)
        if key not in self._made:
            numbers = torch.arange(math.prod(self._mask_lead), dtype=torch.int32).reshape(self._mask_lead)
            # Made on the CPU: the copy is done when it returns, so that any stream may read the table.
            self._made[key] = numbers.expand(lead).reshape(-1).contiguous().to(device)
        return self._made[key]


def _flat(x: Tensor, lead: tuple[int, ...], own: int) -> Tensor:
    """Return x, broadcast to the batch dims, with one batch dim before its own last dims."""
    last = x.shape[x.dim() - own :]
    return x.expand(*lead, *last).reshape(math.prod(lead), *last)


def _turned(x: Tensor, *, turn: bool) -> Tensor:
    return x.mT if turn else x


# ---------------------------------------------------------------------- choosing


def tiles_pay(spec: KernelSpec, names: Sequence[str], block: tuple[int, int] | None, mask: TeSA) -> Support:
    """Say whether kernels on kept tiles can run these operands and may pay, or why not.

    >>> spec = Product("sdd").spec(torch.eye(4) > 0, torch.zeros(4, 4), torch.zeros(4, 4))
    >>> tiles_pay(spec, ("A", "B"), None, spec["A"]).reason
    'it runs on CUDA, not on cpu'
    """
    formats = {str(spec[name].format) for name in names}
    if spec.device != "cuda":
        return on_cuda(spec.device)
    if len(formats) > 1 or not formats <= set(FORMATS):
        given = ", ".join(sorted(formats))
        return Support.no(f"it computes all in one of {', '.join(FORMATS)}, not in {given}", Cause.DTYPE)
    if block is not None and min(block) < _LEAST_BLOCK:
        given = f"its compressed blocks are {block[0]}×{block[1]}"
        return Support.no(f"{given}; sides of {_LEAST_BLOCK} or more can be found quickly", Cause.PATTERN)
    share = covered(mask, (_FINEST, _FINEST))
    if share > _MOST_COVERED:
        given = f"tiles of 16×16 with something live cover {share:.2f} of the matrix"
        return Support.no(f"{given}; at most {_MOST_COVERED} pays", Cause.PATTERN)
    return triton_here()


def covered(mask: TeSA, tile: tuple[int, int]) -> float:
    """Return the fraction of masks (..., rows, cols) that tiles with something live cover.

    >>> covered(TeSA.from_mask(torch.eye(64, dtype=torch.bool)), (16, 32))
    0.5
    """
    block = tuple(min(step, max(1, size)) for step, size in zip(tile, mask.shape[-2:], strict=True))
    kept = mask.kept_blocks((*[1] * (len(mask.shape) - 2), *block))
    return float(kept.float().mean()) if kept.numel() else 0.0


def _tiles(spec: KernelSpec) -> list[ProductTile]:
    """Return the tiles worth timing, the best guess first."""
    product = Product.of(spec)
    mask, exact = spec[product.sparse], str(spec["A"].format) == "fp32"
    slow = exact and torch.backends.cuda.matmul.fp32_precision != "tf32"
    costs = {}
    copied = bulk_copies() and not exact
    turned = product.transpose_A if product.sparse == "A" else not product.transpose_B
    speeds = _FLOAT32_SPEEDS if slow else _SPEEDS
    if copied and product.sparse != "C":
        speeds = {cut[::-1] if turned else cut: speed for cut, speed in _COPIED_SPEEDS.items()}
    for cut, speed in speeds.items():
        inside = not product.compressed or all(b % t == 0 for b, t in zip(product.block, cut, strict=True))
        costs[cut] = covered(mask, cut) / (speed if inside else speed * _TABLED)
    best = sorted(costs, key=lambda cut: costs[cut])[:_COVERS]
    if copied:
        sampled = product.sparse == "C"
        return [tile for cut in best for tile in _copied(*cut, sampled=sampled, turned=turned)][:_TRIED]
    made = [tile for height, width in best for tile in _variants(height, width, slow=slow, exact=exact)]
    return made[:_TRIED]


def _copied(height: int, width: int, *, sampled: bool, turned: bool) -> list[ProductTile]:
    """Return variants whose tiles the copy engine moves."""
    size = height * width
    if sampled:
        warps = 8 if size >= 128 * 128 else 4
        return [ProductTile(height, width, 128, 64, stages, warps, 1) for stages in (4, 3)]
    own, met = (width, height) if turned else (height, width)
    tiles = []
    for free in (128, 256):
        stages = min(4, max(3, _SHARED_ROOM // (2 * (size + met * free))))
        tiles.append(ProductTile(height, width, free, 64, stages, 8 if own * free >= 128 * 256 or met > 64 else 4, 1))
    return tiles


def _variants(height: int, width: int, *, slow: bool, exact: bool) -> list[ProductTile]:
    if slow:
        return [ProductTile(height, width, 32, 32, 1, 4), ProductTile(height, width, 64, 16, 1, 4)]
    size = max(height, width)
    warps = 8 if height * width >= 128 * 128 else 4 if size >= 64 else 2 if size >= 32 else 1
    stages = 2 if exact else 3
    return [
        ProductTile(height, width, 128 if size >= 64 else 64, 32 if exact else 64, stages, max(warps, 4)),
        ProductTile(height, width, 64, 32, stages + 1, warps),
    ]
