"""Options of a plan beside patterns of linear layers: rounding, and convolutions."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from planning.benches import FakeBench
from planning.plans import example, planned, transformer
from sparta.compiler.session import Session
from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError
from sparta.oneshot.targets import find_targets
from sparta.planning import Option, rounding
from sparta.planning.api import plan_with
from sparta.planning.bench import CompilerBench
from sparta.planning.cost import errors_of, grams_of, sensitivity_of
from sparta.planning.options import precisions_of
from sparta.planning.result import Goal
from sparta.planning.rounding import rounded, rounding_errors
from sparta.tesa.spec import Spec


def test_rounding_is_an_option_like_others_and_costs_less_than_pruning_alone():
    plan, without = planned(speedup=2.2, precisions=["int8"]), planned(speedup=2.2)
    assert plan.met
    assert plan.whole.ratio == pytest.approx(2.2, rel=0.03)
    assert set(plan.precisions.values()) == {"int8"}
    assert plan.loss < without.loss
    assert "by plan.compile" in str(plan)
    assert not without.precisions


def test_rounding_and_pruning_go_together_where_neither_is_enough():
    assert not planned(speedup=2.0, patterns=["unstructured"]).met
    plan = planned(speedup=2.0, patterns=["unstructured"], precisions=["int8"])
    assert plan.met
    both = [option for option in plan.assignment.values() if option.prunes and option.precision]
    assert both
    for name, option in plan.assignment.items():
        costs = plan.table.costs[name]
        if option.prunes and option.precision:
            assert costs[option] > costs[option.unrounded]


def test_rounding_and_narrowing_go_together():
    writers = {f"{b}.o.weight": [f"{b}.{n}.weight" for n in "qkv"] for b in (0, 2)}
    writers |= {f"{b}.down.weight": [f"{b}.gate.weight", f"{b}.up.weight"] for b in (1, 3)}
    asked = {"speedup": 2.6, "patterns": ["channels"]}
    assert not planned(**asked, bench=FakeBench({}, writers=writers, slower=1.0, rest=8.0)).met
    bench = FakeBench({}, writers=writers, slower=1.0, rest=8.0)
    plan = planned(**asked, precisions=["int8"], bench=bench)
    assert plan.met
    cut = {name: option for name, option in plan.assignment.items() if option.pattern == "channels"}
    assert any(option.precision == "int8" for option in cut.values())
    for reader, option in cut.items():
        for writer in writers[reader]:
            assert plan.assignment.get(writer, Option("dense")) == Option("dense", precision=option.precision)
        assert option.precision is None or plan.table.costs[reader][option] > plan.table.costs[reader][option.unrounded]
    model = transformer()
    plan.apply(model)
    fast = plan.compile(model, tune="off")
    assert {f"{row.layer}.weight" for row in fast.report.precision.layers if row.format == "int8"} == set(
        plan.precisions
    )
    with torch.no_grad():
        gap = (fast(example()) - model(example())).norm() / model(example()).norm()
    assert gap < 0.05


def test_what_rounding_costs_is_told_by_row():
    torch.manual_seed(0)
    first, last = nn.Linear(64, 64, bias=False), nn.Linear(64, 4, bias=False)
    with torch.no_grad():
        first.weight -= first.weight.mean(1, keepdim=True)
        first.weight[0] = first.weight[1].norm() / 8  # all inputs have a mean, which this row adds up
        last.weight[:, 1:] = 0  # and only this row is read
    model, data = nn.Sequential(first, last).eval(), [10 + torch.randn(64, 64) for _ in range(4)]
    targets = find_targets(model)
    errors = rounding_errors(model, ["0.weight"], data, "int8")
    sensitivity = sensitivity_of(model, targets, data)
    ((target, gram),) = grams_of(model, targets[:1], data)
    option = Option("dense", precision="int8")
    known = {"int8": errors["0.weight"]}
    cost = errors_of(target, gram, [(option, None)], sensitivity, "alps", known)[option]
    spec = Spec.from_zeros(model)
    simulated = rounded(model, data, spec, {"0.weight": "int8"}).simulated
    with torch.no_grad():
        outputs = [(simulated(batch), model(batch)) for batch in data]
    change = sum(float((a - b).square().sum()) for a, b in outputs) / sum(float(b.square().sum()) for _, b in outputs)
    assert change / 4 < cost < 4 * change


def test_rounding_alone_prunes_nothing_and_compiles_rounded():
    model = transformer()
    before = copy.deepcopy(model.state_dict())
    plan = planned(model, speedup=1.2, patterns=["2:4"], precisions=["int8"])
    only = {name: option for name, option in plan.assignment.items() if not option.prunes}
    assert only
    plan.assignment = only
    log = plan.apply(model)
    assert not list(log)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    fast = plan.compile(model, tune="off")
    rounded = {f"{row.layer}.weight" for row in fast.report.precision.layers if row.format == "int8"}
    assert rounded == only.keys()
    with torch.no_grad():
        gap = (fast(example()) - model(example())).norm() / model(example()).norm()
    assert gap < 0.05


def test_compiling_prunes_a_copy_unless_the_plan_was_applied():
    model = transformer()
    plan = planned(model, speedup=1.5, method="wanda")
    fast = plan.compile(tune="off")
    assert all(bool((p != 0).all()) for name, p in model.named_parameters() if name in plan.assignment)
    with torch.no_grad():
        assert not torch.allclose(fast(example()), model(example()), atol=1e-3)
    with pytest.raises(SpartaError):
        plan.compile(transformer(), tune="off")  # which has no zeros


def test_the_metric_is_that_of_the_rounded_model():
    model = transformer()
    seen = []

    def metric(other):
        with torch.no_grad():
            seen.append(float((other(example()) - model(example())).norm()))
        return -seen[-1]

    plan = planned(model, speedup=1.15, patterns=["2:4"], precisions=["int8"], metric=metric)
    assert plan.dense_metric == 0
    assert not any(option.prunes for option in plan.assignment.values())
    assert plan.metric_of(plan.assignment) < 0


def test_the_compiler_times_layers_that_are_rounded():
    model = transformer()
    targets = {t.name: t for t in find_targets(model)}
    bench = CompilerBench(copy.deepcopy(model), example(), targets, Session(budget_s=4.0))
    for option in (Option("dense", precision="int8"), Option("4x1", 0.9, "int8")):
        assert 0 < bench.option_ms("1.gate.weight", option) <= bench.dense_ms("1.gate.weight")
    kinds = {
        "1.gate.weight": (Option("4x1", 0.9, "int8"), Option("4x1", 0.9).made),
        "1.up.weight": (Option("dense", precision="int8"), None),
    }
    whole = bench.whole(kinds)
    assert whole.ms > 0
    assert not bench.notes


def test_bf16_is_an_option_between_the_given_numbers_and_int8():
    asked = {"speedup": 1.2, "patterns": ["2:4"]}
    plan = planned(**asked, precisions=["int8", "bf16"], bench=FakeBench({}, slower=1.0))
    assert plan.met
    for costs in plan.table.costs.values():
        assert 0 < costs[Option("dense", precision="bf16")] < 0.5 * costs[Option("dense", precision="int8")]
        assert costs[Option("2:4", precision="bf16")] > costs[Option("2:4")]
    assert plan.loss < planned(**asked, precisions=["int8"], bench=FakeBench({}, slower=1.0)).loss
    assert "bf16" in plan.precisions.values()
    assert "bf16 by plan.compile" in str(plan)
    name, bf16 = "1.down.weight", Option("dense", precision="bf16")
    given, int8 = Option("dense"), Option("dense", precision="int8")
    sizes = [plan.table.megabytes(name, option) for option in (given, bf16, int8)]
    assert sizes == pytest.approx([sizes[0], sizes[0] / 2, sizes[0] / 4])


@pytest.mark.parametrize("both", [False, True])
def test_layers_in_bf16_stand_beside_others(both):
    model = transformer()
    before = copy.deepcopy(model.state_dict())
    plan = planned(model, speedup=1.2, patterns=["2:4"], precisions=["int8", "bf16"])
    bf16 = Option("dense", precision="bf16")
    plan.assignment = {"1.gate.weight": bf16, "1.up.weight": bf16, "3.down.weight": Option("2:4", precision="bf16")}
    if both:
        plan.assignment["0.o.weight"] = Option("dense", precision="int8")
    plan.apply(model)
    assert torch.equal(before["1.gate.weight"], model[1].gate.weight)
    fast = plan.compile(model, tune="off")
    rounded = {f"{row.layer}.weight": row.format for row in fast.report.precision.layers if not row.why}
    assert rounded == plan.precisions
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    with torch.no_grad():
        wanted = model(example())
        found = fast(example())
    assert found.dtype == torch.float32
    gap = float((found - wanted).norm() / wanted.norm())
    assert 1e-5 < gap < 0.02
    assert fast.report.precision.change == pytest.approx(gap, rel=1.0)


@pytest.mark.parametrize("layer", [nn.Linear(64, 32), nn.Conv2d(8, 16, 3), nn.Conv1d(8, 16, 3, bias=False)], ids=str)
def test_what_bf16_costs_is_measured_on_the_data(layer):
    torch.manual_seed(0)
    data = [torch.randn(4, *([64] if isinstance(layer, nn.Linear) else [8, 12, 12][: layer.weight.dim() - 1]))]
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias += 100  # which does not hide what is lost
        errors = rounding_errors(layer, ["weight"], data, "bf16")
        simulated = rounded(layer, data, Spec({}), {"weight": "bf16"}).simulated
        given = layer(data[0])
        bias = 0 if layer.bias is None else layer.bias.view(-1, *[1] * (layer.weight.dim() - 2))
        change = float((simulated(data[0]) - given).norm() / (given - bias).norm())
    assert errors["weight"] == pytest.approx(change)
    assert not layer._forward_hooks
    assert layer.weight.dtype == torch.float32


class Keyed(nn.Module):
    """A layer that is called by keyword, and one that is there twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.again, self.last = self.first, nn.Linear(16, 4)

    def forward(self, x):
        return self.last(input=self.again(input=self.first(input=x).relu()).relu())


