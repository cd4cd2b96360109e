"""Chains of small images: channels that are set apart, so that threads do not write to the same lines of a cache."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from compiler.conftest import forcing
from sparta.compiler.run.chain.chained import Chained
from sparta.compiler.run.eager import with_fast_paths
from sparta.compiler.run.kernel_module import KernelModule
from sparta.measure.machine import probe_compiler
from sparta.specialize.conv.cpu_grid import GRID

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Residual(nn.Module):
    """Two residual blocks of sparse layers; the first result is returned too where asked for."""

    def __init__(self, *, shows=False):
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3, padding=1)
        self.one, self.two, self.three = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 32, 1)
        self.four, self.five, self.last = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 32, 3, 1, 1), nn.Conv2d(32, 8, 3, 2, 1)
        self.shows = shows

    def forward(self, x):
        y = functional.relu(self.first(x))
        z = functional.relu(self.three(functional.relu(self.two(functional.relu(self.one(y))))) + y)
        z = functional.relu(self.five(functional.relu(self.four(z))) + z)
        return (self.last(z), y) if self.shows else (self.last(z),)


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("size", [(14, 14), (7, 7), (13, 17), (8, 8)])
def test_channels_of_small_images_are_set_apart(shows, size, threads):
    torch.manual_seed(0)
    model = Residual(shows=shows).eval()
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.5)
    spec.apply(model)
    x = torch.randn(1, 16, *size)
    with forcing("cpu"):
        graph = sparta.compile(model, x, spec, tune="off").graph
    for images in (1, 2, 5):
        x = torch.randn(images, 16, *size)
        x[0, 2, 0, 0], x[0, 3, -1, -1] = torch.inf, torch.nan
        chain = Chained(graph)
        # What is returned is contiguous, and so is what is added to it or it is added to; so are whole pairs of lines.
        assert chain.program(x).apart == (0 if size == (8, 8) else 3 if shows else 6)
        with torch.no_grad():
            for one, two in zip(chain(x), with_fast_paths(graph)(x), strict=True):
                torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("size", [(14, 14), (13, 17)])
@pytest.mark.usefixtures("grids")
def test_grids_of_regions_skip_gaps_and_add_what_has_them(shows, size, threads):
    torch.manual_seed(0)
    model = Residual(shows=shows).eval()
    spec = sparta.Spec.from_pattern(model, sparta.Unstructured(), 0.5)
    spec.apply(model)
    x = torch.randn(3, 16, *size)
    with forcing("cpu"):
        graph = sparta.compile(model, x, spec, tune="off").graph
    kernels = [module for module in graph.modules() if isinstance(module, KernelModule)]
    layouts = [choice.params["image"] for module in kernels for _, choice in module.choices.values()]
    assert layouts == [GRID] * 7
    chain = Chained(graph)
    assert chain.program(x).apart == (3 if shows else 6)
    with torch.no_grad():
        for one, truth in zip(chain(x), model(x), strict=True):
            torch.testing.assert_close(one, truth, rtol=1e-4, atol=1e-5)
        x[0, 2, 0, 0], x[1, 3, -1, -1], x[2, 5, 6, 7] = torch.inf, torch.nan, -torch.inf
        for one, two in zip(chain(x), with_fast_paths(graph)(x), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def test_what_others_read_is_not_set_apart():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 8, 1)

        def forward(self, x):
            return self.three(functional.max_pool2d(self.two(functional.relu(self.one(x))), 3, 1, 1)).mean((2, 3))

    model, x = Net().eval(), torch.randn(2, 8, 14, 14)
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.5)
    spec.apply(model)
    with forcing("cpu"):
        chain = Chained(sparta.compile(model, x, spec, tune="off").graph)
    assert chain.program(x).apart == 1  # the first result: a pooling reads the second, a mean the third
    with torch.no_grad():
        torch.testing.assert_close(chain(x)[0], model(x), rtol=1e-4, atol=1e-5)
