"""AC/DC, structured, second-order and dynamic pruning: what each is about, beyond ending at its sparsity."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam

from create.models import CNN, loss_of, prunable, sparsity, take_steps
from sparta.create import Manager, modifier_named
from sparta.create.modifiers.fisher import BlockFisher, GradientFisher
from sparta.create.modifiers.parameters import refuse_shards
from sparta.errors import ShapeError, ValueRangeError

STEPS = 4


def start(model, entry, optimizer=None, **extras):
    optimizer = optimizer or SGD(model.parameters(), lr=0.05, momentum=0.9)
    manager = Manager([entry])
    manager.attach(model, optimizer, STEPS, **extras)
    return manager, optimizer


def moments(optimizer, weight):
    return {key: value for key, value in optimizer.state[weight].items() if key != "step" and value is not None}


# ---------------------------------------------------------------------- AC/DC


def phases(end, frequency, start=0.0):
    entry = modifier_named("ACDCPruning")(
        compression_sparsity=0.8, start_epoch=start, end_epoch=end, update_frequency=frequency
    )
    return "".join("C" if entry.is_compressed(start + count * frequency) else "D" for count in range(8))


def test_phases_take_turns_dense_first_and_end_compressed():
    assert phases(6, 1) == "DCDCDCCC"
    assert phases(7, 1)[:7] == "DCDCDCC", "the seventh would be dense and is the last"
    assert phases(7.5, 1.5)[:5] == "DCDCC"
    assert phases(1, 1)[0] == "C"


def test_sparsity_alternates():
    model = CNN()
    entry = modifier_named("ACDCPruning")(compression_sparsity=0.8, end_epoch=4, update_frequency=1)
    _, optimizer = start(model, entry)
    seen = []
    for epoch in range(4):
        take_steps(model, optimizer, STEPS, epoch * STEPS)
        seen.append(round(entry.masks.sparsity, 2))
    assert seen == [0.0, 0.8, 0.0, 0.8]
    take_steps(model, optimizer, 5)
    assert sparsity(model) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("kind", [lambda p: SGD(p, lr=0.05, momentum=0.9), lambda p: Adam(p, amsgrad=True, lr=0.01)])
@pytest.mark.parametrize("reset", [True, False])
def test_the_optimizer_forgets_when_a_dense_phase_begins(kind, reset):
    model = CNN()
    optimizer = kind(model.parameters())
    entry = modifier_named("ACDCPruning")(
        compression_sparsity=0.8, end_epoch=4, update_frequency=1, momentum_buffer_reset=reset
    )
    start(model, entry, optimizer)
    take_steps(model, optimizer, 2 * STEPS)
    optimizer.zero_grad()
    loss_of(model).backward()
    before = {name: [m.clone() for m in moments(optimizer, w).values()] for name, w in prunable(model).items()}
    gone = []
    optimizer.register_step_pre_hook(
        lambda *_: gone.extend(
            bool((m == 0).all()) for w in prunable(model).values() for m in moments(optimizer, w).values()
        )
    )
    optimizer.step()
    assert all(gone) == reset
    assert any(bool((m != 0).any()) for kept in before.values() for m in kept)
    if isinstance(optimizer, Adam):
        assert float(optimizer.state[model.fc1.weight]["step"]) == (1 if reset else 9)


def test_bad_phases_are_refused():
    make = modifier_named("ACDCPruning")
    with pytest.raises(ValueRangeError, match="compression_sparsity is missing"):
        make(end_epoch=4, update_frequency=1)
    with pytest.raises(ValueRangeError, match="an end and the length of a phase"):
        make(compression_sparsity=0.8, end_epoch=-1, update_frequency=1)


# ---------------------------------------------------------------------- structured


class Residual(nn.Module):
    """Two convolutions whose outputs are added, and a depthwise one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.depthwise(self.one(x) + self.two(x))).mean((2, 3)))

    batch = staticmethod(CNN.batch)


