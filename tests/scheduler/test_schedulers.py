"""All schedulers: preparing, exporting, compiling, exact resume; and each one's own training rule."""

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from scheduler.nets import accuracy, batch, small_net, step_of
from scheduler.runs import CONFIGS, PROB, STEPS, Run
from sparta.errors import FileFormatError, MissingPackageError, NameNotFoundError, ShapeError, ValueRangeError
from sparta.scheduler import (
    ADMMScheduler,
    AmpereScheduler,
    BaseScheduler,
    NMMaskGenerator,
    NormalMaskGenerator,
    ProbMaskPruneScheduler,
    Setup,
    build_sparse_scheduler,
)
from sparta.scheduler.fuse import fuse_batch_norms
from sparta.scheduler.prepared import original_of, plain_state_dict
from sparta.scheduler.probmask import _lowest_pairs
from sparta.sparsify import erk_densities
from sparta.tesa.patterns import NM


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cut", [3, 7])
def test_resuming_is_exact(name, cut):
    straight = Run(name).begin()
    torch.manual_seed(1)
    straight.go(range(STEPS))
    first = Run(name).begin()
    torch.manual_seed(1)
    first.go(range(cut))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first.parts()], file)
    file.seek(0)
    second = Run(name).resume(torch.load(file, weights_only=True)).go(range(cut, STEPS))
    exported = [run.scheduler.export_sparse_model(run.model) for run in (straight, second)]
    for (key, a), b in zip(
        exported[0].model.state_dict().items(), exported[1].model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), key
    assert exported[0].spec == exported[1].spec


@pytest.mark.slow
def test_resuming_in_a_new_process_is_exact(tmp_path):
    saved, expected = {}, {}
    for name in CONFIGS:
        run = Run(name).begin()
        torch.manual_seed(1)
        run.go(range(5))
        saved[name] = (5, copy.deepcopy([part.state_dict() for part in run.parts()]))
        run.go(range(5, STEPS))
        expected[name] = run.scheduler.export_sparse_model(run.model).model.state_dict()
    torch.save(saved, tmp_path / "saved")
    tests = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *filter(None, sys.path)])}
    command = [sys.executable, tests / "scheduler" / "runs.py", tmp_path / "saved", tmp_path / "finished"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    finished = torch.load(tmp_path / "finished", weights_only=True)
    for name, state in expected.items():
        assert all(torch.equal(finished[name][key], value) for key, value in state.items()), name


@pytest.mark.parametrize("name", CONFIGS)
def test_the_exported_model_is_plain_and_computes_what_was_trained(name):
    run = Run(name).begin().go(range(STEPS))
    if name == "probmask":
        run.scheduler.fix_model_subnet(run.model)
    run.model.eval()
    images, _ = batch(0)
    trained, rate = run.model(images), run.scheduler.compute_sparse_rate(run.model)
    predicted = None if name == "ampere" else plain_state_dict(run.model, run.scheduler._layers)
    model, spec = run.scheduler.export_sparse_model(run.model)
    torch.testing.assert_close(model(images), trained)
    assert model.state_dict().keys() == small_net().state_dict().keys()
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    assert type(model.conv2) is nn.Conv2d
    spec.check(model)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert rate == sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    if predicted is not None:
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in predicted.items())
    step_of(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)  # still trainable


@pytest.mark.parametrize("name", ["levels", "str", "probmask"])
def test_training_compiles_as_one_graph_and_masks_reach_it(name):
    plain, compiled = Run(name).begin(), Run(name, compiled=True).begin()
    for run in (plain, compiled):
        torch.manual_seed(3)
        run.go(range(5))
    for a, b in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_optimizers_built_before_preparing_stay_valid_and_get_the_scores():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = build_sparse_scheduler(CONFIGS["str"])
    weight = model.conv1.weight
    model = scheduler.prepare_sparse_model(model)
    assert original_of(model.conv1, "weight") is weight
    scheduler.init_optimizer(optimizer)
    assert len(optimizer.param_groups[1]["params"]) == 4
    before = scheduler.score_parameters()[0].detach().clone()
    step_of(model, optimizer, 0)
    assert not torch.equal(scheduler.score_parameters()[0], before)
    with pytest.raises(ValueRangeError, match="holds no weight of the prepared model"):
        scheduler.init_optimizer(torch.optim.SGD(small_net().parameters(), lr=0.1))