@pytest.mark.parametrize("name", ["first.weight", "again.weight", "last.weight"])
def test_layers_in_bf16_may_be_called_by_keyword_and_be_named_by_any_of_their_paths(name):
    torch.manual_seed(0)
    model, x = Keyed().eval(), torch.randn(8, 16)
    assert 1e-4 < rounding_errors(model, [name], [x], "bf16")[name] < 1e-2
    found = rounded(model, [x], Spec({}), {name: "bf16"})
    layer = found.model.get_submodule(name.removesuffix(".weight"))
    assert layer.weight.dtype == torch.bfloat16
    assert len(layer._forward_hooks) == 1
    assert [row.layer for row in found.report.layers] == [name.removesuffix(".weight")]
    assert 1e-4 < found.report.change < 1e-2
    with torch.no_grad():
        assert found.simulated(x).dtype == torch.float32


def test_a_layer_with_two_paths_becomes_bf16_once():
    model, x = Keyed().eval(), torch.randn(8, 16)
    found = rounded(model, [x], Spec({}), {"first.weight": "bf16", "again.weight": "bf16"})
    assert len(found.model.first._forward_hooks) == 1


@pytest.mark.parametrize("others", [{}, {"last.weight": "int8"}])
def test_layers_in_bf16_that_the_model_lacks_are_an_error(others):
    with pytest.raises(NameNotFoundError, match=r"again\.weight"):
        rounded(Keyed().eval(), [torch.randn(8, 16)], Spec({}), {"agian.weight": "bf16", **others})


