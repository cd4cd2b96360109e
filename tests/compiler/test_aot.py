"""Packaged ahead of time, kernels are C++ operators that compute what they compute in Python."""

import pytest
import torch
from torch import nn

from compiler import nets
from compiler.conftest import forcing
from compiler.test_int8 import Chain, quantised
from sparta.compiler import compile_model
from sparta.compiler.aot import library, package
from sparta.compiler.aot.layers import ConvLayer, Int8Layer, PackedLayer
from sparta.compiler.aot.package import _with_operators
from sparta.errors import MissingPackageError, ValueRangeError
from sparta.specialize import torch_library
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
def test_convolutions_of_a_compiled_model_are_operators(operators, forced):
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Conv2d(4, 16, (3, 2), padding="same")
            self.block = nets.Residual()
            self.line = nn.Conv1d(16, 8, 3, dilation=2, padding=1, groups=2)

        def forward(self, x):
            return self.line(self.block(torch.nn.functional.relu6(self.same(x))).flatten(2))

    model, x = nets.pruned(Images()), torch.randn(2, 4, 9, 8)
    fast = compile_model(model, x, tune="off", dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    graph = _with_operators(fast.graph)
    layers = [layer for layer in graph.modules() if isinstance(layer, ConvLayer)]
    assert len(layers) == len(fast.kernels) == 5
    exported = torch.export.export(graph, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    with torch.no_grad():
        for images in (2, 3):
            x = torch.randn(images, 4, 9, 8)
            torch.testing.assert_close(exported(x)[0], model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="images of"):
        graph(torch.randn(2, 4, 8, 9))
    with pytest.raises(RuntimeError, match="x must be"):
        torch.ops.sparta_aot.conv2d(
            x, layers[0].values, layers[0]._arrays(), [*layers[0]._numbers[:-1], 0], None, x[:1]
        )


@needs_compiler
def test_int8_layers_of_a_compiled_model_are_operators(operators):
    model, x = nets.pruned(Chain(), sparsity=0.5), torch.randn(2, 3, 24)  # linked: layers hand over integers
    spec = quantised(model)
    with forcing("cpu-int8"):
        fast = compile_model(model, x, spec, tune="off")
    graph = _with_operators(fast.graph)
    layers = [layer for layer in graph.modules() if isinstance(layer, Int8Layer)]
    assert len(layers) == len(fast.kernels) > 1
    with torch.no_grad():
        torch.testing.assert_close(graph(x)[0], fast(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="int8 or uint8"):
        torch.ops.sparta_aot.int8_linear(
            torch.ones(2, layers[0]._numbers[1]), [layers[0].values] * 3, layers[0]._arrays(), layers[0]._numbers, None
        )


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
            layer._arrays(),
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
    monkeypatch.setattr(torch_library, "probe_compiler", lambda: (None, "no C++ compiler was found"))
    with pytest.raises(MissingPackageError, match="no C\\+\\+ compiler"):
        library.library_path()
