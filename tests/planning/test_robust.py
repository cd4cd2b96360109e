"""Plans hold on a busy machine: shares of the model count, and what was hurried is not held against options."""

import inspect
import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import sparta
from planning.benches import SHORTER, FakeBench
from planning.plans import batches, example, planned, transformer
from sparta.compiler.api import compile_in
from sparta.compiler.plan import LayerPlan
from sparta.compiler.session import Session
from sparta.errors import FileFormatError, ValueRangeError
from sparta.oneshot.targets import find_targets
from sparta.planning.bench import _GIVEN, CompilerBench, Whole, _lost
from sparta.planning.between import costs_between, times_between
from sparta.planning.notebook import Notebook, Remembering
from sparta.planning.options import MEASURED, SPARSITIES, Option
from sparta.specialize.tuning.select import Choice
from sparta.specialize.tuning.store import Entry


def test_layers_take_a_share_of_the_model_however_the_machine_slows_down():
    factors = iter([1.0, 50.0, 3.0, 700.0] * 100)

    def measure(calls, _seconds):
        for call in calls.values():
            call()
        factor = next(factors)  # other programs slow down all of one comparison
        rounds = [factor * each for each in (1.0, 1.1, 40.0, 0.9, 1.0)]
        return {key: [(10.0 if key == _GIVEN else 2.0) * each for each in rounds] for key in calls}

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)).eval()
    targets = {target.name: target for target in find_targets(model)}
    bench = CompilerBench(model, torch.randn(4, 32), targets, Session(measure=measure))
    given = bench.given_ms()
    assert [bench.dense_ms(name) / given for name in targets] == pytest.approx([0.2] * 3)


def test_a_whole_is_told_on_the_scale_of_the_model_as_given():
    factor = 1.0

    def measure(calls, _seconds):
        for call in calls.values():
            call()
        times = {key: 5.0 if key == "fast" else 10.0 for key in calls}
        return {key: [factor * time] * 5 for key, time in times.items()}

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    targets = {target.name: target for target in find_targets(model)}
    bench = CompilerBench(model, torch.randn(4, 32), targets, Session(measure=measure, tune="off"))
    given, factor = bench.given_ms(), 4.0  # other programs came
    whole = bench.whole({})
    assert (whole.given_ms, whole.ms, whole.ratio) == pytest.approx((given, given / 2, 2.0))


@pytest.mark.parametrize(
    ("entry", "note", "lost"),
    [
        (Entry("dense", {}, 1.0, 1.0), "", True),  # its kernels lost to dense
        (None, "", False),  # the time was up before it was measured
        (Entry("dense", {}, 1.0, 1.0), "dense: end to end, nothing was faster beyond doubt", False),
    ],
)
def test_an_option_is_lost_only_where_its_kernels_were_measured_to_be(entry, note, lost):
    choice = Choice("dense", {}, "dense", entry)
    layer = LayerPlan("fc", "linear", "block 4x1", 0.5, (8, 8), {4: choice}, 1, 1, note=note)
    assert _lost(layer) is lost


def test_levels_between_measured_ones_are_options_and_cost_no_measuring():
    plan = planned(patterns=["4x1"], speedup=1.5)
    asked = {str(option) for times in plan.table.times.values() for option in times if option.prunes}
    assert len(asked) > len(MEASURED)
    for name, times in plan.table.times.items():
        levels = [times[Option("4x1", level)] for level in SPARSITIES if Option("4x1", level) in times]
        costs = [plan.table.costs[name][Option("4x1", level)] for level in SPARSITIES if Option("4x1", level) in times]
        assert levels == sorted(levels)  # more zeros, less time
        assert costs == sorted(costs, reverse=True)  # and more loss


def test_only_some_levels_are_measured():
    timed = []

    class Counting(FakeBench):
        def option_ms(self, name, option):
            timed.append(option)
            return super().option_ms(name, option)

    planned(patterns=["4x1"], max_loss=0.5, bench=Counting({}))
    assert {option.sparsity for option in timed[:6]} <= set(MEASURED)


