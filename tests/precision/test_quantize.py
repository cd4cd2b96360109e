"""Rounding after training: what is watched, which grids are chosen, what the loss is, and what is refused."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparta
from sparta.errors import ArgumentError, NameNotFoundError, ValueRangeError
from sparta.precision import OBSERVERS, Float8, PrecisionReport, quantize
from sparta.precision.data import checked_batches
from sparta.precision.formats import round_weight
from sparta.precision.observe import observe
from sparta.precision.watch import Weights


def mlp(width=32, hidden=48):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, 8))


def batches(*shape, count=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def change(one, two):
    return float((one - two).norm() / two.norm())


def test_the_model_is_not_changed_and_the_copy_lies_on_its_grid():
    model, data = mlp(), batches(16, 32)
    before = copy.deepcopy(model.state_dict())
    model.train()
    found = quantize(model, data)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name in ("0.weight", "2.weight", "4.weight"):
        tesa, weight = found.spec[name], found.model.get_parameter(name)
        steps = weight.double() / tesa.scale.dense()
        assert str(tesa.format) == "int8"
        assert float((steps - steps.round()).abs().max()) < 1e-4
        assert float(steps.abs().max()) < 127.5
    assert 0 < found.report.change < 0.05
    with torch.no_grad():
        assert change(found.simulated(data[0]), model.eval()(data[0])) < 0.05


def test_the_simulation_rounds_weights_and_inputs_and_nothing_else():
    model, data = nn.Linear(24, 8), batches(16, 24)
    found = quantize(model, data, dynamic=False, observer="minmax")
    grid, weight = found.activations["input"], found.model.weight
    expected = nn.functional.linear(grid.rounded(data[0]), weight, model.bias)
    torch.testing.assert_close(found.simulated(data[0]), expected)
    values = torch.cat(data)
    assert grid.scale == pytest.approx(float(values.max() - values.min()) / 255)


class Fused(nn.Module):
    """Weights that no layer of PyTorch's owns, used as they come."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.flat = nn.Parameter(torch.randn(16, 24))
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)

    def forward(self, ids):
        x = self.table(ids) @ self.flat
        return self.attention(x, x, x)[0]


def test_whatever_calls_a_weight_it_is_found():
    torch.manual_seed(0)
    model = Fused()
    ids = [torch.randint(0, 20, (2, 5)) for _ in range(2)]
    found = quantize(model, ids)
    assert {row.layer for row in found.report.rounded} == {
        "table",
        "flat",
        "attention.in_proj_weight",
        "attention.out_proj",
    }
    assert found.spec["flat"].scale.dense()[:, 0].unique().numel() == 1  # its output channels are its columns
    assert found.spec["table.weight"].scale.dense()[0].unique().numel() == 1
    assert "table.input" not in found.activations
    assert found.report.change < 0.05
    assert torch.backends.mha.get_fastpath_enabled()


def test_transformers_linear_layers_and_convolutions():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 4, 2),
        nn.Flatten(),
        nn.Linear(196, 3),
    )
    found = quantize(net, batches(2, 3, 8, 8))
    assert len(found.report.rounded) == 4
    assert found.report.change < 0.05
    scales = found.spec["4.weight"].scale.dense()  # (C, N, h, w): the output channels are dim 1
    assert torch.equal(scales, scales[:1, :, :1, :1].expand_as(scales))
    assert all(not getattr(grid, "dynamic", False) for name, grid in found.activations.items() if name != "6.input")


def test_grids_per_token_are_taken_where_static_ones_are_worse():
    model, data = nn.Linear(16, 8), batches(8, 16)
    for batch in data:
        batch[0] *= 500  # one token makes the grid of all others useless
    found = quantize(model, data)
    assert found.activations["input"].dynamic
    static = quantize(model, data, dynamic=False)
    assert not static.activations["input"].dynamic
    others = slice(1, None)
    exact = model(data[0])[others].detach()
    assert change(found.simulated(data[0])[others], exact) < 0.2 * change(static.simulated(data[0])[others], exact)


def test_the_rows_that_are_kept_come_from_all_positions_of_a_text():
    """Rows at a fixed distance were the first tokens of all texts, and grids were judged by those alone."""
    torch.manual_seed(0)
    tokens = torch.randn(16, 32, 8)
    tokens[:, 0] *= 0.01  # a first token unlike the others, as encoders have
    seen = observe(model := nn.Linear(8, 4), [tokens] * 16, Weights(model))["weight"]
    first = torch.cat(seen.samples).norm(dim=1) < 0.5
    assert 0 < len(first) <= 256
    assert first.float().mean() < 0.2


