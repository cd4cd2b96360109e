"""The plan: what was asked is met by measurement, or the plan says what could be; no clock runs here."""

import copy
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sparta
from planning.benches import FakeBench
from planning.plans import WIDTH, batches, example, planned, transformer
from sparta.compiler.session import Session
from sparta.errors import SpartaError, ValueRangeError
from sparta.oneshot.targets import find_targets


@pytest.mark.parametrize("asked", [1.2, 1.5, 2.0, 2.5])
def test_the_asked_speed_up_is_measured_within_three_percent(asked):
    plan = planned(speedup=asked)
    assert plan.met
    assert plan.whole.ratio == pytest.approx(asked, rel=0.03)
    assert plan.speedup == plan.whole.ratio


@pytest.mark.parametrize("asked", [1.5, 2.0, 3.0])
@pytest.mark.parametrize(("compiled", "slower"), [(0.8, 0.7), (0.9, 1.6), (0.7, 0.5)])
def test_it_is_met_closely_where_compiling_alone_is_faster_and_layers_are_not_what_they_are_alone(
    asked, compiled, slower
):
    bench = FakeBench({}, rest=0.5, compiled=compiled, slower=slower)
    plan = planned(speedup=asked, bench=bench)
    assert plan.met
    assert plan.whole.ratio == pytest.approx(asked, rel=0.03)
    assert bench.calls["whole"] <= 8


def test_what_compiling_alone_gives_costs_nothing():
    plan = planned(speedup=1.5, bench=FakeBench({}, compiled=0.5))
    assert plan.met
    assert not plan.assignment
    assert plan.loss == 0
    assert plan.whole.ratio == pytest.approx(2.0)
    assert "compiling alone gives as much" in plan.reason


def test_where_nothing_beats_dense_what_compiling_alone_gives_is_not_called_met():
    class Beaten(FakeBench):
        def option_ms(self, name, option):
            return 2 * self._size(name)

    plan = planned(speedup=1.5, bench=Beaten({}, compiled=0.8))
    assert not plan.met
    assert plan.whole.ratio == pytest.approx(1.25)
    assert "the fastest that was measured is 1.25x" in plan.reason


def test_where_nothing_lies_between_the_plan_names_the_nearest_below():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).eval()
    plan = planned(model, patterns=["2:4"], speedup=1.05, bench=FakeBench({}, rest=0.5, slower=1.0))
    assert plan.met
    below = max(whole.ratio for _, whole, loss in plan.points if loss < plan.loss)
    assert plan.whole.ratio > 1.03 * 1.05 > 1.05 > below
    assert plan.reason.endswith(f"the nearest below is {below:.2f}x")


def test_where_the_time_was_up_the_plan_says_so():
    clock = [0.0]

    class Slow(FakeBench):
        def whole(self, masks):
            clock[0] += 10.0
            return super().whole(masks)

    session = Session(budget_s=15.0, now=lambda: clock[0])
    plan = planned(speedup=1.8, bench=Slow({}, slower=0.3), session=session)
    assert len(plan.points) == 2
    assert plan.met
    assert "the time was up before others were tried" in plan.reason


def test_estimating_costs_takes_none_of_the_budget(monkeypatch):
    clock = [0.0]
    errors_of = sparta.planning.search.errors_of

    def slow(*arguments):
        clock[0] += 100.0
        return errors_of(*arguments)

    monkeypatch.setattr("sparta.planning.search.errors_of", slow)
    plan = planned(speedup=1.5, session=Session(budget_s=50.0, now=lambda: clock[0]))
    assert clock[0] > 50.0
    assert plan.whole.ratio == pytest.approx(1.5, rel=0.03)


def test_the_table_alone_would_have_missed_it():
    bench = FakeBench({})
    plan = planned(speedup=2.0, bench=bench)
    first = plan.points[1][1]  # after that of the model with nothing changed
    assert abs(first.ratio / 2.0 - 1) > 0.03
    assert 2 <= bench.calls["whole"] <= 6


