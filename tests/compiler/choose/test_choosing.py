"""Layers and the whole are chosen by measurement, within a budget, remembered when that was enough."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from compiler import nets
from compiler.clocks import Clock, compiled, plain_cost
from sparta.common.result import TuningResult
from sparta.common.tuning import includes
from sparta.compiler.choose.partition import partition
from sparta.compiler.job import Job
from sparta.compiler.lower import lowering_of
from sparta.compiler.run.host import Host
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.session import Session
from sparta.compiler.settle import decided, verified
from sparta.compiler.variant import Base, Variant
from sparta.errors import CheckError
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.tuning.select import Choice
from sparta.specialize.tuning.store import Entry, key_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def agree(one, two):
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_tuning_is_remembered(own_stores):
    model, x = nets.pruned(nets.Mlp(64, 64), sparsity=0.9), torch.randn(16, 64)
    lines = []
    first = sparta.compile(model, x, progress=lines.append)
    assert any("layer 1/" in str(line) for line in lines)
    assert first.report.totals.first_compile_seconds is None
    agree(first(x), model(x).detach())


def test_the_tuner_is_asked_whether_what_is_stored_still_holds(own_stores, monkeypatch):
    asked = []

    def tune(problem, *, store, **_options):
        asked.append(store.get(problem.spec))
        entry = Entry("cpu", implement_named("cpu", problem.spec.op).default(problem.spec), 1.0, 2.0)
        store.put(problem.spec, entry)
        return Choice("cpu", entry.params, "stored: 2.00x dense", entry, {}, TuningResult())

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    model, x = nets.pruned(nets.Mlp(64, 64), sparsity=0.9), torch.randn(16, 64)
    first = compiled(model, x, Clock(plain_cost()))
    assert asked
    assert not any(asked)
    assert first.report.totals.first_compile_seconds is None
    asked.clear()
    second = compiled(model, x, Clock(plain_cost()))
    assert all(asked)
    assert second.report.totals.first_compile_seconds == pytest.approx(first.report.totals.compile_seconds, abs=60)
    asked.clear()
    off = sparta.compile(model, x, tune="off")
    assert not asked  # nothing is measured, and what is stored is taken as it is
    assert all(layer.first.implement == "cpu" for layer in off.report.plan.layers)
    for fast in (first, second, off):
        agree(fast(x), model(x).detach())


@pytest.mark.parametrize(("enough", "lasting"), [(0.5, True), (2.0, False)])
def test_a_hurried_decision_is_not_remembered(forced, own_stores, enough, lasting):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    contest = Job.started(model, x, None, None, (), Session(measure=Clock(plain_cost()))).contest(inductor=False)
    contest.timer.enough = enough  # of the time that a comparison wants; none has twice of it
    assert contest.decide().lasting == lasting
    decided(contest)
    assert bool(list(own_stores[0].glob("*.json"))) == lasting


def test_the_most_expensive_layers_are_measured_first_and_depthwise_ones_too(own_stores):
    dense = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), dense, nn.Conv2d(8, 64, 3, padding=1)).eval()
    with torch.no_grad():
        model[2].weight *= torch.rand_like(model[2].weight) < 0.1
    lines = []
    report = sparta.compile(model, torch.randn(1, 3, 16, 16), progress=lines.append).report
    order = [line.split()[4] for line in map(str, lines) if line.startswith("kind of layer ")]
    assert order == ["2", "1"]
    reasons = {layer.name: layer.first.reason for layer in report.plan.layers}
    assert "no zeros" in reasons["0"]
    assert "no zeros" not in reasons["1"]
    # What is moved counts as well: a layer of single pixels with as many products as a depthwise one comes after it.
    wide = nn.Conv2d(64, 64, 3, padding=1, groups=64)
    narrow = nn.Conv2d(64, 8, 1)
    with torch.no_grad():
        narrow.weight *= torch.rand_like(narrow.weight) < 0.1
    lines.clear()
    sparta.compile(nn.Sequential(wide, narrow).eval(), torch.randn(1, 64, 16, 16), progress=lines.append)
    order = [line.split()[4] for line in map(str, lines) if line.startswith("kind of layer ")]
    assert order == ["0", "1"]
    report = sparta.compile(nn.Sequential(nn.Conv2d(3, 8, 1), dense).eval(), torch.randn(1, 3, 16, 16)).report
    assert all("no zeros" in layer.first.reason for layer in report.plan.layers)


def test_layers_whose_time_was_up_have_a_second_turn(own_stores, monkeypatch):
    model, x = nets.pruned(nets.Mlp(64, 64), sparsity=0.9), torch.randn(16, 64)
    turns = []

    def tune(problem, **_options):
        turns.append(key_of(problem.spec))
        entry = Entry("cpu", {"tile": "panel:1:1:1:0:0"}, 1.0, 2.0) if len(turns) > 2 else None
        return Choice("cpu" if entry else "dense", entry.params if entry else {}, "", entry, {}, TuningResult())

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    sparta.compile(model, x)
    assert turns[-2:] == turns[:2]
    assert len(turns) == len(set(turns)) + 2


def test_large_batches_are_compared_at_both_ends():
    weight = torch.randn(64, 64) * (torch.rand(64, 64) < 0.1)
    lowering, x = lowering_of("linear"), torch.randn(40000, 64)
    tesa = sparta.TeSA.from_mask(weight != 0)
    spec = lowering.spec(tesa, x, {}, Epilogue(), device="cpu")
    problem = lowering.problem(spec, weight, x, None, None)
    rows = problem.checked.tolist()
    assert rows[0] == 0
    assert rows[-1] == 39999
    assert len(problem.expected) == len(rows) < 40000
    y = functional.linear(x, weight)
    problem.check(y, "right")
    y[-1, 3] += 1
    with pytest.raises(CheckError):
        problem.check(y, "wrong")


def test_a_spent_budget_leaves_layers_dense_and_says_so(own_stores):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, budget_s=1e-9)
    assert {layer.first.reason for layer in fast.report.plan.layers} == {
        "dense: the budget was spent before this layer"
    }
    agree(fast(x), model(x).detach())


def test_a_budget_keeps_room_for_what_must_still_come():
    now = 0.0
    session = Session(budget_s=100.0, now=lambda: now)
    assert session.left == 100.0
    session.reserve = 10.0
    assert session.left == 90.0
    with session.step(1.0):  # the first step compiles a library, which no other one does
        now = 31.0
    assert session.left == pytest.approx(100 - 31 - 10)
    with session.step(1.0):
        now = 34.0
    assert session.left == pytest.approx(100 - 34 - 10 - 2)
    with session.step(1.0):
        now = 34.5
    assert session.left == pytest.approx(100 - 34.5 - 10)
    session.interrupted = True
    assert session.left == 0.0
    assert Session().left == float("inf")


def test_a_model_too_slow_for_the_budget_is_not_timed_and_says_so(forced, own_stores):
    def clock(_calls, _seconds):
        pytest.fail("timed a model that the budget cannot pay for")

    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    job = Job.started(model, x, None, None, (), Session(measure=clock, budget_s=60))
    contest = job.contest(inductor=False)
    contest.timer.call_seconds = 1e6
    outcome = contest.decide()
    assert outcome.whole.reason == "not timed end to end: the budget was spent"
    assert outcome.variant.kernels == {"first", "second", "last"}
    fast = job.finished(contest.workshop, outcome, verified(job, contest, outcome, check=True)[1], None)
    agree(fast(x), model(x).detach())


def test_an_interrupt_keeps_the_best_so_far(own_stores, monkeypatch):

    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", interrupt)
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x)
    assert "interrupted" in fast.report.full
    agree(fast(x), model(x).detach())


def test_kernels_that_lose_in_the_whole_are_left_out(forced, own_stores):
    def cost(key):
        kernels = key.kernels if isinstance(key, Variant) else frozenset()
        return 10.0 - len(kernels - {"second"}) + 5.0 * len(kernels & {"second"})

    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = compiled(model, x, Clock(cost))
    assert set(fast.kernels) == {"first.weight_kernel", "last.weight_kernel"}
    assert "not in the whole model" in fast.report.full
    assert fast.report.speedup == pytest.approx(10 / 8)
    agree(fast(x), model(x).detach())


def test_plans_of_a_contest_are_not_edited(forced, own_stores):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    contest = Job.started(model, x, None, None, (), Session(measure=Clock(plain_cost(sparse=20.0)))).contest(
        inductor=False
    )
    before = contest.plans
    outcome = contest.decide()
    assert contest.plans is before
    assert all(plan.sparse for plan in before)
    assert not any(plan.sparse for plan in outcome.plans)


def test_kernels_that_lose_together_at_another_size_are_dense_there(forced, own_stores):
    model, sizes = nets.pruned(nets.Mlp()), [torch.randn(6, 32), torch.randn(24, 32)]
    asked = []

    def clock(calls, _seconds):
        asked.append(list(calls))
        other = list(calls) == [Variant(Base.REDUCED), Variant(Base.REDUCED, frozenset({"first", "second", "last"}))]
        last = other and len(asked) > 3  # after the contest of the first size
        return {key: [20.0 if key == list(calls)[1] and last else plain_cost()(key)] * 9 for key in calls}

    batch = torch.export.Dim("batch", min=2, max=64)
    fast = compiled(model, None, clock, sizes=sizes, dynamic_shapes=({0: batch},))
    for layer in fast.report.plan.layers:
        assert {size: choice.implement for size, choice in layer.choices.items()} == {6: "cpu", 24: "dense"}
    for x in sizes:
        agree(fast(x), model(x).detach())


@pytest.mark.parametrize("graphs", [True, False])
def test_what_inductor_compiled_in_a_contest_is_what_a_copy_runs(graphs, forced, own_stores, monkeypatch):
    """All but the recording itself, which needs a GPU."""
    for name in ("sparta.compiler.run.host", "sparta.compiler.choose.workshop"):
        monkeypatch.setattr(f"{name}.on_cuda", lambda _module: True)
        monkeypatch.setattr(f"{name}.Graphed", lambda run, **_options: run)
    monkeypatch.setattr("sparta.compiler.job._replayable", lambda *_: graphs)
    made = []
    monkeypatch.setattr(torch, "compile", lambda module, **_options: made.append(module) or module)

    def has_layers():
        return any(isinstance(child, KernelModule) for module in made for child in module.modules())

    def cost(key):
        compiles = isinstance(key, Variant) and key.host.plain is Host.INDUCTOR
        return 1.0 if compiles and key.kernels else 10.0

    model = nets.pruned(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).eval())
    x = torch.randn(6, 32)
    fast = compiled(model, x, Clock(cost), inductor=True, dynamic_shapes=None)
    assert fast.report.plan.whole.host.plain is Host.INDUCTOR
    assert made
    whole = has_layers()
    assert whole is not graphs  # what is replayed is compiled between layers, and the whole if nothing is
    made.clear()
    agree(copy.deepcopy(fast)(x), model(x).detach())
    assert made
    assert has_layers() is whole


@pytest.mark.parametrize("activation", [functional.relu6, lambda x: functional.hardtanh(x, 0.0, 6.0)])
def test_a_relu6_is_part_of_a_layer_on_the_cpu_alone(activation):
    class Clipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return activation(self.layer(x))

    x = torch.randn(4, 8)
    program = Job.started(Clipped().eval(), x, None, None, (), Session()).reduced
    shapes = program.shapes([x])
    elsewhere = replace(program, tensors={name: tensor.to("meta") for name, tensor in program.tensors.items()})
    (here,), (there,) = partition(program, shapes), partition(elsewhere, shapes)
    assert here.epilogue.activation == "relu6"
    assert there.epilogue.activation is None  # no sparse kernel there knows it


def test_layers_of_one_kind_whose_masks_have_other_gaps_take_tiles_of_their_own(own_stores, monkeypatch):
    torch.manual_seed(0)
    model = nets.pruned(nn.Sequential(nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 1)), sparta.Block(4, 1))
    with torch.no_grad():
        live = model[0].weight.flatten()
        live[live.nonzero()[5]] = 0  # a live weight that happens to be 0

    def tune(problem, **_options):
        spaces = implement_named("cpu", problem.spec.op).space(problem.spec)
        params = {name: space._value[-1] for name, space in spaces.items()}
        return Choice("cpu", params, "the last of all tiles", Entry("cpu", params, 1.0, 2.0))

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    job = Job.started(model, torch.randn(1, 64, 8, 8), None, None, (), Session())
    plans = {plan.name: plan.first for plan in job.contest(inductor=False).plans}
    assert [plan.implement for plan in plans.values()] == ["cpu", "cpu"]
    for subgraph in job.subgraphs:
        spec = subgraph.spec(torch.empty(1, subgraph.weight.shape[1], 8, 8))  # less what is always 0
        assert includes(dict(implement_named("cpu", spec.op).space(spec)), dict(plans[subgraph.name].params))
