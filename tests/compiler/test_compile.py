"""The compiled model computes what the original does, is called as it is, and says what it runs and why."""

import copy
import io
import json
import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparta
from compiler import nets
from compiler.conftest import forcing
from sparta.compiler import Report
from sparta.compiler.run.eager import with_fast_paths
from sparta.errors import MissingPackageError, NameNotFoundError, ShapeError, ValueRangeError
from sparta.specialize.implement import Kernel
from sparta.specialize.tuning.select import Choice

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def agree(one, two):
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


PATTERNS = [sparta.Unstructured(), sparta.Block(4, 1), sparta.Block(8, 8), sparta.NM(2, 4), sparta.Channel(0)]


@settings(max_examples=8, deadline=None)
@given(
    pattern=st.sampled_from(PATTERNS),
    sparsity=st.sampled_from([0.5, 0.75, 0.95]),
    sizes=st.tuples(st.integers(1, 9), st.integers(8, 40), st.integers(8, 40)),
    seed=st.integers(0, 100),
)
def test_random_sparse_models_compute_the_same(pattern, sparsity, sizes, seed):
    torch.manual_seed(seed)
    rows, width, hidden = sizes
    model = nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 3)
    )
    with torch.no_grad():
        for layer in (model[0], model[2]):
            fits = not isinstance(pattern, sparta.NM) or layer.in_features % 4 == 0
            chosen = pattern if fits else sparta.Unstructured()
            tesa = sparta.TeSA.from_pattern(
                chosen, layer.weight.abs(), sparsity if not isinstance(chosen, sparta.NM) else None
            )
            layer.weight.copy_(tesa.apply(layer.weight))
    x = torch.randn(rows, width)
    with forcing():
        fast = sparta.compile(model, x, tune="off")
    for inputs in (x, torch.randn(rows, width)):
        agree(fast(inputs), model(inputs).detach())
    assert fast.report.certificate.passed


@pytest.mark.parametrize("tune", ["off", "quick"])
def test_a_fully_dense_model_stays_dense_and_says_why(tune):
    model, x = nets.Mlp(), torch.randn(4, 32)
    fast = sparta.compile(model, x, tune=tune)
    agree(fast(x), model(x).detach())
    assert not fast.report.plan.sparse
    assert all("no zeros" in layer.first.reason for layer in fast.report.plan.layers)
    assert "no zeros" in fast.report.full


def test_a_model_without_layers_compiles():
    class Nothing(nn.Module):
        def forward(self, x):
            return x.softmax(-1)

    fast = sparta.compile(Nothing(), torch.randn(3, 4))
    assert "no layer" in fast.report.full
    agree(fast(torch.ones(3, 4)), torch.full((3, 4), 0.25))


def test_epilogues_are_fused(forced):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off")
    fused = {name: str(module.fused.epilogue) for name, module in fast.kernels.items()}
    assert fused == {
        "first.weight_kernel": "bias+relu",
        "second.weight_kernel": "bias+gelu+residual",
        "last.weight_kernel": "none",
    }
    calls = [node for node in fast.graph.graph.nodes if node.op == "call_function"]
    assert not calls
    agree(fast(x), model(x).detach())


def test_convolutions_run_with_batch_norms_folded(forced):
    model, x = nets.pruned(nets.Cnn()), torch.randn(2, 3, 16, 16)
    fast = sparta.compile(model, x, tune="off")
    targets = {str(node.target) for node in fast.graph.graph.nodes}
    assert not any("batch_norm" in target for target in targets)
    assert {layer.op for layer in fast.report.plan.sparse} == {"conv2d", "linear"}
    agree(fast(x), model(x).detach())
    assert "4 BatchNorms were folded" in fast.report.full


def test_a_residual_block_is_fused_up_to_its_last_relu(forced):
    model, x = nets.pruned(nets.Residual()), torch.randn(2, 16, 12, 12)
    fast = sparta.compile(model, x, tune="off")
    fused = {name: str(module.fused.epilogue) for name, module in fast.kernels.items()}
    assert sorted(fused.values()) == ["bias", "bias+relu", "bias+residual+relu"]
    assert not [node for node in fast.graph.graph.nodes if node.op == "call_function"]
    given = x.clone()
    agree(fast(x), model(x).detach())
    assert torch.equal(x, given)


