"""Chains: layers, norms and attentions in one call compute what the graph does, at every size and in any layout."""

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional

import sparta
from compiler import nets
from compiler.conftest import choosing, chosen
from sparta.compiler.run.chain import trace as tracing
from sparta.compiler.run.chain.chained import Chained, chainable
from sparta.compiler.run.chain.layouts import round_early
from sparta.compiler.run.chain.trace import Linear, Trace
from sparta.compiler.run.eager import with_fast_paths
from sparta.compiler.run.host import Host, hosted
from sparta.measure.machine import probe_compiler
from sparta.specialize.cpu.bf16 import Bf16Tile
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.tuning.select import Choice

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")
aten = torch.ops.aten


def graph_of(function, *tensors, held=()):
    """Return a graph module of a function of proxies, with tensors that it holds by name."""
    root, graph = nn.Module(), fx.Graph()
    for name, tensor in dict(held).items():
        root.register_buffer(name, tensor)
    given_ = [graph.placeholder(f"x{n}") for n in range(len(tensors))]
    graph.output((function(graph.call_function, *given_, **{n: graph.get_attr(n) for n in dict(held)}),))
    return fx.GraphModule(root, graph)


def ran(module, *tensors):
    """Return the results of a chain and of the graph itself, and the program."""
    chain = Chained(module)
    program = chain.program(*tensors)
    assert program is not None
    with torch.no_grad():
        return chain(*tensors)[0], module(*tensors)[0], program


def near(y, truth):
    torch.testing.assert_close(y, truth, rtol=2e-5, atol=2e-6)


class Layer(nn.Module):
    """An encoder layer with all that a chain has."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, mask=None):
        b, t, c = x.shape
        q, k, v = (f(x).reshape(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(b, t, c)
        x = self.first(x + self.out(y))
        return self.second(x + self.down(functional.gelu(self.up(x))))


class Text(nn.Module):
    """Embeddings, positions and two layers under a padding mask."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(50, 32), nn.Embedding(40, 32), nn.LayerNorm(32)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, ids, mask):
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x, mask[:, None, None].bool())
        return x


def tiled(spec):
    plain = chosen(spec)
    tile = str(Tile("panel", 4, 1))
    return plain if plain.implement == "dense" else Choice("cpu", {"tile": tile}, "forced", plain.entry)


@given(st.data())
@settings(max_examples=25)
def test_attention_is_pytorchs(data):
    b, h, queries, keys = (data.draw(st.integers(1, most)) for most in (2, 4, 70, 70))
    width, value_width = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 8, 16, 33, 64]))
    grouped = data.draw(st.booleans())
    q, k, v = (
        torch.randn(b, length, heads, e).transpose(1, 2)
        for length, heads, e in ((queries, 2 * h if grouped else h, width), (keys, h, width), (keys, h, value_width))
    )
    kind = data.draw(st.sampled_from(["none", "bool", "padding", "float", "causal"]))
    mask = {
        "bool": torch.rand(queries, keys) < 0.7,
        "padding": torch.rand(b, 1, 1, keys) < 0.7,
        "float": torch.randn(b, 1, queries, keys),
    }.get(kind)
    scale = data.draw(st.sampled_from([None, 0.3]))
    options = {"scale": scale, "enable_gqa": grouped}
    tensors = (q, k, v) if mask is None else (q, k, v, mask)

    def attend(call, q, k, v, mask=None):
        return call(aten.scaled_dot_product_attention.default, (q, k, v, mask, 0.0, kind == "causal"), options)

    y, truth, program = ran(graph_of(attend, *tensors), *tensors)
    assert program.calls == 0
    if mask is not None and mask.dtype == torch.bool:  # where nothing is seen PyTorch has several answers
        blind = ~mask.expand(b, q.shape[1], queries, keys).any(-1)
        assert not y[blind].any()
        y, truth = y[~blind], truth[~blind]
    near(y, truth)


