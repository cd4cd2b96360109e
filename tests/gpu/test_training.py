"""On CUDA: masks are those of the CPU, hold under every kind of optimizer, mixed precision and `torch.compile`."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

from scheduler.nets import batch, small_net
from sparta.scheduler import (
    ADMMScheduler,
    AmbaLevelPruneScheduler,
    AmpereScheduler,
    BaseScheduler,
    FPGMMaskGenerator,
    NMMaskGenerator,
    NormalMaskGenerator,
    NuclearMaskGenerator,
    ProbMaskFakeSparse,
    ProbMaskPruneScheduler,
    Setup,
    STRFakeSparse,
    STRScheduler,
    mask_calculator,
)
from sparta.scheduler.prepared import original_of
from sparta.scheduler.probmask import project_scores
from sparta.sparsify import ERK, Energy, Global, Masks, Schedule, Sparsifier, Uniform, find_layers, lamp, make_masks
from sparta.sparsify.scores import Magnitude, Random
from sparta.tesa.patterns import NM, Channel, Unstructured

DEVICE = torch.device("cuda")
STEPS = 12


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """One class compiled by several tests would reach the compiler's limit of versions."""
    torch.compiler.reset()


SCHEDULERS = {
    "levels": lambda: AmbaLevelPruneScheduler(
        total_iters=STEPS, sparsity_table=[30, 60, 80], output_dir=None, save_dir=None, default_input_shape=[1, 3, 8, 8]
    ),
    "ampere": lambda: AmpereScheduler(verbosity=0),
    "ampere 2d": lambda: AmpereScheduler(mask_calculator="m4n2_2d_best", verbosity=0, allow_recompute_mask=True),
    "ampere permuted": lambda: AmpereScheduler(verbosity=0, allow_permutation=True),
    "str": lambda: STRScheduler(Setup(fake_sparse=lambda weight: STRFakeSparse(weight, sInit_value=-5))),
    "probmask": lambda: ProbMaskPruneScheduler(
        Setup(fake_sparse=ProbMaskFakeSparse), prune_rate=0.75, total_iterations=STEPS
    ),
    "admm": lambda: ADMMScheduler(Setup(sparsity={"target_sparsity": 0.75, "uniform": False}), rho=1e-2),
}
EXACT = {"levels": 0.8, "probmask": 0.75, "admm": 0.75}


class Run:
    """A training with one scheduler on one device, as a script would have it."""

    def __init__(self, name, device=DEVICE, make_optimizer=None, compiled=False):
        self.name, self.device = name, device
        self.scheduler = SCHEDULERS[name]()
        self.model = self.scheduler.prepare_sparse_model(small_net(width=16).to(device))
        make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-3))
        self.optimizer = make_optimizer(list(self.model.parameters()))
        self.call = torch.compile(self.model, fullgraph=True) if compiled else self.model

    def begin(self):
        if self.name == "admm":
            self.scheduler.before_run(self.model, 2, STEPS)
        return self.attach()

    def attach(self):
        if not isinstance(self.scheduler, AmbaLevelPruneScheduler):
            self.scheduler.init_optimizer(self.optimizer)
        return self

    def go(self, steps, scaler=None, dtype=None):
        for step in steps:
            images, labels = (tensor.to(self.device) for tensor in batch(step))
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
                loss = functional.cross_entropy(self.call(images), labels)
            if scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()
            self.scheduler.prune_model(self.model, step)
        return self

    def export(self):
        return self.scheduler.export_sparse_model(self.model)

    def parts(self):
        return self.model, self.optimizer, self.scheduler


def zeros_of(model):
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)


def check_exported(name, model, spec):
    spec.check(model)
    zeros, total = zeros_of(model)
    if name in EXACT:
        assert zeros == round(EXACT[name] * total)
    elif name.startswith("ampere"):
        for conv in (model.conv1, model.conv2):
            NM(2, 4).validate(conv.weight != 0)


# ---------------------------------------------------------------------- the same masks as on the CPU


@pytest.mark.parametrize("score", [Magnitude(), Random(3)], ids=["magnitude", "random"])
@pytest.mark.parametrize(
    "allocation",
    [Uniform(), Global(), Global(floor=20), Global(normalize="l1"), Global(normalize="l2"), lamp(), ERK(), Energy()],
    ids=str,
)
def test_allocations_choose_the_weights_that_the_cpu_chooses(allocation, score):
    model = small_net()
    on_gpu = copy.deepcopy(model).to(DEVICE)
    wanted = make_masks(find_layers(model), score, Unstructured(), 0.83, allocation)
    masks = make_masks(find_layers(on_gpu), score, Unstructured(), 0.83, allocation)
    assert all(mask.device.type == DEVICE.type for mask in masks.values())
    assert all(torch.equal(masks[name].cpu(), mask) for name, mask in wanted.items())
    assert sum(int((~mask).sum()) for mask in masks.values()) == sum(int((~mask).sum()) for mask in wanted.values())


