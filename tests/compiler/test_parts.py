"""What cannot be captured whole is compiled in part; only wrong arguments raise."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import sparta
from compiler import nets
from sparta.errors import NameNotFoundError, ValueRangeError


class Deciding(nn.Module):
    """Its path depends on values."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nets.Mlp(outputs=32), nn.Linear(32, 8)

    def forward(self, x):
        y = self.first(x)
        if y.sum() > 0:
            y = y * 2
        return self.second(y)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


class Looking(nn.Module):
    """It reads a layer's weight beside calling it, and cannot be captured."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 8)

    def forward(self, x):
        y = self.linear(x) + self.linear.weight.sum()
        return y if float(y.detach().sum()) > 1e9 else -y


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 8)

    def forward(self, x):
        return self.linear(x) + torch.rand(8)


def test_a_path_by_values_leaves_the_modules_compiled(forced, tmp_path, capfd):
    model = nets.pruned(Deciding())
    fast = sparta.compile(model, torch.randn(4, 32), tune="off")
    assert capfd.readouterr().err == ""
    assert set(fast.parts) == {"first", "second"}
    assert "cannot be captured" in fast.report.notes[0]
    assert {layer.name for layer in fast.report.plan.sparse} >= {"first.second", "second"}
    fast.save(tmp_path / "parts.sparta")
    loaded = sparta.load(tmp_path / "parts.sparta", model=Deciding())
    for sign, size in ((1, 4), (-1, 4), (1, 9), (-1, 1)):
        x = sign * torch.rand(size, 32)
        torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(loaded(x), model(x).detach(), atol=1e-5, rtol=1e-4)
    fast.tune(torch.randn(40, 32))
    with pytest.raises(ValueRangeError, match="model="):
        sparta.load(tmp_path / "parts.sparta")
    with pytest.raises(ValueRangeError, match="first"):
        sparta.load(tmp_path / "parts.sparta", model=nn.Linear(2, 2))


def test_a_model_that_counts_its_calls_keeps_counting(forced):
    model, x = nets.pruned(Counting()), torch.randn(4, 32)
    fast = sparta.compile(model, x, tune="off")
    assert model.calls == 0
    for call in (1, 2, 3):
        torch.testing.assert_close(fast(x), model.linear(x).detach() * call, atol=1e-5, rtol=1e-4)
    assert model.calls == 0
    assert "calls" in fast.report.notes[0]


def test_a_module_whose_weight_others_read_stays(forced):
    model, x = nets.pruned(Looking()), torch.randn(4, 32)
    fast = sparta.compile(model, x, tune="off")
    torch.testing.assert_close(fast(x), model(x).detach())
    assert any("stays as it is" in note for note in fast.report.notes)


def test_randomness_in_forward_is_kept(forced):
    model, x = nets.pruned(Noisy()), torch.randn(4, 32)
    fast = sparta.compile(model, x, tune="off")
    results = []
    for run in (fast, model):
        torch.manual_seed(3)
        results.append(run(x).detach())
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


def test_wrong_arguments_raise():
    with pytest.raises(ValueRangeError, match="does not run on the example"):
        sparta.compile(nn.Linear(4, 2), torch.randn(3, 5), tune="off")
    with pytest.raises(NameNotFoundError):
        sparta.compile(nn.Linear(4, 2), torch.randn(3, 4), sparta.Spec({"no": sparta.TeSA.dense((2,))}), tune="off")
    with pytest.raises(ValueRangeError, match="call it once"):
        sparta.compile(nn.LazyLinear(2), torch.randn(3, 4), tune="off")


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor
    name: str = "pair"


class Structured(nn.Module):
    """Takes and returns what torch does not know by itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, batch):
        left, right = (batch.left, batch.right) if isinstance(batch, Pair) else batch.values()
        return Pair(self.linear(left), right + 1)


def test_data_classes_dicts_and_lists_are_arguments(forced, tmp_path):
    model = nets.pruned(Structured())
    given = Pair(torch.randn(4, 32), torch.randn(4))
    fast = sparta.compile(model, (given,), tune="off")
    found, expected = fast(given), model(given)
    assert type(found) is Pair
    torch.testing.assert_close(found.left, expected.left.detach(), atol=1e-5, rtol=1e-4)
    fast = sparta.compile(model, {"a": given.left, "b": given.right}, tune="off")
    torch.testing.assert_close(fast({"a": given.left, "b": given.right}).left, found.left)
    fast.save(tmp_path / "model.sparta")
    script = (
        "import sys, torch, sparta; fast = sparta.load(sys.argv[1]);"
        "r = fast({'a': torch.ones(2, 32), 'b': torch.ones(2)}); print(tuple(r.left.shape), r.name)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model.sparta")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "(2, 32) pair"


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, mask=None, scale=2.0):
        y = self.linear(x) * scale
        return y if mask is None else y * mask