def test_numbers_that_are_none_spread_as_ieee_says():
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    q[0, 0, 3, 2], k[0, 1, 4, 0], v[0, 1, 0, 5] = torch.nan, torch.inf, torch.nan

    def attend(call, *qkv):
        return call(aten.scaled_dot_product_attention.default, qkv)

    y, _, _ = ran(graph_of(attend, q, k, v), q, k, v)
    # PyTorch's own attention has a quick exponential on some processors, which makes numbers of what is none.
    wide = [each.double() for each in (q, k, v)]
    truth = torch.softmax(wide[0] @ wide[1].mT / 4, -1) @ wide[2]
    assert torch.equal(y.isnan(), truth.isnan())
    x = torch.randn(4, 19)
    x[1, 3], x[2, 0] = torch.nan, torch.inf

    def norm(call, x):
        return call(aten.layer_norm.default, (x, [19]))

    y, truth, _ = ran(graph_of(norm, x), x)
    assert torch.equal(y.isnan(), truth.isnan())


@given(st.data())
@settings(max_examples=25)
def test_norms_sums_and_activations_are_pytorchs(data):
    lead, width = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)), data.draw(st.integers(1, 70))
    x, other = torch.randn(*lead, width), torch.randn(data.draw(st.sampled_from([(width,), (*lead, width)])))
    weight, bias = torch.randn(width), torch.randn(width)
    alpha = data.draw(st.sampled_from([1, 2.5]))

    def steps(call, x, other, weight, bias):
        y = call(aten.layer_norm.default, (x, [width], weight, bias, 1e-6))
        y = call(aten.add.Tensor, (call(aten.gelu.default, (y,)), other), {"alpha": alpha})
        y = call(aten.mul.Tensor, (call(aten.silu.default, (y,)), other))
        y = call(aten.sub.Tensor, (call(aten.relu.default, (y,)), x))
        return call(aten.mul.Tensor, (call(aten.add.Tensor, (y, 0.5)), 3.0))

    y, truth, program = ran(graph_of(steps, x, other, held={"weight": weight, "bias": bias}), x, other)
    assert program.calls == 0
    torch.testing.assert_close(y, truth, rtol=1e-4, atol=1e-5)


@given(st.permutations(range(4)), st.integers(0, 3))
@settings(max_examples=20)
def test_views_cost_nothing_and_copies_are_right(order, dim):
    x = torch.randn(2, 3, 4, 5)

    def moved(call, x):
        y = call(aten.relu.default, (x,))
        y = call(aten.permute.default, (y, list(order)))
        y = call(aten.slice.Tensor, (y, dim, 1, 3))
        y = call(aten.reshape.default, (y, [-1]))
        return call(aten.mul.Tensor, (y, 2.0))

    y, truth, program = ran(graph_of(moved, x), x)
    assert torch.equal(y, truth)
    assert program.calls == 0
    assert program.steps <= 3


