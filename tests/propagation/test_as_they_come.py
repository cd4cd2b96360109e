"""Models as people write them: what they return, how they are wrapped, kept and called at other sizes."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import pairs
import sparta
from sparta import Spec, TeSA
from sparta.errors import CheckError, ShapeError, ValueRangeError
from sparta.propagation import CompactModel, capture, compact, propagate, prune_structured
from sparta.propagation.caches import without_caches
from sparta.propagation.sizes import Sizes, _Guard, _only_of_one


def same(small, model, *inputs, **kwargs):
    with torch.no_grad():
        torch.testing.assert_close(small(*inputs, **kwargs), model(*inputs, **kwargs), rtol=1e-4, atol=1e-5)


def mlp(zeros=5):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    with torch.no_grad():
        model[0].weight[:zeros] = 0
    return model


# ---------------------------------------------------------------------- values that are no plain activations


def test_a_mask_of_booleans():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            return self.a(x).masked_fill((torch.arange(8) > 3).float().expand(2, 8).bool(), 0.0)

    model = Masked().eval()
    small = compact(model, torch.randn(2, 8))
    same(small, model, torch.randn(2, 8))
    result = propagate(model, torch.randn(2, 8))
    assert result.spec["a.weight"].count("dead") == 4 * 8


class Overwritten(nn.Module):
    """Tensors of other shapes and dtypes are written over parts of others, and over whole ones."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        y = self.a(x).relu()
        wide = torch.zeros_like(y, dtype=torch.float64)
        part = wide[:, 2:]
        part[:] = y[:1, 2:]
        y = y.clone()
        y[:, 3] = 2.0
        y.copy_(2 * y)
        return self.b(y + wide.float())


def test_what_is_written_over_a_tensor_is_a_value(tmp_path):
    model, x = Overwritten().eval(), torch.randn(3, 4)
    with torch.no_grad():
        model.a.weight[:2], model.a.bias[:2] = 0, 0
    small = compact(model, x)
    fast = sparta.compile(model, x, tune="off")
    fast.save(tmp_path / "model.sparta")
    for run in (small, fast, sparta.load(tmp_path / "model.sparta")):
        same(run, model, x)
        same(run, model, torch.randn(5, 4))


