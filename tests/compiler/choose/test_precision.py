"""Int8 layers: the integers of the spec run as integers, agree with the rounded model, and come back from a file."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparta
from compiler import nets
from compiler.conftest import forcing
from sparta.errors import NameNotFoundError, ValueRangeError
from sparta.specialize.implement import implement_named
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.quantized import OP, Int8Kernel, integers_of, row_scales
from sparta.specialize.tuning.select import build


def quantized(model, *, per_row=True):
    """Put a model's matrices on int8 grids and return the spec that says so."""
    spec = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                top = weight.abs().amax(1, keepdim=True) if per_row else weight.abs().amax().reshape(1, 1)
                scale = (top / 127).clamp_min(1e-6)
                weight.copy_((weight / scale).round() * scale)
                known = sparta.TeSA.from_zeros(weight)
                one = {"scale": scale.reshape(-1)} if per_row else {"scale": float(scale)}
                spec[name] = known.with_format("int8", **one)
    return sparta.Spec(spec)


def loss_of(fast, model, x):
    """Return how far a compiled model is from its original, over the norm of the output."""
    exact = model(x).detach()
    return float((fast(x) - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def compiled():
    """Return a model, its spec, its input, and what it compiles to with int8 kernels."""
    torch.manual_seed(0)
    model, x = nets.pruned(nets.Mlp(), sparsity=0.6), torch.randn(6, 32)
    spec = quantized(model)
    with forcing("cpu-int8"):
        return model, spec, x, sparta.compile(model, x, spec, tune="off")


@settings(max_examples=30, deadline=None)
@given(low=st.floats(-50, 50), width=st.floats(0, 100), seed=st.integers(0, 100))
def test_a_grid_rounds_by_half_a_step_and_keeps_zero(low, width, seed):
    grid = Quantization.covering(low, low + width)
    x = low + width * torch.rand(64, generator=torch.Generator().manual_seed(seed))
    # One step more at the ends, where the zero point was rounded itself.
    assert float((grid.rounded(x) - x).abs().max()) <= 1.001 * grid.scale + 1e-5 * abs(low)
    assert not grid.rounded(torch.zeros(3)).any()
    assert torch.equal(grid.rounded(grid.rounded(x)), grid.rounded(x))
    assert Quantization.from_dict(json.loads(json.dumps(grid.to_dict()))) == grid


def test_int8_layers_compute_the_rounded_model(compiled):
    model, _, x, fast = compiled
    assert {layer.op for layer in fast.report.plan.layers} == {OP}
    assert all(isinstance(module.built(6)[0], Int8Kernel) for module in fast.kernels.values())
    assert 0 < loss_of(fast, model, x) < 0.05
    assert fast.report.certificate.dtype == "float32 with int8 layers"
    text = str(fast.report)
    assert "cpu-int8" in text
    assert all(row["break_even"] is None for row in fast.report.rows())
    assert "3 layers round their inputs to 8 bits" in text


def test_one_layer_is_exact_in_quanta():
    model, x = nn.Linear(40, 24), torch.randn(5, 40)
    spec = quantized(model)
    with forcing("cpu-int8"):
        fast = sparta.compile(model, x, spec, tune="off")
    (module,) = fast.kernels.values()
    grid = Quantization.from_dict(module.fused.attributes)
    rounded = torch.nn.functional.linear(grid.rounded(x).double(), model.weight.double(), model.bias.double())
    torch.testing.assert_close(fast(x).double(), rounded, rtol=1e-5, atol=1e-5)
    # Half a quantum an input, for a whole row of weights, is the most that rounding can do.
    bound = grid.scale * model.weight.abs().sum(1) + 1e-4
    assert bool(((fast(x) - model(x)).abs() <= bound).all())


class Chain(nn.Module):
    """Layers that feed each other, with and without a ReLU, and one whose result two read."""

    def __init__(self, width=24):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        y = torch.relu(self.c(self.b(torch.relu(self.a(x)))))
        return self.d(y) + y


def test_neighbours_hand_over_integers(tmp_path):
    model, x = nets.pruned(Chain(), sparsity=0.5), torch.randn(2, 3, 24)
    spec = quantized(model)
    with forcing("cpu-int8"):
        fast = sparta.compile(model, x, spec, tune="off")
    gives = {name: Quantization.of_output(module.fused.attributes) for name, module in fast.kernels.items()}
    assert [name for name, grid in gives.items() if grid is not None] == ["a.weight_kernel", "b.weight_kernel"]
    takes = Quantization.from_dict(fast.kernels["b.weight_kernel"].fused.attributes)
    assert gives["a.weight_kernel"] == takes
    assert fast.kernels["a.weight_kernel"](x).dtype == takes.dtype
    assert loss_of(fast, model, x) < 0.05
    fast.save(tmp_path / "model.sparta")
    assert torch.equal(sparta.load(tmp_path / "model.sparta")(x), fast(x))
    # Measured again, a layer is measured on its own.
    module = fast.kernels["a.weight_kernel"]
    spec = next(iter(module.choices.values()))[0]
    problem = module.fused.lowering.problem(spec, module.weight(), x, module.bias, None)
    assert problem.expected.is_floating_point()
    assert Quantization.of_output(problem.spec.attributes) is None
    assert build(problem.spec, {"_name": "cpu-int8", **implement_named("cpu-int8", OP).default(problem.spec)})
    # Where a kernel cannot run any more, dense takes and gives integers in its place.
    state = {
        name: value * 1.01 if name.endswith("b.weight_kernel.live") else value
        for name, value in fast.state_dict().items()
    }
    with torch.no_grad():
        model.b.weight.mul_(1.01)
    with pytest.warns(UserWarning, match="Dense runs instead"):
        fast.load_state_dict(state)
    assert loss_of(fast, model, x) < 0.05


def test_torch_compile_sees_the_integers_between_layers():
    torch._dynamo.reset()
    model, x = nets.pruned(Chain(), sparsity=0.5), torch.randn(3, 24)
    spec = quantized(model)
    with forcing("cpu-int8"):
        fast = sparta.compile(model, x, spec, tune="off")
    again = torch.compile(fast.graph, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(again(x)[0], fast(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["cpu-int8", "onednn-int8", "cpu", "dense"])
@pytest.mark.parametrize("per_row", [True, False])
def test_all_kernels_of_the_operation_agree_on_the_grid(name, per_row):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x):
            return nn.functional.gelu(self.b(torch.relu(self.a(x)) + x)) + x

    model, x = nets.pruned(Deep(), sparsity=0.5), torch.randn(4, 24)
    spec = quantized(model, per_row=per_row)
    with forcing(name):
        fast = sparta.compile(model, x, spec, tune="off")
    assert fast.report.certificate.passed
    tolerance = 0.05 if "int8" in name else 1e-5
    assert loss_of(fast, model, x) < tolerance


def test_int8_is_measured_against_real_numbers(own_stores):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(32, 64)
    spec = quantized(model)
    fast = sparta.compile(model, x, spec, budget_s=6)
    for layer in fast.report.plan.layers:
        assert layer.op == OP
        first = layer.first
        # A dense weight is no reason not to try; a busy machine may be one not to claim anything.
        assert first.entry is not None or any(why in first.reason for why in ("unstable", "time was up", "budget"))
        assert first.implement == "dense" or first.entry is None or first.entry.speedup > 1
    assert fast.report.certificate.passed


def test_grids_of_inputs_may_be_given(compiled):
    model, spec, x, _ = compiled
    exported = SimpleNamespace(scale=0.05, zero_point=3, args=SimpleNamespace(quant_min=-128, quant_max=127))
    with forcing("cpu-int8"):
        fast = sparta.compile(
            model, x, spec, tune="off", activations={"first.input": exported, "last.input": (0.1, 7, "uint8"), "no": 1}
        )
    grids = {name: Quantization.from_dict(module.fused.attributes) for name, module in fast.kernels.items()}
    assert grids["first.weight_kernel"] == Quantization(0.05, 3, "int8")
    assert grids["last.weight_kernel"] == Quantization(0.1, 7, "uint8")
    assert grids["second.weight_kernel"].format == "uint8"  # from the example
    assert "grids that no int8 layer uses: no" in fast.report.full


def test_an_exported_model_compiles_with_its_own_grids():
    from sparta.create.quantize import export, prepare

    model, x = nets.Mlp(), torch.randn(16, 32)
    prepare(model)
    model(x)  # observes the ranges
    exported = export(model)
    with forcing("cpu-int8"):
        fast = sparta.compile(exported.model, x, exported.spec, tune="off", activations=exported.activations)
    given = exported.activations["first.input"]
    grid = Quantization.from_dict(fast.kernels["first.weight_kernel"].fused.attributes)
    assert (grid.scale, grid.zero_point) == (given.scale, given.zero_point)
    assert loss_of(fast, exported.model, x) < 0.05


def test_a_file_holds_integers_and_comes_back(compiled, tmp_path):
    from sparta.compiler.artifact import FORMAT_VERSION
    from sparta.files import load_tensors

    _, _, x, fast = compiled
    fast.save(tmp_path / "model.sparta")
    tensors, _ = load_tensors(tmp_path / "model.sparta", "model", FORMAT_VERSION)
    assert all(tensor.dtype == torch.int8 for name, tensor in tensors.items() if name.startswith("live/"))
    again = sparta.load(tmp_path / "model.sparta")
    assert torch.equal(again(x), fast(x))
    assert again.report.to_dict() == fast.report.to_dict()


def test_channels_that_are_cut_take_their_scales_with_them():
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), torch.randn(6, 32)
    with torch.no_grad():
        model[2].weight[:, 10:50] = 0  # hidden channels that no one sees
    spec = quantized(model)
    with forcing("cpu-int8"):
        fast = sparta.compile(model, x, spec, tune="off")
    assert {module.fused.weight.shape for module in fast.kernels.values()} == {(24, 32), (16, 24)}
    assert loss_of(fast, model, x) < 0.05


def test_other_dtypes_and_values_fall_back_to_real_numbers(compiled):
    model, _, x, fast = compiled
    wide = copy.deepcopy(fast)
    with pytest.warns(UserWarning, match="Dense runs instead"):
        wide.double()
    exact = copy.deepcopy(model).double()(x.double()).detach()
    torch.testing.assert_close(wide(x.double()), exact, rtol=1e-4, atol=1e-5)
    other = copy.deepcopy(fast)
    state = {name: value * 0.37 if name.endswith("live") else value for name, value in fast.state_dict().items()}
    with pytest.warns(UserWarning, match="not on its int8 grid"):
        other.load_state_dict(state)


def test_layers_without_a_usable_grid_stay_in_real_numbers():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    spec = dict(quantized(model))
    spec["0.weight"] = sparta.TeSA.dense((16, 16), format="int8")
    spec["1.weight"] = sparta.TeSA.dense((16, 16)).with_format("int8", scale=torch.rand(16) + 0.1)
    spec["2.weight"] = spec["2.weight"].with_format("int8", scale=0.01, zero_point=3)
    fast = sparta.compile(model, x, sparta.Spec(spec), tune="off")
    text = str(fast.report)
    assert "0 stays in real numbers: an int8 weight without a scale" in text
    assert "1 stays in real numbers: a weight that is not on its int8 grid" in text
    assert "2 stays in real numbers" in text
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Quantization(0.0), ValueRangeError),
        (lambda: Quantization(float("nan")), ValueRangeError),
        (lambda: Quantization(1.0, 200, "int8"), ValueRangeError),
        (lambda: Quantization(1.0, 0, "int4"), NameNotFoundError),
        (lambda: Quantization.of("grid"), ValueRangeError),
        (
            lambda: Quantization.of(
                SimpleNamespace(scale=1.0, zero_point=0, args=SimpleNamespace(quant_min=-8, quant_max=7))
            ),
            ValueRangeError,
        ),
        (lambda: integers_of(torch.tensor([[0.3]]), torch.tensor([1.0])), ValueRangeError),
        (lambda: integers_of(torch.tensor([[300.0]]), torch.tensor([1.0])), ValueRangeError),
        (
            lambda: row_scales(
                sparta.TeSA.dense((2, 4)).with_format("int8", scale=torch.tensor([[1.0, 2.0], [1.0, 2.0]]), group=2)
            ),
            ValueRangeError,
        ),
    ],
)
def test_wrong_grids_are_refused(make, error):
    with pytest.raises(error):
        make()


def test_scales_of_rows_hold_no_memory_but_their_own():
    scales = row_scales(sparta.TeSA.dense((3, 500)).with_format("int8", scale=torch.tensor([0.5, 0.25, 2.0])))
    assert scales.tolist() == [0.5, 0.25, 2.0]
    assert scales.untyped_storage().nbytes() == 3 * scales.element_size()


def test_what_int8_kernels_do_not_run_is_said(compiled):
    _, _, _, fast = compiled
    spec = next(iter(next(iter(fast.kernels.values())).choices.values()))[0]
    int8 = implement_named("cpu-int8", OP)
    assert int8.supports(spec)
    assert "not on cuda" in int8.supports(replace(spec, device="cuda")).reason
    plain = {**spec.operands, "weight": spec["weight"].with_format("fp32")}
    assert "not int8" in int8.supports(replace(spec, operands=plain)).reason
    wide = {**spec.operands, "weight": sparta.TeSA.dense((1, 2**17)).with_format("int8", scale=1.0)}
    assert "K up to" in int8.supports(replace(spec, operands=wide)).reason
