"""The grids of the original's unit tests, small and thinned out, by Triton's interpreter.

Every mode meets every transposition, and each of the other choices (compressed or whole, biased or not, dtype, block)
meets every mode; `tests/gpu/test_unit_grids.py` runs the whole grids.
"""

import itertools
import math

import pytest
import torch

from sparta.nn import SparseBatchMatMul
from sparta.specialize.blocks.sparse_plan import ProductTile, SoftmaxTile
from sparta.specialize.matmul.triton_block import TritonBlockMatmul
from sparta.testing import block_mask
from specialize.unit_cases import ProductCase, run_product, run_softmax

pytest.importorskip("triton", reason="Triton is not installed on this platform")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device")

MODES = ["sdd", "dsd", "dds"]
TILE = {"tile": str(ProductTile(16, 16, 32, 16))}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCKS = [(8, 8), (16, 16), (16, 8), (4, 16)]


def product_cases():
    """Return the thinned grid: the other choices turn in step with modes and transpositions."""
    for number, (mode, (first, second)) in enumerate(
        itertools.product(MODES, itertools.product((False, True), repeat=2))
    ):
        turn = number + number // 4
        yield ProductCase(
            mode, first, second, compressed=turn % 2 == 0, biased=turn % 3 != 0, dtype=DTYPES[turn % 3],
            sizes=(20, 33, 18), lead=(1,) if number % 4 else (2,), block=BLOCKS[turn % 4], sparsity=0.5, seed=number,
            device="cpu",
        )  # fmt: skip


@pytest.mark.parametrize(
    "case", list(product_cases()), ids=lambda case: f"{case.mode}-{case.transpose_A}-{case.transpose_B}"
)
def test_products_and_their_gradients(case):
    run_product(case, params=TILE)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    ("compressed", "batch", "block"), [(True, None, (8, 8)), (False, 2, (8, 8)), (True, 1, (16, 16))]
)
def test_softmax_and_its_gradient(compressed, batch, block):
    mask = block_mask((32, 48), block, 0.6, seed=1)
    x = torch.randn(*([] if batch is None else [batch]), 32, 48).masked_fill(~mask, math.nan)
    run_softmax(mask, x, math.sqrt(48), compressed=compressed, params={"tile": str(SoftmaxTile(16, 16, rows=16))})


@pytest.mark.parametrize(
    ("mode", "first", "second", "compressed", "backward"), list(itertools.product(MODES, *[(False, True)] * 4))
)
def test_search_spaces_are_small_and_hold_their_default(mode, first, second, compressed, backward):
    case = ProductCase(mode, first, second, compressed, sizes=(128, 256, 192), device="cpu")
    mask = case.mask()
    names = {"sdd": "A_mask", "dsd": "B_mask", "dds": "C_mask"}
    op = SparseBatchMatMul(**{names[mode]: mask}, **case.transposes, compressed=compressed)
    inputs = [torch.zeros(4, *case.shapes[name]) for name in "AB"]
    if compressed and mode != "dds":
        which = MODES.index(mode)
        inputs[which] = op.indexes.convert(inputs[which])
    spec = op._spec(inputs, backward=backward)
    space = TritonBlockMatmul().space(spec)["tile"]
    assert space.includes(TritonBlockMatmul().default(spec)["tile"])
    assert 2 <= len(space.domain.values) <= 6
    assert {"dense", "blocks"} <= set(op.get_search_space(inputs).domain.values)
    assert "runs on CUDA" in TritonBlockMatmul().supports(spec).reason
