"""Networks of images as one chain: dense and sparse convolutions, norms and poolings without Python in between."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from compiler.conftest import forcing
from sparta.compiler.run.chain import batches
from sparta.compiler.run.chain.batches import parts_of
from sparta.compiler.run.chain.chained import Chained, chainable
from sparta.compiler.run.chain.memory import planned
from sparta.compiler.run.chain.trace import ImageItem, Trace
from sparta.compiler.run.chain.values import Made
from sparta.compiler.run.eager import with_fast_paths
from sparta.measure.machine import probe_compiler

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


class Block(nn.Module):
    """A residual block with a side way."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.one, self.two = nn.Conv2d(inputs, outputs, 1, bias=False), nn.Conv2d(outputs, outputs, 3, stride, 1)
        self.norm, self.side = nn.BatchNorm2d(outputs), nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        return functional.relu(self.two(functional.relu(self.norm(self.one(x)))) + self.side(x))


class Inverted(nn.Module):
    """A depthwise layer between two of single pixels, and what came in."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(3 * width, width, 1)
        self.each = nn.Conv2d(3 * width, 3 * width, 3, padding=1, groups=3 * width)

    def forward(self, x):
        return x + self.down(functional.relu6(self.each(functional.silu(self.up(x)))))


class Small(nn.Module):
    """All that images meet."""

    def __init__(self):
        super().__init__()
        self.stem, self.before = nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8)
        self.block, self.inverted = Block(8, 12, 2), Inverted(12)
        self.grouped, self.head = nn.Conv2d(12, 8, 3, groups=4), nn.Linear(8, 5)

    def forward(self, x):
        y = functional.max_pool2d(self.stem(x), 3, 2, 1)
        y = functional.relu(self.before(y))  # after a pooling, so that it is not folded
        y = functional.avg_pool2d(self.inverted(self.block(y)), 2, 1)
        return self.head(functional.adaptive_avg_pool2d(self.grouped(y), 1).flatten(1))


def trained(model):
    """A model whose norms have seen something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model.eval()


def chain_of(model, x):
    graph = sparta.compile(model, x, tune="off").graph
    assert chainable(graph)
    chain = Chained(graph)
    program = chain.program(x)
    assert program is not None
    return chain, program, graph


def near(y, truth):
    torch.testing.assert_close(y, truth, rtol=1e-4, atol=1e-5)


def test_a_dense_network_is_one_call_and_layers_do_what_follows_them():
    model, x = trained(Small()), torch.randn(3, 3, 45, 38)
    chain, program, graph = chain_of(model, x)
    assert program.calls == 0
    # The stem, a pooling, the norm, three of each block, three more and the head: activations and sums are no steps.
    assert program.steps == 13
    with torch.no_grad():
        near(chain(x)[0], model(x))
        near(chain(x[:2])[0], model(x[:2]))
        near(chain(x.contiguous(memory_format=torch.channels_last))[0], model(x))
    trace = Trace(graph, (x,), 1)
    assert sum(isinstance(item, ImageItem) for item in trace.items) == 10


def test_a_network_that_is_partly_sparse_is_one_chain(forced):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.AvgPool2d(2)
    ).eval()
    with torch.no_grad():
        model[2].weight *= (torch.rand(4, 8, 3, 3) < 0.2).repeat_interleave(4, 0)
    x = torch.randn(2, 3, 17, 19)
    chain, program, _ = chain_of(model, x)
    assert program.calls == 0
    with torch.no_grad():
        near(chain(x)[0], model(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.avg_pool2d(x, 3, 2, 1),
        lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: functional.avg_pool2d(x, (2, 3), ceil_mode=True),
        lambda x: functional.avg_pool2d(x, 2, divisor_override=3),
        lambda x: functional.adaptive_avg_pool2d(x, (3, 1)),
        lambda x: functional.max_pool2d(x, (3, 2), ceil_mode=True, dilation=2),
        lambda x: x.mean((2, 3)),
        lambda x: x.mean((-1, -2), keepdim=True),
        lambda x: x.mean(1),
        lambda x: x.mean(-1),
    ],
)
def test_poolings_and_means_are_pytorchs(function):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(2, 4, 3, dilation=2, bias=False), nn.Conv2d(4, 6, 3, (2, 1), "valid")

        def forward(self, x):
            return function(self.two(functional.relu(self.one(x))))

    model, x = Net().eval(), torch.randn(2, 2, 23, 18)
    chain, _, _ = chain_of(model, x)
    with torch.no_grad():
        near(chain(x)[0], model(x))
        assert chain(x[:0])[0].shape == model(x[:0]).shape