def test_a_relu6_is_fused_and_a_wider_hardtanh_is_not(forced):
    layers = [nn.Conv2d(8, 8, 1), nn.ReLU6(inplace=True), nn.Conv2d(8, 8, 1), nn.Hardtanh(0, 4)]
    model, x = nets.pruned(nn.Sequential(*layers)), 5 * torch.randn(2, 8, 5, 5)
    fast = sparta.compile(model, x, tune="off")
    assert [str(module.fused.epilogue) for module in fast.kernels.values()] == ["bias+relu6", "bias"]
    agree(fast(x), model(x).detach())


def test_a_relu_writes_in_place_only_where_nothing_else_reads(forced):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            y = self.layer(x) + x
            z = self.other(x)
            return y, torch.relu(y), torch.relu(x), z, nn.functional.relu6(z), torch.relu(x.view(-1))

    model, x = nets.pruned(Twice()), torch.randn(3, 16)
    fast, given = sparta.compile(model, x, tune="off"), x.clone()
    for one, two in zip(fast(x), model(x), strict=True):
        agree(one, two.detach())
    assert torch.equal(x, given)


def test_activations_of_dense_layers_write_in_place_and_the_graph_stays_plain():
    model, x = (
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 1), nn.ReLU()).eval(),
        torch.randn(2, 4, 7, 7),
    )
    fast = sparta.compile(model, x, tune="off")
    quick = with_fast_paths(fast.graph)
    targets = {node.target for node in quick.func.__self__.graph.nodes}
    assert {torch.relu_, torch._C._nn.hardtanh_} <= targets
    assert {torch.ops.aten.relu.default, torch.ops.aten.hardtanh.default} <= {n.target for n in fast.graph.graph.nodes}
    agree(quick(x)[0], model(x).detach())


def test_a_split_weight_competes_saves_and_loads(tmp_path):
    model, x = nn.Linear(160, 128), torch.randn(12, 160)
    mask = sparta.testing.block_mask((128, 160), (4, 1), 0.85, seed=0) | (torch.rand(128, 160) < 0.04)
    with torch.no_grad():
        model.weight.mul_(mask)
    with forcing("split"):
        fast = sparta.compile(model, x, tune="off")
    assert fast.report.rows()[0]["runs"].startswith("split plan=4x1 by cpu + 1x1 by")
    agree(fast(x), model(x).detach())
    fast.save(tmp_path / "model.sparta")
    assert torch.equal(sparta.load(tmp_path / "model.sparta")(x), fast(x))


def test_a_sum_of_two_layers_is_fused_once(forced):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.a(x) + self.b(x), self.a(self.b(x))

    model, x = nets.pruned(Two()), torch.randn(3, 16)
    fast = sparta.compile(model, x, tune="off")
    for one, two in zip(fast(x), model(x), strict=True):
        agree(one, two.detach())
    assert len(fast.kernels) == 4
    assert sum(module.fused.epilogue.residual for module in fast.kernels.values()) == 1


def test_what_propagation_finds_is_used_without_breaking_blocks(forced):
    model = nets.pruned(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    with torch.no_grad():
        model[2].weight[:, :3] = 0  # three hidden channels of a block of four are never seen
        model[2].weight[:, 32:40] = 0  # two whole blocks
    x = torch.randn(4, 64)
    fast = sparta.compile(model, x, tune="off")
    first = next(layer for layer in fast.report.plan.layers if layer.name == "0")
    assert first.pattern == "block 4×1"
    assert first.shape == (56, 64)
    agree(fast(x), model(x).detach())


def test_layers_of_any_spelling_are_found(forced):
    class Spelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8))
            self.other = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight) @ self.other

    model = Spelled()
    with torch.no_grad():
        for weight in (model.weight, model.other):
            weight[::2, ::2] = 0
            weight[1::2, 1::2] = 0
    x = torch.randn(5, 16)
    fast = sparta.compile(model, x, tune="off")
    assert len(fast.report.plan.sparse) == 2
    agree(fast(x), model(x).detach())


