"""The TVM implement computes what the masked dense layer computes, whatever the schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from sparta.errors import MissingPackageError, ShapeError, ValueRangeError
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear import tvm
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.linear.tvm import TvmLinear
from sparta.tesa.attribute import TeSA
from sparta.testing import check, linear_reference

needs_tvm = pytest.mark.skipif(tvm.importlib.util.find_spec("tvm") is None, reason="needs the tvm extra")


def mask_of(rows, columns, density, seed=0, height=1):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(-(-rows // height), columns, generator=generator) < density
    return kept.repeat_interleave(height, 0)[:rows]


@needs_tvm
@given(
    st.tuples(st.integers(0, 70), st.integers(1, 40), st.integers(1, 60)),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (8, 1), (1, 4)]),
    st.integers(0, 3),
)
def test_every_schedule_is_right(sizes, density, schedule, seed):
    m, n, k = sizes
    mask = mask_of(n, k, density, seed)
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((k, m), (k, n), (n,)))
    x, weight = x.t(), weight.t()  # strided on purpose
    spec = linear_spec(TeSA.from_mask(mask), m, torch.float32, epilogue=Epilogue(bias=True))
    kernel = TvmLinear().build(spec, {"rows": schedule[0], "vectors": schedule[1]})
    y = kernel.run(kernel.pack(weight), x, bias, None)
    check(y, linear_reference(x, weight, bias, weight_mask=mask), reduction=k)


@needs_tvm
@pytest.mark.parametrize("threads", [1, 2])
def test_epilogue_and_threads(threads):
    mask = mask_of(32, 64, 0.2, height=4)
    spec = linear_spec(
        TeSA.from_mask(mask), 20, torch.float32, epilogue=Epilogue(bias=True, activation="gelu", residual=True)
    )
    kernel = TvmLinear().build(spec, TvmLinear().default(spec))
    x, weight, bias, residual = torch.randn(20, 64), torch.randn(32, 64), torch.randn(32), torch.randn(20, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = kernel.run(kernel.pack(weight), x, bias, residual)
    finally:
        torch.set_num_threads(before)
    expected = functional.gelu(linear_reference(x, weight, bias, weight_mask=mask)) + residual.double()
    check(y, expected, reduction=64)


@needs_tvm
def test_high_groups_are_tried_only_where_the_mask_has_them():
    scattered = linear_spec(TeSA.from_mask(mask_of(64, 64, 0.05)), 32, torch.float32)
    blocks = linear_spec(TeSA.from_mask(mask_of(64, 64, 0.05, height=8)), 32, torch.float32)
    assert TvmLinear().space(scattered)["rows"].domain.values == (1,)
    assert TvmLinear().default(blocks)["rows"] == 8


def test_refusals_have_reasons():
    sparse, dense = TeSA.from_mask(mask_of(8, 8, 0.1)), TeSA.dense((8, 8))
    assert "not on cuda" in TvmLinear().supports(linear_spec(sparse, 4, torch.float32, device="cuda")).reason
    assert "not bf16" in TvmLinear().supports(linear_spec(sparse, 4, torch.bfloat16)).reason
    assert "density 1.00" in TvmLinear().supports(linear_spec(dense, 4, torch.float32)).reason


def test_without_tvm_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tvm.importlib.util, "find_spec", lambda name: None)
    tvm.compiled.cache_clear()
    spec = linear_spec(TeSA.from_mask(mask_of(8, 8, 0.1)), 4, torch.float32)
    assert "sparta-torch[tvm]" in TvmLinear().supports(spec).reason
    with pytest.raises(MissingPackageError, match=r"sparta-torch\[tvm\]"):
        TvmLinear().build(spec, {"rows": 1, "vectors": 1})


@needs_tvm
def test_bad_input():
    spec = linear_spec(TeSA.from_mask(mask_of(8, 8, 0.1)), 4, torch.float32)
    with pytest.raises(ValueRangeError, match="rows=3"):
        TvmLinear().build(spec, {"rows": 3, "vectors": 1})
    kernel = TvmLinear().build(spec, {"rows": 1, "vectors": 1})
    with pytest.raises(ShapeError, match="as when built"):
        kernel.pack(torch.ones(4, 8))
    with pytest.raises(ShapeError, match=r"\(M, 8\)"):
        kernel.run(kernel.pack(torch.ones(8, 8)), torch.ones(2, 9), None, None)
