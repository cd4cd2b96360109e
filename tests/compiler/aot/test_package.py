"""Packaged ahead of time, kernels are C++ operators that compute what they compute in Python."""

import copy
import random

import pytest
import torch
from torch import nn

from compiler import nets
from compiler.choose.test_precision import Chain, quantized
from compiler.conftest import choosing, chosen, forcing
from sparta.compiler import compile_model
from sparta.compiler.aot import library, package
from sparta.compiler.aot.layers import ConvLayer, Int8Layer, PackedLayer
from sparta.compiler.aot.package import _with_operators
from sparta.errors import MissingPackageError, ValueRangeError
from sparta.measure.machine import probe_compiler
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.int8_linear.cpu import CpuInt8Linear
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.specialize.runtime import cpp_library
from sparta.testing import check, linear_reference

needs_compiler = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def operators():
    return library.load_operators()


@needs_compiler
@pytest.mark.parametrize(
    "tile",
    [
        {"form": "panel", "block": 1, "mv": 1},
        {"form": "panel", "block": 1, "mv": 2, "interleave": 4, "k_chunk": 32},
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
@pytest.mark.filterwarnings("ignore:Using padding=.same.")  # of the model itself
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
@pytest.mark.filterwarnings("ignore:.*a processor with AMX")  # where this one has none
@pytest.mark.parametrize("tile", [Tile(block=4), Tile("gathered", 16, 2)], ids=str)
def test_int8_layers_of_a_compiled_model_are_operators(operators, tile, monkeypatch):
    model, x = nets.pruned(Chain(), sparsity=0.5), torch.randn(2, 3, 24)  # linked: layers hand over integers
    spec = quantized(model)
    monkeypatch.setattr(CpuInt8Linear, "tiles", lambda _self, _spec: [tile])  # also those for other processors
    choosing(monkeypatch, lambda s: chosen(s, "cpu-int8"))
    fast = compile_model(model, x, spec, tune="off")
    graph = _with_operators(fast.graph)
    layers = [layer for layer in graph.modules() if isinstance(layer, Int8Layer)]
    assert len(layers) == len(fast.kernels) > 1
    assert {layer._numbers[4] for layer in layers} == {tile.block}
    with torch.no_grad():
        torch.testing.assert_close(graph(x)[0], fast(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="int8 or uint8"):
        torch.ops.sparta_aot.int8_linear(
            torch.ones(2, layers[0]._numbers[1]), [layers[0].values] * 3, layers[0]._arrays(), layers[0]._numbers, None
        )
    first = layers[0]
    if tile.form == "gathered":  # two groups at a time write neighbouring rows
        swapped, rows = copy.deepcopy(first), first.rows.view(torch.int32).clone()
        rows[:2] = rows[:2].flip(0)
        swapped.rows = rows.view(torch.uint8)
        with pytest.raises(RuntimeError, match=r"rows\[0\] of groups of 16 rows is 16"):
            swapped(torch.randn(2, first._numbers[1]))
    assert first._numbers[-1] == 1  # symmetric rounding makes no -128, which lets quicker kernels run
    least = first.values.clone()
    least.view(torch.int8)[0] = -128
    with pytest.raises(RuntimeError, match="a weight of -128"):
        torch.ops.sparta_aot.int8_linear(
            torch.ones(2, first._numbers[1], dtype=torch.int8),
            [least, first.row_sums, first.multiplier],
            first._arrays(),
            first._numbers,
            None,
        )


@needs_compiler
def test_int8_convolutions_are_not_taken_for_real_ones(operators):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    model, x = nets.pruned(model, sparsity=0.5), torch.randn(2, 4, 9, 8)
    with forcing("cpu-int8"):
        fast = compile_model(model, x, precision="int8", calibration=[x], max_loss=1.0, tune="off")
    with pytest.warns(UserWarning, match="cpu-int8 has no C\\+\\+ operator; it is packaged dense"):
        graph = _with_operators(fast.graph)
    assert not [layer for layer in graph.modules() if isinstance(layer, ConvLayer)]
    with torch.no_grad():
        torch.testing.assert_close(graph(x)[0], fast(x), rtol=1e-4, atol=1e-5)


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
        package(fast, torch.ones(3, 4), tmp_path / "model.txt")
    with pytest.raises(ValueRangeError, match="folder that exists"):
        package(fast, torch.ones(3, 4), tmp_path / "none" / "model.pt2")
    with pytest.raises(ValueRangeError, match="tensor"):
        package(fast, 3.0, tmp_path / "model.pt2")
    with pytest.raises(ValueRangeError, match=r"package\(model, example_inputs, path\)"):
        package(fast, tmp_path / "model.pt2", torch.ones(3, 4))


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(cpp_library, "probe_compiler", lambda: (None, "no C++ compiler was found"))
    with pytest.raises(MissingPackageError, match="no C\\+\\+ compiler"):
        library.library_path()


def packed_calls():
    """Yield an operator and its good arguments: packed linear layers of each form, a convolution, an int8 layer."""
    chance = torch.manual_seed(0)
    weight = torch.randn(64, 80, generator=chance)
    mask = torch.rand(64, 80, generator=chance) < 0.2
    quads = {"form": "panel", "block": 1, "mv": 1, "interleave": 4, "k_chunk": 32}
    for tile in ({"form": "panel", "block": 1, "mv": 1}, quads, {"form": "panel", "block": 4, "mv": 2},
                 {"form": "rows", "block": 1}, {"form": "columns", "block": 16}):  # fmt: skip
        packed = PackedLinear(None, mask, **tile)
        layer = PackedLayer(packed, packed.pack(weight), torch.randn(64, generator=chance), None)
        x = torch.randn(40, 80, generator=chance)
        yield torch.ops.sparta_aot.linear, [x, layer.values, layer._arrays(), layer._numbers, layer.bias, None]
    with forcing():
        model, x = nets.pruned(nets.Cnn()), torch.randn(2, 3, 16, 16, generator=chance)
        graph = _with_operators(compile_model(model, x, tune="off").graph)
    layer = next(layer for layer in graph.modules() if isinstance(layer, ConvLayer))
    x = torch.randn(2, *layer._image, generator=chance)
    yield torch.ops.sparta_aot.conv2d, [x, layer.values, layer._arrays(), layer._numbers, layer.bias, None]
    with forcing("cpu-int8"):
        model, x = nets.pruned(Chain(), sparsity=0.5), torch.randn(2, 3, 24, generator=chance)
        graph = _with_operators(compile_model(model, x, quantized(model), tune="off").graph)
    layer = next(layer for layer in graph.modules() if isinstance(layer, Int8Layer))
    operands = [layer.values, layer.row_sums, layer.multiplier]
    x = torch.zeros(6, layer._numbers[1], dtype=torch.int8)
    yield torch.ops.sparta_aot.int8_linear, [x, operands, layer._arrays(), layer._numbers, layer.bias]


def damaged(arguments, chance):
    """Return the arguments with one thing changed that a file could hold: a number, a length, a type or an index."""
    changed = list(arguments)
    place = chance.choice([p for p, value in enumerate(arguments) if p and value is not None])
    value = changed[place]
    if isinstance(value, torch.Tensor):
        changed[place] = chance.choice([value[:-1].clone(), value.double(), value[:0].clone()])
        return changed
    value = list(value)
    part = chance.randrange(len(value))
    if isinstance(value[part], int):
        value[part] = chance.choice(
            [-1, 0, 7, 2**31, 2**62, -(2**63), value[part] + 1, value[part] * 2, value[part] - 1]
        )
    elif chance.random() < 0.3 or not value[part].numel():
        value[part] = chance.choice([value[part][:-1].clone(), value[part][:0].clone(), value[part].float()])
    else:
        value[part] = value[part].clone()
        raw = value[part].view(-1).view(torch.uint8)
        for _ in range(chance.choice([1, 16])):
            raw[chance.randrange(len(raw))] = chance.choice([0, 1, 127, 128, 255])
    changed[place] = value
    return changed


@needs_compiler
def test_operators_refuse_operands_that_do_not_fit_together(operators):
    """Whatever is not refused computes numbers: under a sanitizer, or with luck, a wild read would end the process."""
    chance, reasons = random.Random(0), []  # noqa: S311 - no secrets
    for operator, arguments in packed_calls():
        expected = operator(*arguments)
        for _ in range(150):
            try:
                operator(*damaged(arguments, chance))
            except RuntimeError as error:
                reasons.append(str(error))
        assert torch.equal(operator(*arguments), expected)
    assert len(reasons) > 300
    assert not [reason for reason in reasons if "sparta_aot" not in reason]


@needs_compiler
@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("starts", 1, 2**40),
        ("starts", 1, -1),
        ("offsets", 0, 2**31 - 64),
        ("rows", 0, -5),
        ("rows", 0, 10**6),
        ("costs", 1, -(2**60)),
        ("chunk_columns", 1, 2**40),
    ],
)
def test_an_index_that_points_outside_is_named(operators, name, place, value):
    packed = PackedLinear(None, torch.rand(64, 80) < 0.2, form="panel", block=1, mv=1)
    layer = PackedLayer(packed, packed.pack(torch.randn(64, 80)), None, None)
    dtype = {"offsets": torch.int32, "rows": torch.int32}.get(name, torch.int64)
    layer(torch.randn(3, 80))
    bad = getattr(layer, name).clone()
    bad.view(dtype)[place] = value
    setattr(layer, name, bad)
    with pytest.raises(RuntimeError, match=f"sparta_aot: {name}"):
        layer(torch.randn(3, 80))


@needs_compiler
@pytest.mark.parametrize("place", [0, 1, 2, 3, 5, 6, 7, -4, -1])
@pytest.mark.parametrize("change", [1, 2, -1, 2**16, 2**40, 2**62])
def test_quads_are_what_their_arrays_hold(operators, place, change):
    """First entries and values, and the lengths of lists: all of them, or the kernel would read beyond the arrays."""
    packed = PackedLinear(None, torch.rand(62, 80) < 0.5, form="panel", block=1, mv=1, interleave=4, k_chunk=40)
    layer = PackedLayer(packed, packed.pack(torch.randn(62, 80)), None, None)
    layer(torch.randn(3, 80))
    bad = layer.starts.clone()
    bad.view(torch.int64)[place] += change
    layer.starts = bad
    with pytest.raises(RuntimeError, match="sparta_aot"):
        layer(torch.randn(3, 80))