def test_a_shared_weight_is_sparse_in_both_places():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    scheduler = BaseScheduler()
    scheduler.prepare_sparse_model(model)
    scheduler.update_sparsity_per_layer(model, 0.5)
    assert torch.equal(model[0].weight, model[2].weight)
    assert float((model[2].weight == 0).float().mean()) == 0.5
    model, _ = scheduler.export_sparse_model(model)
    assert model[0].weight is model[2].weight


def test_copies_of_a_prepared_model_survive_its_export():
    scheduler = BaseScheduler()
    model = scheduler.prepare_sparse_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    parametrize.register_parametrization(model[0], "bias", nn.Tanh())  # somebody else's
    scheduler.update_sparsity_per_layer(model, 0.5)
    average = torch.optim.swa_utils.AveragedModel(model)
    x = torch.randn(3, 8)
    before = average(x)
    model, _ = scheduler.export_sparse_model(model)
    torch.testing.assert_close(average(x), before)
    torch.testing.assert_close(model(x), before)
    assert type(model[1]) is nn.Linear
    assert not parametrize.is_parametrized(model[0], "weight")
    assert parametrize.is_parametrized(model[0], "bias")


def test_attention_and_transposed_convolutions_are_pruned_too():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "u": nn.ConvTranspose2d(8, 4, 2), "c": nn.Conv1d(8, 8, 3)})
    scheduler = BaseScheduler(Setup(NMMaskGenerator()))
    scheduler.prepare_sparse_model(model)
    scheduler.update_sparsity_per_layer(model, 0.5)
    assert float((model["a"].in_proj_weight == 0).float().mean()) == 0.5
    NM(2, 4, 0).validate(model["u"].weight != 0)
    assert model["a"](*[torch.randn(3, 2, 8)] * 3)[0].shape == (3, 2, 8)
    model, spec = scheduler.export_sparse_model(model)
    assert set(spec) == {"a.in_proj_weight", "a.out_proj.weight", "u.weight", "c.weight"}


def test_sparsities_by_layer_and_by_erk():
    scheduler = BaseScheduler()
    model = scheduler.prepare_sparse_model(small_net())
    scheduler.update_sparsity_per_layer(model, {"fc": 0.25, "conv1.weight": 0.75})
    assert float((model.fc.weight == 0).float().mean()) == 0.25
    assert float((model.conv1.weight == 0).float().mean()) == 0.75
    assert float((model.conv2.weight == 0).float().mean()) == 0
    rates = scheduler.get_sparsities_erdos_renyi(model, 0.5, erk_power_scale=1.0)
    shapes = [p.layer.shape for p in scheduler._pruned()]
    assert list(rates.values()) == [1 - density for density in erk_densities(shapes, 0.5)]
    with pytest.raises(NameNotFoundError, match="fcc"):
        scheduler.update_sparsity_per_layer(model, {"fcc": 0.5})


def test_erk_may_leave_the_kernel_out():
    scheduler = BaseScheduler()
    model = scheduler.prepare_sparse_model(small_net())
    rates = scheduler.get_sparsities_erdos_renyi(model, 0.5, 1.0, include_kernel=False)
    shapes = [p.layer.shape for p in scheduler._pruned()]
    assert list(rates.values()) == [1 - density for density in erk_densities(shapes, 0.5, include_kernel=False)]


def test_a_model_that_is_sharded_already_is_refused_where_it_cannot_work(tmp_path):
    model = small_net()
    model.fc.weight.placements = ("Shard(0)",)  # what makes a DTensor known
    with pytest.raises(ShapeError, match="prepare it first, then call fully_shard"):
        BaseScheduler().prepare_sparse_model(model)
    with pytest.raises(ShapeError, match="permute first, then call fully_shard"):
        AmpereScheduler(verbosity=0, allow_permutation=True).prepare_sparse_model(model)
    scheduler = BaseScheduler()
    model = scheduler.prepare_sparse_model(small_net())
    original_of(model.fc, "weight").placements = ("Shard(0)",)
    with pytest.raises(ShapeError, match="an ONNX file of a sharded model"):
        scheduler.export_sparse_onnx(model, torch.randn(1, 3, 8, 8), tmp_path / "net")


