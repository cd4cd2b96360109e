"""Candidates that others register are tried in a process of their own: what ends that process ends no other."""

import importlib
import sys

import pytest
import torch

from sparta.measure.references import linear_reference
from sparta.specialize import implement as registry
from sparta.specialize.implement import implement_named
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning import select
from sparta.specialize.tuning.alone import fault_alone, is_builtin
from sparta.specialize.tuning.select import Choice, Problem
from sparta.specialize.tuning.significance import Verdict
from sparta.specialize.tuning.store import Entry
from sparta.tesa.attribute import TeSA

MODULE = """
import os

from torch import nn

from sparta.specialize.implement import Implement, Support, register
from sparta.specialize.linear.spec import LinearKernel


class Plain(LinearKernel):
    def pack(self, operand):
        return (operand,)

    def run(self, packed, *inputs):
        if inputs[0][0, 0] == 0:
            os.abort()
        return nn.functional.linear(inputs[0], packed[0])


@register
class Mine(Implement):
    op, name = "linear", "mine-alone"

    def supports(self, spec):
        return Support.yes()

    def build(self, spec, params):
        return Plain()
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "module_of_mine.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    registry.implements_of("linear")  # fills the registry
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    importlib.import_module("module_of_mine")
    yield "mine-alone"
    del sys.modules["module_of_mine"]


def problem_of(first):
    weight, x = torch.randn(16, 32), torch.randn(8, 32)
    x[0, 0] = first
    spec = linear_spec(TeSA.dense((16, 32)), 8, torch.float32)
    return Problem(spec, weight, (x, None, None), linear_reference(x, weight), 32)


def test_what_ends_its_process_is_a_fault_and_what_is_right_is_none(mine):
    assert not is_builtin(implement_named(mine, "linear"))
    assert fault_alone(problem_of(1.0), {"_name": mine}) == ""
    assert "failed in a process of its own" in fault_alone(problem_of(0.0), {"_name": mine})


def test_one_that_no_other_process_can_have_is_told(mine, monkeypatch):
    monkeypatch.delattr("module_of_mine.__file__")
    assert "not registered by a module" in fault_alone(problem_of(1.0), {"_name": mine})


def test_a_search_leaves_out_what_failed_alone(mine, monkeypatch):
    asked = []
    monkeypatch.setattr(select, "fault_alone", lambda problem, config: asked.append(config["_name"]) or "it broke")
    prepare = select._compiler(problem_of(1.0), isolated=True)
    prepare({"_name": "dense"})
    with pytest.raises(select.PrunedTrial, match="it broke"):
        prepare({"_name": mine})
    select._compiler(problem_of(1.0), isolated=False)({"_name": mine})
    assert asked == [mine]


@pytest.mark.parametrize("isolated", [True, False])
def test_what_won_for_nearly_the_same_sizes_is_not_run_here_first_either(mine, isolated, monkeypatch):
    monkeypatch.setattr(select, "fault_alone", lambda problem, config: "it broke")
    monkeypatch.setattr(select, "settled", lambda *_: Verdict(3.0, 2.0, won=True, decided=True, stable=True))
    like = Choice(mine, {}, "", Entry(mine, {}, 1.0, 3.0))
    choice = select.tune_kernel(problem_of(1.0), isolated=isolated, like=like, max_trials=2)
    assert (choice.implement == mine) is not isolated