def test_what_lies_between_is_between():
    times = times_between({Option("4x1", 0.95): 1.0, Option("4x1", 0.5): 10.0, Option("2:4"): 3.0})
    assert times[Option("4x1", 0.7)] == pytest.approx(1 + 9 * 25 / 45)
    costs = costs_between({Option("4x1", 0.95): 1e-1, Option("4x1", 0.5): 1e-3, Option("4x1", 0.9, "int8"): 1.0})
    assert all(1e-3 < cost < 1e-1 for cost in costs.values())
    assert not times_between({Option("4x1", 0.95): 1.0})


class Surprising(FakeBench):
    """In the whole, layers that are rounded are far faster than alone, and layers that are pruned far slower."""

    def whole(self, masks):
        self.calls["whole"] += 1
        total = self.rest
        for name in self.targets:
            size = self._size(name)
            option = masks[name][0] if name in masks else None
            if option is None:
                total += size
            elif option.prunes:
                total += 1.1 * size
            else:
                total += size / SHORTER / 3
        return Whole(self.given_ms(), total, self.given_ms() / total, 1.0)


def test_before_a_goal_is_called_out_of_reach_every_layer_is_tried_in_each_precision():
    bench = Surprising({}, rest=2.0)
    plan = planned(transformer(), patterns=["4x1"], precisions=["int8"], speedup=2.4, bench=bench)
    assert plan.met
    assert set(map(str, plan.assignment.values())) <= {"int8"}


def test_what_capturing_takes_leaves_half_of_the_budget_for_measuring():
    now = {"seconds": 0.0}

    class Slow(FakeBench):
        def given_ms(self):
            now["seconds"] += 0.0 if self.calls["given"] else 500.0  # capturing, on a machine that is busy
            self.calls["given"] += 1
            return super().given_ms()

    plan = planned(speedup=1.5, bench=Slow({}), session=Session(budget_s=100.0, now=lambda: now["seconds"]))
    assert plan.met
    assert abs(plan.speedup / 1.5 - 1) <= 0.03


@pytest.mark.parametrize("milliseconds", [5000.0, 500.0, 5.0])
def test_timing_what_is_dense_takes_a_part_of_the_budget(milliseconds):
    now, asked = {"seconds": 0.0}, []

    def measure(calls, seconds):
        times = {key: milliseconds * (1.0 if key == _GIVEN else 0.4) for key in calls}
        rounds = max(1, round(1e3 * seconds / sum(times.values())))
        now["seconds"] += 1e-3 * rounds * sum(times.values())
        asked.append(seconds)
        return {key: [time] * rounds for key, time in times.items()}

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    targets = {target.name: target for target in find_targets(model)}
    session = Session(measure=measure, now=lambda: now["seconds"], budget_s=60.0)
    bench = CompilerBench(model, torch.randn(4, 32), targets, session)
    assert bench.given_ms() == pytest.approx(milliseconds)
    assert [bench.dense_ms(name) for name in targets] == pytest.approx([0.4 * milliseconds] * 2)
    assert max(asked) <= 15.0
    assert now["seconds"] <= 20.0
    assert len(asked) == (1 if milliseconds == 5000.0 else 2)  # one round of calls that take so long


@pytest.mark.parametrize("goal", [{"speedup": 1.5}, {"latency_ms": 15.0}, {"memory_mb": 0.01}, {"max_loss": 0.1}])
def test_an_interrupt_before_the_model_itself_is_timed_ends_the_plan_and_raises_nothing(goal):
    class Stopped(FakeBench):
        def given_ms(self):
            raise KeyboardInterrupt

    plan = planned(bench=Stopped({}), **goal)
    assert not plan.met
    assert not plan.assignment
    assert plan.whole is None
    assert plan.reason.startswith("interrupted")
    assert any("interrupted" in note for note in plan.notes)
    assert plan.curve
    assert "interrupted" in plan.report()


class Counting(FakeBench):
    """Counts whatever it is asked to measure."""

    def given_ms(self):
        self.calls["given"] += 1
        return super().given_ms()

    def dense_ms(self, name):
        self.calls["dense"] += 1
        return super().dense_ms(name)