# ---------------------------------------------------------------------- the signature


def test_it_is_called_as_the_original_is(forced):
    model = nets.pruned(nets.Attention())
    x, mask = torch.randn(2, 6, 32), torch.ones(6, 6, dtype=torch.bool).tril()
    fast = sparta.compile(model, {"x": x, "mask": mask, "scale": 0.5}, tune="off")
    expected = model(x, mask, scale=0.5)
    for found in (fast(x, mask, scale=0.5), fast(scale=0.5, x=x, mask=mask), fast(x, scale=0.5, mask=mask)):
        assert list(found) == ["hidden", "pair"]
        agree(found["hidden"], expected["hidden"].detach())
        agree(found["pair"][1], expected["pair"][1].detach())
    with pytest.raises(ValueRangeError, match=r"compiled for scale=0\.5"):
        fast(x, mask, scale=1.0)
    with pytest.raises(ValueRangeError, match="without mask"):
        fast(x, scale=0.5)
    with pytest.raises(ValueRangeError, match="given twice"):
        fast(x, mask, scale=0.5, x=x)
    with pytest.raises(ShapeError, match="any×any×32"):
        fast(x[..., :16], mask, scale=0.5)
    with pytest.raises(ValueRangeError, match="float64"):
        fast(x.double(), mask, scale=0.5)
    with pytest.raises(ValueRangeError, match="a tensor"):
        fast(None, mask, scale=0.5)


def test_batch_and_sequence_may_change(forced):
    model = nets.pruned(nets.Attention())
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=64)
    shapes = {"x": {0: batch, 1: length}}
    x = torch.randn(3, 7, 32)
    fast = sparta.compile(
        model, {"x": x}, tune="off", dynamic_shapes=shapes, more_inputs=[{"x": torch.randn(2, 40, 32)}]
    )
    assert all(len(layer.choices) == 2 for layer in fast.report.plan.layers)
    for size in ((2, 2), (5, 9), (4, 50)):
        x = torch.randn(*size, 32)
        agree(fast(x)["hidden"], model(x)["hidden"].detach())


def test_results_carry_no_gradient_and_training_is_refused(forced):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32, requires_grad=True)
    fast = sparta.compile(model, x.detach(), tune="off")
    assert not fast(x).requires_grad
    assert not fast.training
    with pytest.raises(ValueRangeError, match="train the original"):
        fast.train()
    fast.eval()


