"""What lies between layers is compiled once for equal stretches, activations are rounded once, and results stay."""

import gc
import operator
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import sparta
from compiler import nets
from compiler.clocks import Clock
from sparta.compiler import job
from sparta.compiler.graph import program
from sparta.compiler.lower.scaled_linear import ScaledLinearLowering
from sparta.compiler.run.host import Host
from sparta.compiler.run.kernel_module import Fused, KernelModule
from sparta.compiler.run.rounding import rounded_tokens, traced_rounding, with_shared_rounding
from sparta.compiler.run.stages import calls_to_compile, staged, tuned
from sparta.compiler.session import Session
from sparta.compiler.variant import ORIGINAL
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.scaled_linear.inputs import InputRounding, RoundsInputs, shared_rounding
from sparta.specialize.scaled_linear.producers import rounded_gate, rounded_norm
from sparta.specialize.scaled_linear.spec import FP8, OP, rounded_weight, scaled_weight
from sparta.specialize.tuning.select import DENSE, Choice


class Block(nn.Module):
    """Gated layers beside a second branch, which stands after the layers that do not need it."""

    def __init__(self, width=16):
        super().__init__()
        self.gate, self.up, self.down, self.side = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        h = self.norm(x)
        y = self.down(functional.silu(self.gate(h)) * torch.tanh(self.up(h)))
        return x + y + torch.sigmoid(self.side(h)) * 0.5


def graph_of(model, x):
    return sparta.compile(model, x, tune="off", dynamic_shapes=None).graph


def compiled_with(graph, x):
    made = []

    def compiler(stretch):
        made.append(stretch)
        calls = []

        def call(*inputs):
            if not calls:
                warnings.warn("compiling", stacklevel=1)  # as Inductor does
            calls.append(stretch)
            return stretch(*inputs)

        return call

    run = staged(graph, compiler)
    with torch.no_grad():
        found, right = pytree.tree_leaves(run(x)), pytree.tree_leaves(graph(x))
    assert len(found) == len(right)
    assert all(torch.equal(one, two) for one, two in zip(found, right, strict=True))
    return made


def test_equal_stretches_are_compiled_once():
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    graph = graph_of(nn.Sequential(*[Block() for _ in range(3)]).eval(), x)
    made = compiled_with(graph, x)
    assert len(made) == 4  # the first norm, gates, sums with the norm of the next block, the last sums
    targets = [node.target for stretch in made for node in stretch.graph.nodes]
    assert torch.ops.aten.linear.default not in targets
    assert calls_to_compile(graph.graph) == sum(
        node.op == "call_function" for stretch in made for node in stretch.graph.nodes
    )


@pytest.mark.parametrize("shape", [(6, 32), (2, 6, 32)])
def test_networks_give_the_same(shape):
    x = torch.randn(shape)
    compiled_with(graph_of(nets.pruned(nets.Mlp()), x), x)


def test_stretches_of_other_constants_or_sizes_are_others():
    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 8)])

        def forward(self, x):
            for exponent, layer in zip((2.0, 3.0, 2.0, 2.0), self.layers, strict=True):
                x = torch.pow(layer(x), exponent)
            return x

    x = torch.randn(5, 8)
    graph = graph_of(Powers().eval(), x)
    assert len(compiled_with(graph, x)) == 2
    assert calls_to_compile(graph.graph) == 2


@pytest.mark.parametrize("tune", [False, True])
def test_what_is_compiled_lives_as_long_as_what_runs_it(tune, monkeypatch):
    """Dynamo forgets it when someone asks for that, and a CUDA graph goes on to replay kernels that were unloaded."""
    made = []

    class Compiled:
        def __init__(self, graph, patches):
            self.graph, self.patches = graph, patches

        def __call__(self, *inputs):
            return self.graph(*inputs)

    def compile_fx(graph, inputs, config_patches):
        compiled = Compiled(graph.forward, config_patches)
        made.append(weakref.ref(compiled))
        return compiled

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    x = torch.randn(3, 16)
    run = staged(graph_of(Block().eval(), x), tuned if tune else None)
    with torch.no_grad():
        run(x)
    torch._dynamo.reset()
    gc.collect()
    assert made
    assert all(compiled() is not None for compiled in made)
    assert all(("max_autotune" in compiled().patches) == tune for compiled in made)
    # Templates of PyTorch before 2.13 give wrong results for some convolutions larger than 1x1.
    assert all(compiled().patches.get("max_autotune_conv_backends", "ATEN") == "ATEN" for compiled in made)
    del run
    torch._dynamo.reset()
    gc.collect()
    assert all(compiled() is None for compiled in made)