def test_layers_alike_are_measured_once_and_what_is_fastest_comes_first():
    model, asked = transformer(), []

    class Noting(FakeBench):
        def option_ms(self, name, option):
            asked.append((self.kind(name), option))
            return super().option_ms(name, option)

        def whole(self, masks):
            asked.append(None)
            return super().whole(masks)

    planned(model, bench=Noting({}), speedup=1.5, patterns=("4x1", "unstructured"))
    assert asked[0] is None  # compiled with nothing changed
    table = asked[1 : asked.index(None, 1)]
    kinds = {kind for kind, _ in table}
    assert len(table) == len(set(table))
    assert len(kinds) == 2  # of 14 layers
    first = table[: 2 * len(kinds)]
    assert {kind for kind, _ in first} == kinds
    assert len({option.sparsity for _, option in first}) == 1


def test_a_latency_and_a_memory_are_met_too():
    given = FakeBench({t.name: t for t in find_targets(transformer())}).given_ms()
    assert planned(latency_ms=0.6 * given).whole.ms == pytest.approx(0.6 * given, rel=0.03)
    dense = planned(speedup=1.2).table.given_mb
    plan = planned(memory_mb=0.6 * dense)
    assert plan.met
    assert plan.whole.memory_mb <= 0.6 * dense * 1.03


def test_a_goal_that_the_model_meets_as_it_is_changes_nothing():
    for goal in ({"latency_ms": 1e9}, {"memory_mb": 1e9}):
        bench = FakeBench({})
        plan = planned(bench=bench, **goal)
        assert plan.met
        assert not plan.assignment
        assert bench.calls["option"] == 0


