"""N:M training: masks that hold and can be recomputed, and channel permutation that changes no output."""

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scheduler.nets import small_net, step_of
from sparta.errors import ShapeError, ValueRangeError
from sparta.scheduler import AmpereScheduler, Setup, kept_magnitude, search_permutation
from sparta.scheduler.channels import find_spaces
from sparta.scheduler.spaces import permute_space
from sparta.tesa.patterns import NM


def prepared(model, **options):
    scheduler = AmpereScheduler(verbosity=0, **options)
    model = scheduler.prepare_sparse_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return scheduler, model, optimizer


@pytest.mark.parametrize("calculator", ["m4n2_1d", "m4n2_2d_best", "m4n2_2d_greedy", "m8n2_1d"])
def test_masks_hold_through_training(calculator):
    scheduler, model, optimizer = prepared(small_net(), mask_calculator=calculator)
    dense = copy.deepcopy(model.state_dict())
    assert scheduler.compute_sparse_rate(model) == 0
    scheduler.init_optimizer(optimizer)
    assert not torch.equal(model.conv1.weight, dense["conv1.weight"])  # pruned at once
    n, m = (2, 8) if calculator.startswith("m8") else (2, 4)
    for step in range(4):
        step_of(model, optimizer, step)
        scheduler.prune_model(model, step)
        NM(n, m).validate(model.conv1.weight != 0)
        if "2d" in calculator:
            NM(n, m, 0).validate(model.conv1.weight != 0)


def test_masks_can_be_recomputed_among_all_weights():
    scheduler, model, optimizer = prepared(nn.Linear(16, 8, bias=False), allow_recompute_mask=True)
    before = model.weight.detach().clone()
    scheduler.init_optimizer(optimizer)
    first = model.weight != 0
    with torch.no_grad():
        model.weight.mul_(1e-3)  # what was kept is now small beside what was pruned
    scheduler.compute_sparse_masks()
    second = model.weight != 0
    assert not bool((first & second).any())
    torch.testing.assert_close(model.weight[second], before[second])
    scheduler.restore_pruned_weights()
    torch.testing.assert_close(model.weight, torch.where(first, before * 1e-3, before))
    scheduler.init_optimizer(optimizer)
    assert scheduler.compute_sparse_rate(model) == 0.5


def test_without_permission_masks_are_computed_once():
    scheduler, _, optimizer = prepared(nn.Linear(16, 8))
    scheduler.init_optimizer(optimizer)
    with pytest.raises(ValueRangeError, match="allow_recompute_mask=True"):
        scheduler.compute_sparse_masks()
    with pytest.raises(ValueRangeError, match="gone"):
        scheduler.restore_pruned_weights()


def test_two_models_in_one_process():
    pairs = [prepared(small_net(seed)) for seed in (0, 1)]
    for scheduler, _, optimizer in pairs:
        scheduler.init_optimizer(optimizer)
    for scheduler, model, optimizer in pairs:
        step_of(model, optimizer, 0)
        assert float((model.conv1.weight == 0).float().mean()) == 0.5
        assert scheduler.export_sparse_model(model).spec["conv1.weight"].density == 0.5


def test_layers_the_hardware_cannot_run_stay_dense_and_are_told(caplog):
    scheduler = AmpereScheduler(verbosity=1)
    with caplog.at_level(logging.INFO, logger="sparta.scheduler"):
        scheduler.prepare_sparse_model(small_net())
    assert set(scheduler._masks.layers) == {"conv1.weight", "conv2.weight"}
    assert "stem.weight of shape (16, 3, 3, 3) stays dense" in caplog.text
    everything = AmpereScheduler(verbosity=0, alignment=(1, 1), whitelist=[nn.Conv2d])
    everything.prepare_sparse_model(small_net())
    assert set(everything._masks.layers) == {"stem.weight", "conv1.weight", "conv2.weight"}


def test_bad_calls_are_refused():
    scheduler = AmpereScheduler(verbosity=0)
    with pytest.raises(ValueRangeError, match="not prepared"):
        scheduler.init_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(ValueRangeError, match="no layer of the model can be pruned"):
        scheduler.prepare_sparse_model(nn.Linear(10, 10))
    model = scheduler.prepare_sparse_model(small_net())
    with pytest.raises(ValueRangeError, match="already"):
        scheduler.prepare_sparse_model(small_net())
    with pytest.raises(ValueRangeError, match="holds none of the 2 layers"):
        scheduler.init_optimizer(torch.optim.SGD(small_net().parameters(), lr=0.1))
    with pytest.raises(ValueRangeError, match="not the model that was prepared"):
        scheduler.compute_sparse_rate(small_net())
    with pytest.raises(ValueRangeError, match="alignment is"):
        AmpereScheduler(alignment=(0, 4))
    with pytest.raises(ValueRangeError, match="that of a AmpereScheduler"):
        scheduler.load_state_dict({"type": "BaseScheduler"})
    assert scheduler.compute_sparse_rate(model) == 0


