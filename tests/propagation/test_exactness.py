"""What each rule claims, on graphs small enough to know the answer by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from propagation.random_graphs import Witness
from sparta import Spec, TeSA
from sparta.propagation import propagate, rule
from sparta.propagation.compact import masked_tensors
from sparta.propagation.constants import Known
from sparta.tesa.grid import Grid


class Calls(nn.Module):
    """A function of x and of some parameters, as a module."""

    def __init__(self, function, **tensors):
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, *args):
        return self.function(self, *args)


def states(result, name):
    return {**result.activations, **result.spec}[name].states()


def honest(result, *inputs):
    """Run with every claim checked and every dead element overwritten; returns the number of constants checked."""
    masked = masked_tensors(result.captured, result.facts)
    with torch.no_grad():
        expected = result.captured.module(*inputs)
        plain = Witness(result, masked, scramble=False)
        plain.run(*inputs)
        scrambled = Witness(result, masked, scramble=True).run(*inputs)
    flat = torch.utils._pytree.tree_leaves
    for one, two in zip(flat(scrambled), flat(expected), strict=True):
        torch.testing.assert_close(one, two)
    return plain.checked


def test_a_zero_row_with_a_bias_is_the_constant_bias_and_not_zero():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
    result = propagate(model, torch.randn(4, 3))
    hidden = result.activations["linear"]
    assert torch.equal(hidden.values()[:, 1], model[0].bias[1].double().expand(4))
    assert hidden.count("live") == 4
    small = result.compact()
    assert small.get_parameter("1.weight").shape == (2, 1)
    assert not torch.equal(small.get_parameter("1.bias"), model[1].bias)


@pytest.mark.parametrize(
    "function",
    [torch.sigmoid, torch.exp, functional.gelu, functional.hardswish, torch.cos, functional.silu, functional.softplus],
)
def test_functions_of_a_constant_are_what_the_function_says(function):
    layer = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        layer.weight[0] = 0
    model = nn.Sequential(layer, Calls(lambda _, x: function(x)), nn.Linear(2, 2))
    result = propagate(model, torch.randn(4, 3))
    name = next(n for n in result.activations if n.startswith(function.__name__))
    assert torch.equal(result.activations[name].values()[:, 0], function(torch.zeros(4)).double())
    result.compact()


def test_a_zero_column_makes_the_producing_row_and_bias_dead():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight[:, 2] = 0
    result = propagate(model, torch.randn(5, 3))
    assert states(result, "0.weight").eq(2).nonzero()[:, 0].unique().tolist() == [2]
    assert states(result, "0.bias").tolist() == [0, 0, 2, 0]


def test_a_column_that_meets_a_zero_input_is_dead():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
    assert states(propagate(model, torch.randn(5, 3)), "2.weight").eq(2).nonzero()[:, 1].unique().tolist() == [1]


def test_of_two_zero_factors_one_is_kept():
    model = Calls(lambda m, x: (x * m.a) * (x * m.b), a=torch.tensor([0.0, 1, 0]), b=torch.tensor([0.0, 0, 1]))
    x = torch.randn(4, 3)
    result = propagate(model, x)
    assert honest(result, x) > 0
    assert propagate(model, x, assume_finite=False).spec["a"].count("dead") == 0


def test_zero_times_minus_infinity_is_not_zero():
    def function(m, x):
        return (x * m.zero) * torch.full((2,), -torch.inf)

    model = Calls(function, zero=torch.zeros(2))
    result = propagate(model, torch.randn(3, 2))
    assert result.activations["mul_1"].values().isnan().all()


def test_without_the_finite_assumption_zero_weights_prove_nothing():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
    result = propagate(model, torch.randn(4, 3), assume_finite=False)
    assert result.activations["linear"].count("live") == 8


def test_batch_norm_moves_a_constant():
    model = nn.Sequential(nn.Conv1d(2, 3, 1, bias=False), nn.BatchNorm1d(3)).eval()
    with torch.no_grad():
        model[0].weight[0] = 0
        model[1].weight[2] = 0
        for tensor in (model[1].running_mean, model[1].bias):
            tensor.normal_()
    x = torch.randn(4, 2, 5)
    result = propagate(model, x, Spec.from_zeros(model, include=["*.weight"]))
    out = result.activations["batch_norm"]
    assert out.states()[:, 0].eq(1).all()
    assert out.states()[:, 2].eq(1).all()
    torch.testing.assert_close(out.values()[0, 0, 0].float(), model(x)[0, 0, 0])
    assert states(result, "0.weight")[2].eq(2).all()
    assert honest(result, x) > 0


def test_a_layer_norm_observes_all_and_knows_only_what_its_scale_erases():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4))
    with torch.no_grad():
        model[0].weight[1] = 0
        model[1].weight[3] = 0
        model[1].bias.normal_()
    x = torch.randn(5, 3)
    result = propagate(model, x)
    assert result.activations["layer_norm"].states()[0].tolist() == [0, 0, 0, 1]
    assert result.spec["0.weight"].count("dead") == 0
    assert result.compact().get_parameter("0.weight").shape == (4, 3)
    assert honest(result, x) > 0


def test_a_constant_channel_stays_where_padding_would_make_it_differ():
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 3, padding=1))
    with torch.no_grad():
        model[0].weight[1] = 0
    result = propagate(model, torch.randn(2, 2, 5, 5))
    assert result.compact().get_parameter("1.weight").shape == (2, 3, 3, 3)
    assert "cannot fold" in result.why("0.weight")
    model[1].padding = (0, 0)
    assert propagate(model, torch.randn(2, 2, 5, 5)).compact().get_parameter("1.weight").shape == (2, 2, 3, 3)


@pytest.mark.parametrize("layer", [nn.ConvTranspose1d, nn.Conv1d])
def test_groups_lose_equal_channels(layer):
    model = nn.Sequential(nn.Conv1d(4, 8, 1, bias=False), layer(8, 8, 3, groups=2), nn.Conv1d(8, 2, 1))
    with torch.no_grad():
        model[0].weight[[0, 1, 4]] = 0
        model[2].weight[:, 6:] = 0
    x = torch.randn(2, 4, 6)
    result = propagate(model, x)
    small = result.compact()
    assert small.get_parameter("0.weight").shape == (7 - 1, 4, 1)  # only channel 0 of each group can go together
    torch.testing.assert_close(small(x), model(x))


def test_softmax_gives_a_masked_logit_no_weight():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("hidden", torch.tensor([False, True, False]))
            self.scores, self.values = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.values(torch.softmax(self.scores(x).masked_fill(self.hidden, -torch.inf), -1))

    model, x = Masked(), torch.randn(5, 4)
    result = propagate(model, x)
    assert result.activations["softmax"].states()[0].tolist() == [0, 1, 0]
    assert states(result, "scores.weight")[1].eq(2).all()
    assert states(result, "values.weight")[:, 1].eq(2).all()
    assert honest(result, x) > 0


def test_where_takes_the_branch_that_is_known():
    def function(m, x):
        return torch.where(torch.tensor([True, False, True]), x * m.a, x * m.b)

    model, x = Calls(function, a=torch.rand(3), b=torch.rand(3)), torch.randn(4, 3)
    result = propagate(model, x)
    assert states(result, "a").tolist() == [0, 2, 0]
    assert states(result, "b").tolist() == [2, 0, 2]
    honest(result, x)


def shape_ops(m, x):
    y = x * m.scale
    y = y.reshape(2, 3, 2, 2).permute(0, 2, 1, 3).flatten(1)
    first, second = y.chunk(2, 1)
    z = torch.cat([second, first[:, 1:4], first[:, ::2], first[:, 5:6].expand(2, 4)], 1)
    z = torch.stack([z.flip(1), z.roll(1, 1)], 2).select(2, 0).unsqueeze(1).squeeze(1)
    z = functional.pad(z, (1, 2)) + torch.zeros_like(functional.pad(z, (1, 2)))
    return torch.einsum("bk,nk->bn", z[:, :16], m.weight), z.sum(1), z[:, 2:7].mean(-1, keepdim=True), z.amax(1)


def test_views_slices_and_sums_carry_facts_exactly():
    weight = torch.randn(3, 16)
    weight[:, ::3] = 0
    scale = torch.randn(12)
    scale[4:9] = 0
    model, x = Calls(shape_ops, scale=scale, weight=weight), torch.randn(2, 12)
    result = propagate(model, x, Spec.from_zeros(model, include="*"))
    assert honest(result, x) > 10
    result.compact()


def test_an_op_without_a_rule_is_conservative_and_named():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Calls(lambda _, x: torch.cumprod(x, 1)), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
    result = propagate(model, torch.randn(2, 3))
    assert result.activations["cumprod"].count("live") == 6
    assert any("cumprod" in where for where in result.facts.notes)
    assert "cumprod" in str(result)
    assert result.compact().get_parameter("0.weight").shape == (3, 3)


def test_users_add_rules_for_their_own_ops():
    @torch.library.custom_op("sparta_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x):
        return torch.empty_like(x)

    op = torch.ops.sparta_test.double.default

    @rule("constants", op)
    def doubled(call):
        known = call.known(call["x"])
        return Known(known.const, Grid(known.shape, known.value.block, known.value.cells * 2))

    @rule("observed", op)
    def doubled_observed(call, seen):
        return [(call["x"], seen)]

    @rule("axes", op)
    def doubled_axes(call, axes):
        axes.broadcast(call["x"], call.node)

    model = nn.Sequential(nn.Linear(3, 4), Calls(lambda _, x: torch.ops.sparta_test.double(x)), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
        model[2].weight[:, 2] = 0
    small = propagate(model, torch.randn(2, 3)).compact()
    assert small.get_parameter("0.weight").shape == (2, 3)


def test_facts_that_would_grow_too_large_are_given_up_and_said():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[::3] = 0
    result = propagate(model, torch.randn(2, 8), cell_limit=8)
    assert any("limit" in text for text in result.facts.notes.values())
    result.compact()


def test_knowledge_along_a_dynamic_dim_is_dropped():
    def function(m, x):
        return x * torch.cat([torch.zeros(1, 3), torch.ones(x.shape[0] - 1, 3)]) * m.scale

    model, x = Calls(function, scale=torch.tensor([1.0, 0.0, 2.0])), torch.randn(4, 3)
    dynamic = {"args": ({0: torch.export.Dim.DYNAMIC},)}
    result = propagate(model, x, Spec({"scale": TeSA.from_mask(torch.tensor([True, False, True]))}), dynamic)
    out = result.activations["mul_1"]
    assert out.states()[:, 1].eq(1).all()
    assert out.count("live") == 8


def test_a_bit_format_reaches_what_only_moves_the_elements():
    model = Calls(lambda m, x: (x @ m.weight.t()[:, :2]).relu(), weight=torch.randn(3, 4))
    given = TeSA.dense((3, 4)).with_format("int4", scale=0.1)
    result = propagate(model, torch.randn(2, 4), Spec({"weight": given}))
    formats = {name: str(tesa.format) for name, tesa in result.activations.items()}
    assert formats["t"] == formats["slice_1"] == "int4" == str(result.spec["weight"].format)
    assert formats["matmul"] == formats["relu"] == "fp32"


def test_repeated_heads_go_together():
    class Repeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(12, 2)

        def forward(self, x):
            heads = self.first(x).unflatten(1, (3, 2)).repeat_interleave(2, 1)
            return self.last(torch.tanh(heads).flatten(1))

    model, x = Repeats(), torch.randn(5, 4)
    with torch.no_grad():
        model.last.weight[:, 4:8] = 0
        model.last.weight[:, 8:10] = 0
    result = propagate(model, x)
    assert honest(result, x) == 0
    small = result.compact()
    assert small.get_parameter("first.weight").shape == (4, 4)
    assert small.get_parameter("last.weight").shape == (2, 8)


def test_infinite_constants_are_not_folded():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(3, 2)
            self.register_buffer("hidden", torch.tensor([False, True, False]))

        def forward(self, x):
            return self.last(torch.exp(x).masked_fill(self.hidden, torch.inf))

    result = propagate(Masked(), torch.randn(2, 3))
    assert result.compact().get_parameter("last.weight").shape == (2, 3)


def zeroed(*shape, rows=(), columns=()):
    """Return a random tensor with some rows and columns of zeros."""
    tensor = torch.randn(*shape)
    tensor[list(rows)] = 0
    if columns:
        tensor[:, list(columns)] = 0
    return tensor


def attend(m, x):
    q, k, v = (x @ w for w in (m.q, m.k, m.v))
    q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return y.transpose(1, 2).flatten(2) @ m.o


FAMILIES = {
    "addmm": (lambda m, x: torch.addmm(m.b, torch.tanh(torch.addmm(m.a, x, m.w)), m.v), (5, 4)),
    "prelu": (lambda m, x: functional.prelu(x @ m.w + m.a, m.s) @ m.v, (5, 4)),
    "group norm": (lambda m, x: functional.group_norm((x @ m.w)[:, :, None], 2, m.g, m.a)[..., 0] @ m.v, (5, 4)),
    "instance norm": (lambda m, x: functional.instance_norm((x @ m.w).mT, weight=m.g, bias=m.a).mT @ m.v, (2, 5, 4)),
    "rms norm": (lambda m, x: functional.rms_norm(x @ m.w, (6,), m.g) @ m.v, (5, 4)),
    "interpolate": (lambda m, x: functional.interpolate((x @ m.w).mT, scale_factor=2).mT @ m.v, (2, 5, 4)),
    "rows": (lambda m, x: (x @ m.w).index_select(0, torch.tensor([2, 0])) @ m.v, (5, 4)),
    "lookup": (lambda m, x: torch.sigmoid(functional.embedding(x.argmax(1), m.w)) @ m.v, (5, 4)),
    "sum": (lambda m, x: torch.sigmoid(x @ m.w).sum(-1) + torch.sigmoid(x @ m.w + 1).mean(1), (5, 4)),
    "division": (lambda m, x: ((x @ m.w) / (1 + (x @ m.w).abs().sum(1, keepdim=True))) @ m.v, (5, 4)),
    "turned": (lambda m, x: (torch.tanh(x @ m.w).unflatten(1, (3, 2)).permute(2, 1, 0).T.mT.flatten(1)) @ m.v, (5, 4)),
    "grouped queries": (attend, (2, 3, 4)),
}


@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_honest_and_compacts(family):
    function, shape = FAMILIES[family]
    tensors = {
        "w": zeroed(4, 6, columns=[1, 3, 4, 5]),
        "v": zeroed(6, 3, rows=[2]),
        "s": torch.rand(6),
        "b": torch.randn(3),
        "a": torch.randn(6),
        "g": torch.tensor([1.0, 2, 0, 1, 1, 0]),
        "q": zeroed(4, 8),
        "o": zeroed(8, 3, rows=range(4)),
        "k": zeroed(4, 4),
    }
    if family == "grouped queries":
        tensors["v"] = zeroed(4, 4)
    model = Calls(function, **tensors)
    x = torch.randn(*shape)
    result = propagate(model, x)
    honest(result, x)
    small = result.compact()
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
    data = result.to_dict()
    norms = {"group norm", "rms norm"}
    assert family in norms or data["parameters_compact"] < data["parameters"]
