"""Rules for recurrent networks, Fourier transforms, lengths, running sums and einsums over several dims."""

import pytest
import torch
from torch import nn

from sparta.propagation import compact, propagate, prune_structured


def same(small, model, *inputs):
    with torch.no_grad():
        torch.testing.assert_close(small(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


class Recurrent(nn.Module):
    def __init__(self, kind, *, layers=2, both=True, bias=True, states=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.body = getattr(nn, kind)(6, 8, layers, bias=bias, bidirectional=both, batch_first=True)
        self.out = nn.Linear(16 if both else 8, 3)
        self.states = states

    def forward(self, x):
        y, last = self.body(self.first(x).relu())
        return (self.out(y), last) if self.states else self.out(y)


def silence(network, units, gates, candidate):
    """Set to zero what could move some units."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            rows = parameter.reshape(gates, -1, *parameter.shape[1:])
            rows[candidate, units] = 0
            if "bias" in name:
                rows[candidate, units] = 0


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "gates", "candidate"), [("LSTM", 4, 2), ("GRU", 3, 2), ("RNN", 1, 0)])
def test_units_that_nothing_moves_go(kind, gates, candidate, both, bias):
    model = Recurrent(kind, both=both, bias=bias).eval()
    silence(model.body, [1, 4, 5], gates, candidate)
    small = compact(model, torch.randn(2, 4, 5))
    assert small.get_parameter("body.weight_hh_l0").shape == (gates * 5, 5)
    assert small.get_parameter("body.weight_ih_l1").shape == (gates * 5, 10 if both else 5)
    assert small.get_parameter("out.weight").shape == (3, 10 if both else 5)
    same(small, model, torch.randn(3, 7, 5))


def test_units_that_move_in_one_layer_stay_in_all():
    model = Recurrent("LSTM").eval()
    with torch.no_grad():
        for name, parameter in model.body.named_parameters():
            if "l0" in name:
                parameter.reshape(4, 8, *parameter.shape[1:])[2, :3] = 0
    small = compact(model, torch.randn(2, 4, 5))
    assert small.get_parameter("body.weight_hh_l0").shape == (32, 8)
    result = propagate(model, torch.randn(2, 4, 5))
    assert result.spec["body.weight_ih_l1"].count("dead") == 32 * 6, "what reads them is dead all the same"
    same(small, model, torch.randn(2, 4, 5))


def test_inputs_of_zero_and_inputs_that_no_one_reads():
    model = Recurrent("GRU").eval()
    with torch.no_grad():
        model.first.weight[:2] = 0
        model.first.bias[:2] = 0
        model.body.weight_ih_l0[:, 3] = 0
        model.body.weight_ih_l0_reverse[:, 3] = 0
    small = compact(model, torch.randn(2, 4, 5))
    assert small.get_parameter("body.weight_ih_l0").shape == (24, 3)
    assert small.get_parameter("first.weight").shape == (3, 5)
    same(small, model, torch.randn(2, 4, 5))


def test_last_states_and_given_states():
    model = Recurrent("LSTM", states=True).eval()
    silence(model.body, [0, 7], 4, 2)
    small = compact(model, torch.randn(2, 4, 5))
    same(small, model, torch.randn(2, 4, 5))

    class Started(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model.body

        def forward(self, x, h, c):
            return self.body(x, (h, c))[0]

    started, inputs = Started().eval(), (torch.randn(2, 4, 6), torch.randn(4, 2, 8), torch.randn(4, 2, 8))
    small = compact(started, inputs)
    assert small.get_parameter("body.weight_hh_l0").shape == (32, 8), "a state that is given moves every unit"
    same(small, started, *inputs)


def test_projections_are_left_alone():
    model = nn.LSTM(4, 8, proj_size=3, batch_first=True).eval()
    same(compact(model, torch.randn(2, 5, 4)), model, torch.randn(2, 5, 4))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_networks_are_pruned_by_units(kind):
    model = Recurrent(kind).eval()
    small, report = prune_structured(model, torch.randn(2, 4, 5), 0.5)
    assert small.get_parameter("body.weight_hh_l1_reverse").shape[1] == 4
    assert report.parameters_compact < 0.4 * report.parameters
    assert small(torch.randn(3, 6, 5)).shape == (3, 6, 3)


class Transformed(nn.Module):
    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.mix = nn.Linear(6, 8), nn.Linear(8, 6), mix
        with torch.no_grad():
            self.a.weight[:3] = 0
            self.a.bias[:3] = 0

    def forward(self, x):
        return self.b(self.mix(self.a(x)))


MIXES = {
    "fft": (lambda y: torch.fft.fft(y, dim=1).real, 5),
    "fft2 over the channels": (lambda y: torch.fft.fft2(y, dim=(1, 2)).real, 8),
    "rfft and back": (lambda y: torch.fft.irfft(torch.fft.rfft(y, dim=1) * (1 + 2j), n=y.shape[1], dim=1), 5),
    "fftn of the last dims": (lambda y: torch.fft.fftn(y, s=(4,), dim=(1,)).imag[:, :4], 5),
    "shift": (lambda y: torch.fft.fftshift(y, dim=(1,)), 5),
    "running sum": (lambda y: y.cumsum(1), 5),
    "running sum over the channels": (lambda y: y.cumsum(2), 8),
    "length of a channel": (lambda y: y * torch.linalg.vector_norm(y, dim=1, keepdim=True), 5),
    "length of all channels": (lambda y: y / torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True), 5),
    "largest": (lambda y: y * torch.linalg.vector_norm(y, ord=float("inf"), dim=(1, 2), keepdim=True), 5),
    "count": (lambda y: y * torch.linalg.vector_norm(y, ord=0, dim=2, keepdim=True), 8),
    "tiles": (lambda y: y.repeat(1, 2, 1)[:, :4] + y.repeat(1, 1, 2)[..., :8], 5),
    "tiles beside": (lambda y: y + y.repeat(1, 2, 1)[:, 2:6], 5),
    "windows": (
        lambda y: (
            torch.nn.functional.unfold(y.transpose(1, 2)[..., None], (3, 1), padding=(1, 0))
            .unflatten(1, (8, 3))
            .sum(2)
            .transpose(1, 2)
        ),
        5,
    ),
    "other names": (lambda y: torch.multiply(y, y[:, :1].expand_as(y)).reshape_as(y) - torch.negative(y).view_as(y), 5),
    "einsum over two dims": (lambda y: y * torch.einsum("btc,btc->b", y, y + 1)[:, None, None], 5),
    "triangles": (lambda y: y + (y.transpose(1, 2)[..., None] * y.mean(1)[..., None, None]).tril().sum(-1).mT, 5),
    "outer einsum": (lambda y: y + torch.einsum("bc,bt->btc", y[:, 0], y[:, :, 4]), 5),
    "einsum with dots": (lambda y: y * torch.einsum("...tc,...sc->...ts", y, y).sum(-1, keepdim=True), 5),
}


@pytest.mark.parametrize("name", MIXES)
def test_channels_of_zero_go_through(name):
    mix, left = MIXES[name]
    model = Transformed(mix).eval()
    small = compact(model, torch.randn(2, 4, 6))
    assert small.get_parameter("b.weight").shape == (6, left)
    same(small, model, torch.randn(2, 4, 6))
    same(small, model, torch.randn(3, 4, 6))


def test_an_einsum_of_heads_and_widths():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(2, 4, 3))
            with torch.no_grad():
                self.weight[1] = 0
                self.weight[:, 2] = 0

        def forward(self, x):
            return torch.einsum("bhd,hdo->bo", self.a(x).reshape(-1, 2, 4), self.weight)

    model = Heads().eval()
    small = compact(model, torch.randn(5, 6))
    assert small.get_parameter("weight").shape == (1, 3, 3)
    assert small.get_parameter("a.weight").shape == (3, 6)
    same(small, model, torch.randn(2, 6))


class Shuffled(nn.Module):
    """Channels that are moved between two convolutions."""

    def __init__(self, move, outputs):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.move = nn.Conv2d(3, 8, 1), nn.Conv2d(outputs, 2, 1), move

    def forward(self, x):
        return self.b(self.move(self.a(x)))


SHUFFLES = {
    "channels to pixels": (nn.PixelShuffle(2), 2, [4, 5, 6, 7], 1),
    "some pixels of a channel": (nn.PixelShuffle(2), 2, [4, 5], 2),
    "pixels to channels": (nn.PixelUnshuffle(2), 32, [1, 3], 24),
    "interleaved groups": (nn.ChannelShuffle(2), 8, [1, 2, 5, 6], 4),
    "a group that loses others": (nn.ChannelShuffle(2), 8, [0, 1], 8),
}


@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffles(name):
    move, outputs, zeros, left = SHUFFLES[name]
    model = Shuffled(move, outputs).eval()
    with torch.no_grad():
        model.a.weight[zeros] = 0
        model.a.bias[zeros] = 0
    small = compact(model, torch.randn(2, 3, 4, 4))
    assert small.get_parameter("b.weight").shape[1] == left
    same(small, model, torch.randn(3, 3, 6, 6))


@pytest.mark.parametrize("rank", [3, 4])
def test_attention_that_folds_the_batch_into_its_heads(rank):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=rank == 3).eval()
    with torch.no_grad():
        layer.self_attn.out_proj.weight[:, 4:8] = 0
    x = torch.randn(3, 5, 16)
    small = compact(layer, x)
    assert small.get_parameter("self_attn.in_proj_weight").shape == (36, 16)
    same(small, layer, torch.randn(2, 7, 16))


@pytest.mark.parametrize(("groups", "left"), [(12, 7), (4, 9), (2, 12), (1, 12)])
def test_a_group_norm_loses_groups_of_zeros_as_a_whole(groups, left):
    torch.manual_seed(0)
    first, norm, last = nn.Conv1d(3, 12, 5, bias=False), nn.GroupNorm(groups, 12), nn.Conv1d(12, 4, 3)
    model = nn.Sequential(first, norm, nn.GELU(), last).eval()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_()
        first.weight[[0, 1, 2, 5, 7]] = 0  # the first of four groups of three, and some of others
    x = torch.randn(2, 3, 30)
    result = propagate(model, x)
    small = result.compact()
    assert small.get_parameter("1.weight").shape == (left,)
    assert small.get_parameter("3.weight").shape == (4, left, 3)
    same(small, model, torch.randn(3, 3, 40))


def test_a_group_of_which_one_channel_is_read_stays():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 6, 1), nn.GroupNorm(2, 6), nn.Conv1d(6, 4, 1)).eval()
    with torch.no_grad():
        model[2].weight[:, [0, 1, 3, 4, 5]] = 0
    small = compact(model, torch.randn(2, 3, 8))
    assert small.get_parameter("0.weight").shape == (3, 3, 1)
    same(small, model, torch.randn(2, 3, 8))
