"""A split weight computes what the whole weight does, in parts that are regular, and refuses where it cannot pay."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import SpartaError, ValueRangeError
from sparta.measure.checks import check
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.spec import apply_epilogue, linear_spec
from sparta.specialize.linear.split import parts_of
from sparta.specialize.tuning.select import Problem, build, tune_kernel
from sparta.tesa.attribute import TeSA
from sparta.tesa.patterns import NM
from sparta.testing import block_mask

SPLIT = implement_named("split", "linear")


def mixed(shape=(128, 160), block=(4, 1), seed=0):
    """Return a mask of whole blocks and of single elements beside them."""
    single = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.04
    return block_mask(shape, block, 0.85, seed=seed) | single


def expected_of(weight, x, bias, residual, epilogue):
    wide = [None if t is None else t.double() for t in (bias, residual)]
    return apply_epilogue(torch.nn.functional.linear(x.double(), weight.double(), wide[0]), epilogue, wide[1])


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    way=st.sampled_from(["4x1+1x1", "16x16+4x1+1x1", "2:4+1x1", "2:4+4x1+1x1", "1:4", "8x8"]),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 50),
)
def test_every_live_weight_is_in_exactly_one_part_and_parts_are_regular(shape, way, density, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    parts = parts_of(TeSA.from_mask(mask), way)
    owners = sum((part.owned.int() for part in parts), torch.zeros(shape, dtype=torch.int32))
    assert torch.equal(owners, mask.int())
    for part in parts:
        assert not bool((part.owned & ~part.tesa.mask()).any())
        if ":" in part.name:
            assert NM(*map(int, part.name.split(":"))).holds(part.tesa.mask())
        else:
            h, w = map(int, part.name.split("x"))
            blocks = part.tesa.mask()
            for row in range(0, shape[0], h):
                for column in range(0, shape[1], w):
                    tile = blocks[row : row + h, column : column + w]
                    assert bool(tile.all()) or not bool(tile.any())


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_sum_of_the_parts_is_the_product_with_the_whole(activation, residual, bias):
    mask, epilogue = mixed(), Epilogue(bias=bias, activation=activation, residual=residual)
    spec = linear_spec(TeSA.from_mask(mask), 12, torch.float32, epilogue=epilogue)
    weight, x = torch.randn(mask.shape), torch.randn(12, mask.shape[1])
    given_bias = torch.randn(mask.shape[0]) if bias else None
    given_residual = torch.randn(12, mask.shape[0]) if residual else None
    before = None if given_residual is None else given_residual.clone()
    for plan in SPLIT.space(spec)["plan"]._value:
        kernel = build(spec, {"_name": "split", "plan": plan})
        packed = kernel.pack(torch.where(mask, weight, torch.nan))  # what is pruned is not read
        expected = expected_of(weight * mask, x, given_bias, given_residual, epilogue)
        check(kernel.run(packed, x, given_bias, given_residual), expected, reduction=mask.shape[1])
        more = torch.randn(3, mask.shape[1])  # any other M runs as well
        rest = None if given_residual is None else given_residual[:3]
        expected = expected_of(weight * mask, more, given_bias, rest, epilogue)
        check(kernel.run(packed, more, given_bias, rest), expected, reduction=mask.shape[1])
    assert before is None or torch.equal(before, given_residual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shorter_dtypes_run_as_well(dtype):
    mask = mixed()
    spec = linear_spec(TeSA.from_mask(mask), 8, dtype)
    weight, x = (torch.randn(mask.shape) * mask).to(dtype), torch.randn(8, mask.shape[1]).to(dtype)
    kernel = build(spec, {"_name": "split", **SPLIT.default(spec)})
    check(kernel.run(kernel.pack(weight), x, None, None), expected_of(weight, x, None, None, Epilogue()), reduction=160)


def test_parts_of_three_kinds():
    mask = mixed((128, 160), (16, 16)) | mixed((128, 160), (4, 1), seed=1)
    spec = linear_spec(TeSA.from_mask(mask), 16, torch.float32)
    weight, x = torch.randn(mask.shape) * mask, torch.randn(16, 160)
    plan = "16x16 by cpu + 4x1 by cpu + 1x1 by torch-csr"
    kernel = build(spec, {"_name": "split", "plan": plan})
    check(kernel.run(kernel.pack(weight), x, None, None), expected_of(weight, x, None, None, Epilogue()), reduction=160)


def test_parameters_of_a_part_may_be_given():
    spec = linear_spec(TeSA.from_mask(mixed()), 16, torch.float32)
    weight, x = torch.randn(128, 160) * mixed(), torch.randn(16, 160)
    tiles = implement_named("cpu", "linear").space(spec)["tile"]._value
    kernel = build(spec, {"_name": "split", "plan": "4x1 by cpu + 1x1 by cpu", "1x1": {"tile": tiles[-1]}})
    check(kernel.run(kernel.pack(weight), x, None, None), expected_of(weight, x, None, None, Epilogue()), reduction=160)


def test_it_competes_with_the_others_by_measurement():
    mask = mixed()
    weight, x = torch.randn(mask.shape) * mask, torch.randn(16, 160)
    spec = linear_spec(TeSA.from_mask(mask), 16, torch.float32)
    problem = Problem(spec, weight, (x, None, None), expected_of(weight, x, None, None, Epilogue()), 160)
    choice = tune_kernel(problem, max_trials=10, max_seconds=None)
    timed = {trial.params["_name"]: trial for trial in choice.result.trials if trial.value is not None}
    assert "split" in timed
    assert "4x1 by cpu + 1x1 by" in str(SPLIT.supports(spec).reason)


@pytest.mark.parametrize(
    ("mask", "device", "match"),
    [
        (mixed((32, 32)), "cpu", "too small"),
        (torch.ones(128, 160, dtype=torch.bool), "cpu", "without zeros"),
        (torch.zeros(128, 160, dtype=torch.bool), "cpu", "nothing else"),
        (block_mask((128, 160), (4, 1), 0.8, seed=0), "cpu", r"regular \(block 4×1\)"),
        (torch.rand(128, 160, generator=torch.Generator().manual_seed(0)) < 0.1, "cpu", "only .*% of the live weights"),
        (mixed(), "meta", "no way to split is known for meta"),
        (mixed(), "cuda", "no way to split leaves two parts"),
    ],
)
def test_it_says_why_a_split_cannot_pay(mask, device, match):
    answer = SPLIT.supports(linear_spec(TeSA.from_mask(mask), 16, torch.float32, device=device))
    assert not answer
    assert re.search(match, answer.reason)


@pytest.mark.parametrize(
    "plan", ["4x1", "4x1 by cpu, 1x1 by cpu", "4by1 by cpu + 1x1 by cpu", "1x1 by cpu + 2:4 by cpu"]
)
def test_plans_that_cannot_be_read_are_refused(plan):
    spec = linear_spec(TeSA.from_mask(mixed()), 16, torch.float32)
    with pytest.raises(ValueRangeError):
        build(spec, {"_name": "split", "plan": plan})


def test_a_kernel_that_refuses_its_part_is_named():
    spec = linear_spec(TeSA.from_mask(mixed()), 16, torch.float32)
    with pytest.raises(SpartaError, match="torch-bsr for the part 4x1"):
        build(spec, {"_name": "split", "plan": "4x1 by torch-bsr + 1x1 by cpu"})