# ---------------------------------------------------------------------- the search


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(2, 6), st.integers(0, 99))
def test_an_order_never_keeps_less(rows, stripes, seed):
    matrix = torch.randn(rows, 4 * stripes, generator=torch.Generator().manual_seed(seed))
    order = search_permutation(matrix, escapes=3)
    assert torch.equal(order.sort().values, torch.arange(4 * stripes))
    assert kept_magnitude(matrix[:, order]) >= kept_magnitude(matrix)
    assert torch.equal(order, search_permutation(matrix, escapes=3))


def test_the_search_gains_a_third_of_what_unstructured_would():
    matrix = torch.randn(64, 128)
    order = search_permutation(matrix, escapes=5)
    now, then = kept_magnitude(matrix), kept_magnitude(matrix[:, order])
    unstructured = float(matrix.abs().topk(64, dim=1).values.sum())
    assert (then - now) / (unstructured - now) > 0.3


def test_what_cannot_gain_is_left_alone():
    assert search_permutation(torch.randn(4, 4)).tolist() == [0, 1, 2, 3]
    already = torch.randn(4, 16) * (torch.arange(16) % 2)
    assert torch.equal(search_permutation(already), torch.arange(16))
    with pytest.raises(ShapeError, match="a multiple of 4"):
        kept_magnitude(torch.ones(2, 6))


# ---------------------------------------------------------------------- the graph


class Residual(nn.Module):
    """Two branches that are added: all convolutions that feed the sum share one order."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.left = nn.Conv2d(16, 16, 3, padding=1)
        self.right = nn.Conv2d(16, 16, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.gate = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 8)
        self.classify = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.left(x)
        x += self.right(x)
        x = self.depthwise(x)
        x = x * torch.sigmoid(self.gate(nn.functional.adaptive_avg_pool2d(x, 1)))
        x = nn.functional.adaptive_avg_pool2d(x, 1)
        return self.classify(nn.functional.relu(self.head(x.flatten(1))))


class Dense(nn.Module):
    """Layers that read the outputs of all before them, side by side, normalised together."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first = nn.Conv2d(16, 24, 3, padding=1)
        self.norm = nn.BatchNorm2d(40)
        self.second = nn.Conv2d(40, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.last = nn.Conv2d(48, 16, 1)
        self.other = nn.Conv2d(48, 16, 1)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        a = torch.relu(self.stem(x))
        b = self.first(a)
        both = torch.relu(self.norm(torch.cat([a, b], 1)))
        c = self.depthwise(torch.cat((both, self.second(both)), dim=1))
        y, z = (nn.functional.adaptive_avg_pool2d(conv(c), 1).flatten(1) for conv in (self.last, self.other))
        return self.head(torch.cat([y, z], -1))


class Groups(nn.Module):
    """Convolutions with groups, in a chain and beside a plain one: channels stay within their group."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 1)
        self.grouped = nn.Conv2d(32, 64, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(64)
        self.finer = nn.Conv2d(64, 64, 1, groups=4)
        self.beside = nn.Conv2d(64, 64, 1)
        self.out = nn.Conv2d(64, 8, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.grouped(torch.relu(self.stem(x)))))
        return self.out(torch.relu(self.finer(x) + self.beside(x)))


class Awkward(nn.Module):
    """A shared layer, a reshape, a parameter, a spatial flatten, a concatenation of rows: nothing may be permuted."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 16, 1)
        self.b = nn.Conv2d(3, 16, 1)
        self.mix = nn.Conv2d(16, 16, 1)
        self.twice = nn.Conv2d(16, 16, 1)
        self.offset = nn.Parameter(torch.randn(1, 16, 1, 1))
        self.fc = nn.Linear(16 * 16, 32)
        self.out = nn.Linear(32, 16)

    def forward(self, x):
        x = self.mix(torch.cat([self.a(x), self.b(x)], 2)[:, :, :4])
        x = self.twice(self.twice(x)) + self.offset
        x = self.fc(torch.flatten(x, 1))
        return self.out(x.view(-1, 32))


def mlp():
    return nn.Sequential(
        nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(), nn.Linear(32, 8)
    )


def conv1d():
    return nn.Sequential(
        nn.Conv1d(4, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 3), nn.MaxPool1d(2), nn.Conv1d(16, 8, 1)
    )


class Norms(nn.Module):
    """Norms over channels and space, over space alone, a slope per channel, a mean over space, a view."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.whole, self.space, self.slope = nn.LayerNorm([16, 8, 8]), nn.LayerNorm([8, 8]), nn.PReLU(16)
        self.fc, self.out = nn.Linear(16, 32), nn.Linear(32, 8)
        for norm in (self.whole, self.space):
            nn.init.normal_(norm.weight)
        nn.init.normal_(self.slope.weight)

    def forward(self, x):
        x = self.b(self.slope(self.whole(self.a(x))))
        x = self.c(torch.relu(self.space(x))).mean((2, 3))
        return self.out(torch.relu(self.fc(x.view(x.size(0), -1))))


class Attends(nn.Module):
    """Words, encoder layers, attention of one's own with a residual, a mean over words, a head."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)
        self.one = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 8)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)

    def forward(self, ids):
        x = self.encoder(self.words(ids))
        x = self.norm(x + self.attention(x, x, x)[0])
        return self.head(self.one(x).mean(-2))