def test_arguments_with_defaults_may_be_left_out(forced, tmp_path):
    model, x = nets.pruned(Optional()), torch.randn(4, 32)
    fast = sparta.compile(model, {"x": x, "mask": None}, tune="off")
    fast.save(tmp_path / "model.sparta")
    for run in (fast, sparta.load(tmp_path / "model.sparta")):
        for found in (run(x), run(x, None), run(x=x, scale=2.0), run(x, None, 2.0)):
            torch.testing.assert_close(found, model(x).detach(), atol=1e-5, rtol=1e-4)
        with pytest.raises(ValueRangeError, match="scale"):
            run(x, None, 3.0)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_weights_that_are_computed_are_folded_and_lowered(forced):
    model, x = nets.Mlp().eval(), torch.randn(4, 32)
    for layer in (model.first, model.second):
        prune.ln_structured(layer, "weight", 0.5, n=1, dim=0)
    parametrize.register_parametrization(model.last, "weight", Halved())
    before = dict(model.state_dict())
    fast = sparta.compile(model, x, tune="off")
    assert {layer.name for layer in fast.report.plan.sparse}
    torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-4)
    assert before.keys() == model.state_dict().keys()
    spec = sparta.Spec({"first.weight_orig": sparta.TeSA.from_mask(model.first.weight_mask != 0)})
    torch.testing.assert_close(sparta.compile(model, x, spec, tune="off")(x), model(x).detach(), atol=1e-5, rtol=1e-4)


class Standardised(nn.Conv2d):
    """A convolution whose rows are brought to one mean and variance at each call, as in NF-ResNets."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x):
        rows, scale = self.weight.reshape(1, self.out_channels, -1), (self.gain * 0.7).view(-1)
        weight = nn.functional.batch_norm(rows, None, None, scale, training=True, momentum=0.0)
        return nn.functional.conv2d(x, weight.reshape_as(self.weight), self.bias)


def test_weights_that_the_forward_computes_are_cut(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Standardised(3, 16, 3), nn.ReLU(), Standardised(16, 16, 3), nn.ReLU(), Standardised(16, 4, 1))
    masks = {name: torch.ones_like(model[name].weight, dtype=torch.bool) for name in (0, 2)}
    masks[0][:6], masks[2][4:10] = False, False
    with torch.no_grad():
        model[0].bias[:6], model[2].bias[4:10] = 0, 0
    spec = sparta.Spec({f"{name}.weight": sparta.TeSA.from_mask(mask) for name, mask in masks.items()})
    x, before = torch.randn(2, 3, 8, 8), dict(model.state_dict())
    by_spec = sparta.compile(model.eval(), x, spec, tune="off")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    spec.apply(model)
    by_zeros = sparta.compile(model, x, tune="off")
    by_zeros.save(tmp_path / "model.sparta")
    for fast in (by_spec, by_zeros, sparta.load(tmp_path / "model.sparta")):
        assert [plan.shape for plan in fast.report.plan.layers] == [(10, 3, 3, 3), (10, 10, 3, 3), (4, 10, 1, 1)]
        for images in (x, torch.randn(3, 3, 6, 9)):
            torch.testing.assert_close(fast(images), model(images).detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.optim.swa_utils.AveragedModel])
def test_wrapped_models_are_unwrapped(forced, wrap):
    model, x = nets.pruned(nets.Mlp()), torch.randn(4, 32)
    fast = sparta.compile(wrap(model), x, tune="off", inductor=False)
    torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-4)
    assert not any("module." in layer.name for layer in fast.report.plan.layers)


class Repeated(nn.Module):
    """One layer, called three times, whose constants differ from call to call."""

    def __init__(self):
        super().__init__()
        self.inp, self.body, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.inp(x)
        for _ in range(3):
            x = x + nn.functional.gelu(self.body(x))
        return self.out(x)


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.b(self.a(x).relu()).float()


@pytest.mark.parametrize(("kind", "error"), [(Repeated, 1e-5), (Cast, 5e-2)])
def test_layers_called_again_and_casts_inside_forward(kind, error):
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(5, 16)
    with torch.no_grad():
        for layer in model.children():
            layer.weight[: layer.weight.shape[0] // 2] = 0
    fast = sparta.compile(model, torch.randn(2, 16), tune="off")
    torch.testing.assert_close(fast(x), model(x).detach(), atol=error, rtol=error)


def test_a_step_that_fails_becomes_a_line(monkeypatch):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("sparta.compiler.job.derive", broken)
    model, x = nets.pruned(nets.Mlp()), torch.randn(4, 32)
    fast = sparta.compile(model, x, tune="off")
    torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-4)
    assert any("planted" in note for note in fast.report.notes)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:the model takes PyTorch's fast path")
def test_an_encoder_with_padding_is_compiled(forced, nested):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    model = nets.pruned(nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested))
    x, padded = torch.randn(3, 6, 32), torch.zeros(3, 6, dtype=torch.bool)
    padded[1, 4:] = True
    fast = sparta.compile(model, {"src": x, "src_key_padding_mask": padded}, tune="off")
    assert isinstance(fast, sparta.compiler.CompiledModel)
    with torch.no_grad():
        for size in (3, 1, 2):
            given = {"src": x[:size], "src_key_padding_mask": padded[:size]}
            found, expected = fast(**given), model(**given)
            torch.testing.assert_close(found[~padded[:size]], expected[~padded[:size]], atol=1e-5, rtol=1e-4)


class Memory:
    """What a model hands on to its next call, of a class that torch does not know."""

    def __init__(self, values):
        self.layers = [Entry(values)]


class Entry:
    def __init__(self, values):
        self.values, self.places = values, range(len(values))


class Remembering(Deciding):
    def forward(self, x):
        return {"y": super().forward(x), "memory": Memory(2 * x)}


class Config:
    use_cache = True


class Tied(Deciding):
    """A model with a cache, which reads a layer's weight only without it."""

    def __init__(self):
        super().__init__()
        self.config = Config()

    def forward(self, x):
        y = super().forward(x)
        return y if self.config.use_cache else y @ self.second.weight