def test_sequences_are_convolved_too():
    model = nn.Sequential(nn.Conv1d(4, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 8, 3, 2, groups=8), nn.Conv1d(8, 3, 1))
    x = torch.randn(2, 4, 33)
    chain, program, _ = chain_of(model.eval(), x)
    assert program.calls == 0
    with torch.no_grad():
        near(chain(x)[0], model(x))


def test_a_result_that_two_read_is_not_changed_for_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(3, 4, 1)

        def forward(self, x):
            y = self.one(x)
            return functional.relu(y) + self.two(y), functional.relu(self.three(x) + y), y

    model, x = Twice().eval(), torch.randn(1, 3, 9, 9)
    chain, _, _ = chain_of(model, x)
    with torch.no_grad():
        for one, two in zip(chain(x), model(x), strict=True):
            near(one, two)


class Other(nn.Module):
    """A function of a convolution's result."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.head, self.function = nn.Conv2d(3, 4, 1), nn.Linear(4, 4), function
        self.register_buffer("shared", torch.randn(4, 1, 1))
        self.register_buffer("each", torch.randn(4, 4, 6, 6))

    def forward(self, x):
        return self.function(self, self.conv(x))


ALONE = {
    "the head": lambda m, y: m.head(y.mean((2, 3))),
    "a shared tensor": lambda m, y: functional.relu(y + m.shared),
    "a sum with itself": lambda m, y: y + functional.silu(y),
    "flattened": lambda m, y: y.flatten(1),
    "channels last": lambda m, y: m.head(y.permute(0, 2, 3, 1)),
}
NOT_ALONE = {
    "a mean over images": lambda m, y: y.mean(0, keepdim=True) + y,
    "a mean over images, counted from the end": lambda m, y: m.head(y.mean((2, 3)).mean(-2, keepdim=True)),
    "a tensor for each image": lambda m, y: y + m.each,
    "all in one row": lambda m, y: y.flatten(),
    "another order": lambda m, y: y.permute(1, 0, 2, 3),
    "values spread over other dims": lambda m, y: functional.avg_pool2d(y, 3, 1) + y.mean((2, 3)),
    "softmax": lambda m, y: y.softmax(0),
}


def parts(model, x):
    graph = sparta.compile(model, x, tune="off").graph
    chain = Chained(graph)
    program = chain.program(x)
    assert program is not None
    return chain, parts_of(program, graph, (x,), chain.program_of)


@pytest.mark.parametrize("name", ALONE)
def test_batches_of_images_run_in_parts(monkeypatch, name):
    monkeypatch.setattr(batches, "_LARGE_BYTES", 0)
    monkeypatch.setattr(batches, "_PART_BYTES", (0,))
    model, x = Other(ALONE[name]).eval(), torch.randn(4, 3, 6, 6)
    chain, (found,) = parts(model, x)
    assert found.images == 1
    with torch.no_grad():
        near(found((x,))[0], model(x))
        near(chain(x)[0], model(x))


@pytest.mark.parametrize("name", NOT_ALONE)
def test_batches_whose_images_meet_run_as_they_are(monkeypatch, name):
    monkeypatch.setattr(batches, "_LARGE_BYTES", 0)
    model, x = Other(NOT_ALONE[name]).eval(), torch.randn(4, 3, 6, 6)
    chain, found = parts(model, x)
    assert not found
    with torch.no_grad():
        near(chain(x)[0], model(x))


def test_parts_divide_the_batch_and_what_fits_is_not_cut(monkeypatch):
    model, x = trained(Small()), torch.randn(6, 3, 45, 38)
    assert not parts(model, x)[1]
    arena = Chained(sparta.compile(model, x, tune="off").graph).program(x).arena_bytes
    monkeypatch.setattr(batches, "_LARGE_BYTES", 0)
    monkeypatch.setattr(batches, "_PART_BYTES", (arena * 5 // 6, 0))
    _, (found, single) = parts(model, x)
    assert (found.images, single.images) == (3, 1)
    with torch.no_grad():
        near(found((x,))[0], model(x))
    assert not parts(model, x[:1])[1]


def test_layers_of_single_pixels_run_band_by_band_where_their_result_is_large():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 256, 1), nn.Conv2d(256, 24, 1)
            self.side, self.last = nn.Conv2d(8, 256, 1), nn.Conv2d(24, 8, 1)

        def forward(self, x):
            y = functional.relu(self.two(functional.relu(self.one(x))) + self.side(x))
            return self.last(functional.relu(self.three(y))), y

    model = Wide().eval()
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.5)
    spec.apply(model)
    x = torch.randn(2, 8, 33, 35)  # results of more than a megabyte an image, and no whole vectors
    with forcing("cpu"):
        graph = sparta.compile(model, x, spec, tune="off").graph
    trace = Trace(graph, (x,), 2)
    planned(trace.items, trace.threads)
    convolutions = [item for item in trace.items if isinstance(item, ImageItem)]
    for first, second in pairwise(convolutions):  # what the second writes is not where the first reads
        if second.x.source is first.result.source and isinstance(first.x.source, Made):
            assert first.x.source.last > trace.items.index(first)
    with torch.no_grad():
        for given in (x, x[:1], torch.randn(1, 8, 64, 64)):
            for one, two in zip(Chained(graph)(given), with_fast_paths(graph)(given), strict=True):
                assert torch.equal(one, two)


class Expanded(nn.Module):
    """Layers of single pixels whose results depthwise layers alone read, and one whose result is returned too."""

    def __init__(self, kernel, stride):
        super().__init__()
        geometry = {"stride": stride, "padding": kernel // 2, "groups": 44}
        self.up, self.each = nn.Conv2d(8, 44, 1), nn.Conv2d(44, 44, kernel, **geometry)
        self.again, self.other = nn.Conv2d(44, 44, 1), nn.Conv2d(44, 44, kernel, **geometry)

    def forward(self, x):
        y = functional.relu6(self.each(functional.relu6(self.up(x))))
        z = functional.relu(self.again(y))
        return functional.relu(self.other(z)), z


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1)])
def test_depthwise_layers_read_what_is_computed_for_them_band_by_band(kernel, stride, threads):
    torch.manual_seed(0)
    model = Expanded(kernel, stride).eval()
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.5, include=["up.weight", "again.weight"])
    spec.apply(model)
    x, before = torch.randn(2, 8, 71, 67), torch.get_num_threads()
    with forcing("cpu"):
        graph = sparta.compile(model, x, spec, tune="off").graph
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            for given in (x, x[:1], torch.randn(1, 8, 24, 40), torch.randn(1, 8, 113, 121)):
                chain = Chained(graph)
                (run, *_rest) = chain.program(given)._runs
                first, _second = chain.program(given).timed([given])[:2]
                assert first[0] == "conv"
                assert run.passing == {0, 1}  # the second layer of single pixels is returned
                for one, two, truth in zip(chain(given), with_fast_paths(graph)(given), model(given), strict=True):
                    assert torch.equal(one, two)
                    near(one, truth)
    finally:
        torch.set_num_threads(before)
