"""One way to call all modules, and the older spellings that mean the same."""

import pytest
import torch
from torch import nn

import sparta.nn as sn
from sparta.errors import ValueRangeError
from sparta.specialize.tuning.select import Choice

MASK = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
X = torch.randn(4, 8)
DENSE = {"_name": "dense"}


def made():
    return sn.SparseLinear(nn.Linear(8, 8), weight_mask=MASK)


@pytest.fixture
def asked(monkeypatch):
    """A tuner that measures nothing and keeps what it was asked with."""
    options = []

    def dense(problem, *, store, **given):
        options.append(given)
        return Choice("dense", {}, "not measured")

    monkeypatch.setattr("sparta.nn.operator.tune_kernel", dense)
    return options


@pytest.mark.parametrize("name", ["example_inputs", "inputs"])
def test_tune_takes_its_inputs_by_both_names(asked, name):
    assert made().tune(**{name: (X,)}).implement == "dense"
    assert made().get_search_space(**{name: X}).includes(DENSE)


@pytest.mark.parametrize(
    "call",
    [
        lambda op: op.build(X, DENSE),
        lambda op: op.build(example_inputs=X, config=DENSE),
        lambda op: op.build(DENSE, X),
        lambda op: op.build(None, X),
        lambda op: op.build(config=DENSE, sample_inputs=(X,)),
        lambda op: sn.build(op, X),
        lambda op: sn.build(op, sample_inputs=X, configs={"": DENSE}),
    ],
)
def test_build_takes_the_order_of_all_and_that_of_the_original(call):
    op = made()
    call(op)
    assert op.ready


def test_two_spellings_at_once_are_refused(asked):
    with pytest.raises(ValueRangeError, match="both example_inputs and inputs"):
        made().tune(example_inputs=X, inputs=X)


@pytest.mark.parametrize("name", ["budget_s", "max_seconds"])
def test_a_budget_is_shared_by_all_that_is_measured(asked, name):
    made().tune(X, backward=True, **{name: 3.0})
    assert [given["max_seconds"] for given in asked] == [1.5, 1.5]


def test_the_budget_of_a_model_is_shared_by_its_modules(asked):
    sn.tune(nn.Sequential(made(), sn.SparseLinear(nn.Linear(8, 8), weight_mask=~MASK)), X, budget_s=2.0)
    assert len(asked) == 2
    assert 0.9 < asked[0]["max_seconds"] <= 1.0  # half of what is left
    assert asked[1]["max_seconds"] <= 2.0


@pytest.mark.parametrize("budget", [0, -1.0])
def test_a_budget_is_above_zero(asked, budget):
    with pytest.raises(ValueRangeError, match="budget_s"):
        made().tune(X, budget_s=budget)
    with pytest.raises(ValueRangeError, match="budget_s"):
        sn.tune(made(), X, budget_s=budget)