@pytest.mark.parametrize("goal", [{"speedup": 1.5}, {"latency_ms": 15.0}, {"latency_ms": 1000.0}])
def test_a_plan_made_again_from_its_checkpoint_measures_nothing(goal, tmp_path):
    first, second = Counting({}), Counting({})
    plan = planned(bench=first, checkpoint=tmp_path, **goal)
    assert first.calls["given"]
    again = planned(bench=second, checkpoint=tmp_path, **goal)
    assert not +second.calls
    assert again.assignment == plan.assignment
    assert again.speedup == plan.speedup


def test_what_is_remembered_is_considered_without_a_budget(tmp_path):
    asked = {"patterns": ["4x1", "channels"], "precisions": ["int8"], "checkpoint": tmp_path}
    plan = planned(speedup=1.5, **asked)
    again = planned(speedup=1.8, **asked, session=Session(budget_s=1e-9))
    assert again.table.costs == plan.table.costs
    assert again.table.narrow == plan.table.narrow
    assert again.assignment


def test_what_is_captured_late_leaves_half_of_the_budget_for_measuring():
    now = {"seconds": 0.0}
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    targets = {target.name: target for target in find_targets(model)}

    def measure(calls, _seconds):
        return {key: [10.0 if key == _GIVEN else 2.0] * 3 for key in calls}

    def capturing(_line):
        now["seconds"] += 80.0

    session = Session(measure=measure, now=lambda: now["seconds"], budget_s=100.0, show=capturing)
    bench = CompilerBench(model, torch.randn(4, 32), targets, session)
    assert bench.dense_ms(next(iter(targets))) == pytest.approx(2.0)  # the model's own time is in the notebook
    assert session.left == pytest.approx(50.0)
    assert session.left_for_layers == pytest.approx(30.0)


def test_milliseconds_of_a_later_plan_are_on_the_scale_of_the_model_as_it_was_remembered(tmp_path):
    class Slower(FakeBench):
        """The machine has become twice as slow since the model as given was timed."""

        def given_ms(self):
            return 2 * super().given_ms()

        def whole(self, masks):
            found = super().whole(masks)
            return replace(found, ms=2 * found.ms, ratio=self.given_ms() / (2 * found.ms))

    planned(speedup=1.3, checkpoint=tmp_path)
    plan = planned(speedup=1.8, checkpoint=tmp_path, bench=Slower({}))
    assert plan.latency_ms == pytest.approx(plan.table.given_ms / plan.speedup)


def test_a_pattern_that_does_not_fit_names_the_layer():
    plan = planned(speedup=1.5, patterns=["4096x1", "4x1"])
    assert plan.met
    assert any(note.startswith("4096x1 does not fit ") and ".weight" in note for note in plan.notes)
    assert not any(option.pattern == "4096x1" for option in plan.assignment.values())


def test_a_layer_that_the_data_never_reaches_stays_dense():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.unused, self.last = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            return self.last(self.first(x).relu())

    torch.manual_seed(0)
    plan = planned(Unused().eval(), speedup=1.2, patterns=["4x1"])
    assert plan.assignment
    assert "unused.weight" not in plan.assignment


def test_activations_that_are_not_finite_are_an_error():
    data = batches()
    data[1][0, 0, 0] = float("nan")
    with pytest.raises(ValueRangeError, match="NaN"):
        planned(speedup=1.5, data=data)


def test_data_that_was_used_up_is_an_error():
    spent = iter(batches())
    list(spent)
    with pytest.raises(ValueRangeError, match="used before"):
        planned(speedup=1.5, data=spent)


def test_what_competes_in_a_plain_call_of_compile_competes_for_a_plan(monkeypatch):
    """Or a plan on CUDA would prune for a speed-up that Inductor gives in `plan.compile` at no loss."""
    asked = {}

    def spied(*args, inductor=False, **more):
        asked["plan"] = inductor
        return compile_in(*args, inductor=inductor, **more)

    monkeypatch.setattr("sparta.planning.bench.compile_in", spied)
    CompilerBench(transformer(), example(), {}, Session(tune="off")).whole({})
    plain = inspect.signature(sparta.compile).parameters["inductor"].default
    assert asked == {"plan": plain}


