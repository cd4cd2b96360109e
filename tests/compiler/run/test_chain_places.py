"""Int8 networks of images: results, residuals and poolings stay in bytes from layer to layer, bit for bit the same."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from compiler.conftest import forcing
from sparta.compiler.run.chain.chained import Chained
from sparta.compiler.run.chain.layouts import fuse
from sparta.compiler.run.chain.places import hand_over_bytes
from sparta.compiler.run.chain.trace import ImageItem, Native, Trace
from sparta.compiler.run.eager import with_fast_paths
from sparta.compiler.run.kernel_module import KernelModule
from sparta.measure.machine import probe_compiler
from sparta.precision.api import quantize
from sparta.specialize.cpu.chain import StepKind
from sparta.specialize.cpu.tile import Tile

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


class Block(nn.Module):
    """A residual block, with a side way where the size changes."""

    def __init__(self, inputs, outputs, stride=1, activation=functional.relu, width=8):
        super().__init__()
        self.one, self.two = nn.Conv2d(inputs, width, 1), nn.Conv2d(width, width, 3, stride, 1)
        self.three = nn.Conv2d(width, outputs, 1)
        self.side = None if inputs == outputs and stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)
        self.activation = activation

    def forward(self, x):
        y = self.three(self.activation(self.two(functional.relu(self.one(x)))))
        return functional.relu(y + (x if self.side is None else self.side(x)))


class Net(nn.Module):
    """A stem, a pooling, and blocks with and without a side way."""

    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 6, 5, 2, 2), Block(6, 14, 2, functional.silu)
        self.second, self.last = Block(14, 14, 1, functional.relu6), Block(14, 14, 1, functional.relu)

    def forward(self, x):
        y = functional.max_pool2d(functional.relu(self.stem(x)), 3, 2, 1)
        return self.last(self.second(self.first(y)))


class Wide(nn.Module):
    """Layers of whole groups of 32 channels and of others, with epilogues of both kinds: in registers and not."""

    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 32, 3, 1, 1), Block(32, 32, 1, functional.relu6, 48)
        self.second, self.last = Block(32, 64, 2, functional.silu, 32), Block(64, 64, 1, functional.relu, 40)
        self.end = nn.Conv2d(64, 33, 1)

    def forward(self, x):
        return self.end(self.last(self.second(self.first(functional.relu6(self.stem(x))))))


class TwoResults(nn.Module):
    """A result that is returned, pooled and convolved."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 10, 3, padding=1), nn.Conv2d(10, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        y = functional.relu(self.one(x))
        return self.three(functional.max_pool2d(self.two(y), 2)), y, functional.avg_pool2d(y, 2)


