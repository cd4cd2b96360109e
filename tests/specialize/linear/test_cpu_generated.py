"""Generated kernels against float64: any mask, number of tokens and threads; the code says what the mask says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sparta.errors import NameNotFoundError, ShapeError, SpartaError, ValueRangeError
from sparta.nn import SparseLinear
from sparta.specialize.cpu import runnable_isas, toolchain
from sparta.specialize.implement import implement_named
from sparta.specialize.linear import cpu_generated
from sparta.specialize.linear.cpu_generate import generate
from sparta.specialize.linear.cpu_generated import GeneratedLinear
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA
from sparta.testing import check, linear_reference
from specialize.kernel_strategies import weight_masks

ISAS = [isa for isa in runnable_isas() if isa != "portable"]
pytestmark = pytest.mark.skipif(not ISAS, reason="code is generated for AVX2 and AVX-512")
ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}


@settings(max_examples=25)  # each compiles a library
@given(weight_masks(), st.sampled_from(ISAS), st.data())
def test_the_result_is_that_of_the_masked_dense_layer(mask, isa, data):
    outputs, inputs = mask.shape
    layer = GeneratedLinear(mask, isa=isa)
    weight = torch.where(mask, torch.randn(mask.shape), torch.nan)
    for tokens in (0, 1, 16, data.draw(st.integers(2, 40))):
        x, residual = torch.randn(inputs, tokens).t(), torch.randn(tokens, outputs)
        bias = data.draw(st.sampled_from([None, torch.randn(outputs)]))
        activation = data.draw(st.sampled_from(list(ACTIVATIONS)))
        y = layer(x, layer.pack(weight), bias, activation, residual, threads=data.draw(st.sampled_from([1, 2, 3])))
        truth = ACTIVATIONS[activation](linear_reference(x, weight, bias, weight_mask=mask)) + residual.double()
        check(y, truth, reduction=128)


def test_every_live_weight_is_one_multiplication():
    mask = np.random.default_rng(0).random((50, 30)) < 0.2
    for isa in ("avx512", "avx2"):
        code = generate(mask, isa)
        assert code.source.count("vfmadd231ps") == mask.sum()
        assert sorted(code.positions.tolist()) == np.flatnonzero(mask).tolist()
    # An input that no weight of a group reads is not loaded.
    assert generate(np.zeros((9, 9), dtype=bool), "avx512").source.count("(%rdi)") == 0


def test_nan_and_inf_reach_only_the_rows_that_read_them():
    mask = torch.rand(40, 30) < 0.3
    layer, x = GeneratedLinear(mask), torch.randn(5, 30)
    x[2, 7] = torch.inf
    y = layer(x, layer.pack(torch.ones(40, 30)))
    assert torch.equal(y[2].isinf(), mask[:, 7])
    assert bool(y[[0, 1, 3, 4]].isfinite().all())


def test_it_runs_in_a_module_and_takes_new_values():
    mask = torch.rand(40, 30) < 0.3
    layer = SparseLinear(torch.nn.Linear(30, 40), weight_mask=mask)
    layer.build(torch.randn(8, 30), {"_name": "cpu-generated"})
    for tokens in (8, 100):
        x = torch.randn(tokens, 30)
        check(layer(x), linear_reference(x, layer.weight, layer.bias, weight_mask=mask), reduction=30)
        with torch.no_grad():
            layer.weight.mul_(2)


def test_what_it_is_not_made_for_is_refused_with_a_reason(monkeypatch):
    implement = implement_named("cpu-generated", "linear")
    small = TeSA.from_mask(torch.rand(8, 8) < 0.5)
    assert implement.supports(linear_spec(small, 16, torch.float32))
    assert "17 rows" in implement.supports(linear_spec(small, 17, torch.float32)).reason
    assert "1 rows" in implement.supports(linear_spec(small, 1, torch.float32)).reason
    assert "fp64" in implement.supports(linear_spec(small, 8, torch.float64)).reason
    large = TeSA.from_mask(torch.ones(400, 400, dtype=torch.bool))
    assert "live weights" in implement.supports(linear_spec(large, 16, torch.float32)).reason
    monkeypatch.setenv("SPARTA_CPU_ISA", "portable")
    assert "Linux" in implement.supports(linear_spec(small, 16, torch.float32)).reason
    with pytest.raises(ValueRangeError, match="x86-64"):
        GeneratedLinear(torch.ones(2, 2, dtype=torch.bool))


def test_wrong_arguments_say_what_is_allowed(monkeypatch):
    mask = torch.ones(3, 2, dtype=torch.bool)
    layer = GeneratedLinear(mask)
    values = layer.pack(torch.ones(3, 2))
    for call, error, text in [
        (lambda: GeneratedLinear(mask.float()), ShapeError, "bool"),
        (lambda: layer.pack(torch.ones(2, 3)), ShapeError, "as when compiled"),
        (lambda: layer(torch.ones(2, 3), values), ShapeError, "x of shape"),
        (lambda: layer(torch.ones(2, 2), values[1:]), ShapeError, "values of shape"),
        (lambda: layer(torch.ones(2, 2), values, activation="rellu"), NameNotFoundError, "relu"),
    ]:
        with pytest.raises(error, match=text):
            call()
    monkeypatch.setattr(cpu_generated, "build", lambda isa, source: toolchain.build(isa))
    with pytest.raises(SpartaError, match="does not load"):
        GeneratedLinear(mask)