@pytest.mark.parametrize("lead", [(1, 7), (2, 20), (3, 33)])
def test_a_whole_encoder_is_one_call(monkeypatch, lead):
    choosing(monkeypatch, tiled)
    model, x = nets.pruned(nn.Sequential(Layer(), Layer())), torch.randn(*lead, 32)
    fast = sparta.compile(model, x, tune="off")
    chain = Chained(fast.graph)
    program = chain.program(x)
    assert (program.calls, program.shared, program.handed) == (0, 2, 2)
    assert len(program.timed([x])) == program.steps + program.shared
    with torch.no_grad():
        torch.testing.assert_close(chain(x)[0], model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(chain(x)[0], with_fast_paths(fast.graph)(x)[0], rtol=1e-5, atol=1e-6)


def test_texts_of_all_lengths_with_padding(monkeypatch):
    choosing(monkeypatch, tiled)
    model = nets.pruned(Text())
    ids, mask = torch.randint(50, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    fast = sparta.compile(model, (ids, mask), tune="off")
    run = hosted(fast.general if fast.general is not None else fast.graph, Host.CHAIN, any_size=True)
    for batch, length in [(2, 12), (1, 3), (2, 12), (3, 40)]:
        ids, mask = torch.randint(50, (batch, length)), torch.ones(batch, length, dtype=torch.int64)
        mask[0, length // 2 :] = 0
        with torch.no_grad():
            torch.testing.assert_close(run(ids, mask)[0], model(ids, mask), rtol=1e-4, atol=1e-5)
    with pytest.raises(IndexError, match="out of range"):
        run(torch.full((2, 12), 50), torch.ones(2, 12, dtype=torch.int64))


@pytest.mark.parametrize(("tile", "blocks"), [(Tile(block=4, mv=1), False), (Tile("gathered", 16, 2), True)])
def test_int8_layers_hand_over_bytes_and_share_what_they_round(monkeypatch, tile, blocks):
    monkeypatch.setattr(tracing, "attends_by_blocks", lambda: blocks)
    model = nn.Sequential(Layer(), Layer()).eval()
    batches = [torch.randn(2, 35, 32) for _ in range(4)]
    spec, _ = sparta.prune(model, batches, "4x4", 0.5, method="magnitude")
    choosing(monkeypatch, lambda s: Choice("cpu-int8", {"tile": str(tile)}, "forced", chosen(s).entry))
    options = {"precision": "int8", "calibration": batches, "tune": "off"}
    fast = sparta.compile(model, batches[0], spec, **options)
    chain = Chained(fast.graph)
    program = chain.program(batches[0])
    assert program.calls == 0
    assert program.shared == 2
    kinds = [kind for kind, _ in program.timed([batches[0]])]
    assert kinds.count("attention_bf16" if blocks else "attention") == 2
    with torch.no_grad():
        y, plain = chain(batches[1])[0], with_fast_paths(fast.graph)(batches[1])[0]
    # Sums are exact in both; norms and attention are rounded in their own order, which may move a number by a step.
    assert (y - plain).norm() <= 0.02 * plain.norm()


def test_curved_results_are_rounded_by_the_layer_that_makes_them(monkeypatch):
    layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)).eval()
    batches = [torch.randn(21, 32) for _ in range(4)]
    spec, _ = sparta.prune(layers, batches, "4x4", 0.5, method="magnitude")
    choosing(monkeypatch, lambda s: Choice("cpu-int8", {"tile": str(Tile(block=4, mv=1))}, "forced", chosen(s).entry))
    fast = sparta.compile(layers, batches[0], spec, precision="int8", calibration=batches, tune="off")
    trace = Trace(fast.graph, [batches[0]], 1)
    round_early(trace)
    first, second = (item for item in trace.items if isinstance(item, Linear))
    if second.product.takes is None:
        pytest.skip("calibration chose scales per token, which are known only when all of a token is there")
    assert first.result.meta.dtype == second.product.takes
    with torch.no_grad():
        y, plain = Chained(fast.graph)(batches[1])[0], with_fast_paths(fast.graph)(batches[1])[0]
    torch.testing.assert_close(y, plain, rtol=1e-4, atol=1e-5)


def test_what_python_runs_stands_between_chains(monkeypatch):
    choosing(monkeypatch, tiled)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)

        def forward(self, x):
            y = torch.tanh(self.one(x))
            z = torch.cumsum(self.norm(y), 0)
            a, b = torch.max(z, dim=0)
            return self.two(z) + a, b, y

    model, x = nets.pruned(Mixed()), torch.randn(9, 32)
    fast = sparta.compile(model, x, tune="off")
    chain = Chained(fast.graph)
    assert chain.program(x).calls >= 3
    with torch.no_grad():
        for y, truth in zip(chain(x), model(x), strict=True):
            torch.testing.assert_close(y, truth, rtol=1e-4, atol=1e-5)