@pytest.mark.parametrize(
    "goal",
    [
        {},
        {"speedup": 2.0, "max_loss": 0.1},
        {"speedup": 1.0},
        {"speedup": 1e30},
        {"speedup": float("nan")},
        {"latency_ms": -1.0},
        {"memory_mb": float("inf")},
        {"max_loss": 5.0},
        {"speedup": "fast"},
        {"speedup": 2.0, "patterns": "chanels"},
        {"speedup": 2.0, "patterns": []},
        {"speedup": 2.0, "precisions": "int4"},
        {"speedup": 2.0, "precisions": ["int8", "fp8"]},
        {"speedup": 2.0, "precisions": 8},
        {"speedup": 2.0, "method": "alpz"},
        {"speedup": 2.0, "data": []},
        {"speedup": 2.0, "data": [torch.ones(3, 5)]},
        {"speedup": 2.0, "ignore": "*"},
        {"speedup": 2.0, "budget_s": -1.0},
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_told_before_anything_is_measured(goal):
    arguments = {"data": batches(), **goal}
    with pytest.raises(SpartaError):
        sparta.plan(transformer(), example(), **arguments)


def test_a_largest_loss_is_kept_and_used():
    plan = planned(max_loss=0.2)
    assert 0.1 < plan.loss <= 0.2
    assert plan.speedup > planned(max_loss=0.05).speedup > 1


def test_more_speed_costs_more():
    losses = [planned(speedup=asked).loss for asked in (1.2, 1.6, 2.2)]
    assert losses == sorted(losses)
    assert losses[0] < losses[-1]


def test_a_plan_is_never_worse_than_one_option_for_all():
    plan = planned(speedup=1.8, patterns=["4x1"])
    table = plan.table
    for sparsity in (0.5, 0.6, 0.7, 0.8, 0.9):
        uniform = {name: sparta.planning.Option("4x1", sparsity) for name in table.times}
        dense, sparse = table.sums(uniform)
        speedup = table.given_ms / (table.rest_ms + dense + table.factor * sparse)
        assert plan.at(speedup).loss <= table.loss(uniform) * (1 + 1e-9)


def test_layers_with_one_input_take_one_option():
    plan = planned(speedup=2.0)
    for block in (0, 2):
        assert len({plan.assignment.get(f"{block}.{name}.weight") for name in "qkv"}) == 1
    for block in (1, 3):
        assert len({plan.assignment.get(f"{block}.{name}.weight") for name in ("gate", "up")}) == 1


def test_what_cannot_be_reached_is_said_with_what_can():
    plan = planned(speedup=50.0)
    assert not plan.met
    assert "cannot be reached" in plan.reason
    assert f"{plan.whole.ratio:.2f}x" in plan.reason
    assert "NOT met" in str(plan)
    with pytest.raises(ValueRangeError, match="does not reach 50x"):
        plan.apply(transformer())
    with pytest.raises(ValueRangeError, match="at most"):
        plan.at(50.0)
    assert plan.at(1.5).speedup == pytest.approx(1.5, rel=0.05)


def test_a_layer_that_runs_dense_in_the_whole_is_not_counted_as_fast():
    names = frozenset({"1.gate.weight", "1.up.weight"})
    plan = planned(speedup=1.6, bench=FakeBench({}, always_dense=names))
    assert plan.met
    assert not names & plan.assignment.keys()


def test_other_speed_ups_come_from_the_table_at_once():
    bench = FakeBench({})
    plan = planned(speedup=1.5, bench=bench)
    before = bench.calls.copy()
    other = plan.at(2.0)
    assert bench.calls == before
    assert other.speedup == pytest.approx(2.0, rel=0.03)
    assert other.whole is None
    assert "not measured" in other.reason
    assert plan.goal.speedup == 1.5


def test_the_curve_is_a_front_with_measured_points():
    curve = planned(speedup=1.5).curve
    by_table = [point for point in curve if not point.measured]
    assert len(by_table) >= 10
    assert [point.speedup for point in curve] == sorted(point.speedup for point in curve)
    losses = [point.loss for point in by_table]
    assert losses == sorted(losses)
    assert losses[0] == 0
    assert any(point.measured for point in curve)


def test_the_plan_is_applied_and_the_spec_holds():
    model = transformer()
    plan = planned(model, speedup=1.5, method="sparsegpt")
    log = plan.apply(model)
    plan.spec.check(model)
    assert {layer.name for layer in log} == plan.assignment.keys()
    for layer in log:
        assert layer.density == pytest.approx(plan.assignment[layer.name].density, abs=0.02)


def test_the_spec_is_found_without_changing_the_model():
    model = transformer()
    before = copy.deepcopy(model.state_dict())
    plan = planned(model, speedup=1.5, method="wanda")
    assert set(plan.spec) == plan.assignment.keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_estimates_order_models_as_their_outputs_change():
    model, changes = transformer(), []
    for asked in (1.3, 2.2):
        plan, pruned = planned(model, speedup=asked), copy.deepcopy(model)
        plan.apply(pruned)
        with torch.no_grad():
            change = float((pruned(example()) - model(example())).norm() / model(example()).norm())
        changes.append((plan.loss, change))
        assert change < 3 * plan.loss
    assert changes[0][1] < changes[1][1]


def test_a_metric_is_evaluated_for_dense_for_the_plan_and_on_the_curve():
    model = transformer()
    with torch.no_grad():
        aim = model(example())

    def metric(other):
        with torch.no_grad():
            return -float((other(example()) - aim).norm())

    plan = planned(model, speedup=1.5, metric=metric, method="wanda")
    assert plan.dense_metric == 0
    assert plan.metric_of(plan.assignment) < 0
    known = [point.metric for point in plan.curve if point.metric is not None]
    assert len(known) >= 3
    allowed = -0.6 * min(known)
    strict = planned(model, max_loss=allowed, metric=metric, method="wanda")
    assert 0 < strict.dense_metric - strict.metric_of(strict.assignment) <= allowed


def test_channels_and_heads_are_options_and_go_where_they_are_read():
    writers = {f"{b}.o.weight": [f"{b}.{n}.weight" for n in "qkv"] for b in (0, 2)}
    writers |= {f"{b}.down.weight": [f"{b}.gate.weight", f"{b}.up.weight"] for b in (1, 3)}
    plan = planned(speedup=1.5, patterns=["channels"], bench=FakeBench({}, writers=writers))
    assert plan.met
    assert set(plan.assignment) <= {f"{b}.o.weight" for b in (0, 2)} | {f"{b}.down.weight" for b in (1, 3)}
    model = transformer()
    plan.apply(model)
    for name in plan.assignment:
        weight = model.get_parameter(name)
        gone = (weight == 0).all(0)
        assert 0 < int(gone.sum()) < len(gone)
        width = 8 if name.endswith("o.weight") else 1
        assert all(len(set(head.tolist())) == 1 for head in gone.view(-1, width))


def test_layers_alike_are_measured_narrower_once():
    bench = FakeBench({})
    planned(speedup=1.5, patterns=["channels"], bench=bench)
    shares, sizes, sides = 6, 2, 2
    assert bench.calls["narrow"] == shares * sizes * sides


def test_channels_compete_with_masks_for_the_same_layers():
    plan = planned(speedup=2.0, patterns=["4x1", "channels"])
    for block in (1, 3):
        option = plan.assignment.get(f"{block}.down.weight")
        if option is not None and option.pattern == "channels":
            assert f"{block}.gate.weight" not in plan.assignment


@pytest.mark.parametrize("when", ["option", "whole"])
def test_an_interrupt_keeps_what_is_known(when):
    plan = planned(speedup=3.5, bench=FakeBench({}, interrupt_at=when))
    assert any("interrupted" in note for note in plan.notes)
    if when == "option":
        assert len([name for name, times in plan.table.times.items() if len(times) > 1]) <= 2
    else:
        assert len(plan.points) == 1


def test_a_killed_plan_goes_on_and_gives_the_same(tmp_path):
    whole = planned(speedup=2.0)
    first = FakeBench({}, interrupt_at="whole")
    planned(speedup=2.0, bench=first, checkpoint=tmp_path)
    second = FakeBench({})
    again = planned(speedup=2.0, bench=second, checkpoint=tmp_path)
    assert again.assignment == whole.assignment
    assert again.loss == pytest.approx(whole.loss)
    assert second.calls["whole"] == len(whole.points) - 1
    third = FakeBench({})
    planned(speedup=2.0, bench=third, checkpoint=tmp_path)
    assert third.calls["whole"] == 0


KILLED = """
import os, signal, sys
sys.path[:0] = [{tests!r}]
from planning.benches import FakeBench
from planning.plans import planned

class Killed(FakeBench):
    def whole(self, masks):
        if self.calls["whole"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().whole(masks)

planned(speedup=2.0, bench=Killed({{}}), checkpoint={folder!r})
"""


def test_a_process_that_is_killed_leaves_what_it_had_measured(tmp_path):
    code = KILLED.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    bench, whole = FakeBench({}), planned(speedup=2.0)
    again = planned(speedup=2.0, bench=bench, checkpoint=tmp_path)
    assert again.assignment == whole.assignment
    assert bench.calls["whole"] == len(whole.points) - 1


def test_the_checkpoint_of_another_plan_is_refused(tmp_path):
    planned(speedup=2.0, checkpoint=tmp_path)
    with pytest.raises(SpartaError, match="another plan"):
        planned(transformer(1), speedup=2.0, checkpoint=tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(SpartaError):
        planned(speedup=2.0, checkpoint=tmp_path)


def test_a_spent_budget_is_told():
    session = Session(budget_s=1e-9)
    plan = planned(speedup=2.0, session=session)
    assert any("budget" in note for note in plan.notes)


def test_a_plan_is_a_table_a_dict_a_file_and_a_report(tmp_path):
    plan = planned(speedup=1.5)
    text = plan.report()
    assert all(name in text for name in plan.table.times)
    assert "measured" in text
    path = tmp_path / "plan.json"
    plan.save(path)
    stored = json.loads(path.read_text())
    assert stored["met"] is True
    assert len(stored["layers"]) == len(plan.table.times)
    assert math.isfinite(stored["curve"][0]["loss"])


def test_plots_show_the_curve():
    pytest.importorskip("matplotlib").use("Agg")
    axes = planned(speedup=1.5).plot()
    assert len(axes.lines) == 2