def test_what_is_around_a_model_goes_whatever_its_layers_are_rounded_to():
    model, x = Keyed().eval(), torch.randn(8, 16)
    for precision in ("int8", "bf16"):
        assert rounding_errors(nn.DataParallel(model), ["last.weight"], [x], precision)["last.weight"] > 0
        found = rounded(nn.DataParallel(model), [x], Spec({}), {"last.weight": precision}, quick=True)
        assert type(found.model) is Keyed


def test_copies_in_bf16_are_made_one_by_one(monkeypatch):
    done = []

    def noting(what, call):
        return lambda layer: done.append(what) or call(layer)

    monkeypatch.setattr(rounding, "deepcopy", noting("copied", copy.deepcopy))
    monkeypatch.setattr(rounding, "_shorten", noting("shortened", rounding._shorten))
    rounding_errors(transformer(), ["0.q.weight", "1.up.weight", "1.down.weight"], [example()], "bf16")
    assert done == ["copied", "shortened"] * 3


def test_a_weight_that_others_share_stays_as_it_is_for_them():
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    model[1].weight = model[0].weight
    words = torch.arange(5)
    short = rounded(model.eval(), [words], Spec({}), {"1.weight": "bf16"}).simulated
    assert short[0].weight.dtype == torch.float32
    assert short(words).dtype == torch.float32


