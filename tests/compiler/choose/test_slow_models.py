"""A model whose calls take long is compiled well under a small budget: by a clock that only its own products move."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sparta
from compiler import nets
from compiler.conftest import chosen
from sparta.compiler.api import compile_in
from sparta.compiler.choose.light import lighter
from sparta.compiler.graph.fixed import fixed_program
from sparta.compiler.job import Job
from sparta.compiler.run.host import Host
from sparta.compiler.session import Session
from sparta.compiler.variant import Base, Variant

LAYERS, SECONDS = 4, 0.5  # of the model, and of each dense product: a call takes two seconds


class Deep(nn.Module):
    """Layers, norms and sums, as in an encoder."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(LAYERS))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + layer(x).relu())
        return x


class Ticking(TorchDispatchMode):
    """While active, a dense product of real tensors takes half a second by its clock; nothing else takes any time."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        product = func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.linear.default)
        if product and type(result) is torch.Tensor and result.device.type == "cpu":
            self.now += SECONDS
        return result

    def measure(self, calls, _seconds):
        """Time calls by this clock, each once; what kernels run takes a tenth of a second."""
        found = {}
        for key, call in calls.items():
            before = self.now
            call()
            if isinstance(key, Variant) and key.kernels:
                self.now += 0.1 if key.host is Host.CHAIN else 0.3
            found[key] = [1e3 * max(1e-3, self.now - before)]
        return found


@pytest.fixture
def ticking():
    with Ticking() as clock:
        yield clock


def slow_session(clock, budget_s):
    return Session(measure=clock.measure, now=lambda: clock.now, budget_s=budget_s)


def test_a_slow_model_gets_the_chain_under_a_budget_of_a_few_calls(forced, own_stores, ticking):
    model, x = nets.pruned(Deep(), sparta.Block(4, 1)).eval(), torch.randn(4, 8, 64)
    fast = compile_in(slow_session(ticking, 20.0), model, [x])
    whole = fast.report.plan.whole
    assert (whole.base, whole.host) == (Base.REDUCED, Host.CHAIN)
    assert len(fast.kernels) == LAYERS
    assert fast.report.certificate.passed
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-4)


def test_few_calls_come_before_anything_is_measured(forced, own_stores, ticking):
    model, x = nets.pruned(Deep(), sparta.Block(4, 1)).eval(), torch.randn(4, 8, 64)
    session = slow_session(ticking, 60.0)
    session.call_seconds = LAYERS * SECONDS
    Job.started(model, x, None, "auto", (), session).contest(inductor=False)
    assert ticking.now <= 2 * LAYERS * SECONDS


def test_shapes_and_numbers_that_are_derived_are_those_that_are_computed():
    x = torch.randn(4, 8, 64)
    job = Job.started(nets.pruned(Deep(), sparta.Block(4, 1)).eval(), x, None, "auto", (), Session())
    for program in (*job.any_size, job.original):
        computed, derived = program.shapes([x]), program.shapes([x], computed=False)
        described = [
            {node: (value.shape, value.stride(), value.dtype, value.device.type) for node, value in found.items()}
            for found in (computed, derived)
        ]
        assert described[0] == described[1]
        fixed = [fixed_program(program, [x], computed=how).module().code for how in (True, False)]
        assert fixed[0] == fixed[1]


def test_a_program_whose_shapes_depend_on_values_is_run():
    class Chosen(nn.Module):
        def forward(self, x):
            return x[x > 0]

    x = torch.arange(-2.0, 3.0)
    program = Job.started(Chosen(), x, None, None, (), Session()).original
    *_, last = program.shapes([x], computed=False).values()
    assert last.shape == (2,)


def test_a_heavy_layer_is_measured_on_some_rows_and_its_times_are_those_of_all(own_stores, monkeypatch):
    monkeypatch.setattr("sparta.compiler.choose.light._HEAVY", 1e5)
    monkeypatch.setattr("sparta.compiler.choose.light._LIGHT", 5e4)
    seen = []

    def tune(problem, **_options):
        seen.append(problem.inputs[0].shape)
        return chosen(problem.spec)

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    model, x = nets.pruned(nn.Sequential(nn.Linear(64, 64)), sparta.Block(4, 1)), torch.randn(2, 64, 64)
    (plan,) = Job.started(model, x, None, None, (), Session()).contest(inductor=False).plans
    assert seen == [(8, 64)]
    assert list(plan.choices) == [128]
    assert (plan.first.entry.milliseconds, plan.first.entry.dense_milliseconds) == (16.0, 32.0)
    assert plan.first.reason.endswith("on 8 of 128 rows")


def test_images_are_taken_whole_and_light_layers_too():
    model = nets.pruned(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)), sparta.Block(4, 1))
    (subgraph,) = Job.started(model, torch.randn(2, 8, 8, 8), None, None, (), Session()).subgraphs
    assert lighter(subgraph, torch.randn(2, 8, 8, 8), None) is None
    part = lighter(subgraph, torch.empty(64, 8, 256, 256), torch.empty(64, 8, 256, 256))
    assert part.x.shape[1:] == (8, 256, 256)
    assert part.kept == len(part.x) == len(part.residual) < part.all == 64


def test_layers_that_the_budget_does_not_reach_run_what_won_for_their_like(own_stores, monkeypatch):
    clock, tuned = [0.0], []

    def tune(problem, **_options):
        clock[0] += 100.0
        tuned.append(problem.spec["weight"].shape)
        return chosen(problem.spec)

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 96))
    session = Session(now=lambda: clock[0], budget_s=50.0)
    model, x = nets.pruned(net, sparta.Block(4, 1)), torch.randn(16, 64)
    plans = Job.started(model, x, None, None, (), session).contest(inductor=False).plans
    assert len(tuned) == 1
    assert [plan.sparse for plan in plans] == [True] * 3
    assert sum("as the most similar layer" in plan.first.reason for plan in plans) == 2


def test_depthwise_layers_that_lost_channels_run_what_won_for_whole_ones(own_stores, monkeypatch):
    clock = [0.0]

    def tune(problem, **_options):
        clock[0] += 100.0
        return chosen(problem.spec, "cpu-dense")

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    layers = [nn.Conv2d(width, width, 3, padding=1, groups=width) for width in (16, 48)]
    net = nn.Sequential(layers[0], nn.Conv2d(16, 48, 1), layers[1])
    with torch.no_grad():
        kept = (torch.arange(48)[:, None] // 4 + torch.arange(16)) % 5 == 0  # every channel is read
        net[1].weight *= kept[:, :, None, None]
        layers[1].weight[::6] = 0.0
    session = Session(now=lambda: clock[0], budget_s=50.0)
    plans = Job.started(net.eval(), torch.randn(1, 16, 20, 20), None, None, (), session).contest(inductor=False).plans
    reasons = {plan.name: plan.first for plan in plans}
    assert len({plan.pattern for plan in plans if plan.name in "02"}) == 2
    assert {reasons[name].implement for name in "02"} == {"cpu-dense"}
    assert sum("as the most similar layer" in reasons[name].reason for name in "02") == 1


def test_a_layer_of_another_kind_is_no_like(own_stores, monkeypatch):
    clock = [0.0]

    def tune(problem, **_options):
        clock[0] += 100.0
        return chosen(problem.spec)

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    sparta.Spec.from_pattern(net, sparta.Block(4, 1), 0.8, include=["0.weight"]).apply(net)
    sparta.Spec.from_pattern(net, sparta.Unstructured(), 0.5, include=["2.weight"]).apply(net)
    session = Session(now=lambda: clock[0], budget_s=50.0)
    plans = Job.started(net, torch.randn(16, 64), None, None, (), session).contest(inductor=False).plans
    assert sum(plan.sparse for plan in plans) == 1
    assert {plan.first.reason for plan in plans if not plan.sparse} == {"dense: the budget was spent before this layer"}