@pytest.mark.parametrize(("pattern", "sparsity"), [(NM(2, 4), None), (NM(2, 4), 0.3), (Channel(0), 0.5)], ids=str)
def test_patterns_choose_what_the_cpu_chooses(pattern, sparsity):
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 16, 1))
    on_gpu = copy.deepcopy(model).to(DEVICE)
    wanted = make_masks(find_layers(model), Magnitude(), pattern, sparsity)
    masks = make_masks(find_layers(on_gpu), Magnitude(), pattern, sparsity)
    assert all(torch.equal(masks[name].cpu(), mask) for name, mask in wanted.items())


@pytest.mark.parametrize("name", ["m4n2_1d", "m4n2_2d_best", "m4n2_2d_greedy", "m8n2_1d"])
def test_mask_calculators_choose_what_the_cpu_chooses(name):
    calculate = mask_calculator(name)
    for weight in (torch.randn(64, 48), torch.randn(16, 32, 3, 3)):
        assert torch.equal(calculate(weight.to(DEVICE), 1).cpu(), calculate(weight, 1))


@pytest.mark.parametrize(
    "generator",
    [
        NormalMaskGenerator(),
        NormalMaskGenerator(structured=True),
        NMMaskGenerator(),
        FPGMMaskGenerator(),
        FPGMMaskGenerator(func="l1"),
        FPGMMaskGenerator(func="cos"),
        NuclearMaskGenerator(),
    ],
    ids=lambda made: f"{type(made).__name__} {getattr(made, 'func', '')}",
)
def test_mask_generators_choose_what_the_cpu_chooses(generator):
    weight = torch.randn(24, 16, 3, 3)
    assert torch.equal(generator.generate_mask(weight.to(DEVICE), 0.5).cpu(), generator.generate_mask(weight, 0.5))


@pytest.mark.parametrize("name", ["levels", "ampere", "ampere 2d", "admm"])
def test_a_scheduler_makes_the_masks_that_it_makes_on_the_cpu(name):
    """From the same weights: training itself rounds differently."""
    found = []
    for device in (torch.device("cpu"), DEVICE):
        run = Run(name, device).begin()
        if name == "admm":
            run.scheduler._prune()
        else:
            run.scheduler.prune_model(run.model, 0)
        found.append({key: tesa.mask("cpu") for key, tesa in run.export().spec.items()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_probabilities_are_projected_as_on_the_cpu():
    scores = [torch.rand(300, 40), torch.rand(77)]
    on_gpu = [s.to(DEVICE, copy=True) for s in scores]
    shift, other = project_scores(scores, 1500.0), project_scores(on_gpu, 1500.0)
    assert float(other) == pytest.approx(float(shift), abs=1e-7)
    assert float(sum(s.double().sum() for s in on_gpu)) == pytest.approx(1500.0, rel=1e-6)
    for a, b in zip(scores, on_gpu, strict=True):
        torch.testing.assert_close(b.cpu(), a, atol=1e-6, rtol=0)


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_trains_and_exports(name):
    run = Run(name).begin().go(range(STEPS))
    if name == "probmask":
        run.scheduler.fix_model_subnet(run.model)
    run.model.eval()
    images = batch(99)[0].to(DEVICE)
    trained = run.model(images)
    model, spec = run.export()
    torch.testing.assert_close(model(images), trained, atol=1e-5, rtol=1e-4)
    check_exported(name, model, spec)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_half_precision_with_a_gradient_scaler(name, fused):
    run = Run(name, make_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=not fused, fused=fused)).begin()
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**28)  # the first steps overflow and are skipped
    run.go(range(STEPS), scaler, torch.float16)
    assert scaler.get_scale() < 2.0**28
    assert not torch.equal(run.model.norm.weight.cpu(), torch.ones(16))  # the others are not
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())
    model, spec = run.export()
    check_exported(name, model, spec)


