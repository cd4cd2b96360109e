"""Chains compete under every budget, with the plan's kernels and without one; a memory of something slower yields."""

import pytest
import torch

from compiler import nets
from compiler.clocks import Clock, compiled
from sparta.compiler.job import Job
from sparta.compiler.run.host import Host
from sparta.compiler.session import Session
from sparta.compiler.variant import Base, Variant

pytestmark = pytest.mark.usefixtures("forced", "own_stores")


def cost(sparse, dense, others=9.0):
    """Return what chains take with kernels and without, beside a model of 10 ms."""

    def of(key):
        if not isinstance(key, Variant):
            return 8.0
        if key.host is Host.CHAIN:
            return sparse if key.kernels else dense
        return 10.0 if key.base in (Base.GIVEN, Base.ORIGINAL) else others

    return of


def model_and_input():
    torch.manual_seed(0)
    return nets.pruned(nets.Mlp()), torch.randn(6, 32)


def test_a_chain_without_sparse_kernels_runs_where_it_is_faster_than_one_with_them():
    model, x = model_and_input()
    fast = compiled(model, x, Clock(cost(sparse=8.0, dense=5.0)))
    assert fast.report.plan.whole.host is Host.CHAIN
    assert not any(layer.sparse for layer in fast.report.plan.layers)
    assert fast.report.speedup == pytest.approx(2.0)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dense", [5.0, 2.97])
def test_a_chain_with_kernels_stays_where_one_without_them_is_slower_or_hardly_faster(dense):
    model, x = model_and_input()
    whole = compiled(model, x, Clock(cost(sparse=3.0, dense=dense))).report.plan.whole
    assert whole.chosen == "sparse, chain"


def test_a_chain_competes_when_the_budget_is_spent():
    model, x = model_and_input()
    session = Session(budget_s=100.0, now=lambda: 0.0)
    contest = Job.started(model, x, None, None, (), session).contest(inductor=False)
    session.started -= 1000.0  # which takes all that is left
    contest.timer.measure = clock = Clock(cost(sparse=3.0, dense=5.0))
    assert session.left == 0
    outcome = contest.decide()
    assert outcome.variant.host is Host.CHAIN
    assert outcome.variant.kernels
    asked = {key for keys, _ in clock.asked for key in keys if isinstance(key, Variant)}
    assert {key for key in asked if key.host is Host.CHAIN} == {outcome.variant}


def test_a_remembered_choice_yields_to_a_chain_that_is_faster_now():
    model, x = model_and_input()
    first = compiled(model, x, Clock(cost(sparse=12.0, dense=12.0, others=4.0)))
    assert first.report.plan.whole.host is Host.EAGER
    again = compiled(model, x, Clock(cost(sparse=12.0, dense=12.0, others=4.0)))
    assert again.report.plan.whole.reason.startswith("remembered")
    now = compiled(model, x, Clock(cost(sparse=3.0, dense=12.0, others=4.0)))
    assert now.report.plan.whole.chosen == "sparse, chain"