def test_whole_filters_go_and_groups_lose_the_same():
    model = Residual()
    entry = modifier_named("StructuredPruning")(
        params=["one.weight", "two.weight", "depthwise.weight"],
        param_groups=[["one.weight", "two.weight"]],
        init_sparsity=0.0,
        final_sparsity=0.5,
        end_epoch=1,
    )
    norms = model.one.weight.detach().square().sum((1, 2, 3)) + model.two.weight.detach().square().sum((1, 2, 3))
    Manager([entry]).apply(model)
    gone = (model.one.weight == 0).flatten(1).all(1)
    assert int(gone.sum()) == 4
    assert torch.equal(gone, (model.two.weight == 0).flatten(1).all(1))
    assert torch.equal(gone, (model.one.weight == 0).flatten(1).any(1)), "whole filters"
    assert torch.equal(norms.argsort()[:4].sort().values, gone.nonzero().flatten())
    assert not bool((model.depthwise.weight == 0).any())


def test_input_channels_go():
    model = CNN()
    entry = modifier_named("StructuredPruning")(
        params=["conv2.weight"], mask_type="channel", final_sparsity=0.25, end_epoch=1
    )
    manager, optimizer = start(model, entry)
    take_steps(model, optimizer, STEPS)
    gone = (model.conv2.weight == 0).all(0).flatten(1).all(1)
    assert int(gone.sum()) == 2
    assert entry in manager.structured_modifiers
    assert not manager.pruning_modifiers


def test_groups_of_unequal_layers_and_nothing_but_depthwise_are_refused():
    make = modifier_named("StructuredPruning")
    with pytest.raises(ShapeError, match=r"\[8, 16\] channels"):
        start(CNN(), make(param_groups=[["conv1.weight", "fc1.weight"]], final_sparsity=0.5, end_epoch=1))
    with pytest.raises(ValueRangeError, match="depthwise convolutions only"):
        start(Residual(), make(params=["depthwise.weight"], final_sparsity=0.5, end_epoch=1))


def test_a_layer_is_taken_out_and_put_back():
    model = CNN()
    weight = model.conv2.weight.detach().clone()
    _, optimizer = start(model, modifier_named("LayerPruning")(layers=["conv2"], start_epoch=1, end_epoch=2))
    take_steps(model, optimizer, STEPS + 1)
    assert isinstance(model.conv2, nn.Identity)
    take_steps(model, optimizer, STEPS - 1)
    assert isinstance(model.conv2, nn.Conv2d), "training is over"
    assert not torch.equal(model.conv2.weight, weight), "it learnt before"
    with pytest.raises(ValueRangeError, match="did you mean 'conv2'"):
        start(CNN(), modifier_named("LayerPruning")(layers=["conv3"]))


# ---------------------------------------------------------------------- second order


@given(seed=st.integers(0, 50), size=st.integers(1, 9), block=st.integers(1, 9), count=st.integers(1, 6))
def test_both_estimates_are_the_damped_fisher_matrix(seed, size, block, count):
    """Against the dense formulas, block by block."""
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(count, size, generator=generator)
    weight = torch.randn(size, generator=generator)
    kept = torch.rand(size, generator=generator) < 0.5
    damp = 0.1
    blocks = BlockFisher(weight, damp, block)
    for gradient in gradients:
        blocks.add(gradient)
    free = GradientFisher(gradients, damp, block)
    saliency, moved = torch.zeros(size), torch.zeros(size)
    for first in range(0, size, min(block, size)):
        part = slice(first, first + min(block, size))
        g, w, s = gradients[:, part].double(), weight[part].double(), kept[part]
        matrix = damp * torch.eye(g.shape[1]) + g.T @ g / count
        saliency[part] = (w.square() / (2 * torch.linalg.inv(matrix).diagonal())).float()
        new = w * s
        if s.any():
            new[s] += torch.linalg.solve(matrix[s][:, s], matrix[s][:, ~s] @ w[~s])
        moved[part] = new.float()
    for fisher in (blocks, free):
        assert torch.allclose(fisher.saliency(weight), saliency, rtol=1e-3, atol=1e-5)
        assert torch.allclose(fisher.compensated(weight, kept), moved, rtol=1e-3, atol=1e-4)


