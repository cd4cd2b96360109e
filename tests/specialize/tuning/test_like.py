"""What won for nearly the same sizes is taken without a search where it wins here as well, and only there."""

import pytest
import torch

from sparta.specialize.implement import implement_named
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning import select
from sparta.specialize.tuning.select import Choice, Problem, tune_kernel
from sparta.specialize.tuning.significance import Verdict
from sparta.specialize.tuning.store import Entry, TuningStore
from sparta.tesa.attribute import TeSA
from sparta.testing import linear_reference


@pytest.fixture
def problem():
    torch.manual_seed(0)
    mask = (torch.rand(16, 96) < 0.2).repeat_interleave(4, 0)
    weight, x = torch.randn(64, 96) * mask, torch.randn(32, 96)
    spec = linear_spec(TeSA.from_mask(mask), 32, torch.float32)
    return Problem(spec, weight, (x, None, None), linear_reference(x, weight, weight_mask=mask), 96)


@pytest.fixture
def said(monkeypatch):
    """Let a clock of the test's own say how much faster than dense the like one is here; searches are counted."""
    searches = []
    search = select.search
    monkeypatch.setattr(select, "search", lambda *a, **k: searches.append(1) or search(*a, **k))

    def say(gain, *, stable=True):
        verdict = Verdict(gain, 2.0, gain > 1, decided=True, stable=stable)
        monkeypatch.setattr(select, "settled", lambda *_: verdict)
        return searches

    return say


def like(problem, speedup, name="cpu", **params):
    chosen = {**implement_named(name, "linear").default(problem.spec), **params}
    return Choice(name, chosen, "", Entry(name, chosen, 1.0, speedup))


def test_what_wins_about_as_clearly_is_taken_without_a_search_and_stored(problem, said, tmp_path):
    searches, store = said(2.8), TuningStore(tmp_path)
    choice = tune_kernel(problem, like=like(problem, 3.0), store=store, max_trials=2)
    assert not searches
    assert choice.implement == "cpu"
    assert choice.entry.speedup == pytest.approx(2.8)
    assert "nearly the same sizes" in choice.reason
    assert store.get(problem.spec) == choice.entry


@pytest.mark.parametrize(("gain", "stable"), [(1.5, True), (0.9, True), (2.9, False)])
def test_what_wins_by_less_or_not_for_sure_is_searched_for(problem, said, gain, stable):
    searches = said(gain, stable=stable)
    choice = tune_kernel(problem, like=like(problem, 3.0), max_trials=2)
    assert searches
    assert "nearly the same sizes" not in choice.reason


def test_what_does_not_fit_here_is_searched_for(problem, said):
    searches = said(3.0)
    tune_kernel(problem, like=like(problem, 3.0, tile="nothing"), max_trials=2)
    wrong = Choice("no-such-kernel", {}, "", Entry("no-such-kernel", {}, 1.0, 3.0))
    tune_kernel(problem, like=wrong, max_trials=2)
    tune_kernel(problem, like=Choice("dense", {}, "", Entry("dense", {}, 1.0, 1.0)), max_trials=2)
    assert len(searches) == 3


def test_what_computes_something_else_here_is_searched_for(problem, said, monkeypatch):
    searches, build = said(3.0), select.build

    def wrong(spec, config):
        kernel = build(spec, config)
        right = kernel.run
        monkeypatch.setattr(kernel, "run", lambda *inputs: right(*inputs) + 1.0, raising=False)
        monkeypatch.setattr(select, "build", build)
        return kernel

    monkeypatch.setattr(select, "build", wrong)
    tune_kernel(problem, like=like(problem, 3.0), max_trials=2)
    assert searches


def test_a_look_at_it_leaves_most_of_the_time_for_a_search(problem, monkeypatch):
    given = {}
    search = select.search

    def looked(_dense, _candidate, seconds, _roof):
        given.setdefault("look", seconds)
        return Verdict(0.9, 2.0, won=False, decided=True, stable=True)

    def searched(*args, **options):
        given["search"] = options["max_seconds"]
        return search(*args, **options)

    monkeypatch.setattr(select, "settled", looked)
    monkeypatch.setattr(select, "search", searched)
    tune_kernel(problem, like=like(problem, 3.0), max_trials=2, max_seconds=1000.0)
    assert given["look"] <= 250.0
    assert given["search"] > 600.0