def test_parts_are_tried_without_a_cache_too(forced):
    model, x = nets.pruned(Tied()), torch.randn(4, 32)
    fast = sparta.compile(model, x, tune="off")
    assert set(fast.parts) == {"first"}
    for use_cache in (True, False):
        model.config.use_cache = fast.model.config.use_cache = use_cache
        torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-4)


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 32)

    def forward(self, count):
        return self.table(torch.arange(count))


class Sized(Deciding):
    """A module of it is called with a size as a number."""

    def __init__(self):
        super().__init__()
        self.places = Places()

    def forward(self, x):
        return super().forward(x + self.places(x.shape[0]))


def test_a_size_as_a_number_is_not_fixed(forced):
    model = nets.pruned(Sized())
    fast = sparta.compile(model, torch.randn(4, 32), tune="off")
    assert {"first", "second"} <= set(fast.parts)
    assert "places" not in fast.parts
    for size in (4, 9):
        x = torch.randn(size, 32)
        torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-4)


def test_objects_inside_results_are_looked_into(forced):
    model, x = nets.pruned(Remembering()), torch.randn(4, 32)
    fast = sparta.compile(model, x, tune="off")
    assert fast.report.certificate.passed
    assert set(fast.parts) == {"first", "second"}
    found = fast(x)
    torch.testing.assert_close(found["y"], model(x)["y"].detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["memory"].layers[0].values, 2 * x)


class Ticking(Deciding):
    """Returns something else at every call, by state that is outside of it."""

    ticks = 0

    def forward(self, x):
        Ticking.ticks += 1
        return super().forward(x) * Ticking.ticks


def test_a_model_that_does_not_repeat_itself_runs_as_it_is():
    fast = sparta.compile(nets.pruned(Ticking()), torch.randn(4, 32), tune="off")
    assert not fast.report.certificate.passed
    assert not fast.parts
    assert "does not repeat itself" in fast.report.notes[-1]
    assert fast(torch.randn(4, 32)).shape == (4, 8)


class Unordered(nn.Module):
    """Modules whose names are in another order than they are made, and are many."""

    def __init__(self):
        super().__init__()
        self.z, self.a = nn.Linear(32, 32), nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(11))

    def forward(self, x):
        for layer in (self.z, self.a, *self.layers):
            x = layer(x) if float(x.sum()) < 1e9 else -layer(x)
        return x


def test_many_parts_come_back_in_their_places(tmp_path):
    model, x = nets.pruned(Unordered()), torch.randn(4, 32)
    fast = sparta.compile(model, x, tune="off")
    assert len(fast.parts) == 13
    fast.save(tmp_path / "parts.sparta")
    torch.testing.assert_close(sparta.load(tmp_path / "parts.sparta", model=Unordered())(x), fast(x))