class Checking(nn.Module):
    """A model that looks at values before it goes on, as XLM does with lengths."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, lengths):
        torch._check(lengths.max().item() <= x.shape[1])
        return self.b(self.a(x).relu())


def test_checks_of_values_are_no_part_of_a_graph(tmp_path):
    model, x, lengths = Checking().eval(), torch.randn(3, 5, 4), torch.tensor([2, 5, 1])
    fast = sparta.compile(model, (x, lengths), tune="off")
    fast.save(tmp_path / "model.sparta")
    for run in (compact(model, (x, lengths)), fast, sparta.load(tmp_path / "model.sparta")):
        same(run, model, x, lengths)


class Heads(nn.Module):
    """Attention whose result is viewed as attention lays it out; something is written in place, as in SAM."""

    def __init__(self):
        super().__init__()
        self.q, self.v, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = x.clone()
        first = x[:, 0]
        first[:] = 1.0
        q, v = (layer(x).view(2, 5, 2, 8).transpose(1, 2) for layer in (self.q, self.v))
        return self.out(functional.scaled_dot_product_attention(q, q, v).transpose(1, 2).reshape(2, 5, 16))


def test_attention_of_another_width_may_have_another_layout():
    model, x = Heads().eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        for rows in (slice(0, 3), slice(8, 11)):
            model.v.weight[rows], model.v.bias[rows] = 0, 0
    small = compact(model, x)
    assert small.get_parameter("v.weight").shape == (10, 16)
    same(small, model, x)


class Coordinates(nn.Module):
    """A table of numbers that differ from position to position goes through a small network, as in Swin-V2."""

    def __init__(self, table, *, parameter=False):
        super().__init__()
        self.a, self.b = nn.Linear(table.shape[-1], 16), nn.Linear(16, 4)
        if parameter:
            self.t = nn.Parameter(table)
        else:
            self.register_buffer("t", table)

    def forward(self, x):
        return x + self.b(self.a(self.t).relu())


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("zeros", ["one", "a column", "a position", "all but one", "all"])
def test_a_table_with_some_zeros_keeps_the_columns_that_read_it(zeros, parameter):
    torch.manual_seed(0)
    table = torch.randn(7, 7, 3)
    where = {
        "one": (3, 3, 1),
        "a column": (slice(None), slice(None), 1),
        "a position": (2, 4),
        "all": slice(None),
    }
    if zeros == "all but one":
        table = torch.where(torch.arange(table.numel()).reshape(table.shape) == 50, table, 0.0)
    else:
        table[where[zeros]] = 0
    model = Coordinates(table, parameter=parameter).eval()
    small = compact(model, torch.randn(7, 7, 4))
    same(small, model, torch.randn(7, 7, 4))
    left = {"a column": 2, "all but one": 1, "all": 1}.get(zeros, 3)
    assert small.get_parameter("a.weight").shape[1] == left


def test_a_slope_without_dims():
    class Sloped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.slope = nn.Linear(8, 8), nn.Linear(8, 2), nn.Parameter(torch.tensor(0.25))
            with torch.no_grad():
                self.a.weight[:4] = 0

        def forward(self, x):
            return self.b(functional.prelu(self.a(x), self.slope))

    model = Sloped().eval()
    small = compact(model, torch.randn(2, 8))
    same(small, model, torch.randn(2, 8))
    assert small.get_parameter("b.weight").shape == (2, 4)
    assert prune_structured(model, torch.randn(2, 8), 0.5)[1].slots[0].after == 4


def test_rotary_embeddings_as_complex_numbers():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(8, 24)
            self.register_buffer("turn", torch.polar(torch.ones(6, 4), torch.randn(6, 4)))
            with torch.no_grad():
                self.q.weight[:5] = 0
                self.q.bias[:5] = 0

        def forward(self, x):
            rest, turned = self.q(x).split([16, 8], -1)
            pairs = torch.view_as_complex(turned.reshape(*turned.shape[:-1], 4, 2)) * self.turn
            return rest.sum(-1), torch.view_as_real(pairs).flatten(-2)

    model = Rotary().eval()
    small = compact(model, torch.randn(2, 6, 8))
    same(small, model, torch.randn(3, 6, 8))
    assert small.get_parameter("q.weight").shape == (19, 8)


# ---------------------------------------------------------------------- kept, copied, called at other sizes


def test_a_compact_model_is_saved_pickled_and_copied_like_any_other():
    model, x = mlp(), torch.randn(3, 4)
    small = compact(model, x)
    assert not small.training
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    pickled = pickle.loads(pickle.dumps(small))  # noqa: S301 - our own
    for other in (torch.load(file, weights_only=False), pickled, copy.deepcopy(small)):
        assert isinstance(other, CompactModel)
        assert other.mapping.keys() == small.mapping.keys()
        torch.testing.assert_close(other(x), small(x))
        same(other, model, torch.randn(7, 4))
        assert other.get_parameter("0.weight") is not small.get_parameter("0.weight")
        other(x).sum().backward()
    assert small.get_parameter("0.weight").grad is None


def test_a_nested_call_survives_pickling():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, pair, *, scale):
            return {"sum": self.a(pair[0]) * scale, "both": (pair[1], [self.a(pair[1])])}

    model, inputs = Nested().eval(), {"pair": (torch.randn(2, 4), torch.randn(3, 4)), "scale": torch.tensor(2.0)}
    small = pickle.loads(pickle.dumps(compact(model, inputs)))  # noqa: S301 - our own
    same(small, model, **inputs)


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
        self.head = nn.Linear(8, 2)
        with torch.no_grad():
            self.layers[0].weight[:4] = 0
            self.layers[0].bias[:4] = 0

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


@pytest.mark.parametrize("batch", [1, 2])
def test_any_batch_and_image_size(batch):
    model = Picture().eval()
    small = compact(model, torch.randn(batch, 3, 16, 16))
    assert small.get_parameter("layers.2.weight").shape[1] == 4
    for shape in ((1, 3, 16, 16), (5, 3, 31, 40), (2, 3, 7, 9)):
        same(small, model, torch.randn(shape))


def test_a_size_that_the_model_fixes_is_named():
    small = compact(mlp(), torch.randn(3, 4))
    with pytest.raises(ShapeError, match=r"a size of 5 in dim 1 of input.*4"):
        small(torch.randn(3, 5))
    with pytest.raises(ShapeError, match="dims"):
        small(torch.randn(3, 4, 4))
    fixed = compact(mlp(), torch.randn(3, 4), dynamic_shapes=None)
    with pytest.raises(ShapeError, match=r"a size of 7 in dim 0 of input.*3"):
        fixed(torch.randn(7, 4))
    with pytest.raises(ValueRangeError, match="dynamic_shapes"):
        propagate(mlp(), torch.randn(3, 4), dynamic_shapes="all")


def test_sizes_that_belong_together_are_checked_together():
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    small = compact(Sum(), (torch.randn(3, 4), torch.randn(3, 4)))
    same(small, Sum(), torch.randn(5, 6), torch.randn(5, 6))
    with pytest.raises(ShapeError, match="as in the other inputs"):
        small(torch.randn(5, 6), torch.randn(1, 6))


def test_relations_of_sizes_are_checked():
    class Pairs(nn.Module):
        def forward(self, x):
            return x.reshape(x.shape[0] // 2, 2, -1).sum(1) if x.shape[0] % 2 == 0 else x

    small = compact(Pairs(), torch.randn(4, 3))
    assert small(torch.randn(8, 3)).shape == (4, 3)
    with pytest.raises(ShapeError, match="Mod"):
        small(torch.randn(5, 3))


def test_a_relation_that_divides_by_zero_does_not_hold():
    sympy = pytest.importorskip("sympy")
    mod = pytest.importorskip("torch.utils._sympy.functions").Mod
    size = sympy.Symbol("s", integer=True, positive=True)
    sizes = Sizes([("x", (size,)), ("y", (2 * size,))], [_Guard(sympy.Eq(mod(7, size - 3), 1), "a remainder")])
    sizes(torch.randn(6), torch.randn(12))
    with pytest.raises(ShapeError, match="a remainder"):
        sizes(torch.randn(3), torch.randn(6))
    with pytest.raises(ShapeError, match="dim 0 of y"):
        sizes(torch.randn(6), torch.randn(6))


def test_remainders_of_numbers_below_zero_are_conditions_that_do_not_hold():
    sympy = pytest.importorskip("sympy")
    mod = pytest.importorskip("torch.utils._sympy.functions").Mod
    size = sympy.Symbol("s", integer=True, positive=True)
    condition = sympy.Eq(mod(size - 3, 4), 1)  # of a pooled image, as torch has it: no value for sizes below 3
    assert not _only_of_one(condition)
    sizes = Sizes([("x", (size,))], [_Guard(condition, "a remainder")])
    sizes(torch.randn(8))
    with pytest.raises(ShapeError, match="a remainder"):
        sizes(torch.randn(2))


def test_a_sum_along_a_free_dim_is_not_the_examples():
    class Counted(nn.Module):
        def forward(self, x):
            ones = torch.zeros_like(x).exp()
            return x + ones.sum(0) + ones.T @ ones

    model = Counted()
    small = compact(model, torch.randn(3, 3))
    same(small, model, torch.randn(3, 3))
    total = compact(nn.Sequential(Total()), torch.randn(3, 2))
    same(total, Total(), torch.randn(7, 2))


class Total(nn.Module):
    def forward(self, x):
        ones = torch.zeros_like(x).exp()
        return x.sum(0) * 0.5 + ones.sum(0) + (ones.T @ ones).sum(0)


def test_wrappers_are_taken_off():
    model, x = mlp(), torch.randn(3, 4)
    for wrapped in (
        nn.DataParallel(model),
        torch.compile(model, backend="eager"),
        torch.optim.swa_utils.AveragedModel(model),
    ):
        small = compact(wrapped, x)
        assert small.get_parameter("2.weight").shape == (2, 3)
        same(small, model, x)


# ---------------------------------------------------------------------- what is dead without any pruning


class Residual(nn.Module):
    """Blocks whose last norm starts at 0, and a head that this call does not read."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.inner = nn.Conv2d(3, 6, 1)
        self.unread = nn.Linear(3, 5)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x):
        heads = torch.stack([self.unread(x.mean((2, 3))), self.unread(x.amax((2, 3))) * 2])
        y = x + self.norm(self.conv(x))
        return self.inner(y), heads[1:]