class Inverted(nn.Module):
    """Depthwise layers between others, the second of which has no kernel of integers; one result is returned too."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 14, 1), nn.Conv2d(14, 14, 3, 2, 1, groups=14)
        self.three, self.four, self.five = (
            nn.Conv2d(14, 6, 1),
            nn.Conv2d(6, 12, 3, padding=1, groups=6),
            nn.Conv2d(12, 8, 1),
        )

    def forward(self, x):
        y = functional.relu6(self.two(functional.relu6(self.one(x))))
        return self.five(functional.relu(self.four(self.three(y)))), y


BATCHES = [torch.randn(2, 3, 37, 41, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def compiled(model):
    """A model in int8, every convolution by the kernels of integers."""
    torch.manual_seed(3)
    for tensor in model.parameters():
        nn.init.uniform_(tensor, -0.3, 0.4)
    spec = sparta.Spec.from_pattern(model, sparta.Unstructured(), 0.4)
    spec.apply(model)
    with forcing("cpu-int8"):
        return sparta.compile(model, BATCHES[0], spec, precision="int8", calibration=BATCHES, tune="off")


@pytest.fixture(scope="module")
def net():
    return compiled(Net().eval())


@pytest.fixture(scope="module")
def wide():
    return compiled(Wide().eval())


def with_tiles(graph, tile, image):
    """The same graph with other kernels."""
    found = copy.deepcopy(graph)
    for layer in found.modules():
        if isinstance(layer, KernelModule):
            params = {"tile": str(tile), "image": image}
            layer.choices = {size: (spec, replace(c, params=params)) for size, (spec, c) in layer.choices.items()}
            layer.rebuild()
    return found


def items_of(graph):
    trace = Trace(graph, (BATCHES[0],), 1)
    fuse(trace)
    hand_over_bytes(trace)
    return trace.items


@pytest.mark.parametrize(
    ("tile", "image"),
    [
        (Tile(block=4, mv=4), "flat"),
        (Tile(block=4, mv=1), "columns"),
        (Tile(block=4, mv=3), "taps"),
        (Tile(block=4, mv=2), "rows"),
        (Tile(block=1, mv=2), "columns"),
        (Tile("gathered", 16, 3), "flat"),
        (Tile("gathered", 16, 2), "taps"),
    ],
    ids=str,
)
def test_bytes_go_from_layer_to_layer_and_results_are_the_same_bits(net, tile, image):
    graph = with_tiles(net.graph, tile, image)
    chain = Chained(graph)
    program = chain.program(BATCHES[0])
    # The stem, the pooling, in each block what its own layers read, the first two blocks, and the side way.
    assert (program.calls, program.handed) == (0, 2 + 3 * 2 + 2 + 1)
    with torch.no_grad():
        for batch in (*BATCHES, 30 * BATCHES[0]):
            assert torch.equal(chain(batch)[0], with_fast_paths(graph)(batch)[0])


@pytest.mark.parametrize(
    "tile", [Tile("runs", 32), Tile(block=4, mv=4), Tile(block=4, mv=3), Tile("gathered", 16, 2)], ids=str
)
def test_bytes_of_wide_layers_are_the_same_bits_with_any_number_of_threads(wide, tile):
    graph = with_tiles(wide.graph, tile, "flat")
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            truth = [with_fast_paths(graph)(batch)[0] for batch in BATCHES]
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                chain = Chained(graph)
                for _ in range(3):
                    for batch, y in zip(BATCHES, truth, strict=True):
                        assert torch.equal(chain(batch)[0], y)
    finally:
        torch.set_num_threads(before)


def test_a_residual_and_a_pooling_are_in_bytes_and_in_nothing_else(net):
    items = items_of(net.graph)
    layers = [item for item in items if isinstance(item, ImageItem)]
    assert [item.call.step.kind for item in items if isinstance(item, Native)] == [StepKind.INT8_POOL]
    assert sum(item.residual_bytes is not None for item in layers) == 3  # those of all blocks, a side way or none
    assert all(item.in_bytes in (None, item.result.source) for item in layers)
    assert sum(item.from_bytes is None for item in layers) == 1  # the stem reads the image


def test_what_others_read_too_is_written_in_real_numbers_beside():
    graph = compiled(TwoResults().eval()).graph
    first = next(item for item in items_of(graph) if isinstance(item, ImageItem))
    assert first.in_bytes is not None
    assert first.in_bytes is not first.result.source
    with torch.no_grad():
        for batch in BATCHES:
            for one, two in zip(Chained(graph)(batch), with_fast_paths(graph)(batch), strict=True):
                assert torch.equal(one, two)


def test_layers_that_read_one_tensor_share_its_grid_and_residuals_are_rounded_to_it(net):
    layers = [module for module in net.graph.modules() if isinstance(module, KernelModule)]
    grids = {name.split(".weight")[0]: m.fused.attributes for name, m in net.graph.named_modules() if m in layers}
    assert grids["first.one"]["input_scale"] == grids["first.side"]["input_scale"]
    for block in ("second", "last"):
        assert grids[f"{block}.three"]["residual_scale"] == grids[f"{block}.one"]["input_scale"]
    # What the first block adds is read by no convolution, and has a grid of its own.
    assert grids["first.three"]["residual_scale"] not in {each["input_scale"] for each in grids.values()}
    assert net.report.precision.change < 0.05


def test_files_keep_the_grid_of_a_residual(net, tmp_path):
    net.save(tmp_path / "net.sparta")
    with torch.no_grad():
        assert torch.equal(sparta.load(tmp_path / "net.sparta")(BATCHES[1]), net(BATCHES[1]))


def test_grids_that_are_given_are_kept_and_residuals_are_not_rounded_then():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), Block(8, 8), nn.Conv2d(8, 4, 1)).eval()
    found = quantize(model, BATCHES, "int8")
    pairs = {name: (grid.scale, grid.zero_point, grid.format) for name, grid in found.activations.items()}
    with forcing("cpu-int8"):
        attributes = [
            [m.fused.attributes for m in fast.graph.modules() if isinstance(m, KernelModule)]
            for fast in (
                sparta.compile(found.model, BATCHES[0], found.spec, activations=grids, tune="off")
                for grids in (found.activations, pairs)
            )
        ]
    assert any("residual_scale" in each for each in attributes[0])
    assert not any("residual_scale" in each for each in attributes[1])


def test_depthwise_layers_take_and_hand_on_bytes():
    graph = compiled(Inverted().eval()).graph
    kinds = (StepKind.INT8_DEPTHWISE, StepKind.DEPTHWISE)
    planes = [item for item in items_of(graph) if isinstance(item, ImageItem) and item.product.step.kind in kinds]
    assert [item.product.step.kind for item in planes] == list(kinds)
    assert [item.from_bytes is None for item in planes] == [False, True]
    assert [item.in_bytes is item.result.source for item in planes] == [False, True]  # the first is written twice
    with torch.no_grad():
        for batch in (*BATCHES, 30 * BATCHES[0]):
            handed = Chained(graph)(batch)
            with mock.patch("sparta.compiler.run.chain.program.hand_over_bytes", return_value=0):
                apart = Chained(graph)(batch)
            assert all(torch.equal(one, two) for one, two in zip(handed, apart, strict=True))