def test_states_of_another_kind_or_model_are_refused():
    scheduler, other = BaseScheduler(), BaseScheduler()
    scheduler.prepare_sparse_model(small_net())
    other.prepare_sparse_model(nn.Linear(4, 4))
    with pytest.raises(ValueRangeError, match="differ in the layers"):
        other.load_state_dict(scheduler.state_dict())
    with pytest.raises(ValueRangeError, match="the state of a 'X'"):
        other.load_state_dict({"type": "X"})
    state = Run("levels").begin().go(range(2)).scheduler.state_dict()
    fresh = build_sparse_scheduler(CONFIGS["levels"])
    fresh.prepare_sparse_model(small_net(width=16))
    with pytest.raises(ValueRangeError, match="set_lr_scheduler"):
        fresh.load_state_dict(state)
    run = Run("str")
    run.scheduler.setup = Setup(NormalMaskGenerator())
    with pytest.raises(ValueRangeError, match="takes no mask"):
        run.scheduler.update_sparsity_per_layer(run.model, 0.5)


# ---------------------------------------------------------------------- ProbMask


def test_probmask_meets_its_budget_exactly_and_learns():
    options = {"prune_rate": 0.8, "total_iterations": 60, "warmup_iteration_stamps": 5, "finetune_iteration_stamps": 40}
    scheduler = build_sparse_scheduler(
        {**PROB, "scheduler": {"type": "ProbMaskPruneScheduler", "kwargs": {**options, "no_prune_layer": "fc"}}}
    )
    model = scheduler.prepare_sparse_model(small_net())
    scores = scheduler.score_parameters()
    weights = [p for p in model.parameters() if all(p is not s for s in scores)]
    optimizer = torch.optim.Adam([{"params": weights}, {"params": scores, "lr": 0.05}], lr=0.01)
    total = sum(s.numel() for s in scores)
    for iteration in range(60):
        step_of(model, optimizer, iteration)
        scheduler.prune_model(model, iteration)
        budget = total * (1 - scheduler.schedule.at(iteration))
        assert float(sum(s.detach().double().sum() for s in scores)) <= budget * (1 + 1e-5)
        assert all(bool(((s >= 0) & (s <= 1)).all()) for s in scores)
    assert float(next(fake for fake in scheduler._fakes().values()).tau) == pytest.approx(1 / 0.03)
    scheduler.fix_model_subnet(model)
    scheduler.fix_model_subnet(model)  # a second time changes nothing
    for iteration in range(60, 75):
        step_of(model, optimizer, iteration)
    model, spec = scheduler.export_sparse_model(model)
    assert round(spec.density * total) == total - round(0.8 * total)
    assert bool((model.fc.weight != 0).all())
    assert accuracy(model) > 0.6