class Branches(nn.Module):
    """What cannot be traced as a whole: its parts can."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)])
        self.out = nn.Linear(16, 8)

    def forward(self, x):
        x = self.inner(x) if x.sum() > 0 else self.inner(-x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


MODELS = {
    "norms": (Norms, (2, 3, 8, 8)),
    "attention": (Attends, (3, 5)),
    "branches": (Branches, (2, 4, 16)),
    "small": (lambda: small_net(width=32), (2, 3, 8, 8)),
    "residual": (Residual, (2, 3, 8, 8)),
    "dense": (Dense, (2, 3, 8, 8)),
    "groups": (Groups, (2, 3, 8, 8)),
    "awkward": (Awkward, (2, 3, 4, 4)),
    "mlp": (mlp, (5, 16)),
    "conv1d": (conv1d, (2, 4, 20)),
}


def input_of(name, shape):
    return torch.randint(0, 50, shape) if name == "attention" else torch.randn(shape)


@pytest.mark.filterwarnings("ignore:the model cannot be traced")
@pytest.mark.parametrize("name", MODELS)
def test_permuting_changes_no_output_and_keeps_more(name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    x = input_of(name, shape)
    for _ in range(2):
        model(x)  # batch norms that are not the identity
    model.eval()
    plain = copy.deepcopy(model)
    before = model(x)
    permuted = AmpereScheduler(verbosity=0, allow_permutation=True, alignment=(8, 4))
    permuted.prepare_sparse_model(model)
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-4)
    straight = AmpereScheduler(verbosity=0, alignment=(8, 4))
    straight.prepare_sparse_model(plain)
    kept = []
    for scheduler, net in ((permuted, model), (straight, plain)):
        scheduler.init_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        kept.append(sum(float(layer.parameter.detach().abs().sum()) for layer in scheduler._masks.layers.values()))
    if name == "awkward":
        assert kept[0] == pytest.approx(kept[1])
    else:
        assert kept[0] > 1.005 * kept[1]


@pytest.mark.filterwarnings("ignore:the model cannot be traced")
@pytest.mark.parametrize("name", MODELS)
def test_any_order_of_a_free_space_changes_no_output(name):
    make, shape = MODELS[name]
    model = make()
    x = input_of(name, shape)
    model(x)
    model.eval()
    before = model(x)
    free = [space for space in find_spaces(model) if not space.fixed]
    assert (len(free) > 0) == (name != "awkward")
    for space in free:
        permute_space(space, torch.cat([b.start + torch.randperm(b.stop - b.start) for b in space.blocks()]))
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-4)


def test_a_fixed_space_says_why():
    reasons = [space.fixed for space in find_spaces(Awkward())]
    assert all(reasons)
    spatial = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Flatten(), nn.Linear(256, 8))
    assert "16 channels are read as 256" in [space.fixed for space in find_spaces(spatial)]
    assert find_spaces(nn.Sequential(nn.Linear(4, 4)))[0].fixed.startswith("placeholder")


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 8)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x


def test_a_model_that_cannot_be_traced_says_so_and_trains_on():
    scheduler = AmpereScheduler(verbosity=0, allow_permutation=True, alignment=(8, 16))
    with pytest.warns(UserWarning, match="which allow_permutation needs"):
        scheduler.prepare_sparse_model(Branching())
    scheduler.init_optimizer(torch.optim.SGD(scheduler._all[0].module.parameters(), lr=0.1))
    assert scheduler._masks.sparsity == 0.5


def test_what_runs_through_a_transformer_is_one_space():
    spaces = [space for space in find_spaces(Attends()) if not space.fixed]
    assert sorted(space.size for space in spaces) == [16, 32, 32, 32]  # the sum, and the inside of three layers


def test_a_model_that_cannot_be_traced_may_have_leaves():
    model = nn.Sequential(Branching(), nn.Linear(8, 8))
    AmpereScheduler(Setup(leaf_module=(Branching,)), verbosity=0, allow_permutation=True).prepare_sparse_model(model)