@pytest.mark.parametrize("observer", list(OBSERVERS))
def test_observers_cover_what_they_should(observer):
    model, data = nn.Linear(16, 8), batches(64, 16)
    seen = observe(model, data, Weights(model))["weight"]
    grid = OBSERVERS[observer](seen)
    values = torch.cat(data)
    width, whole = 255 * grid.scale, float(values.max() - values.min())
    assert 0.3 * whole < width <= 1.001 * whole
    if observer == "minmax":
        assert width == pytest.approx(whole)
    if observer == "mse":
        minmax = OBSERVERS["minmax"](seen)
        sample = torch.cat(seen.samples)
        assert (grid.rounded(sample) - sample).norm() <= (minmax.rounded(sample) - sample).norm()


def test_outliers_are_cut_off_by_percentiles():
    model, data = nn.Linear(16, 8), batches(128, 16)
    data[0][0, 0] = 1000.0
    wide, narrow = (quantize(model, data, observer=name, dynamic=False) for name in ("minmax", "percentile"))
    assert narrow.activations["input"].scale < 0.1 * wide.activations["input"].scale


class Normed(nn.Module):
    def __init__(self, *, residual=False):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.residual = residual
        with torch.no_grad():
            self.norm.weight[3], self.norm.bias[5] = 50.0, -30.0

    def forward(self, x):
        x = self.norm(x)
        y = torch.relu(self.fc(x))
        return self.out(y + x if self.residual else y)


def test_norms_take_over_what_makes_grids_coarse():
    torch.manual_seed(0)
    model, data = Normed(), batches(16, 32)
    plain, moved = (quantize(model, data, migrate=migrate, dynamic=False) for migrate in (False, True))
    assert moved.report.change < 0.6 * plain.report.change
    assert "scaled by its norm" in str(moved.report)
    # In real numbers nothing changed: factors are powers of two, on both sides.
    factors = model.norm.weight / moved.model.norm.weight
    assert bool((factors != 1).any())
    assert torch.equal(torch.exp2(factors.log2().round()), factors)
    # A norm that something else reads as well stays.
    torch.manual_seed(0)
    shared = Normed(residual=True)
    assert torch.equal(quantize(shared, data).model.norm.weight, shared.norm.weight)


def test_layers_that_would_hurt_stay_as_they_are():
    model, data = mlp(), batches(16, 32)
    with torch.no_grad():
        model[2].weight[:, 0] *= 3000  # one input channel that rounding its neighbours by
        model[0].weight[0] /= 3000
    everything = quantize(model, data, dynamic=False)
    bound = 0.5 * everything.report.change
    found = quantize(model, data, dynamic=False, max_loss=bound)
    left = [row for row in found.report.layers if row.error is None]
    assert left
    assert len(left) < 3
    assert found.report.change <= bound
    assert all(f"max_loss={bound:g}" in row.why for row in left)
    names = {f"{row.layer}.weight" for row in left}
    for name in names:
        assert torch.equal(found.model.get_parameter(name), model.get_parameter(name))
        assert name not in found.spec or str(found.spec[name].format) != "int8"
    none = quantize(model, data, max_loss=0.0)
    assert none.report.change == 0
    assert not none.report.rounded


def test_a_metric_decides_where_there_is_one():
    model, data = mlp(), batches(16, 32)
    with torch.no_grad():
        wanted = model(data[0]).argmax(1)
    calls = []

    def accuracy(candidate):
        calls.append(candidate)
        with torch.no_grad():
            return float((candidate(data[0]).argmax(1) == wanted).float().mean())

    found = quantize(model, data, metric=accuracy, max_loss=0.5)
    assert found.report.metric[0] == 1.0
    assert found.report.metric[1] >= 0.5
    assert "metric" in str(found.report)
    assert len(calls) >= 2
    assert quantize(model, data, metric=accuracy).report.max_loss == pytest.approx(0.01)
    with pytest.raises(ValueRangeError, match="a finite number"):
        quantize(model, data, metric=lambda _: float("nan"))
    with pytest.raises(ValueRangeError, match="higher is better"):
        quantize(model, data, metric=lambda _: "good")


def test_live_weights_that_round_to_zero_stay_live():
    model = nn.Linear(64, 64)
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.8)
    spec.apply(model)
    with torch.no_grad():
        model.weight[:, 7] *= 1e-5
        model.weight[0, model.weight[0].abs().argmax()] *= 50
    found = quantize(model, batches(8, 64), spec=spec)
    assert int((found.model.weight == 0).sum()) > int((model.weight == 0).sum())
    assert torch.equal(found.spec["weight"].mask(), spec["weight"].mask())
    assert found.spec["weight"].describe_pattern() == "block 4×1"
    read = quantize(model, batches(8, 64))  # without a spec the zeros before rounding count
    assert torch.equal(read.spec["weight"].mask(), model.weight != 0)