def test_the_lowest_probabilities_go_and_among_equals_the_smallest_weights():
    scores = [torch.tensor([0.0, 1.0, 0.5, 0.5]), torch.tensor([0.5, 0.0])]
    weights = [torch.tensor([9.0, 1.0, 3.0, 2.0]), torch.tensor([1.0, 9.0])]
    chosen = [
        [int(place) for place in torch.cat(_lowest_pairs(scores, weights, count)).nonzero().flatten()]
        for count in range(7)
    ]
    assert chosen == [[], [0], [0, 5], [0, 4, 5], [0, 3, 4, 5], [0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_the_temperature_starts_where_the_generator_says():
    config = {**PROB, "mask_generator": {"type": "ProbMaskGenerator", "kwargs": {"tau": 7.0}}}
    scheduler = build_sparse_scheduler(
        {**config, "scheduler": {"type": "ProbMaskPruneScheduler", "kwargs": {"total_iterations": 10}}}
    )
    model = scheduler.prepare_sparse_model(small_net())
    assert {float(fake.tau) for fake in scheduler._fakes().values()} == {7.0}
    scheduler.prune_model(model, 9)
    assert [float(fake.tau) for fake in scheduler._fakes().values()] == pytest.approx([1 / 0.03] * 4)


def test_probmask_trains_either_part_alone():
    scheduler = ProbMaskPruneScheduler(total_iterations=10)
    model = scheduler.prepare_sparse_model(small_net())
    score, weight = scheduler.score_parameters()[0], original_of(model.conv1, "weight")
    scheduler.freeze_model_weights(model)
    scheduler.freeze_model_subnet(model)
    assert not weight.requires_grad
    assert not score.requires_grad
    scheduler.unfreeze_model_weights(model)
    scheduler.unfreeze_model_subnet(model)
    assert weight.requires_grad
    assert score.requires_grad
    scheduler.fix_model_subnet(model)
    scheduler.unfix_model_subnet(model)
    assert not any(fake.fixed for fake in scheduler._fakes().values())
    with pytest.raises(ValueRangeError, match="warm-up until 5"):
        ProbMaskPruneScheduler(total_iterations=10, warmup_iteration_stamps=5, finetune_iteration_stamps=4)
    with pytest.raises(ValueRangeError, match="another fake_sparse"):
        ProbMaskPruneScheduler(Setup()).prepare_sparse_model(small_net())


# ---------------------------------------------------------------------- ADMM


def test_the_admm_penalty_reaches_the_gradient_at_every_step():
    setup = Setup(sparsity={"target_sparsity": 0.5})
    scheduler = ADMMScheduler(setup, rho=0.1, rho_stages=1)
    model = scheduler.prepare_sparse_model(nn.Linear(6, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler.before_run(model, 2, 30)
    scheduler.init_optimizer(optimizer)
    weight = original_of(model, "weight")
    for iteration in range(4):
        before, target, dual = (
            t.clone() for t in (weight.detach(), scheduler._target["weight"], scheduler._dual["weight"])
        )
        optimizer.zero_grad()
        (model(torch.zeros(1, 6)).sum()).backward()  # no gradient of its own
        optimizer.step()
        torch.testing.assert_close(weight.detach(), before - 0.1 * (before - target + dual))
        scheduler.prune_model(model, iteration)
        assert int((scheduler._target["weight"] == 0).sum()) == 12
    loss = scheduler.penalty()
    (gradient,) = torch.autograd.grad(loss, weight)
    expected = weight.detach() - scheduler._target["weight"] + scheduler._dual["weight"]
    torch.testing.assert_close(gradient, 0.1 * expected)


@pytest.mark.parametrize("fused", [False, True])
def test_the_admm_penalty_is_the_same_under_a_gradient_scaler(fused):
    ends = []
    for scaled in (False, True):
        scheduler = ADMMScheduler(Setup(sparsity={"target_sparsity": 0.5}), rho=0.1, rho_stages=1)
        torch.manual_seed(0)
        model = scheduler.prepare_sparse_model(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
        scheduler.before_run(model, 2, 30)
        scheduler.init_optimizer(optimizer)
        for iteration in range(4):
            optimizer.zero_grad()
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(iteration))
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.prune_model(model, iteration)
        ends.append(original_of(model, "weight").detach().clone())
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("structured", [False, True])
def test_admm_prunes_exactly_after_its_first_part(uniform, structured):
    setup = Setup(NormalMaskGenerator(structured), sparsity={"target_sparsity": 0.5, "uniform": uniform})
    scheduler = ADMMScheduler(setup, rho=0.01)
    model = scheduler.prepare_sparse_model(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler.before_run(model, 3, 27)
    scheduler.init_optimizer(optimizer)
    rhos = []
    for iteration in range(27):
        step_of(model, optimizer, iteration)
        scheduler.prune_model(model, iteration)
        rhos.append(scheduler.present_rho)
        rate = scheduler.compute_sparse_rate(model)
        assert (rate == 0) == (iteration < 8)
        assert scheduler.residual(model) >= 0
    assert rhos[:9] == pytest.approx([0.01, 0.01, 0.1, 0.1, 0.1, 1.0, 1.0, 1.0, 0.0])
    assert scheduler.compute_sparse_rate(model) == pytest.approx(0.5, abs=0.1 if structured else 1e-3)
    assert accuracy(model) > 0.5


def test_admm_refuses_what_would_have_no_effect():
    scheduler = ADMMScheduler(Setup(sparsity={"target_sparsity": 0.5}))
    model = scheduler.prepare_sparse_model(small_net())
    with pytest.raises(ValueRangeError, match="has not begun"):
        scheduler.prune_model(model, 0)
    with pytest.raises(ValueRangeError, match="1 <= iters_per_epoch"):
        scheduler.before_run(model, 5, 4)
    scheduler.before_run(model, 1, 4)
    with pytest.raises(ValueRangeError, match="nothing adds the penalty"):
        scheduler.prune_model(model, 0)
    with pytest.raises(ValueRangeError, match="rho 0"):
        ADMMScheduler(Setup(sparsity={"target_sparsity": 0.5}), rho=0)
    with pytest.raises(ValueRangeError, match="sparsity is 2"):
        ADMMScheduler(Setup(sparsity={"target_sparsity": 2}))


# ---------------------------------------------------------------------- batch norms, ONNX


def test_batch_norms_are_folded_and_the_output_stays():
    model = small_net()
    for step in range(3):  # batch norms that are not the identity
        model(batch(step)[0])
    model.eval()
    images, _ = batch(5)
    before = model(images)
    folded = copy.deepcopy(model)
    assert fuse_batch_norms(folded) == [("stem", "norm"), ("conv1", "norm1")]
    torch.testing.assert_close(folded(images), before, atol=1e-5, rtol=1e-4)
    assert folded.conv1.bias is not None
    scheduler = build_sparse_scheduler({"fuse_bn": True})
    prepared = scheduler.prepare_sparse_model(model)
    torch.testing.assert_close(prepared(images), before, atol=1e-5, rtol=1e-4)
    assert isinstance(prepared.norm, nn.Identity)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(x)) if x.sum() > 0 else x


def test_a_model_that_cannot_be_traced_says_so_and_can_be_a_leaf():
    scheduler = build_sparse_scheduler({"fuse_bn": True})
    with pytest.raises(ValueRangeError, match="cannot be traced, which fuse_bn needs"):
        scheduler.prepare_sparse_model(Branching())
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), Branching())
    scheduler = build_sparse_scheduler({"fuse_bn": True, "leaf_module": [Branching]})
    model = scheduler.prepare_sparse_model(model)
    assert isinstance(model[1], nn.Identity)
    assert isinstance(model[2].norm, nn.BatchNorm2d)
    BaseScheduler().prepare_sparse_model(Branching())  # needs no tracing


def test_onnx_is_written_with_zeros_or_the_missing_packages_are_named(tmp_path, monkeypatch):
    scheduler = BaseScheduler()
    model = scheduler.prepare_sparse_model(small_net())
    scheduler.update_sparsity_per_layer(model, 0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = {}

    def export(written, inputs, path, **options):
        seen.update(
            path=path, training=written.training, zeros=float((written.fc.weight == 0).float().mean()), **options
        )

    monkeypatch.setattr(torch.onnx, "export", export)
    monkeypatch.setattr("sparta.scheduler.export.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"sparta-torch\[onnx\]"):
        scheduler.export_sparse_onnx(model, torch.randn(1, 3, 8, 8), tmp_path / "net")
    monkeypatch.setattr("sparta.scheduler.export.find_spec", lambda name: True)
    scheduler.export_sparse_onnx(model, torch.randn(1, 3, 8, 8), tmp_path / "net", opset_version=18)
    wanted = {"training": False, "zeros": 0.5, "opset_version": 18, "verbose": False, "external_data": False}
    assert seen == {"path": str(tmp_path / "net.onnx"), **wanted}
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert scheduler.compute_sparse_rate(model) == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(FileFormatError, match="folder does not exist"):
        scheduler.export_sparse_onnx(model, torch.randn(1, 3, 8, 8), tmp_path / "no" / "net.onnx")


@pytest.mark.parametrize("name", CONFIGS)
def test_an_onnx_file_has_the_zeros_and_computes_the_same(name, tmp_path):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = Run(name).begin().go(range(STEPS))
    if name == "probmask":
        run.scheduler.fix_model_subnet(run.model)
    images, _ = batch(0)
    run.scheduler.export_sparse_onnx(torch.compile(run.model, backend="eager"), images, tmp_path / "net")
    assert run.model.training
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]
    file = onnx.load(tmp_path / "net.onnx")
    written = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
    session = runtime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {file.graph.input[0].name: images.numpy()})
    model, spec = run.scheduler.export_sparse_model(run.model)
    model.eval()
    torch.testing.assert_close(torch.from_numpy(output), model(images).detach(), atol=1e-5, rtol=1e-4)
    assert "conv2.weight" in spec
    for layer, tesa in spec.items():
        # a batch norm may be folded into the convolution before it; a zero stays one
        assert float((written[layer] == 0).mean()) == pytest.approx(1 - tesa.density, abs=1e-9), layer