OPTIMIZERS = {
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pruned", ["forget", "keep", "train"])
def test_masks_hold_under_every_kind_of_optimizer(optimizer, pruned):
    model = small_net().to(DEVICE)
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    sparsifier = Sparsifier(model, Schedule.cubic(0.9, end=6, every=2), allocation=Global(), pruned=pruned).attach(made)
    for step in range(9):
        images, labels = (tensor.to(DEVICE) for tensor in batch(step))
        made.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        made.step()
        for name, mask in sparsifier.masks.to_dict().items():
            assert not bool(model.get_parameter(name)[~mask].any()), name
        sparsifier.step()
    zeros, total = zeros_of(model)
    assert zeros == round(0.9 * total)
    for layer in find_layers(model):  # state was zeroed when the last masks were set, and nothing has moved it since
        for key, value in made.state[layer.parameter].items():
            if isinstance(value, torch.Tensor) and value.shape == layer.parameter.shape and pruned != "train":
                assert not bool(value[~sparsifier.masks[layer.name]].any()), key


def test_the_movement_score_is_the_same_under_a_gradient_scaler():
    found = []
    for fused, scaled in ((False, False), (True, True), (False, True)):
        model = small_net().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, foreach=not fused, fused=fused)
        scaler = torch.amp.GradScaler(DEVICE.type, enabled=scaled, init_scale=1024.0)
        sparsifier = Sparsifier(model, Schedule.constant(0.5, at=99), score="movement", pruned="train").attach(
            optimizer
        )
        for step in range(3):
            images, labels = (tensor.to(DEVICE) for tensor in batch(step))
            optimizer.zero_grad()
            scaler.scale(functional.cross_entropy(model(images), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(sparsifier.score(find_layers(model)[0]).clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found[2], found[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["levels", "ampere", "str", "probmask", "admm"])
def test_a_compiled_step_is_one_graph_and_sees_new_masks(name):
    run = Run(name, compiled=True).begin().go(range(STEPS))
    if name == "probmask":
        run.scheduler.fix_model_subnet(run.model)
    run.model.eval()
    images = batch(99)[0].to(DEVICE)
    with torch.no_grad():
        compiled, eager = run.call(images), run.model(images)
    torch.testing.assert_close(compiled, eager, atol=1e-3, rtol=1e-3)
    model, spec = run.export()
    check_exported(name, model, spec)


def test_a_compiled_model_keeps_masks_that_an_optimizer_holds():
    model = small_net().to(DEVICE)
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    sparsifier = Sparsifier(compiled, Schedule.cubic(0.8, end=4)).attach(optimizer)
    for step in range(6):
        images, labels = (tensor.to(DEVICE) for tensor in batch(step))
        optimizer.zero_grad()
        functional.cross_entropy(compiled(images), labels).backward()
        optimizer.step()
        sparsifier.step()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images), atol=1e-3, rtol=1e-3)
    assert zeros_of(model)[0] == sum(round(0.8 * layer.parameter.numel()) for layer in find_layers(model))


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("name", ["levels", "ampere 2d", "str", "probmask", "admm"])
def test_resuming_is_exact(name):
    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        straight, first = Run(name).begin(), Run(name).begin()
        torch.manual_seed(1)
        straight.go(range(STEPS))
        torch.manual_seed(1)
        first.go(range(5))
        file = io.BytesIO()
        torch.save([part.state_dict() for part in first.parts()], file)
        file.seek(0)
        second = Run(name)
        for part, state in zip(second.parts(), torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        second.attach().go(range(5, STEPS))
    finally:
        torch.backends.cudnn.deterministic = deterministic
    ends = [run.export() for run in (straight, second)]
    for (key, a), b in zip(ends[0].model.state_dict().items(), ends[1].model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


def test_masks_move_between_devices_through_their_state():
    model = small_net()
    masks = Masks(find_layers(model), pruned="keep")
    masks.set(make_masks(find_layers(model), Magnitude(), Unstructured(), 0.5))
    on_gpu = copy.deepcopy(model).to(DEVICE)
    moved = Masks(find_layers(on_gpu), pruned="keep")
    moved.load_state_dict(masks.state_dict())
    assert all(torch.equal(mask, moved[name].cpu()) for name, mask in masks.to_dict().items())
    back = Masks(find_layers(model), pruned="keep")
    back.load_state_dict(moved.state_dict())
    with moved.exposed(), back.exposed():
        for a, b in zip(on_gpu.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.cpu(), b)


def test_permuting_changes_no_output_and_keeps_more():
    model = small_net(width=32).to(DEVICE)
    for step in range(2):
        model(batch(step)[0].to(DEVICE))  # batch norms that are not the identity
    model.eval()
    plain, images = copy.deepcopy(model), batch(5)[0].to(DEVICE)
    before = model(images)
    kept = []
    for net, allowed in ((model, True), (plain, False)):
        scheduler = AmpereScheduler(verbosity=0, allow_permutation=allowed)
        scheduler.prepare_sparse_model(net)
        torch.testing.assert_close(net(images), before, atol=1e-4, rtol=1e-3)
        scheduler.init_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        kept.append(sum(float(layer.parameter.detach().abs().sum()) for layer in scheduler._masks.layers.values()))
    assert kept[0] > 1.005 * kept[1]


def test_a_base_scheduler_keeps_masks_where_the_model_is():
    scheduler = BaseScheduler()
    model = scheduler.prepare_sparse_model(small_net().to(DEVICE))
    scheduler.update_sparsity_per_layer(model, 0.5)
    assert original_of(model.conv1, "weight").device.type == DEVICE.type
    assert all(fake.mask.device.type == DEVICE.type for fake in scheduler._fakes().values())
    model = model.to("cpu")  # masks are buffers and go along
    assert model(batch(0)[0]).device.type == "cpu"
    assert scheduler.compute_sparse_rate(model) == pytest.approx(0.5, abs=1e-3)