def test_the_original_is_left_alone(forced):
    model, x = nets.pruned(nets.Cnn()).train(), torch.randn(2, 3, 16, 16)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    fast = sparta.compile(model, x, tune="off")
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    expected = fast(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(fast(x), expected)


# ---------------------------------------------------------------------- as a module


def test_copies_and_state_dicts(forced):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off")
    expected = fast(x)
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        for value in fast.state_dict().values():
            value.zero_()
    fast.load_state_dict(fast.state_dict())
    assert not fast(x).any()
    assert torch.equal(twin(x), expected)
    fast.load_state_dict(twin.state_dict())
    assert torch.equal(fast(x), expected)
    wrong = dict(twin.state_dict())
    name = next(key for key in wrong if key.endswith("live"))
    wrong[name] = wrong[name][:-1]
    with pytest.raises(ShapeError, match="compile the model with the other mask"):
        fast.load_state_dict(wrong)


def test_another_dtype(forced):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off", dtype=torch.bfloat16)
    assert fast(x).dtype == torch.bfloat16
    assert fast.report.certificate.dtype == "bfloat16"
    torch.testing.assert_close(fast(x).float(), model(x).detach(), rtol=0.1, atol=0.1)
    assert next(model.parameters()).dtype == torch.float32
    wide = sparta.compile(model, x, tune="off")
    with pytest.warns(UserWarning, match="Dense runs instead"):
        wide.double()
    torch.testing.assert_close(wide(x.double()).float(), model(x).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueRangeError, match="floating-point"):
        sparta.compile(model, x, dtype=torch.int8)


def test_torch_compile_reaches_the_kernels(forced):
    torch._dynamo.reset()
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off")
    again = torch.compile(fast.graph, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        agree(again(x)[0], fast(x))
    torch._dynamo.reset()


def test_it_can_be_pickled_and_kept_by_torch_save(forced):
    x = torch.randn(6, 32)
    fast = sparta.compile(nets.pruned(nets.Mlp()), x, tune="off")
    again = pickle.loads(pickle.dumps(fast))  # noqa: S301 - our own
    assert torch.equal(again(x), fast(x))
    kept = io.BytesIO()
    torch.save(fast, kept)
    kept.seek(0)
    assert torch.equal(torch.load(kept, weights_only=False)(x), fast(x))


def test_threads_share_a_compiled_model(forced):
    model = nets.pruned(nets.Mlp())
    inputs = [torch.randn(6, 32) for _ in range(8)]
    fast = sparta.compile(model, inputs[0], tune="off")
    expected = [fast(x) for x in inputs]
    found = [None] * len(inputs)

    def run(index):
        found[index] = fast(inputs[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_wrong_arguments():
    model, x = nets.Mlp(), torch.randn(6, 32)
    with pytest.raises(NameNotFoundError, match="did you mean 'quick'"):
        sparta.compile(model, x, tune="quik")
    with pytest.raises(ValueRangeError, match="budget_s"):
        sparta.compile(model, x, budget_s=0)
    for name in ("device", "target"):
        with pytest.raises(ValueRangeError, match="device='tpu9'"):
            sparta.compile(model, x, **{name: "tpu9"})
    with pytest.raises(ValueRangeError, match="Module"):
        sparta.compile(torch.relu, x)


# ---------------------------------------------------------------------- the report


def test_the_report_is_data(forced):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off")
    report = fast.report
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again.to_dict() == report.to_dict()
    assert again.totals.live_parameters < again.totals.parameters
    assert again.totals.compiled_memory < again.totals.memory
    assert {row["implement"] for row in report.rows()} == {"cpu"}
    try:
        import pandas as pd
    except ImportError:
        with pytest.raises(MissingPackageError, match="rows"):
            report.to_dataframe()
    else:
        assert isinstance(report.to_dataframe(), pd.DataFrame)
        assert len(report.to_dataframe()) == 3


def test_the_report_says_what_would_win():
    from sparta.compiler.plan import LayerPlan
    from sparta.compiler.report import advice, break_even

    layer = LayerPlan("fc", "linear", "unstructured", 0.5, (8, 8), {1: Choice("dense", {}, "")}, 0, 0, 1.25)
    assert break_even(layer) == pytest.approx(0.6)
    assert "60%" in advice(layer)
    assert "Block(4, 1)" in advice(layer)


# ---------------------------------------------------------------------- verification


class _Wrong(Kernel):
    """A kernel that is off by a little in one element."""

    def __init__(self, kernel):
        self.kernel = kernel

    def pack(self, operand):
        return self.kernel.pack(operand)

    def run(self, packed, *inputs):
        y = self.kernel.run(packed, *inputs)
        y.view(-1)[0] += 0.1 * y.abs().max() + 0.1
        return y


def test_a_kernel_with_wrong_numbers_is_replaced(forced, monkeypatch):
    from sparta.compiler.run import kernel_module

    real = kernel_module.build

    def build(spec, config):
        kernel = real(spec, config)
        wrong = config["_name"] != "dense" and spec.epilogue.activation == "relu"
        return _Wrong(kernel) if wrong else kernel

    monkeypatch.setattr(kernel_module, "build", build)
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off")
    agree(fast(x), model(x).detach())
    assert set(fast.kernels) == {"second.weight_kernel", "last.weight_kernel"}
    assert "wrong numbers" in fast.report.full
    trusting = sparta.compile(model, x, tune="off", verify=False)
    assert len(trusting.kernels) == 3
    assert "not verified" in trusting.report.full


def test_a_model_that_is_no_function_runs_as_it_was():
    class Random(nn.Module):
        def forward(self, x):
            return x + torch.rand(x.shape)

    fast = sparta.compile(Random(), torch.zeros(3, 4), tune="off")
    assert not torch.equal(fast(torch.zeros(3, 4)), fast(torch.zeros(3, 4)))
    assert any("randomness" in note for note in fast.report.notes)