def test_branches_that_start_dead_stop_nothing():
    model, x = Residual().eval(), torch.randn(2, 3, 5, 5)
    small = compact(model, x)
    same(small, model, x)
    assert small.get_parameter("conv.weight").shape[0] == 3 or small.get_parameter("conv.weight").numel() < 27
    pruned, report = prune_structured(model, x, 0.5)
    assert pruned.get_parameter("conv.weight").shape == (3, 3, 3, 3), "what is not chosen stays for training"
    assert report.parameters_compact <= report.parameters


def test_a_layer_that_the_spec_empties_is_still_an_error():
    model = mlp(zeros=0)
    spec = Spec({"2.weight": TeSA.from_mask(torch.zeros(2, 8, dtype=torch.bool))})
    with pytest.raises(ShapeError, match=r"nothing of '0\."):
        compact(model, torch.randn(3, 4), spec)
    small = compact(model, torch.randn(3, 4), spec, allow_empty=True)
    assert small.get_parameter("0.weight").shape == (1, 4)


# ---------------------------------------------------------------------- the model itself, not only its graph


def test_the_fast_path_of_encoder_layers_is_named():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    inputs = {"src": torch.randn(2, 5, 16), "src_key_padding_mask": padding}
    with pytest.warns(UserWarning, match="enable_nested_tensor=False"):
        small = compact(model, inputs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(small(**inputs)[~padding], model(**inputs)[~padding], rtol=1e-4, atol=1e-5)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    same(compact(plain, inputs), plain, **inputs)


def test_a_model_that_runs_differently_while_it_is_traced():
    class Sly(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) * (2.0 if torch.compiler.is_exporting() else 1.0)

    with pytest.raises(CheckError, match="captured graph"):
        compact(Sly(), torch.randn(2, 4))
    assert isinstance(propagate(Sly(), torch.randn(2, 4)).compact(check=False), CompactModel)


class Counting(nn.Module):
    """Draws noise, counts its calls and writes to its input."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        x.mul_(2)
        return self.a(x) + torch.randn_like(x) + self.calls


def test_noise_state_and_inputs_that_are_written_to():
    model, x = Counting().eval(), torch.randn(2, 4)
    before, state = x.clone(), torch.get_rng_state()
    compact(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, before)
    assert float(model.calls) == 0


# ---------------------------------------------------------------------- language models


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_language_model_by_its_default_call():
    model = llama()
    assert model.config.use_cache
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, :8] = 0
    ids = torch.randint(0, 32, (2, 6))
    small = compact(model, ids)
    assert model.config.use_cache, "the configuration is put back"
    assert small.get_parameter("model.layers.0.self_attn.k_proj.weight").shape == (8, 16), "no cache keeps its keys"
    for shape in ((2, 6), (1, 9), (4, 1)):
        ids = torch.randint(0, 32, shape)
        with torch.no_grad():
            torch.testing.assert_close(small(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert type(small(ids)) is type(model(ids))


def test_without_caches_is_for_a_while():
    model = llama()
    with without_caches(model):
        assert not model.config.use_cache
    with without_caches(model, active=False):
        assert model.config.use_cache
    assert capture(nn.Linear(2, 2), torch.randn(1, 2)).model is not None


# ---------------------------------------------------------------------- shuffled channels


class Shuffle(nn.Module):
    """ShuffleNet's unit: half of the channels go on, half through a branch, and both halves are interleaved."""

    def __init__(self, width):
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            *(nn.Conv2d(half, half, 1), nn.BatchNorm2d(half), nn.ReLU()),
            *(nn.Conv2d(half, half, 3, padding=1, groups=half), nn.BatchNorm2d(half), nn.Conv2d(half, half, 1)),
        )

    def forward(self, x):
        first, second = x.chunk(2, 1)
        y = torch.cat([first, self.branch(second)], 1)
        b, c, h, w = y.shape
        return y.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


def test_a_channel_shuffle_can_be_pruned():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), Shuffle(16), Shuffle(16), nn.Conv2d(16, 4, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    small, report = prune_structured(model, x, 0.5)
    assert small(x).shape == (2, 4, 6, 6)
    assert report.parameters_compact < 0.8 * report.parameters
    assert sparta.prune_structured(model, x, 0.5, round_to=2)[1].parameters_compact <= report.parameters


def test_a_model_that_trains_in_several_processes():
    assert "all the same" in pairs.run("propagation.one_process")