@pytest.mark.parametrize(("tune", "competes"), [("full", True), ("quick", False)])
def test_all_that_inductor_can_try_is_tried_where_everything_is(tune, competes):
    session = Session(budget_s=0.01, tune=tune)
    started = job.Job.started(nets.pruned(nets.Mlp()), torch.randn(6, 32), None, None, (), session)
    session.in_graphs = True
    assert (Host.TUNED_GRAPH in started.contest(inductor=True)._hosts(ORIGINAL)) is competes
    session.in_graphs = False
    assert Host.TUNED_GRAPH not in started.contest(inductor=True)._hosts(ORIGINAL)


def test_views_alone_are_not_compiled():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x):
            return self.second(self.first(x).reshape(-1, 2, 4).transpose(0, 1))

    x = torch.randn(5, 8)
    assert not compiled_with(graph_of(Heads().eval(), x), x)


@pytest.mark.parametrize(("worth", "picked"), [(64.0, 1), (1e6, 0)])
def test_a_layer_picks_what_it_reads_only_where_moving_costs_little(worth, picked, monkeypatch):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 512), nn.Linear(64, 512)

        def forward(self, x):
            return self.first(x), self.second(x)

    model, x = Two().eval(), torch.randn(5, 64)
    model.second.weight.data[:, 16:48] = 0
    monkeypatch.setitem(program._MOVED, "cpu", worth)
    graph = graph_of(model, x)
    assert sum(node.target is torch.ops.aten.index_select.default for node in graph.graph.nodes) == picked
    for one, two in zip(pytree.tree_leaves(graph(x)), model(x), strict=True):
        torch.testing.assert_close(one, two.detach())


@pytest.mark.parametrize("host", [Host.INDUCTOR_GRAPH, Host.INDUCTOR])
def test_other_sizes_are_not_compiled_where_the_example_is_replayed(host, monkeypatch):
    model, compiled = nets.pruned(nets.Mlp()), []
    fast = sparta.compile(model, torch.randn(6, 32), tune="off")
    assert fast.general is not None
    fast.report = replace(fast.report, plan=replace(fast.report.plan, whole=replace(fast.report.plan.whole, host=host)))
    monkeypatch.setattr(torch, "compile", lambda module: compiled.append(module) or module)
    x = torch.randn(9, 32)
    torch.testing.assert_close(fast._by_size().made((x.shape,))(x)[0], model(x).detach(), rtol=1e-4, atol=1e-5)
    assert len(compiled) == (host is Host.INDUCTOR)


@pytest.mark.parametrize(("graphs", "many", "competes"), [(True, 1, True), (True, 10**6, False), (False, 1, False)])
def test_inductor_competes_where_graphs_are_replayed_and_much_lies_between_layers(graphs, many, competes, monkeypatch):
    monkeypatch.setattr(job, "_MANY_CALLS", many)
    session = Session(budget_s=0.01)
    started = job.Job.started(nets.pruned(nets.Mlp()), torch.randn(6, 32), None, None, (), session)
    session.in_graphs = graphs
    assert started.contest(inductor=None).inductor is competes
    assert started.contest(inductor=True).inductor


@pytest.mark.parametrize("graphs", [True, False])
def test_inductor_competes_for_convolutions_that_are_replayed(graphs):
    """However little lies between them: it chooses their layout, and no other host does."""
    session = Session(budget_s=0.01)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    started = job.Job.started(network, torch.randn(1, 3, 8, 8), None, None, (), session)
    session.in_graphs = graphs
    assert started.contest(inductor=None).inductor is graphs


