"""A budget holds for the whole compilation, and what is alike is measured once."""

import time

import pytest
import torch
from torch import nn

import sparta
from compiler import nets
from compiler.clocks import Clock, plain_cost
from sparta.compiler.job import Job
from sparta.compiler.run.host import Host
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.session import Session
from sparta.specialize.tuning.select import Choice
from sparta.specialize.tuning.significance import confirm
from sparta.specialize.tuning.store import Entry


class Repeated(nn.Module):
    """Convolutions and linear layers that come three times each, with other values."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()) for _ in range(3)])
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])

    def forward(self, x):
        return self.layers(self.convolutions(x).flatten(2))


@pytest.fixture
def tuned(monkeypatch):
    """Count what is tuned instead of tuning; all of it is stored as dense, and what is stored holds."""
    calls = []

    def tune(problem, *, max_seconds, store, **_options):
        if (entry := store.get(problem.spec)) is not None:
            return Choice(entry.implement, entry.params, "stored", entry)
        calls.append((problem.spec.op, max_seconds))
        entry = Entry("dense", {}, 1.0, 1.0)
        store.put(problem.spec, entry)
        return Choice("dense", {}, "dense: nothing was faster", entry)

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    return calls


def test_alike_layers_are_tuned_once_and_not_again_by_the_next_compilation(tuned, own_stores):
    x = torch.randn(2, 8, 4, 8)
    sparta.compile(nets.pruned(Repeated(), sparta.Block(4, 1)), x)
    assert sorted(op for op, _ in tuned) == ["conv2d", "linear"]
    tuned.clear()
    report = sparta.compile(nets.pruned(Repeated(), sparta.Block(4, 1)), x).report  # other values of the same kind
    assert not tuned
    assert {layer.first.reason for layer in report.plan.layers} == {"dense: nothing was faster (stored)"}


def test_what_a_layer_needs_beside_its_trials_is_taken_off_their_time(tuned, own_stores, monkeypatch):
    from sparta.compiler.lower.linear import LinearLowering

    prepare = LinearLowering.problem

    def slow(self, *args):
        time.sleep(0.1)
        return prepare(self, *args)

    monkeypatch.setattr(LinearLowering, "problem", slow)
    sparta.compile(nets.pruned(nn.Sequential(nn.Linear(32, 32))), torch.randn(4, 32))
    assert [seconds <= 2.9 for _, seconds in tuned] == [True]


def test_inductor_does_not_begin_what_the_budget_cannot_pay(forced, own_stores, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_a, **_k: pytest.fail("compiled without the budget for it"))
    session = Session(measure=Clock(plain_cost()), budget_s=1000)
    contest = Job.started(nets.pruned(nets.Mlp()), torch.randn(6, 32), None, None, (), session).contest(inductor=True)
    contest.session.inductor_seconds = 1e6
    outcome = contest.decide()
    assert outcome.variant.host in (Host.EAGER, Host.CHAIN, Host.PANELS)
    assert any("was not tried: compiling takes about" in note for note in session.notes)
    assert not outcome.lasting


def test_inductor_begins_with_the_graph_that_has_kernels(forced, own_stores, monkeypatch):
    compiled = []

    def compile_nothing(module, **_options):
        compiled.append(any(isinstance(child, KernelModule) for child in module.modules()))
        return module

    monkeypatch.setattr(torch, "compile", compile_nothing)
    session = Session(measure=Clock(plain_cost()), budget_s=1000)
    job = Job.started(nets.pruned(nets.Mlp()), torch.randn(6, 32), None, None, (), session)
    job.contest(inductor=True).decide()
    assert compiled == [True, False]


@pytest.mark.parametrize("works", [True, False])
def test_what_inductor_takes_is_learnt_from_what_compiles_alone(forced, own_stores, monkeypatch, works):
    def compile_it(module, **_options):
        if not works:
            raise RuntimeError("no compiler")
        return module

    monkeypatch.setattr(torch, "compile", compile_it)
    session = Session(measure=Clock(plain_cost()), budget_s=1000)
    job = Job.started(nets.pruned(nets.Mlp()), torch.randn(6, 32), None, None, (), session)
    job.contest(inductor=True).decide()
    assert (session.inductor_seconds != Session().inductor_seconds) is works
    assert any("does not run: " in note for note in session.notes) is not works


class Spent(Session):
    """A session whose time for layers is over before the first."""

    @property
    def left_for_layers(self):
        return 0.0


@pytest.mark.parametrize(("stored", "interrupted"), [(False, False), (True, False), (False, True)])
def test_layers_that_the_budget_did_not_reach_were_hurried(tuned, own_stores, stored, interrupted):
    model, x = nets.pruned(nn.Sequential(nn.Linear(32, 32))), torch.randn(4, 32)
    if stored:
        sparta.compile(model, x)
    session = Spent(measure=Clock(plain_cost()), interrupted=interrupted)
    Job.started(model, x, None, None, (), session).contest(inductor=False)
    assert session.hurried is not (stored or interrupted)


def test_a_confirmation_ends_with_its_time_and_two_pairs_must_be_far_above():
    calls = []

    def kernel(milliseconds):
        def call():
            calls.append(milliseconds)
            time.sleep(milliseconds / 1e3)
            return torch.empty(())

        return call

    assert not confirm(kernel(60), kernel(55), 0.0).won
    assert len(calls) == 4  # each once to warm up and once that counts
    assert confirm(kernel(60), kernel(20), 0.0).won
