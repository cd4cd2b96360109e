"""Packaged ahead of time, kernels are C++ operators that compute what they compute in Python."""

import pytest
import torch
from torch import nn

from sparta.compiler import compile_model
from sparta.compiler.aot import library, package
from sparta.compiler.aot.package import PackedLayer
from sparta.errors import MissingPackageError, ValueRangeError
from sparta.specialize.cpu.linear import PackedLinear
from sparta.testing import check, linear_reference
from sparta.testing.machine import probe_compiler

needs_compiler = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def operators():
    return library.load_operators()


@needs_compiler
@pytest.mark.parametrize(
    "tile",
    [
        {"form": "panel", "block": 1, "mv": 1},
        {"form": "panel", "block": 4, "mv": 2},
        {"form": "rows", "block": 1},
        {"form": "columns", "block": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_operators_compute_what_kernels_compute(operators, tile, activation):
    mask = torch.rand(64, 80) < 0.2
    weight, bias = torch.randn(64, 80), torch.randn(64)
    packed = PackedLinear(None, mask, **tile)
    layer = PackedLayer(packed, packed.pack(weight), bias, activation)
    for lead in ((5,), (2, 3), (0,), (1,)):
        x, residual = torch.randn(*lead, 80), torch.randn(*lead, 64)
        expected = linear_reference(x, weight, bias, weight_mask=mask)
        expected = {None: lambda y: y, "relu": torch.relu, "gelu": nn.functional.gelu}[activation](expected)
        check(layer(x), expected, reduction=80)
        check(layer(x, residual), expected + residual.double(), reduction=80)


@needs_compiler
def test_operators_refuse_what_does_not_fit(operators):
    packed = PackedLinear(torch.eye(8))
    layer = PackedLayer(packed, packed.values, None, None)
    with pytest.raises(RuntimeError, match="float32"):
        layer(torch.ones(2, 8, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="residual"):
        torch.ops.sparta_aot.linear(
            torch.ones(2, 8),
            layer.values,
            [getattr(layer, n) for n in layer._names],
            layer._numbers,
            None,
            torch.ones(3),
        )


def test_bad_paths_and_inputs_are_refused_before_any_work(tmp_path):
    fast = compile_model(nn.Linear(4, 2), torch.ones(3, 4), tune="off")
    with pytest.raises(ValueRangeError, match=r"\.pt2"):
        package(fast, tmp_path / "model.txt", torch.ones(3, 4))
    with pytest.raises(ValueRangeError, match="folder that exists"):
        package(fast, tmp_path / "none" / "model.pt2", torch.ones(3, 4))
    with pytest.raises(ValueRangeError, match="tensor"):
        package(fast, tmp_path / "model.pt2", 3.0)


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(library, "probe_compiler", lambda: (None, "no C++ compiler was found"))
    with pytest.raises(MissingPackageError, match="no C\\+\\+ compiler"):
        library.library_path()