def test_no_gradient_is_no_estimate():
    with pytest.raises(ValueRangeError, match="no gradients"):
        BlockFisher(torch.ones(3), 0.1, 2).saliency(torch.ones(3))
    with pytest.raises(ValueRangeError, match="no gradients"):
        GradientFisher(torch.zeros(0, 3), 0.1, 2)


def regression(seed):
    """A linear layer at its optimum on correlated inputs, where the curvature tells what magnitudes do not."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(12) + 0.3 * torch.randn(12, 12, generator=generator)
    x = torch.randn(400, 12, generator=generator) @ mix
    y = x @ torch.randn(12, 3, generator=generator) + 0.5 * torch.randn(400, 3, generator=generator)
    model = nn.Linear(12, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    return model, x, y


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["OBSPruning", "MFACPruning"])
def test_pruning_by_curvature_costs_less_than_by_magnitude(name, seed):
    losses = {}
    for kind in ("MagnitudePruning", name):
        model, x, y = regression(seed)
        samples = iter(range(10**9))

        def closure(model=model, x=x, y=y, samples=samples):
            row = next(samples) % len(x)
            return (model(x[row]) - y[row]).square().sum()

        options = {"num_grads": 200, "damp": 1e-4, "fisher_block_size": 36} if kind == name else {}
        Manager([modifier_named(kind)(final_sparsity=0.3, end_epoch=0, **options)]).apply(model, loss_closure=closure)
        assert int((model.weight == 0).sum()) == 11
        losses[kind] = (model(x) - y).square().mean().item()
    assert losses[name] < losses["MagnitudePruning"]


def test_sampling_leaves_gradients_buffers_and_modes_alone():
    model = CNN()
    model.train()
    model.fc1.eval()
    loss_of(model).backward()
    held = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters() if "norm" in name}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    entry = modifier_named("OBSPruning")(final_sparsity=0.5, end_epoch=0, num_grads=3)
    Manager([entry]).apply(model, data=[model.batch(0)])
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert all(torch.equal(model.get_parameter(n), p) for n, (p, _) in held.items())
    assert all(torch.equal(model.get_parameter(n).grad, g) for n, (_, g) in held.items())
    assert (model.training, model.fc1.training, model.conv1.training) == (True, False, True)


def test_an_update_in_parts_samples_as_often():
    model = CNN()
    calls = []

    def closure():
        calls.append(1)
        return loss_of(model, len(calls))

    entry = modifier_named("OBSPruning")(
        final_sparsity=0.8, end_epoch=1, update_frequency=0.5, num_grads=2, num_recomputations=3
    )
    _, optimizer = start(model, entry, loss_closure=closure)
    take_steps(model, optimizer, 1)
    assert len(calls) == 2, "nothing came before the first update"
    take_steps(model, optimizer, 2)
    assert len(calls) == 2 + 6
    take_steps(model, optimizer, 1)
    assert sparsity(model) == pytest.approx(0.8, abs=0.01)


def test_mfac_keeps_the_last_gradients_and_no_more():
    model = CNN()
    entry = modifier_named("MFACPruning")(final_sparsity=0.8, end_epoch=4, num_grads=3)
    _, optimizer = start(model, entry)
    for step in range(5):
        take_steps(model, optimizer, 1, step)
        assert len(entry.state_dict()["kept"]) == min(step + 1, 3)
    newest = entry.state_dict()["kept"][-1]
    assert newest.numel() == sum(weight.numel() for weight in prunable(model).values())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (None, "M-FAC pruning has seen no gradient"),
        ([], "data has no batch"),
        ([torch.ones(3)], "a batch of data is a Tensor"),
        ([{"x": torch.ones(2, 12)}], "returns no loss"),
    ],
)
def test_bad_sources_of_gradients_are_refused(data, text):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(12, 3)

        def forward(self, x):
            return self.fc(x)

    entry = modifier_named("MFACPruning")(final_sparsity=0.5, end_epoch=0)
    with pytest.raises(ValueRangeError, match=text):
        Manager([entry]).apply(Named(), data=data)


def test_a_model_that_returns_its_loss_takes_mappings():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x, labels):
            return {"loss": nn.functional.mse_loss(self.fc(x), labels)}

    model = WithLoss()
    entry = modifier_named("OBSPruning")(final_sparsity=0.5, end_epoch=0, num_grads=2)
    Manager([entry]).apply(model, data=[{"x": torch.randn(3, 6), "labels": torch.randn(3, 4)}])
    assert int((model.fc.weight == 0).sum()) == 12


def test_what_computes_with_whole_weights_refuses_shards():
    sharded = SimpleNamespace(parameter=SimpleNamespace(placements=()))
    with pytest.raises(ShapeError, match="OBSPruning with sharded weights"):
        refuse_shards([sharded], "OBSPruning")


def test_bad_counts_of_gradients_are_refused():
    with pytest.raises(ValueRangeError, match="num_grads is"):
        modifier_named("MFACPruning")(final_sparsity=0.5, end_epoch=1, num_grads=0)
    with pytest.raises(ValueRangeError, match="num_grads: 1"):
        start(CNN(), modifier_named("RigLPruning")(final_sparsity=0.5, end_epoch=1, num_grads=4))


# ---------------------------------------------------------------------- dynamic


@pytest.mark.parametrize("strategy", ["erdos_renyi_kernel", "erdos_renyi", "uniform"])
def test_rigl_keeps_its_sparsity_and_moves_its_places(strategy):
    model = CNN()
    entry = modifier_named("RigLPruning")(
        final_sparsity=0.8, end_epoch=4, update_frequency=0.5, sparsity_strategy=strategy
    )
    _, optimizer = start(model, entry)
    take_steps(model, optimizer, 1)
    first = {name: weight == 0 for name, weight in prunable(model).items()}
    counts = {name: int(entry.masks[name].sum()) for name in first}
    moved = 0
    for step in range(1, 4 * STEPS):
        take_steps(model, optimizer, 1, step)
        assert {name: int(entry.masks[name].sum()) for name in first} == counts
        moved += sum(int((first[name] & (weight != 0)).sum()) for name, weight in prunable(model).items())
    assert moved > 0
    shares = {round(count / prunable(model)[name].numel(), 1) for name, count in counts.items()}
    assert (len(shares) == 1) == (strategy == "uniform")


def test_rigl_grows_where_the_gradient_is_largest_and_drops_the_smallest():
    model = nn.Linear(8, 4, bias=False)
    optimizer = SGD(model.parameters(), lr=1e-6)
    entry = modifier_named("RigLPruning")(
        final_sparsity=0.5, end_epoch=100, update_frequency=1, sparsity_strategy="uniform", init_update_fraction=0.25
    )
    Manager([entry]).attach(model, optimizer, 1)
    model(torch.randn(3, 8)).square().sum().backward()
    optimizer.step()
    before = entry.masks["weight"]
    optimizer.zero_grad()
    model(torch.randn(3, 8)).square().sum().backward()
    gradient, weight = model.weight.grad.clone(), model.weight.detach().clone()
    optimizer.step()
    after = entry.masks["weight"]
    count = 4
    stay = before.clone()
    stay.view(-1)[torch.where(before, weight.abs(), torch.inf).view(-1).argsort()[:count]] = False
    grown = torch.where(stay, -torch.inf, gradient.abs()).view(-1).argsort(descending=True)[:count]
    expected = stay.clone()
    expected.view(-1)[grown] = True
    assert torch.equal(after, expected)


def test_rigl_may_sample_its_gradients():
    model = CNN()
    entry = modifier_named("RigLPruning")(final_sparsity=0.8, end_epoch=1, update_frequency=0.25, num_grads=2)
    _, optimizer = start(model, entry, data=[model.batch(7)])
    take_steps(model, optimizer, STEPS)
    assert sparsity(model) == pytest.approx(0.8, abs=0.01)


def test_top_kast_computes_with_few_weights_and_trains_more():
    model = nn.Linear(20, 10, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    entry = modifier_named("TopKASTPruning")(
        forward_sparsity=0.8, backward_sparsity=0.5, update_frequency=1, active_weight_decay=0.0
    )
    Manager([entry]).attach(model, optimizer, 100)
    before = model.weight.detach().clone()
    model(torch.randn(64, 20)).square().sum().backward()
    optimizer.step()
    assert int((model.weight == 0).sum()) == 160
    with entry.masks.exposed():
        changed = model.weight.detach() != before
    assert int(changed.sum()) == pytest.approx(100, abs=2)
    with pytest.raises(ValueRangeError, match="above forward_sparsity"):
        modifier_named("TopKASTPruning")(forward_sparsity=0.5, backward_sparsity=0.8)


def test_top_kast_pulls_harder_on_what_is_not_computed_with():
    model = nn.Linear(20, 10, bias=False)
    optimizer = SGD(model.parameters(), lr=1.0)
    entry = modifier_named("TopKASTPruning")(
        forward_sparsity=0.8, backward_sparsity=0.0, update_frequency=1, active_weight_decay=0.01
    )
    Manager([entry]).attach(model, optimizer, 100)
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    kept = entry.masks["weight"]
    with entry.masks.exposed():
        shrunk = 1 - model.weight.detach() / before
    assert torch.allclose(shrunk[kept], torch.tensor(0.01), atol=1e-5)
    assert torch.allclose(shrunk[~kept], torch.tensor(0.05), atol=1e-5)


def test_channels_in_front_of_a_norm_do_not_shrink_away():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    manager = Manager(
        [modifier_named("MFACPruning")(final_sparsity=0.8, end_epoch=2, update_frequency=0.25, num_grads=8)]
    )
    manager.attach(model, optimizer, steps_per_epoch=8)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 3, 8, 8, generator=generator), torch.randint(4, (64,), generator=generator)
    for _ in range(17):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        before = model[0].weight.detach().clone()
        optimizer.step()
        kept = model[0].weight != 0
        survived = (before * kept).flatten(1).norm(dim=1)
        assert (model[0].weight.detach().flatten(1).norm(dim=1) >= 0.5 * survived).all()


@pytest.mark.parametrize(
    "entry",
    [
        modifier_named("TopKASTPruning")(forward_sparsity=0.8, backward_sparsity=0.5, end_epoch=4),
        modifier_named("ACDCPruning")(compression_sparsity=0.8, end_epoch=4, update_frequency=1),
    ],
    ids=lambda entry: entry.name,
)
def test_weights_that_come_back_still_learn_under_rprop(entry):
    model = CNN()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
    start(model, entry, optimizer)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(
            float(optimizer.state[w]["step_size"].min()) for w in prunable(model).values() if w in optimizer.state
        )
    )
    take_steps(model, optimizer, 4 * STEPS)
    assert min(seen) > 0, "a step size of zero is no memory of gradients"


@pytest.mark.parametrize("name", ["OBSPruning", "MFACPruning"])
def test_pruned_weights_do_not_make_up_for_others(name):
    """The curvature is that of the weights that are there, as if the network had no others."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1, bias=False)
    small = nn.Linear(3, 1, bias=False)
    there = torch.tensor([True, False, True, False, False, True])
    with torch.no_grad():
        model.weight[:, ~there] = 0
        small.weight.copy_(model.weight[:, there])
    x = torch.randn(5, 6) @ (torch.eye(6) + 0.5 * torch.randn(6, 6))
    found = []
    for net, inputs in ((model, x), (small, x[:, there])):
        data = [(row.unsqueeze(0), torch.ones(1, 1)) for row in inputs]
        entry = modifier_named(name)(final_sparsity=0.9, end_epoch=1, num_grads=5, damp=1e-3)
        manager, _ = start(net, entry, data=data)
        entry.masks.set({"weight": net.weight != 0})
        found.append(entry.scores(manager.run)["weight"])
    assert torch.allclose(found[0][:, there], found[1], rtol=1e-4)


def test_the_last_dense_phase_can_be_twice_as_long():
    def drawn(end):
        entry = modifier_named("ACDCPruning")(
            compression_sparsity=0.8, end_epoch=end, update_frequency=1, long_last_dense_phase=True
        )
        return "".join("C" if entry.is_compressed(epoch) else "D" for epoch in range(end + 1))

    assert [drawn(end) for end in (1, 2, 3, 4, 5, 7)] == ["CC", "DCC", "DDCC", "DDCCC", "DCDDCC", "DCDCDDCC"]
