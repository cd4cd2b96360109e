"""On a busy machine the quickest calls choose, and layers that won one by one; nothing of it is claimed or stored."""

import random

import pytest
import torch
from torch import nn

from compiler import nets
from compiler.clocks import Clock, compiled, plain_cost
from compiler.conftest import chosen
from sparta.common.result import Trial, TuningResult
from sparta.compiler.choose import judge
from sparta.compiler.clock import Rounds
from sparta.compiler.job import Job
from sparta.compiler.session import Session
from sparta.compiler.variant import GIVEN, ORIGINAL, Base, Variant
from sparta.specialize.tuning.select import Choice
from sparta.tesa.attribute import TeSA

SPARSE = Variant(Base.REDUCED, frozenset({"fc"}))


def crowded(seed):
    """Noise of many busy processes: one call in four is left alone, others take two to fifty times as long."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    return lambda _round, _place: 1.0 if chance.random() < 0.25 else chance.uniform(2, 50)


def rounds_of(times, seed, count=60):
    noise = crowded(seed)
    return Rounds({key: [time * noise(0, 0) for _ in range(count)] for key, time in times.items()})


@pytest.mark.parametrize("seed", range(20))
def test_the_quickest_calls_choose_where_rounds_do_not_agree(seed):
    rounds = rounds_of({GIVEN: 10.0, ORIGINAL: 10.0, SPARSE: 7.0}, seed)
    assert judge.doubt(rounds, SPARSE)
    assert judge.surest(rounds) == SPARSE


@pytest.mark.parametrize("seed", range(20))
def test_noise_chooses_nothing_that_is_slower_or_the_same(seed):
    rounds = rounds_of({GIVEN: 10.0, ORIGINAL: 10.0, SPARSE: 10.2}, seed)
    share = judge._share_won(rounds, SPARSE)
    if share < 0.6:  # else most rounds were for it, by chance
        assert judge.surest(rounds) == ORIGINAL
        assert judge.surest(rounds, layers_win=True) == ORIGINAL


def test_a_small_gain_by_the_quickest_calls_is_enough_for_layers_that_won_one_by_one():
    pairs = [(10.0, 9.5), (10.0, 400.0), (10.0, 350.0), (300.0, 9.5), (10.0, 380.0)] * 6
    rounds = Rounds({GIVEN: [a for a, _ in pairs], ORIGINAL: [a for a, _ in pairs], SPARSE: [b for _, b in pairs]})
    assert judge.surest(rounds) == ORIGINAL
    assert judge.surest(rounds, layers_win=True) == SPARSE


def test_quickest_calls_of_few_rounds_tell_nothing():
    noise = [1.0, 40.0, 30.0, 60.0, 1.0, 20.0]
    rounds = Rounds({GIVEN: [10.0] * 6, ORIGINAL: [10.0] * 6, SPARSE: [5.0 * each for each in noise]})
    assert judge.surest(rounds, layers_win=True) == ORIGINAL


@pytest.mark.parametrize("seed", range(5))
def test_beside_busy_processes_a_sparse_model_runs_sparse_and_claims_nothing(forced, own_stores, seed):
    torch.manual_seed(0)
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    report = compiled(model, x, Clock(plain_cost(sparse=5.0), crowded(seed))).report
    assert report.plan.whole.base is Base.REDUCED
    assert any(layer.sparse for layer in report.plan.layers)
    assert report.speedup is None or report.speedup == pytest.approx(2.0, rel=0.2)
    if report.speedup is None:
        assert not list(own_stores[0].glob("*.json"))


@pytest.mark.parametrize("seed", range(5))
def test_a_brief_look_becomes_a_longer_one_where_timing_is_unstable(forced, own_stores, seed):
    clock = Clock(plain_cost(sparse=5.0), crowded(seed), rounds=7)
    session = Session(measure=clock, now=lambda: 0.0, brief=True)
    job = Job.started(nets.pruned(nets.Mlp()), torch.randn(6, 32), None, None, (), session)
    outcome = job.contest(inductor=False).decide()
    assert outcome.variant.base is Base.REDUCED
    assert outcome.variant.kernels


def test_looking_for_zeros_takes_nothing_of_the_time_for_measuring(forced, own_stores, monkeypatch):
    now = {"seconds": 0.0}
    looking, from_zeros = {"on": False}, TeSA.from_zeros

    def slow(tensor):
        now["seconds"] += 3.0 if looking["on"] else 0.0
        return from_zeros(tensor)

    monkeypatch.setattr(TeSA, "from_zeros", slow)
    model = nets.pruned(nets.Mlp())
    session = Session(measure=Clock(plain_cost(sparse=5.0)), budget_s=8.0, now=lambda: now["seconds"])
    job = Job.started(model, torch.randn(6, 32), None, None, (), session)
    looking["on"] = True
    outcome = job.contest(inductor=False).decide()
    assert now["seconds"] > 4.0
    assert outcome.whole.ratio == pytest.approx(2.0)


class Cut(nn.Module):
    """Pairs of layers of nearly the same sizes, as cut channels leave them."""

    def __init__(self, widths=(120, 124, 128, 118)):
        super().__init__()
        self.pairs = nn.ModuleList(nn.Sequential(nn.Linear(64, w), nn.ReLU(), nn.Linear(w, 64)) for w in widths)

    def forward(self, x):
        for pair in self.pairs:
            x = x + pair(x)
        return x


def test_layers_of_nearly_the_same_sizes_share_one_search(own_stores, monkeypatch):
    asked = []

    def tune(problem, *, like, **_options):
        asked.append((tuple(problem.spec["weight"].shape), None if like is None else like.implement))
        return chosen(problem.spec)

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    torch.manual_seed(0)
    compiled(nets.pruned(Cut()), torch.randn(16, 64), Clock(plain_cost()))
    searched = [shape for shape, like in asked if like is None]
    assert len(asked) == 8
    assert len(searched) <= 4  # two directions, and sizes on either side of a step
    assert {like for _, like in asked if like is not None} == {"cpu"}


def test_what_won_for_nearly_the_same_sizes_is_looked_at_once(own_stores, monkeypatch):
    asked = {}

    def tune(problem, *, like, **_options):
        asked.setdefault(tuple(problem.spec["weight"].shape), []).append(like is not None)
        if like is None:
            return chosen(problem.spec)
        return Choice("dense", {}, "dense: nothing was faster when the time was up", None, {}, TuningResult())

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    torch.manual_seed(0)
    compiled(nets.pruned(Cut()), torch.randn(16, 64), Clock(plain_cost()))
    second = [turns for turns in asked.values() if len(turns) > 1]
    assert second
    assert all(turns == [True, False] for turns in second)


@pytest.mark.parametrize(("value", "runs"), [(1.4, "dense"), (None, "dense"), (0.7, "cpu")])
def test_what_lost_here_does_not_run_because_a_table_says_so(value, runs, own_stores, monkeypatch):
    now, late = {"seconds": 0.0}, "dense: nothing was faster when the time was up"

    def tune(problem, **_options):
        now["seconds"] += 100.0
        trial = Trial(0, chosen(problem.spec).config, value, "pruned" if value is None else "complete")
        return Choice("dense", {}, late, None, {}, TuningResult((trial,)))

    def tables(spec, _store=None):
        known = chosen(spec)
        return Choice(known.implement, known.params, "shipped table: 3.00x dense on another machine")

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", tune)
    monkeypatch.setattr("sparta.compiler.choose.layers.choose", tables)
    session = Session(now=lambda: now["seconds"], budget_s=50.0)
    model = nets.pruned(nn.Sequential(nn.Linear(64, 64)))
    (plan,) = Job.started(model, torch.randn(16, 64), None, None, (), session).contest(inductor=False).plans
    assert plan.first.implement == runs
    assert plan.first.reason.startswith(late if runs == "dense" else "shipped table")