def test_results_are_the_callers_own(monkeypatch):
    choosing(monkeypatch, tiled)
    model, x = nets.pruned(nn.Sequential(Layer())), torch.randn(2, 5, 32)
    chain = Chained(sparta.compile(model, x, tune="off").graph)
    with torch.no_grad():
        first = chain(x)[0]
        kept = first.clone()
        chain(x + 1)
    assert torch.equal(first, kept)

    def constant(call, x, held):
        return call(aten.mul.Tensor, (held, 2.0))

    module = graph_of(constant, x, held={"held": torch.ones(3)})
    chain = Chained(module)
    chain(x)[0].zero_()
    assert torch.equal(chain(x)[0], torch.full((3,), 2.0))


def test_several_threads_share_a_chain(monkeypatch):
    choosing(monkeypatch, tiled)
    model = nets.pruned(nn.Sequential(Layer(), Layer()))
    xs = [torch.randn(2, 9, 32) for _ in range(8)]
    chain = Chained(sparta.compile(model, xs[0], tune="off").graph)
    with torch.no_grad():
        expected, wrong = [chain(x)[0] for x in xs], []

    def work(x, y):
        with torch.no_grad():
            wrong.extend(1 for _ in range(20) if not torch.equal(chain(x)[0], y))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(xs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_writes_to_its_arguments_or_depends_on_data_runs_eagerly():
    x = torch.randn(4, 6)

    def in_place(call, x):
        return call(aten.relu_.default, (call(aten.mul.Tensor, (x, 2.0)),))

    chain = Chained(graph_of(in_place, x))
    assert chain.program(x) is None
    assert torch.equal(chain(x)[0], (2 * x).relu())

    def chosen_by_data(call, x):
        return call(aten.nonzero.default, (call(aten.relu.default, (x,)),))

    chain = Chained(graph_of(chosen_by_data, x))
    assert torch.equal(chain(x)[0], x.relu().nonzero())
    assert torch.equal(chain(torch._neg_view(x))[0], (-x).relu().nonzero())


def test_inputs_of_any_strides(monkeypatch):
    choosing(monkeypatch, tiled)
    model = nets.pruned(nn.Sequential(Layer()))
    chain = Chained(sparta.compile(model, torch.randn(2, 6, 32), tune="off").graph)
    wide = torch.randn(4, 12, 64)
    for x in (wide[::2, ::2, ::2], wide[1:3, 2:8, 16:48], torch.randn(32, 6, 2).permute(2, 1, 0)):
        with torch.no_grad():
            torch.testing.assert_close(chain(x)[0], model(x), rtol=1e-4, atol=1e-5)


def test_convolutions_are_steps(forced):
    layers = [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2)]
    model, x = nets.pruned(nn.Sequential(*layers)), torch.randn(2, 8, 9, 9)
    fast = sparta.compile(model, x, tune="off")
    assert chainable(fast.graph)
    chain = Chained(fast.graph)
    assert chain.program(x).calls == 0
    with torch.no_grad():
        torch.testing.assert_close(chain(x)[0], model(x), rtol=1e-4, atol=1e-5)
        cut = torch.randn(2, 8, 9, 12)[..., :9]
        torch.testing.assert_close(chain(cut)[0], model(cut), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [12, 10])
def test_int8_convolutions_hand_over_bytes(monkeypatch, width):
    model = nn.Sequential(
        *(nn.Conv2d(8, width, 1), nn.ReLU(), nn.Conv2d(width, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 8, 3, 2)),
        *(nn.ReLU(), nn.Conv2d(8, 8, 1)),
    ).eval()
    batches = [torch.randn(2, 8, 9, 11) for _ in range(3)]
    spec = sparta.Spec.from_pattern(model, sparta.Unstructured(), 0.5)
    spec.apply(model)

    def choose(spec):
        tile = {"tile": str(Tile(block=4, mv=2)), "image": "flat"}
        return Choice("cpu-int8", tile, "forced", chosen(spec).entry)

    choosing(monkeypatch, choose)
    fast = sparta.compile(model, batches[0], spec, precision="int8", calibration=batches, tune="off")
    chain = Chained(fast.graph)
    program = chain.program(batches[0])
    assert (program.calls, program.handed) == (0, 3)
    with torch.no_grad():
        for batch in batches:
            assert torch.equal(chain(batch)[0], with_fast_paths(fast.graph)(batch)[0])


