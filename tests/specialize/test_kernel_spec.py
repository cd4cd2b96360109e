"""A kernel spec is JSON, has a stable digest, and shares a bucket with specs of alike cost."""

import json

import pytest
import torch
from hypothesis import given

from sparta.errors import FileFormatError, NameNotFoundError, ValueRangeError
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import int8_linear_spec
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import apply_epilogue, linear_spec
from sparta.tesa.attribute import TeSA
from strategies import masks


def spec(density=0.5, rows=16, **options):
    mask = torch.rand(32, 64, generator=torch.Generator().manual_seed(0)) < density
    return linear_spec(TeSA.from_mask(mask), rows, torch.float32, **options)


@given(masks(shape=(6, 10)))
def test_json_round_trip(mask):
    before = linear_spec(TeSA.from_mask(mask), 8, torch.bfloat16, epilogue=Epilogue(bias=True, activation="gelu"))
    after = KernelSpec.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after == before
    assert after.digest == before.digest
    assert hash(after) == hash(before)
    assert str(after) == str(before)


def test_the_digest_depends_on_everything():
    specs = [spec(), spec(0.6), spec(rows=17), spec(epilogue=Epilogue(bias=True)), spec(device="cuda")]
    assert len({s.digest for s in specs}) == len(specs)


def test_buckets_round_rows_and_density_but_not_the_shape():
    assert spec(rows=9).bucket == spec(rows=16).bucket
    assert spec(rows=16).bucket != spec(rows=17).bucket
    assert spec(0.5).bucket == spec(0.505).bucket
    assert spec(0.5).bucket != spec(0.1).bucket
    assert "linear" in spec().bucket
    empty = linear_spec(TeSA.constant((4, 4), 0.0), 1, torch.float32)
    assert "@0.000" in empty.bucket


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_epilogues(activation):
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    function = getattr(torch.nn.functional, activation) if activation else lambda t: t
    epilogue = Epilogue(activation=activation, residual=True)
    assert torch.equal(apply_epilogue(x, epilogue, residual), function(x) + residual)
    assert "residual" in str(epilogue)


def test_wrong_inputs():
    with pytest.raises(NameNotFoundError, match="did you mean 'gelu'"):
        Epilogue(activation="gello")
    with pytest.raises(NameNotFoundError, match="operand of linear"):
        spec()["wieght"]
    with pytest.raises(ValueRangeError, match="without"):
        KernelSpec.from_dict({"op": "linear"})
    damaged = spec().to_dict()
    damaged["operands"]["weight"]["tensors"]["live"][2] = "not base 64!"
    with pytest.raises(FileFormatError, match="cannot be read"):
        KernelSpec.from_dict(damaged)


def test_layers_whose_grids_differ_share_a_bucket():
    weight = TeSA.dense((8, 16)).with_format("int8", scale=0.1)
    one, two = (int8_linear_spec(weight, 4, Quantization(scale, point)) for scale, point in ((0.5, 3), (0.25, 7)))
    assert one.bucket == two.bucket
    assert one.digest != two.digest
    assert one.bucket != int8_linear_spec(weight, 4, Quantization.per_token()).bucket
