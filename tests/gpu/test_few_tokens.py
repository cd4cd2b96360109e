"""On CUDA, few tokens in bf16 and fp16: walking over live values, and 2:4 weights that stream past a resident input."""

import pytest
import torch

from gpu.cases import two_four
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA
from sparta.testing import check, linear_reference


def check_all(name, mask, m, dtype):
    n, k = mask.shape
    x, weight, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((m, k), (n, k), (n,)))
    spec = linear_spec(TeSA.from_mask(mask), m, dtype, epilogue=Epilogue(bias=True), device="cuda")
    implement = implement_named(name, "linear")
    assert implement.answer(spec), implement.answer(spec).reason
    expected = linear_reference(x, weight, bias, weight_mask=mask.cuda())
    tiles = implement.space(spec)["tile"].domain.values
    assert tiles
    for tile in tiles:
        kernel = implement.build(spec, {"tile": tile})
        packed = kernel.pack(weight)
        kernel.run(packed, x, bias, None).fill_(torch.nan)
        y = kernel.run(packed, x, bias, None)
        check(y, expected, reduction=k, what=tile)
        assert torch.equal(y, kernel.run(packed, x, bias, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "density"),
    [
        (1, 64, 256, 0.3),
        (3, 17, 50, 0.05),
        (2, 100, 1300, 0.001),
        (4, 77, 5000, 0.08),
        (2, 300, 700, 0.15),
        (1, 9, 40, 0.0),
    ],
)
def test_walking_over_live_values(m, n, k, density, dtype):
    check_all("cuda-gather", torch.rand(n, k) < density, m, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 2100), (3, 17, 2048), (16, 100, 1304), (7, 2500, 4096)])
def test_two_four_beside_a_resident_input(m, n, k, dtype):
    check_all("cuda-24-resident", two_four(n, k), m, dtype)