def test_stages_win_a_contest_as_any_host_does(forced, own_stores, monkeypatch):
    """All but the recording itself, which needs a GPU."""
    compiled = []
    for name in ("sparta.compiler.run.host", "sparta.compiler.choose.workshop"):
        monkeypatch.setattr(f"{name}.on_cuda", lambda _module: True)
        monkeypatch.setattr(f"{name}.Graphed", lambda run, **_options: run)
    monkeypatch.setattr(torch, "compile", lambda module, **_options: compiled.append(module) or module)
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)

    def cost(key):
        return 1.0 if getattr(key, "host", None) is Host.INDUCTOR_GRAPH and key.kernels else 10.0

    session = Session(measure=Clock(cost), budget_s=1000)
    started = job.Job.started(model, x, None, None, (), session)
    session.in_graphs = True
    contest = started.contest(inductor=True)
    outcome = contest.decide()
    assert outcome.variant.host is Host.INDUCTOR_GRAPH
    assert outcome.variant.kernels
    assert compiled
    assert not any(isinstance(child, KernelModule) for module in compiled for child in module.modules())
    found = contest.workshop.run(outcome.variant, outcome.plans)(x)
    torch.testing.assert_close(pytree.tree_leaves(found)[0], model(x).detach(), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- rounding


class Reference(RoundsInputs):
    """The product of codes in real numbers."""

    def __init__(self, tesa, scale):
        self._tesa, self._round = tesa, InputRounding(scale)

    def pack(self, operand):
        return (rounded_weight(operand, self._tesa),)

    def run_rounded(self, packed, x, bias, residual):
        y = functional.linear(x[0].float() * x[1][:, None], packed[0], bias)
        return y if residual is None else y + residual


def layer(outputs, inputs, scale=None, *, residual=False, rounds=True):
    weight = torch.randn(outputs, inputs)
    tesa = scaled_weight(weight)
    attributes = {"activations": FP8, "group": inputs, "input_scale": scale}
    fused = Fused(OP, tesa, attributes, Epilogue(residual=residual))
    x = torch.empty(4, inputs)
    spec = ScaledLinearLowering().spec(tesa, x, attributes, fused.epilogue, device="cpu")
    made = KernelModule(fused, weight.flatten(), None, {4: (spec, Choice(DENSE, {}, "a test"))})
    if rounds:
        kernel = Reference(tesa, scale)
        made._built = [(4, kernel, kernel.pack(weight))]
    return made


def network(**layers):
    root = nn.Module()
    for name, each in layers.items():
        root.add_module(name, each)
    graph = fx.Graph()
    x = graph.placeholder("x")
    q, k, p = (graph.call_module(name, (x,)) for name in ("query", "key", "plain"))
    y = graph.call_function(torch.ops.aten.mul.Tensor, (q, k))
    out = graph.call_module("out", (y, x))
    graph.output((out, graph.call_module("static", (y,)), p))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("traced", [True, False])
def test_layers_that_read_the_same_share_its_codes(traced):
    torch.manual_seed(0)
    module = network(
        query=layer(16, 16),
        key=layer(16, 16),
        plain=layer(8, 16, rounds=False),
        out=layer(16, 16, residual=True),
        static=layer(16, 16, 0.25),
    )
    rounded = with_shared_rounding(module, traced=traced)
    calls = [node.target for node in rounded.graph.nodes if node.op == "call_function"]
    assert calls.count(traced_rounding if traced else rounded_tokens) == 2  # x by rows, y with one scale
    assert calls.count(rounded_gate) == 1  # y by rows, where it is made
    assert torch.ops.aten.mul.Tensor not in calls
    x = torch.randn(2, 2, 16)
    for one, two in zip(rounded(x), module(x), strict=True):
        assert one.shape == two.shape
        assert torch.equal(one, two)
    for one, two in zip(staged(rounded, lambda stretch: stretch)(x), module(x), strict=True):
        assert torch.equal(one, two)
    module.query._built = [(4, layer(16, 16, rounds=False)._built[0][1], (module.query.weight(),))]
    assert (rounded(x)[0] - module(x)[0]).norm() < 0.2 * module(x)[0].norm()  # dense took its place, and takes codes


@pytest.mark.parametrize("rounding", [traced_rounding, rounded_tokens])
def test_codes_lie_row_by_row_in_memory(rounding):
    for x in (torch.randn(16, 4).t(), torch.randn(2, 16, 3).transpose(1, 2), torch.randn(5, 32)[:, ::2]):
        codes, scales = rounding(x, None)
        assert codes.is_contiguous()
        assert scales.is_contiguous()
        expected, others = rounding(x.contiguous(), None)
        assert torch.equal(codes.float(), expected.float())
        assert torch.equal(scales, others)


def halves(norm, *, kept):
    """Return a norm, a gated layer and a layer that adds the norm, if it is kept: half a decoder, or an encoder."""
    root = nn.Module()
    for name, each in {"gate": layer(24, 16), "up": layer(24, 16), "down": layer(16, 24, residual=kept)}.items():
        root.add_module(name, each)
    root.register_buffer("scale", torch.rand(16))
    root.register_buffer("shift", torch.randn(16))
    graph, aten = fx.Graph(), torch.ops.aten
    x = graph.placeholder("x")
    scale = graph.get_attr("scale")
    if norm == "rms":
        h = graph.call_function(aten.rms_norm.default, (x, [16], scale))
    else:
        h = graph.call_function(aten.layer_norm.default, (x, [16], scale, graph.get_attr("shift"), 1e-3))
    gate, up = (graph.call_module(name, (h,)) for name in ("gate", "up"))
    opened = graph.call_function(aten.mul.Tensor, (up, graph.call_function(aten.silu.default, (gate,))))
    graph.output((graph.call_module("down", (opened, h) if kept else (opened,)),))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_what_makes_tokens_rounds_them(norm, kept, traced):
    torch.manual_seed(0)
    module, x = halves(norm, kept=kept), torch.randn(2, 2, 16)
    rounded = with_shared_rounding(module, traced=traced)
    calls = [node.target for node in rounded.graph.nodes if node.op == "call_function"]
    assert [call for call in calls if call is not operator.getitem] == [rounded_norm, rounded_gate]
    assert torch.equal(rounded(x)[0], module(x)[0])
    assert torch.equal(staged(rounded, None)(x)[0], module(x)[0])  # in which nothing is left to compile
    assert calls_to_compile(rounded.graph) == 0


def test_calls_with_several_results_hand_tensors_to_a_stretch():
    torch.manual_seed(0)
    module, x = halves("layer", kept=False), torch.randn(2, 2, 16)
    (down,) = (node for node in module.graph.nodes if node.target == "down")
    (norm,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.layer_norm.default)
    with module.graph.inserting_after(down):
        total = module.graph.call_function(torch.ops.aten.add.Tensor, (down, norm))
    next(iter(reversed(module.graph.nodes))).args = ((total,),)
    module.recompile()
    rounded, given = with_shared_rounding(module), []

    def compiler(stretch):
        given.extend(node for node in stretch.graph.nodes if node.target is operator.getitem)
        return stretch

    assert torch.equal(staged(rounded, compiler)(x)[0], module(x)[0])
    assert not given


def test_a_graph_without_fp8_is_left_alone():
    module = graph_of(nets.pruned(nets.Mlp()), torch.randn(6, 32))
    assert with_shared_rounding(module) is module


class PreNorm(nn.Module):
    """Blocks whose layers read tensors in memory that Inductor uses again and again."""

    def __init__(self, width=32, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([layer(width, width), layer(width, width)]) for _ in range(blocks))

    def forward(self, x):
        for first, second in self.blocks:
            x = x + second(functional.silu(first(functional.layer_norm(x, x.shape[-1:]))))
        return x


@pytest.mark.filterwarnings("ignore")  # Inductor's own
def test_layers_under_inductor_round_what_they_are_given():
    torch.manual_seed(0)
    model, x = PreNorm(), torch.randn(64, 32)
    with torch.no_grad(), shared_rounding():
        exact, found = model(x), torch.compile(model)(x)
    assert float((found - exact).norm() / exact.norm()) < 0.02


def test_a_tensor_that_was_written_to_unseen_is_rounded_again():
    torch.manual_seed(0)
    made, x, other = layer(16, 16), torch.randn(4, 16), torch.randn(4, 16)
    expected = made(other)
    made(x)
    x.data.copy_(other)
    assert torch.equal(made(x), expected)
    for _ in range(2):  # in another call of a model, and in what Inductor has compiled
        with shared_rounding():
            made(x)
            torch.ops.sparta.subgraph(x, None, made.handle)
        x.data.copy_(torch.randn(4, 16))
        expected = made(x.clone())
        with shared_rounding():
            assert torch.equal(made(x), expected)
            x.data.copy_(other)
            assert torch.equal(torch.ops.sparta.subgraph(x, None, made.handle), made(other))


def test_layers_share_what_is_rounded_within_a_call(monkeypatch):
    torch.manual_seed(0)
    rounded = []
    plain = InputRounding.__call__

    def watched(self, x):
        rounded.append(x)
        return plain(self, x)

    monkeypatch.setattr(InputRounding, "__call__", watched)
    query, key, static, x = layer(16, 16), layer(8, 16), layer(8, 16, 0.5), torch.randn(2, 3, 16)
    with shared_rounding():
        found = [query(x), key(x)]
        assert len(rounded) == 1
        with shared_rounding():  # a call within
            key(x)
        assert len(rounded) == 2
        key(x)
        assert len(rounded) == 2
        static(x)
        assert len(rounded) == 3
        with torch.inference_mode():
            hidden = torch.randn(2, 16)
        key(hidden)
        key(hidden)
        assert len(rounded) == 5  # such tensors do not tell when they are written to
    assert [tuple(each.shape) for each in found] == [(2, 3, 16), (2, 3, 8)]
    assert torch.equal(found[0], query(x))
