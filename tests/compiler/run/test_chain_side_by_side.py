"""Batches of which every thread computes images of its own: the same results, where no image sees another."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from compiler.conftest import forcing
from compiler.run.test_chain_images import NOT_ALONE, Other, Small, trained
from compiler.run.test_chain_sequences import Attending
from sparta.compiler.run.chain import batches
from sparta.compiler.run.chain.batches import SideBySide, side_by_side
from sparta.compiler.run.chain.chained import Chained
from sparta.compiler.run.chain.program import Program
from sparta.errors import SpartaError
from sparta.measure.machine import probe_compiler

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


@pytest.fixture(params=[2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def small_batches(monkeypatch):
    """Let small batches be cut, into parts of as many images as each thread gets at most, and of one."""
    monkeypatch.setattr(batches, "_SHARED_BYTES", 0)
    monkeypatch.setattr(batches, "_PART_BYTES", (1 << 30, 0))


def near(given, wanted):
    torch.testing.assert_close(given, wanted, rtol=2e-5, atol=2e-5)


def cut(graph, x, threads):
    """Return a graph as one chain, and its ways side by side."""
    chain = Chained(graph)
    program = chain.program(x)
    assert program is not None
    return chain, side_by_side(program, graph, (x,), lambda *given: chain.program_of(*given, threads=1), threads)


def sparse(model, x, pattern="4x1"):
    spec = sparta.Spec.from_pattern(model, pattern, 0.5, include=["*one.weight", "*two.weight"])
    spec.apply(model)
    with forcing("cpu"):
        return sparta.compile(model, x, spec, tune="off").graph


@pytest.mark.parametrize("batch", [2, 3, 5, 6])
@pytest.mark.usefixtures("small_batches")
def test_images_side_by_side_are_those_of_the_batch(threads, batch):
    model, x = trained(Small()), torch.randn(batch, 3, 45, 38)
    chain, found = cut(sparse(model, x), x, threads)
    fitting = [n for n in range(1, batch // threads + 1) if batch % n == 0]
    assert [each.images for each in found] == sorted({max(fitting), 1} if fitting else (), reverse=True)
    with torch.no_grad():
        truth = model(x)
        for each in found:
            near(each((x,))[0], truth)
            assert torch.equal(each((x,))[0], each((x,))[0])
        near(chain(x)[0], truth)


@pytest.mark.usefixtures("small_batches")
def test_strided_inputs_of_several_tensors_and_several_results(threads):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.last = nn.Conv2d(8, 16, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 1)

        def forward(self, x, y):
            z = functional.relu(self.one(x) + self.two(y))
            return z, self.last(z)

    model = Two().eval()
    x, y = torch.randn(6, 12, 13, 8).permute(0, 3, 1, 2), torch.randn(12, 8, 12, 13)[::2]
    graph = sparta.compile(model, (x, y), tune="off").graph
    chain = Chained(graph)
    whole = chain.program(x, y)
    found = side_by_side(whole, graph, (x, y), lambda *given: chain.program_of(*given, threads=1), threads)
    assert found
    with torch.no_grad():
        for each in found:
            for one, two in zip(each((x, y)), model(x, y), strict=True):
                near(one, two)


@pytest.mark.usefixtures("small_batches")
def test_sequences_and_integers_side_by_side(threads):
    model, x = Attending().eval(), torch.randn(6, 5, 16)
    _, found = cut(sparta.compile(model, x, tune="off").graph, x, threads)
    assert found
    with torch.no_grad():
        for each in found:
            near(each((x,))[0], model(x))
    model, x = trained(Small()), torch.randn(6, 3, 45, 38)
    fast = sparta.compile(model, x, precision="int8", calibration=[x], max_loss=1.0, tune="off")
    chain, found = cut(fast.graph, x, threads)
    with torch.no_grad():
        whole = chain.program(x)((x,))[0]
        for each in found:
            near(each((x,))[0], whole)


@pytest.mark.usefixtures("small_batches", "grids")
def test_grids_of_regions_side_by_side(threads):
    model, x = trained(Small()), torch.randn(6, 3, 45, 38)
    chain, found = cut(sparse(model, x, "unstructured"), x, threads)
    assert found
    with torch.no_grad():
        for each in found:
            near(each((x,))[0], model(x))
        near(chain(x)[0], model(x))


@pytest.mark.parametrize("name", NOT_ALONE)
@pytest.mark.usefixtures("small_batches")
def test_batches_whose_images_meet_are_not_cut(name):
    model, x = Other(NOT_ALONE[name]).eval(), torch.randn(4, 3, 6, 6)
    assert not cut(sparta.compile(model, x, tune="off").graph, x, threads=2)[1]


def test_small_batches_single_images_and_single_threads_run_as_they_are(monkeypatch):
    model, x = trained(Small()), torch.randn(6, 3, 45, 38)
    graph = sparta.compile(model, x, tune="off").graph
    assert not cut(graph, x, threads=2)[1]
    monkeypatch.setattr(batches, "_SHARED_BYTES", 0)
    assert cut(graph, x, threads=2)[1]
    assert not cut(graph, x, threads=1)[1]
    assert not cut(graph, x[:1], threads=2)[1]
    assert not cut(graph, x, threads=7)[1]


@pytest.mark.usefixtures("small_batches")
def test_a_chain_takes_the_way_that_is_measured_to_be_fastest(monkeypatch, threads):
    model, x = trained(Small()), torch.randn(6, 3, 45, 38)
    chain = Chained(sparse(model, x))
    monkeypatch.setattr(batches, "_CLEARLY", 1e9)  # whatever the clock says, parts run
    with torch.no_grad():
        near(chain(x)[0], model(x))
        (program,) = chain._programs.values()
        assert isinstance(program, SideBySide)
        assert program.threads == threads
        with ThreadPoolExecutor(4) as pool:  # each caller with memory of its own
            for given, found in [(x + n, pool.submit(chain, x + n)) for n in range(8)]:
                near(found.result()[0], model(given))


@pytest.mark.parametrize("any_size", [False, True])
@pytest.mark.usefixtures("small_batches")
def test_sizes_that_come_and_go_are_not_tried_side_by_side(monkeypatch, threads, any_size):
    monkeypatch.setattr(batches, "_CLEARLY", 1e9)
    model, x = trained(Small()), torch.randn(6, 3, 45, 38)
    chain = Chained(sparse(model, x), any_size=any_size)
    with torch.no_grad():
        near(chain(x)[0], model(x))
    (program,) = chain._programs.values()
    assert type(program) is (Program if any_size else SideBySide)


class Words(nn.Module):
    """Words that are looked up, and layers after them."""

    def __init__(self):
        super().__init__()
        self.words, self.one, self.two = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids):
        return self.two(functional.gelu(self.one(self.words(ids))))


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_word_that_is_none_in_one_part_is_an_error_of_all(threads, place):
    model, ids = Words().eval(), torch.randint(50, (7, 2, 9))
    graph = sparta.compile(model, ids[0], tune="off").graph
    program = Chained(graph).program_of(graph, (ids[0],), threads=1)
    assert program.in_one_call
    parts = [(part,) for part in ids]
    with torch.no_grad():
        for found, (part,) in zip(program.side_by_side(parts, threads), parts, strict=True):
            near(found[0], model(part))
        parts[place] = (ids[place] + 50,)
        with pytest.raises(IndexError, match="out of range"):
            program.side_by_side(parts, threads)
        parts[place] = (ids[place],)
        near(program.side_by_side(parts, threads)[place][0], model(ids[place]))


@pytest.mark.usefixtures("small_batches")
def test_what_a_step_says_is_raised(monkeypatch):
    model, x = trained(Small()), torch.randn(4, 3, 45, 38)
    _, (found, *_rest) = cut(sparse(model, x), x, threads=2)
    (run,) = found.program._runs
    monkeypatch.setattr(run, "_run_parts", lambda *_: 2)
    with pytest.raises((SpartaError, MemoryError)):
        found((x,))