def test_what_is_ignored_stays():
    model, data = mlp(), batches(4, 32)
    found = quantize(model, data, ignore=["2", "4.weight"])
    assert [row.layer for row in found.report.rounded] == ["0"]
    assert {row.why for row in found.report.layers if row.error is None} == {"as asked"}
    with pytest.raises(NameNotFoundError):
        quantize(model, data, ignore="nothing")


def test_fp8_rounds_per_row_and_per_tensor():
    model, data = mlp(), batches(16, 32)
    found = quantize(model, data, "fp8")
    assert str(found.spec["0.weight"].format) == "fp8_e4m3"
    assert 0.001 < found.report.change < 0.1
    x = torch.randn(5, 7)
    for grid in (Float8(), Float8(float(x.abs().max()) / 448)):
        assert float(((grid.rounded(x) - x) / x).abs().median()) < 0.0625
    rows = Float8().rounded(torch.tensor([[1e-6, 2e-6], [1e6, 2e6]]))
    torch.testing.assert_close(rows, torch.tensor([[1e-6, 2e-6], [1e6, 2e6]]), rtol=0.07, atol=0)
    assert Float8().rounded(torch.zeros(2, 3)).eq(0).all()
    with pytest.raises(ValueRangeError):
        Float8(0.0)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    axis=st.integers(0, 1),
    power=st.integers(-30, 30),
    format=st.sampled_from(["int8", "fp8_e4m3"]),
)
def test_weights_round_by_half_a_step_and_zeros_stay(rows, columns, axis, power, format):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + 10 * columns)) * 2.0**power
    weight[weight.abs() < 0.3 * 2.0**power] = 0
    rounded = round_weight(weight, axis, format)
    assert rounded.scales.shape == (weight.shape[axis],)
    assert not rounded.values[weight == 0].any()
    step = rounded.scales.reshape([-1, 1] if axis == 0 else [1, -1])
    gap = (rounded.values - weight).abs()
    allowed = 0.5 * step if format == "int8" else torch.maximum(weight.abs() / 16, step * 2.0**-9)
    assert bool((gap <= allowed * 1.001 + 1e-38).all())


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (torch.randn(4, 32), ArgumentError, "an iterable of batches"),
        ({"x": torch.randn(4, 32)}, ArgumentError, "calibration=\\[batch\\]"),
        (3, ArgumentError, "calibration is a int"),
        ([], ValueRangeError, "no batch"),
        ([torch.full((4, 32), float("nan"))], ValueRangeError, "batch 0 holds NaN"),
        ([torch.randn(4, 32), torch.full((4, 32), float("inf"))], ValueRangeError, "batch 1 holds NaN or infinity"),
        ([torch.zeros(4, 32)], ValueRangeError, "zero width"),
        ([(torch.randn(4, 32), torch.tensor([1]))], ValueRangeError, "leave labels out"),
        ([torch.randn(4, 31)], ValueRangeError, "cannot run calibration batch 0"),
    ],
)
def test_bad_calibration_is_refused(data, error, match):
    with pytest.raises(error, match=match):
        quantize(mlp(), data)


def test_batches_of_another_structure_than_the_example_are_refused():
    x = torch.randn(4, 32)
    assert checked_batches([x, x[:2]], x)
    assert checked_batches([{"a": x}], {"a": x})
    for wrong in ((x, x), {"x": x}, x[0], [x.tolist()]):
        with pytest.raises(ValueRangeError, match="the structure of the example inputs"):
            checked_batches([wrong], x)


class Quiet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) + self.b(x * 0)


def test_a_layer_that_sees_one_number_only_stays_and_says_so():
    found = quantize(Quiet(), batches(4, 8))
    assert [row.layer for row in found.report.rounded] == ["a"]
    assert "zero width" in next(row.why for row in found.report.layers if row.layer == "b")


def test_activations_that_are_not_finite_are_refused():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x / 0.0)

    with pytest.raises(ValueRangeError, match=r"the inputs of 'fc.weight' hold NaN or infinity"):
        quantize(Bad(), batches(4, 8))


@pytest.mark.parametrize(
    "wrong",
    [{"precision": "int7"}, {"observer": "maximum"}, {"max_loss": -1}, {"max_loss": "small"}],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises((ValueRangeError, NameNotFoundError)):
        quantize(mlp(), batches(4, 32), **wrong)
    with pytest.raises(ValueRangeError, match=r"a torch.nn.Module"):
        quantize("model", batches(4, 32))
    with pytest.raises(ValueRangeError, match="nothing to round"):
        quantize(nn.ReLU(), batches(4, 32))


def test_the_report_comes_back_from_json():
    report = quantize(mlp(), batches(4, 32), max_loss=0.2, ignore="2").report.with_measured(0.01, (0.5, 0.4))
    again = PrecisionReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    assert "as compiled" in str(again)