def test_a_whole_that_gave_up_is_compiled_again_with_nothing_pruned_too(monkeypatch):
    tried = []

    def spied(session, *args, **more):
        tried.append(compile_in(session, *args, **more))
        return tried[-1]

    monkeypatch.setattr("sparta.planning.bench.compile_in", spied)
    CompilerBench(transformer(), example(), {}, Session(tune="off")).whole({})  # which is never timed
    assert len(tried) == 2


def test_what_one_whole_learned_of_inductor_counts_for_the_next(monkeypatch):
    seen = []

    def spied(session, *args, **more):
        seen.append(session.inductor_seconds)
        session.inductor_seconds = 0.003
        return compile_in(session, *args, **more)

    monkeypatch.setattr("sparta.planning.bench.compile_in", spied)
    bench = CompilerBench(transformer(), example(), {}, Session(tune="off"))
    bench.whole({})
    bench.whole({})
    assert seen[0] == Session().inductor_seconds
    assert seen[-1] == 0.003


def test_the_model_with_nothing_changed_is_compiled_before_layers_spend_the_budget():
    @dataclass
    class InOrder(FakeBench):
        def whole(self, masks):
            self.order.append(f"whole of {len(masks)}")
            return super().whole(masks)

        def option_ms(self, name, option):
            self.order.append("option")
            return super().option_ms(name, option)

    for goal in ({"speedup": 1.5}, {"latency_ms": 1.0}):
        bench = InOrder({})
        bench.order = []
        planned(bench=bench, **goal)
        assert bench.order[:2] == ["whole of 0", "option"]
        assert bench.order.count("whole of 0") == 1


def test_a_compilation_without_time_says_that_it_was_hurried():
    session = Session(budget_s=1e-6)
    compile_in(session, transformer(), [example()], None, dynamic_shapes=None, check=False)
    assert session.hurried


def test_a_whole_that_was_hurried_is_not_kept_for_other_plans():
    @dataclass
    class Hurried(FakeBench):
        hurried: bool = True

        def whole(self, masks):
            return replace(super().whole(masks), hurried=self.hurried)

    bench, notebook = Hurried({}), Notebook()
    assert Remembering(bench, notebook).whole({}).hurried
    bench.hurried = False
    assert not Remembering(bench, notebook).whole({}).hurried
    bench.hurried = True
    assert not Remembering(bench, notebook).whole({}).hurried
    assert bench.calls["whole"] == 2


def test_a_whole_that_is_interrupted_is_neither_compiled_again_nor_kept(monkeypatch):
    tried = []

    def interrupted(session, *args, **more):
        tried.append(compile_in(session, *args, **more))
        session.interrupted = True  # as where Ctrl-C ends a contest
        return tried[-1]

    monkeypatch.setattr("sparta.planning.bench.compile_in", interrupted)
    bench, notebook = CompilerBench(transformer(), example(), {}, Session(tune="off")), Notebook()
    with pytest.raises(KeyboardInterrupt):
        Remembering(bench, notebook).whole({})
    assert len(tried) == 1
    assert bench.session.interrupted
    assert not any(key.startswith("whole") for key in notebook.entries)


def test_after_an_interrupt_among_layers_the_whole_is_still_measured():
    session = Session(tune="off")
    bench = CompilerBench(transformer(), example(), {}, session)
    session.interrupted = True
    assert bench.whole({}).ratio > 0


def test_what_inductor_takes_is_the_most_that_a_whole_has_seen(monkeypatch):
    seen, took = [], iter([0.003, 0.003, 0.5, 0.5, 0.02, 0.02, 0.02, 0.02])

    def spied(session, *args, **more):
        seen.append(session.inductor_seconds)
        session.inductor_seconds = next(took)
        return compile_in(session, *args, **more)

    monkeypatch.setattr("sparta.planning.bench.compile_in", spied)
    bench = CompilerBench(transformer(), example(), {}, Session(tune="off"))
    for _ in range(4):
        bench.whole({})  # each of which compiles twice
    assert seen == [Session().inductor_seconds, 0.003, 0.003, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_a_notebook_of_another_version_is_refused(tmp_path):
    Notebook.opened(tmp_path, "a question").keep("whole ", {"ratio": 1.0})
    record = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**record, "version": 1}))
    with pytest.raises(FileFormatError, match=r"of another version.*use an empty folder"):
        Notebook.opened(tmp_path, "a question")
