"""`compile(precision=...)`: the rounded model runs, with its accuracy in the report, and comes back from a file."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sparta
from compiler.conftest import forcing
from sparta.compiler.aot.layers import DenseLayer
from sparta.compiler.api import compile_in
from sparta.compiler.clock import Rounds
from sparta.compiler.precise import Wanted, _cast, compiled_at
from sparta.compiler.session import Session
from sparta.compiler.verify import TOLERANCES
from sparta.create import quantize as training
from sparta.errors import ArgumentError, FileFormatError, NameNotFoundError, ValueRangeError
from sparta.files import load_tensors, save_tensors
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import OP


class Sentences(nn.Module):
    """A small encoder of sentences: embeddings, attention-free layers, a head."""

    def __init__(self, words=200, width=32):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, ids):
        x = self.table(ids)
        return x + self.down(torch.relu(self.up(self.norm(x))))


def pruned(model, pattern, sparsity=0.75):
    spec = sparta.Spec.from_pattern(model, pattern, sparsity)
    spec.apply(model)
    return spec


def change(one, two):
    return float((one - two).detach().norm() / two.detach().norm())


@pytest.fixture(scope="module")
def compiled():
    """Return a pruned model, its spec, its data, and what it compiles to with int8 kernels."""
    torch.manual_seed(0)
    model = Sentences()
    spec = pruned(model, sparta.Block(4, 1))
    with torch.no_grad():  # so that others of their rows round to zero
        model.up.weight[:, 3] *= 1e-4
        model.up.weight[:, 7] *= 1e-4
        model.down.weight[:, 5] *= 1e-4
        model.down.weight[:, 9] *= 1e-4
    data = [torch.randint(0, 200, (4, 6)) for _ in range(3)]
    with forcing("cpu-int8"):
        fast = sparta.compile(model, data[0], spec, precision="int8", calibration=data, tune="off")
    return model, spec, data, fast


def test_int8_kernels_run_on_the_blocks_of_the_spec(compiled):
    model, spec, data, fast = compiled
    layers = {layer.name: layer for layer in fast.report.plan.layers}
    assert {layer.op for layer in layers.values()} == {OP}
    assert {layer.first.implement for layer in layers.values()} == {"cpu-int8"}
    assert {layer.pattern for layer in layers.values()} == {"block 4×1"}
    for name, kernel in fast.kernels.items():
        mask = spec[f"{name.partition('.')[0]}.weight"].mask()
        assert torch.equal(kernel.fused.weight.mask(), mask)
        zeros = kernel.weight()[mask] == 0
        assert bool(zeros.any())  # live weights that rounded to zero
    assert 0 < change(fast(data[1]), model(data[1])) < 0.05


def test_the_report_has_accuracy_beside_speed(compiled):
    model, _, data, fast = compiled
    precision = fast.report.precision
    assert precision.measured
    expected = torch.stack([model(batch) for batch in data]).detach()
    found = torch.stack([fast(batch) for batch in data])
    assert precision.change == pytest.approx(change(found, expected), rel=1e-3)
    for text in (str(fast.report), fast.report.full):
        assert "accuracy: the outputs change by" in text
        assert "precision int8: 3 in int8" in text
    assert fast.report.certificate.passed
    assert fast.report.certificate.dtype == "float32 with int8 layers"


def test_what_runs_is_the_simulated_model(compiled):
    from sparta.precision import quantize

    model, spec, data, fast = compiled
    found = quantize(model, data, spec=spec, max_loss=0.1)
    for batch in data:
        torch.testing.assert_close(fast(batch), found.simulated(batch), rtol=1e-4, atol=1e-4)


def test_files_hold_integers_and_are_smaller(compiled, tmp_path):
    model, spec, data, fast = compiled
    fast.save(tmp_path / "int8.sparta")
    sparta.compile(model, data[0], spec, tune="off").save(tmp_path / "fp32.sparta")
    assert (tmp_path / "int8.sparta").stat().st_size < 0.6 * (tmp_path / "fp32.sparta").stat().st_size
    tensors, _ = load_tensors(tmp_path / "int8.sparta", "model", 99)
    assert tensors["integers/table.weight"].dtype == torch.int8
    assert not [name for name, t in tensors.items() if t.dim() == 2 and t.is_floating_point() and t.shape[1] > 1]
    again = sparta.load(tmp_path / "int8.sparta")
    assert torch.equal(again(data[1]), fast(data[1]))
    assert again.report.precision == fast.report.precision
    assert {layer.pattern for layer in again.report.plan.layers} == {"block 4×1"}
    assert str(again.spec["up.weight"].format) == "int8"
    assert torch.equal(again.spec["up.weight"].mask(), spec["up.weight"].mask())


@pytest.mark.parametrize("damage", ["lost", "wide", "shape"])
def test_files_with_other_scales_are_refused(compiled, tmp_path, damage):
    fast = compiled[-1]
    fast.save(tmp_path / "model.sparta")
    tensors, payload = load_tensors(tmp_path / "model.sparta", "model", 99)
    scales = tensors.pop("scales/table.weight")
    if damage == "wide":
        tensors["scales/table.weight"] = scales.double()
    if damage == "shape":
        tensors["scales/table.weight"] = scales[:3]
    save_tensors(tmp_path / "other.sparta", "model", 2, tensors, payload)
    with pytest.raises(FileFormatError, match="8-bit integers with their scales"):
        sparta.load(tmp_path / "other.sparta")


def test_without_calibration_the_example_serves_and_the_report_says_so():
    model, x = nn.Linear(16, 8), torch.randn(4, 16)
    fast = sparta.compile(model, x, precision="int8", tune="off")
    assert "calibrated on the example inputs alone" in fast.report.full


def test_layers_that_would_hurt_stay_and_say_why():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    data = [torch.randn(16, 32) for _ in range(2)]
    with forcing("cpu-int8"):
        fast = sparta.compile(model, data[0], precision="int8", calibration=data, max_loss=0.0, tune="off")
    assert fast.report.precision.change == 0
    assert "stays in fp32: rounding it alone changes the outputs by" in str(fast.report)
    assert torch.equal(fast(data[0]), model(data[0]).detach())


def test_a_metric_is_measured_on_what_runs():
    torch.manual_seed(0)
    model, data = nn.Linear(16, 4), [torch.randn(32, 16)]
    wanted = model(data[0]).argmax(1)

    def accuracy(candidate):
        return float((candidate(data[0]).argmax(1) == wanted).float().mean())

    fast = sparta.compile(model, data[0], precision="int8", calibration=data, metric=accuracy, max_loss=0.2, tune="off")
    assert fast.report.precision.metric == (1.0, accuracy(fast))
    assert "metric" in fast.report.full


def test_convolutions_with_their_norms():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    with torch.no_grad():
        net[1].weight.copy_(torch.linspace(-2, 2, 8))
        net[1].running_var.uniform_(0.5, 2)
    data = [torch.randn(2, 4, 8, 8) for _ in range(2)]
    with forcing("cpu-int8"):
        fast = sparta.compile(net, data[0], precision="int8", calibration=data, tune="off")
    assert {layer.op for layer in fast.report.plan.layers} == {"int8_conv2d"}
    assert {layer.first.implement for layer in fast.report.plan.layers} == {"cpu-int8"}
    assert 0 < change(fast(data[1]), net(data[1])) < 0.05


@pytest.mark.parametrize("grid", [Quantization(0.0625, 100, "uint8"), Quantization.per_token()])
def test_a_tied_weight_has_its_grid_under_any_of_its_names(grid):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(torch.relu(self.table(ids)))

    from sparta.precision import quantize

    model, ids = Tied(), torch.randint(0, 40, (3, 5))
    found = quantize(model, [ids])
    assert list(found.activations) == ["table.input"]
    for name in ("table.input", "head.input"):
        with forcing("cpu-int8"):
            fast = sparta.compile(found.model, ids, found.spec, activations={name: grid}, tune="off")
        (kernel,) = fast.kernels.values()
        assert Quantization.from_dict(kernel.fused.attributes) == grid
        assert "grids that no int8 layer uses" not in fast.report.full


def test_a_convolution_comes_back_from_a_file(tmp_path):
    net, x = nn.Conv2d(4, 8, 3), torch.randn(1, 4, 8, 8)
    with forcing("cpu-int8"):
        fast = sparta.compile(net, x, precision="int8", tune="off")
    fast.save(tmp_path / "model.sparta")
    tensors, _ = load_tensors(tmp_path / "model.sparta", "model", 99)
    assert {t.dtype for name, t in tensors.items() if name.startswith("live/")} == {torch.int8}
    assert torch.equal(sparta.load(tmp_path / "model.sparta")(x), fast(x))
    (kernel,) = fast.kernels.values()  # in a package for C++ it stands for PyTorch's convolution of rounded images
    torch.testing.assert_close(DenseLayer(kernel)(x), fast(x), rtol=1e-4, atol=1e-4)


def test_weights_stored_the_other_way_round():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 24))

        def forward(self, x):
            return x @ self.weight

    model, x = Product(), torch.randn(6, 16)
    with forcing("cpu-int8"):
        fast = sparta.compile(model, x, precision="int8", tune="off")
    assert [layer.first.implement for layer in fast.report.plan.layers] == ["cpu-int8"]
    assert 0 < change(fast(x), model(x)) < 0.03


# ---------------------------------------------------------------------- trained models


def trained(*, calibrated=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.8)
    spec.apply(model)
    x = torch.randn(32, 64)
    training.prepare(model)
    if calibrated:
        training.calibrate(model, [x])
    return model, spec, x


def test_trained_models_go_the_same_way_with_their_own_grids():
    model, spec, x = trained()
    with forcing("cpu-int8"):
        fast = sparta.compile(model, x, precision="int8", tune="off")
    assert {layer.pattern for layer in fast.report.plan.layers} == {"block 4×1"}
    learned = training.export(model).activations["0.input"]
    grid = Quantization.from_dict(next(iter(fast.kernels.values())).fused.attributes)
    assert (grid.scale, grid.zero_point) == (learned.scale, learned.zero_point)
    assert fast.report.precision.change < 0.01  # of what training saw
    assert change(fast(x), model.eval()(x)) < 0.01
    assert torch.equal(fast.spec["0.weight"].mask(), spec["0.weight"].mask())


class Residual(nn.Module):
    """Two convolutions read one tensor, which is added to what the first of them leads to."""

    def __init__(self):
        super().__init__()
        self.enter, self.first, self.second, self.side = (nn.Conv2d(8, 8, 1) for _ in range(4))

    def forward(self, x):
        x = torch.relu(self.enter(x))
        return torch.relu(self.second(torch.relu(self.first(x))) + x) + self.side(x)


@pytest.mark.parametrize("learnt", [True, False])
def test_grids_that_training_learnt_are_not_shared_and_residuals_not_rounded_to_them(learnt):
    torch.manual_seed(0)
    net, x = Residual().eval(), torch.randn(2, 8, 6, 6)
    if learnt:
        training.prepare(net)
        training.calibrate(net, [x])
        with torch.no_grad():  # training has moved it
            net.side.input_quantizer.high.mul_(1.5)
    with forcing("cpu-int8"):
        fast = sparta.compile(net, x, precision="int8", calibration=[x], tune="off")
    attributes = {name: kernel.fused.attributes for name, kernel in fast.kernels.items()}
    assert any("residual_scale" in each for each in attributes.values()) is not learnt
    grids = {name.removesuffix(".weight_kernel"): Quantization.from_dict(each) for name, each in attributes.items()}
    assert (grids["first"] == grids["side"]) is not learnt
    if learnt:
        own = training.export(net).activations
        assert all(grid.scale == own[f"{name}.input"].scale for name, grid in grids.items())


def test_a_model_that_was_never_calibrated_is_refused():
    model, _, x = trained(calibrated=False)
    with pytest.raises(ValueRangeError, match="not calibrated"):
        sparta.compile(model, x, precision="int8", tune="off")


# ---------------------------------------------------------------------- other precisions


def test_bf16_keeps_the_interface():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(4, 32)
    fast = sparta.compile(model, x, precision="bf16", tune="off")
    assert fast(x).dtype == torch.float32
    assert 0 < fast.report.precision.change < 0.02
    assert next(iter(fast.graph.buffers())).dtype == torch.bfloat16
    kept = sparta.compile(model, x, precision="bf16", max_loss=1e-6, tune="off")
    assert torch.equal(kept(x), model(x).detach())
    assert "bf16 costs" in kept.report.full


@pytest.mark.parametrize("name", ["cpu-bf16-panel", "cpu"])
def test_a_model_in_bf16_that_returns_fp32_keeps_its_kernels(name):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
    model = nn.Sequential(*layers).eval()
    sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.8).apply(model)
    with forcing(name):
        fast = sparta.compile(_cast(model), torch.randn(32, 64), tune="off")
    assert fast(torch.randn(32, 64)).dtype == torch.float32
    assert not [note for note in fast.report.notes if "agree" in note]
    assert {layer.first.implement for layer in fast.report.plan.layers} == {name}
    assert 1e-4 < fast.report.certificate.error <= fast.report.certificate.tolerance == TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("faster", ["bf16", "fp32"])
def test_bf16_runs_only_where_it_is_faster_than_the_model_as_it_was(faster):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(4, 32)
    shares, compared = [], []

    def one(given, spec, activations, share):
        shares.append(share)
        return compile_in(Session(tune="off"), given, [x], spec, activations=activations)

    def compare(models):
        compared.append(list(models))
        return Rounds({name: [1.0 if name == faster else 2.0] * 3 for name in models})

    fast = compiled_at(Wanted("bf16"), model, [x], None, one, compare)
    assert (shares, compared) == ([0.5, 0.5], [["bf16", "fp32"]])
    wide = next(iter(fast.graph.buffers())).dtype
    assert wide == (torch.bfloat16 if faster == "bf16" else torch.float32)
    report = fast.report.precision
    assert [row.format for row in report.layers] == [faster]
    assert (report.change > 1e-5) == (faster == "bf16")
    told = str(report)
    assert "bf16 1 ms, fp32 2 ms" in told if faster == "bf16" else "no slower than in bf16 here (bf16 2 ms" in told


def test_auto_compares_times_and_not_each_ones_gain_over_itself():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(4, 32)

    def one(given, spec, activations, _share):
        return compile_in(Session(tune="off"), given, [x], spec, activations=activations)

    def compare(models):
        return Rounds({name: [1.0 if name == "int8" else 2.0] * 3 for name in models})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparta.compiler.precise._candidates", lambda *_: ["bf16", "int8"])
        fast = compiled_at(Wanted("auto"), model, [x], None, one, compare)
    assert fast.report.precision.precision == "auto (int8)"
    assert "tried: bf16 2 ms, int8 1 ms" in str(fast.report.precision)


def test_auto_takes_what_is_within_the_loss():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(4, 32)
    fast = sparta.compile(model, x, precision="auto", tune="off")
    assert fast.report.precision.precision.startswith("auto (")
    assert fast.report.precision.change <= 0.1
    assert "tried: int8" in fast.report.full


def test_fp8_is_refused_on_the_cpu_with_advice():
    with pytest.raises(ValueRangeError, match="pass precision='int8'"):
        sparta.compile(nn.Linear(4, 4), torch.randn(2, 4), precision="fp8")


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"precision": "int7"}, NameNotFoundError, "int8"),
        ({"calibration": [torch.randn(4, 16)]}, ValueRangeError, "calibration without a precision"),
        ({"max_loss": 0.1}, ValueRangeError, "max_loss without a precision"),
        ({"precision": "int8", "max_loss": -0.1}, ValueRangeError, "0 or more"),
        ({"precision": "int8", "metric": 3}, ValueRangeError, "a function of a model"),
        ({"precision": "int8", "calibration": torch.randn(4, 16)}, ArgumentError, "an iterable of batches"),
        ({"precision": "int8", "calibration": [{"x": torch.randn(4, 16)}]}, ValueRangeError, "the structure of"),
        ({"precision": "int8", "calibration": [torch.full((4, 16), torch.nan)]}, ValueRangeError, "NaN"),
        ({"precision": "int8", "calibration": [torch.ones(4, 16)]}, ValueRangeError, "zero width"),
    ],
)
def test_bad_input_is_refused(wrong, error, match):
    with pytest.raises(error, match=match):
        sparta.compile(nn.Linear(16, 4), torch.randn(4, 16), tune="off", **wrong)


def test_other_dtypes_are_refused_with_advice():
    model, x = nn.Linear(16, 4).double(), torch.randn(4, 16).double()
    with pytest.raises(ValueRangeError, match=r"dtype=torch.float32"):
        sparta.compile(model, x, precision="int8", tune="off")
    fast = sparta.compile(model, x, precision="int8", calibration=[x], dtype=torch.float32, tune="off")
    assert fast.report.precision.rounded  # the data follow the model


def test_other_sizes_run_in_int8_too(compiled):
    model, _, _, fast = compiled
    assert "sizes: the example's only" not in fast.report.full
    for shape in ((1, 3), (7, 11)):
        ids = torch.randint(0, 200, shape)
        assert 0 < change(fast(ids), model(ids)) < 0.05


def test_layers_in_fp8_are_lowered_and_agree_with_the_simulation():
    """Without a GPU the dense kernel runs them; that it is asked, with bits and pattern, is the same everywhere."""
    from sparta.precision import quantize
    from sparta.specialize.scaled_linear.spec import OP as SCALED

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    spec = sparta.Spec.from_pattern(model, sparta.Block(8, 8), 0.5)
    spec.apply(model)
    data = [torch.randn(8, 64) for _ in range(2)]
    found = quantize(model, data, "fp8", spec=spec, dynamic=True)
    short, x = found.model.to(torch.bfloat16), data[0].bfloat16()
    fast = sparta.compile(short, x, found.spec, activations=found.activations, tune="off")
    layers = fast.report.plan.layers
    assert {layer.op for layer in layers} == {SCALED}
    assert {layer.pattern for layer in layers} == {"block 8×8"}
    assert change(fast(x).float(), model(data[0])) < 0.05
    assert all(str(fast.spec[name].format) == "fp8_e4m3" for name in spec)


def test_files_hold_fp8(tmp_path):
    from sparta.precision import quantize

    torch.manual_seed(0)
    model, data = Sentences(), [torch.randint(0, 200, (4, 6)) for _ in range(2)]
    spec = pruned(model, sparta.Block(4, 1))
    found = quantize(model, data, "fp8", spec=spec)
    short = found.model.to(torch.bfloat16)
    fast = sparta.compile(short, data[0], found.spec, activations=found.activations, tune="off")
    fast.save(tmp_path / "model.sparta")
    tensors, _ = load_tensors(tmp_path / "model.sparta", "model", 99)
    assert tensors["fp8-bf16/table.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(sparta.load(tmp_path / "model.sparta")(data[1]), fast(data[1]))


def test_live_weights_of_fp8_kernels_are_stored_in_fp8():
    from sparta.compiler.artifact import _codes
    from sparta.specialize.scaled_linear.spec import rounded_weight, scaled_weight

    torch.manual_seed(0)
    weight = torch.randn(16, 32)
    known = scaled_weight(weight, sparta.TeSA.from_mask(torch.rand(16, 32) < 0.5))
    live = rounded_weight(weight, known).bfloat16()[known.mask()]
    codes = _codes(SimpleNamespace(live=live, fused=SimpleNamespace(weight=known)))
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal((codes.float() * known.scale.dense().float()[known.mask()]).bfloat16(), live)
    other = torch.randn_like(live)
    assert _codes(SimpleNamespace(live=other, fused=SimpleNamespace(weight=known))) is other