@pytest.mark.parametrize("flags", [("avx2",), ("avx2", "avx512_bf16")])
def test_bf16_is_an_option_where_the_processor_computes_in_it(flags, monkeypatch):
    machine = SimpleNamespace(vector_isa=flags)
    monkeypatch.setattr("sparta.compiler.precise.probe_cpu", lambda: machine)
    assert precisions_of("auto", "cpu", {torch.float32}) == ["int8"]
    if len(flags) == 1:
        with pytest.raises(ValueRangeError, match=r"precisions='bf16'.*int8 for float32 on this cpu"):
            precisions_of("bf16", "cpu", {torch.float32})
        return
    assert precisions_of(["int8", "bf16"], "cpu", {torch.float32}) == ["int8", "bf16"]
    with pytest.raises(ValueRangeError, match="none for bfloat16"):
        precisions_of("bf16", "cpu", {torch.bfloat16})


@pytest.mark.parametrize(("capability", "able"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bf16_is_an_option_on_gpus_that_compute_in_it(capability, able, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert precisions_of("auto", "cuda", {torch.float32}) == []
    if able:
        assert precisions_of("bf16", "cuda", {torch.float32}) == ["bf16"]
        return
    with pytest.raises(ValueRangeError, match=r"precisions='bf16'.*none for float32 on this cuda"):
        precisions_of("bf16", "cuda", {torch.float32})


def test_the_compiler_times_layers_in_bf16():
    model = transformer()
    targets = {t.name: t for t in find_targets(model)}
    bench = CompilerBench(copy.deepcopy(model), example(), targets, Session(budget_s=4.0))
    kinds = {}
    for name, option in {"1.gate.weight": Option("4x1", 0.9, "bf16"), "1.up.weight": Option("dense", None, "bf16"),
                         "1.down.weight": Option("dense", None, "int8")}.items():  # fmt: skip
        assert 0 < bench.option_ms(name, option) <= bench.dense_ms(name)
        kinds[name] = (option, option.made if option.prunes else None)
    whole = bench.whole(kinds)
    assert whole.ms > 0
    assert "1.up.weight" not in whole.dense, "it is dense as it was meant to be"


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu_(self.norm(self.first(x)))
        return self.head(torch.relu_(self.second(x)).mean((2, 3)))


@pytest.mark.parametrize("precisions", [[], ["int8"], ["int8", "bf16"]])
@pytest.mark.parametrize("patterns", [["4x1"], ["channels"], ["4x1", "channels"]])
def test_convolutions_are_planned_too(patterns, precisions):
    torch.manual_seed(0)
    model = Convolutions().eval()
    targets = {t.name: t for t in find_targets(model)}
    images = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    plan = plan_with(
        FakeBench(targets, rest=0.5), Session(), (model, copy.deepcopy(model)), images[0], images, Goal(speedup=1.3),
        patterns=patterns, precisions=precisions,
    )  # fmt: skip
    assert plan.met
    assert plan.assignment
    for name, costs in plan.table.costs.items():
        assert all(costs[Option("dense", precision=each)] > 0 for each in precisions), name
    pruned = copy.deepcopy(model)
    plan.apply(pruned)
    plan.spec.check(pruned)


def test_convolutions_with_a_batch_norm_after_them_are_timed_too():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))
    targets = {t.name: t for t in find_targets(model.eval())}
    bench = CompilerBench(model, torch.randn(1, 3, 12, 12), targets, Session(budget_s=4.0))
    assert bench.dense_ms("0.weight") > 0
    assert 0 < bench.option_ms("3.weight", Option("8x1", 0.9)) <= bench.dense_ms("3.weight")


def test_rounding_is_timed_before_the_patterns_spend_the_budget():
    bench = FakeBench({})

    class Short(Session):
        @property
        def left_for_layers(self):
            return 1.0 if bench.calls["option"] < 4 else 0.0

    plan = planned(speedup=1.15, bench=bench, session=Short(), precisions=["int8"])
    assert plan.met
    assert all(Option("dense", precision="int8") in times for times in plan.table.times.values())
    assert any("budget" in note for note in plan.notes)