def test_a_chain_is_a_host_that_competes_is_saved_and_loaded(monkeypatch, own_stores, tmp_path):
    from compiler.clocks import Clock, compiled

    def cost(key):
        return 3.0 if getattr(key, "host", None) is Host.CHAIN else 6.0 if getattr(key, "kernels", ()) else 10.0

    choosing(monkeypatch, tiled)
    model, x = nets.pruned(nn.Sequential(Layer(), Layer())), torch.randn(2, 20, 32)
    fast = compiled(model, x, Clock(cost))
    fast.save(tmp_path / "model.sparta")
    for each in (fast, copy.deepcopy(fast), sparta.load(tmp_path / "model.sparta")):
        assert each.report.plan.whole.host is Host.CHAIN
        for lead in ((2, 20), (1, 5), (3, 31)):
            other = torch.randn(*lead, 32)
            torch.testing.assert_close(each(other), model(other).detach(), rtol=1e-4, atol=1e-5)
    moved = copy.deepcopy(fast).to(torch.bfloat16)
    torch.testing.assert_close(moved(x.bfloat16()), model(x).detach().bfloat16(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_models_are_computed_in_real_numbers_between_their_ends(monkeypatch, dtype):
    choosing(monkeypatch, tiled)
    monkeypatch.setattr(tracing, "bf16_dense_tile", lambda _tokens: None)  # as on a processor without bf16
    monkeypatch.setattr(tracing, "attends_by_blocks", lambda: False)
    model, x = nets.pruned(nn.Sequential(Layer(), Layer())).to(dtype), torch.randn(2, 9, 32).to(dtype)
    fast = sparta.compile(model, x, tune="off")
    chain = Chained(fast.graph)
    program = chain.program(x)
    assert program.calls == 2  # into float32 and back
    with torch.no_grad():
        y, exact = chain(x)[0], model.double()(x.double())
    assert y.dtype == dtype
    assert (y.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("form", ["blocks:16:16", "pairs:4:32"])
def test_models_in_bf16_are_computed_in_it_where_the_processor_can(monkeypatch, form):
    monkeypatch.setattr(tracing, "bf16_dense_tile", lambda _tokens: Bf16Tile.parse(form))
    monkeypatch.setattr(tracing, "attends_by_blocks", lambda: True)
    model, x = nn.Sequential(Layer(), Layer()).eval().bfloat16(), torch.randn(2, 9, 32).bfloat16()
    chain = Chained(sparta.compile(model, x, tune="off").graph)
    program = chain.program(x)
    kinds = [kind for kind, _ in program.timed([x])]
    assert (program.calls, kinds.count("bf16"), kinds.count("panels"), kinds.count("attention_bf16")) == (2, 12, 0, 2)
    assert program.handed >= 2  # the first product of a feed-forward leaves its result as the second reads it
    assert program.shared >= 2  # queries, keys and values
    with torch.no_grad():
        y, exact = chain(x)[0], model.double()(x.double())
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).norm() <= 4 * torch.finfo(torch.bfloat16).eps * exact.norm()


def test_layers_in_short_formats_for_a_few_tokens_are_steps(monkeypatch):
    choosing(monkeypatch, lambda spec: chosen(spec, "cpu-bf16"))
    model, x = nets.pruned(nn.Sequential(Layer(), Layer())).bfloat16(), torch.randn(1, 2, 32).bfloat16()
    chain = Chained(sparta.compile(model, x, tune="off").graph)
    program = chain.program(x)
    kinds = [kind for kind, _ in program.timed([x])]
    assert program.calls == 2  # into float32 and back
    assert kinds.count("short") == 12
    with torch.no_grad():
        y, exact = chain(x)[0], model.double()(x.double())
    assert (y.double() - exact).norm() <= 4 * torch.finfo(torch.bfloat16).eps * exact.norm()


def test_a_weight_with_two_biases_is_two_layers():
    x, weight, one, two = torch.randn(9, 16), torch.randn(8, 16), torch.randn(8), torch.randn(8)

    def both(call, x, weight, one, two):
        first, second = (call(aten.linear.default, (x, weight, bias)) for bias in (one, two))
        return call(aten.mul.Tensor, (first, second))

    y, truth, _ = ran(graph_of(both, x, held={"weight": weight, "one": one, "two": two}), x)
    torch.testing.assert_close(y, truth, rtol=1e-4, atol=1e-3)


def test_packed_weights_hold_what_they_are_known_by():
    """Layers are known by the addresses of their tensors, which must not be given to others meanwhile."""
    x, weight = torch.randn(9, 16), torch.randn(8, 16)
    graph = graph_of(lambda call, x, weight: call(aten.linear.default, (x, weight)), x, held={"weight": weight})
    chain = Chained(graph)
    chain(x)
    packed = [each for value in chain._packed.values() if isinstance(value, tuple) for each in value]
    assert any(isinstance(each, torch.Tensor) and each.data_ptr() == weight.data_ptr() for each in packed)


def test_dense_products_do_what_follows_them():
    model, x = nn.Sequential(Layer(), Layer()).eval(), torch.randn(2, 9, 32)
    chain = Chained(sparta.compile(model, x, tune="off").graph)
    program = chain.program(x)
    assert (program.calls, program.steps) == (0, 2 * 9)  # six products, attention and two norms
    with torch.no_grad():
        torch.testing.assert_close(chain(x)[0], model(x), rtol=1e-4, atol=1e-5)


def test_a_sum_of_two_products_and_one_that_is_used_twice():
    x, weight = torch.randn(9, 16), torch.randn(16, 16)

    def twice(call, x, weight):
        one, two = (call(aten.linear.default, (y, weight)) for y in (x, call(aten.relu.default, (x,))))
        both = call(aten.add.Tensor, (one, two))
        three = call(aten.linear.default, (both, weight))
        return call(aten.add.Tensor, (call(aten.gelu.default, (three,)), call(aten.add.Tensor, (three, x))))

    y, truth, _ = ran(graph_of(twice, x, held={"weight": weight}), x)
    torch.testing.assert_close(y, truth, rtol=1e-4, atol=1e-3)


@given(st.integers(1, 2) | st.integers(3, 40), st.integers(1, 70), st.sampled_from([1, 5, 33, 1600]), st.booleans())
@settings(max_examples=30)
def test_dense_layers_are_products_too(tokens, outputs, inputs, has_bias):
    x, weight, bias = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(outputs)

    def layer(call, x, weight, bias):
        return call(aten.relu.default, (call(aten.linear.default, (x, weight, bias) if has_bias else (x, weight)),))

    y, truth, program = ran(graph_of(layer, x, held={"weight": weight, "bias": bias}), x)
    assert program.calls == 0
    torch.testing.assert_close(y, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs", [7, 40_000])
def test_a_dense_layer_of_one_token_is_a_stream_with_its_activation_and_residual(inputs):
    x, weight, bias = torch.randn(1, inputs), torch.randn(19, inputs) / inputs**0.5, torch.randn(19)

    def layer(call, x, weight, bias, added):
        y = call(aten.gelu.default, (call(aten.linear.default, (x, weight, bias)),))
        return call(aten.add.Tensor, (y, added))

    held = {"weight": weight, "bias": bias, "added": torch.randn(1, 19)}
    y, truth, program = ran(graph_of(layer, x, held=held), x)
    assert (program.calls, program.steps) == (0, 1)
    exact = functional.gelu(functional.linear(x.double(), weight.double(), bias.double())) + held["added"].double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, truth, rtol=1e-4, atol=1e-5)
