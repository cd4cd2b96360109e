"""Hosts that a machine does not have give way to those it has, and what is counted off a budget is stated."""

from collections import OrderedDict, namedtuple
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree

import sparta
from compiler import nets
from sparta.compiler.choose.end_to_end import Contest, _best
from sparta.compiler.graph.signature import builder
from sparta.compiler.run.host import hosted
from sparta.compiler.session import Session
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning.select import Problem, tune_kernel
from sparta.testing import block_mask

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - a structure that models return


def test_a_model_of_a_cuda_graph_runs_without_cuda(tmp_path):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off")
    assert torch.equal(hosted(fast.graph, "graph")(x)[0], fast(x))
    fast.report = replace(
        fast.report, plan=replace(fast.report.plan, whole=replace(fast.report.plan.whole, host="graph"))
    )
    fast.save(tmp_path / "graph.sparta")
    torch.testing.assert_close(sparta.load(tmp_path / "graph.sparta")(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_images_are_pooled_by_the_kernel_library(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.MaxPool2d(3, 2, padding=1), torch.nn.ReLU()).eval()
    x = torch.randn(2, 3, 15, 13)
    expected = model(x).detach()
    host = hosted(sparta.compile(model, x, tune="off").graph, "eager")
    by_pytorch, pooled = torch.nn.functional.max_pool2d, []

    def watched(image, *args, **kwargs):
        pooled.append(image.device.type)
        return by_pytorch(image, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "max_pool2d", watched)
    torch.testing.assert_close(host(x)[0], expected)
    assert pooled == ["meta"]  # PyTorch is asked for the size only


def test_graphs_change_nothing_where_there_are_none():
    mask = block_mask((32, 32), (4, 1), 0.8, seed=0)
    weight, x = torch.randn(32, 32) * mask, torch.randn(8, 32)
    spec = linear_spec(sparta.TeSA.from_mask(mask), 8, torch.float32)
    problem = Problem(spec, weight, (x, None, None), x.double() @ weight.double().T, 32)
    choice = tune_kernel(problem, max_trials=2, max_seconds=2, in_graphs=True)
    assert choice.entry is not None


def test_a_budget_keeps_something_for_the_whole():
    session = Session(budget_s=1000.0)
    assert 0 < session.left_for_layers < session.left
    assert session.share(0.25, most=1e9) <= session.left_for_layers / 3
    session.started -= 700.0
    assert session.left_for_layers <= 0 < session.left
    assert session.affords(200.0)
    session.started -= 400.0
    assert session.left == 0
    assert session.affords(1.0)  # nothing, next to the budget
    assert not session.affords(200.0)
    session.interrupted = True
    assert not session.affords(1.0)


@pytest.mark.parametrize("tensor", [torch.zeros(3, 4), torch.rand(8, 12) * (torch.rand(8, 12) > 0.5), torch.ones(5, 7)])
def test_what_is_found_out_of_a_tensor_is_kept(tensor):
    known = sparta.TeSA.from_zeros(tensor)
    assert known.count("live") == int(tensor.count_nonzero())
    assert known.with_format(torch.float32) is known
    assert known.with_format("int8", scale=0.5) is not known
    other = known.with_format(torch.float16)
    assert other is not known
    assert str(other.format) == ("fp16" if known.count("live") else "any")


@pytest.mark.parametrize(("inductor", "chosen"), [(9.9, "original graph"), (9.7, "original graph, inductor")])
def test_another_host_than_eager_must_win_clearly(inductor, chosen):
    times = {"model as given": 8.0, "original graph": 10.0, "sparse": 11.0, "original graph, inductor": inductor}
    assert _best(times) == chosen


def test_two_that_are_close_compete_once_more_and_others_do_not(monkeypatch):
    contest = Contest.__new__(Contest)
    rounds = []

    def times(calls, _rounds=0):
        rounds.append(sorted(calls))
        first = {"model as given": 10.0, "original graph": 9.5, "sparse": 30.0, "original graph, inductor": 10.0}
        again = {**first, "original graph, inductor": 9.0}
        return {name: (first if len(rounds) == 1 else again)[name] for name in calls}

    monkeypatch.setattr(contest, "_times", times)
    monkeypatch.setattr(contest, "_affords", lambda _variants: True)
    names = ("model as given", "original graph", "sparse", "original graph, inductor")
    found, best = contest._fastest(dict.fromkeys(names, lambda: None))
    assert rounds[1] == ["model as given", "original graph", "original graph, inductor"]
    assert best == "original graph, inductor"
    assert found == {"model as given": 10.0, "original graph": 9.5, "sparse": 30.0, "original graph, inductor": 9.0}


@pytest.mark.parametrize("structure", [1, (1,), [1, (2, [])], {"b": 1, "a": (2,)}, OrderedDict(x=1), Pair(1, [2])])
def test_a_structure_is_built_as_pytree_builds_it(structure):
    leaves, spec = pytree.tree_flatten(structure)
    build = builder(spec)
    assert build(leaves) == structure
    assert type(build(tuple(leaves))) is type(structure)


class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x, y):
        return {"both": (self.linear(x), self.linear(y))}


def test_the_short_way_into_a_model_gives_what_the_long_way_gives():
    model, (x, y) = Pairs().eval(), torch.randn(2, 3, 8)
    fast = sparta.compile(model, (x, y), tune="off")
    expected = model(x, y)["both"]
    with torch.no_grad():
        for _ in range(3):  # the first call makes the host
            torch.testing.assert_close(fast(x, y)["both"], expected)
            torch.testing.assert_close(fast(x=x, y=y)["both"], expected)
        with pytest.raises(sparta.errors.ShapeError):
            fast(x[:2], y)
        with pytest.raises(sparta.errors.SpartaError):
            fast(x)
        seen = []
        hook = fast.register_forward_hook(lambda module, args, result: seen.append(len(args)))
        fast(x, y)
        hook.remove()
        fast(x, y)
        assert seen == [2]
        fast.load_state_dict({name: t * 0 for name, t in fast.state_dict().items()})
        assert not fast(x, y)["both"][0].any()
    assert not fast(x, y)["both"][1].requires_grad
