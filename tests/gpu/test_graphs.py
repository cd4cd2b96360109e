"""A CUDA graph reads and writes only memory that is its own or that it keeps, whatever happens beside it.

Between replays memory is taken, filled with what is not a number, given back and unmapped, workspaces are cleared,
kernels are collected, and other graphs are recorded, replayed and dropped. Every result is compared.
"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from compiler.conftest import forcing
from gpu.cases import draw
from sparta.compiler.run.cuda_graph import Graphed
from sparta.compiler.run.host import Host, hosted
from sparta.nn import DynamicSparseMoE, SparseAttention, SparseBatchMatMul, SparseLinear
from sparta.specialize.cuda.graphs import recorded
from sparta.specialize.implement import supported
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.moe import op
from sparta.specialize.tuning.rivals import Problem, build, replayed
from sparta.testing import block_mask, check, linear_reference

POISON = 2**31 - 1  # as a number of a block it is out of any bounds, and as bf16 not a number


def poison(copies=6):
    """Take memory in blocks of all sizes, as other code does, fill it, and give it back."""
    taken = [
        torch.full((2**size,), POISON, dtype=torch.int32, device="cuda") for size in range(7, 24) for _ in range(copies)
    ]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        taken += [torch.full((2**size,), POISON, dtype=torch.int32, device="cuda") for size in range(7, 24)]
    side.synchronize()
    del taken


def churn(turn):
    """Do what other code may do between two replays."""
    gc.collect()
    poison()
    if turn % 3 == 1:
        torch._C._cuda_clearCublasWorkspaces()
    if turn % 2:
        torch.cuda.empty_cache()
    a = draw(256, 256)
    other, result = recorded(lambda: functional.gelu(a @ a))
    other.replay()
    torch.testing.assert_close(result, functional.gelu(a @ a), rtol=2e-2, atol=2e-2)
    del other, result
    poison(2)


# ---------------------------------------------------------------- workspaces and failed recordings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_workspaces_of_cublas_belong_to_the_graph(dtype):
    """Long sums of few results are split, and the parts meet in the workspace."""
    x, bias = draw(16, 16384, dtype=dtype), draw(64, dtype=dtype)
    weights = [draw(64, 16384, dtype=dtype) / 128 for _ in range(3)]

    def call():
        return [functional.linear(x, weight, bias) for weight in weights] + [x @ weights[0].t(), x.t() @ x[:, :64]]

    graph, results = recorded(call)
    for turn in range(12):
        x.copy_(draw(16, 16384, dtype=dtype))
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        poison(2)
        graph.replay()
        for found, right in zip(results, call(), strict=True):
            torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2, msg=f"turn {turn}")


def test_graphs_that_end_take_nothing_from_those_that_go_on():
    x, weight = draw(16, 8192), draw(64, 8192) / 90
    graphs = [recorded(lambda: functional.linear(x, weight)) for _ in range(4)]
    while graphs:
        graph, result = graphs.pop(0)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(result, functional.linear(x, weight), rtol=2e-2, atol=2e-2)
        del graph, result
        gc.collect()
        torch.cuda.empty_cache()
        poison(2)


def test_a_recording_that_fails_leaves_the_allocator_as_it_was():
    x = torch.ones(1 << 20, device="cuda")

    def waits():
        return (x * 2).sum().item()

    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            recorded(waits)
    gc.collect()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # memory that two streams have used is given back
        y = torch.ones(1 << 22, device="cuda")
    y.record_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    del y
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    graph, result = recorded(lambda: x + 1)
    graph.replay()
    assert torch.equal(result, x + 1)


# ---------------------------------------------------------------- candidates of a search


def linear_problem(mask, rows):
    weight, x = torch.where(mask.cuda(), draw(*mask.shape), 0), draw(rows, mask.shape[1])
    spec = linear_spec(sparta.TeSA.from_mask(mask), rows, torch.bfloat16, device="cuda")
    return Problem(spec, weight, (x, None, None), linear_reference(x, weight), mask.shape[1])


def problems():
    """Return a problem for each operation, by name."""
    two_four = torch.tensor([True, False, False, True]).repeat(256, 128)
    tokens, keys = torch.arange(256) // 64, torch.arange(256) // 64
    local = (tokens[:, None] - keys[None, :]).abs() <= 1
    heads = torch.stack([local, local.flip(0) | local, local, local]).cuda()
    qkv = tuple(draw(2, 4, 256, 64) for _ in range(3))
    masks = torch.stack([block_mask((256, 256), (32, 32), 0.7, seed=seed) for seed in range(4)]).cuda()
    product = SparseBatchMatMul(A_mask=masks, compressed=False)
    experts = DynamicSparseMoE([nn.Linear(256, 320) for _ in range(8)]).cuda().bfloat16()
    visits = (
        draw(100, 256),
        torch.randint(0, 8, (100, 2), device="cuda"),
        torch.rand(100, 2, device="cuda").bfloat16(),
    )
    return {
        "blocks": linear_problem(block_mask((320, 512), (64, 64), 0.8, seed=1), 100),
        "2:4, few tokens": linear_problem(two_four, 16),
        "2:4, many tokens": linear_problem(two_four, 512),
        "unstructured": linear_problem(torch.rand(256, 512) < 0.1, 8),
        "attention": SparseAttention(mask=heads)._problem(qkv, backward=False),
        "product": product._problem((masks * draw(2, 4, 256, 256), draw(2, 4, 256, 64)), backward=False),
        "experts": experts._problem(visits, backward=False),
    }


NAMES = ["blocks", "2:4, few tokens", "2:4, many tokens", "unstructured", "attention", "product", "experts"]


@pytest.mark.parametrize("name", NAMES)
def test_a_timed_candidate_outlives_its_kernel(name):
    """A search drops kernels as soon as they are recorded; tables of theirs are read in every replay."""
    problem, candidates = problems()[name], []
    for implement in supported(problem.spec)[0]:
        kernel = build(problem.spec, {"_name": implement.name, **implement.default(problem.spec)})
        candidates.append((implement.name, replayed(problem, kernel, 3), weakref.ref(kernel)))
        del kernel
    op._made_table.cache_clear()
    for turn in range(6):
        churn(turn)
        for implement, replay, kernel in candidates:
            assert kernel() is not None, implement
            problem.check(replay(), f"{implement}, turn {turn}")
    assert len(candidates) > 1


# ---------------------------------------------------------------- models


class Block(nn.Module):
    """A layer as Llama has them: norms of the square, rotated heads, a gated product."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm, self.second = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def rotate(self, x):
        angle = torch.arange(x.shape[2], device=x.device)[:, None] / 10 ** torch.arange(
            0, 4, 8 / x.shape[3], device=x.device
        )
        half, other = x.chunk(2, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat((half * cos - other * sin, other * cos + half * sin), -1)

    def forward(self, x):
        b, t, w = x.shape
        h = self.norm(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, w))
        h = self.second(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def stack(width=512, layers=2):
    model = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
    names = [f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    sparta.Spec.from_pattern(model, sparta.Block(64, 64), 0.9, include=names).apply(model)
    return model.to("cuda", torch.bfloat16).eval()


def close(found, right, what):
    gap = (found.double() - right.double()).norm() / right.double().norm()
    assert float(gap) < 3e-2, f"{what}: {float(gap)}"


@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor")
def test_reduce_overhead_beside_a_model_in_a_graph():
    """Inductor clears workspaces and empties the cache whenever it warms up or records."""
    model, x = stack(), draw(1, 64, 512)
    fast = sparta.compile(model, x, budget_s=30)
    graphed = hosted(fast.graph, Host.GRAPH)
    torch._dynamo.reset()
    dense = torch.compile(copy.deepcopy(model), mode="reduce-overhead")
    with torch.no_grad():
        for turn in range(200):
            x = draw(1, 64, 512)
            right = model(x)
            torch.compiler.cudagraph_mark_step_begin()
            beside = dense(x).clone()
            close(fast(x), right, f"compiled, turn {turn}")
            close(graphed(x)[0], right, f"in a graph, turn {turn}")
            close(beside, right, f"reduce-overhead, turn {turn}")
            if turn % 20 == 10:
                churn(turn // 20)
            if turn % 50 == 25:
                dense = torch.compile(copy.deepcopy(model), mode="reduce-overhead")
    assert not graphed.problem


def test_a_model_in_a_graph_while_all_else_goes_on():
    model, x = stack(256, 1), draw(2, 32, 256)
    fast = sparta.compile(model, x, tune="off")
    hosts = {name: hosted(fast.graph, Host.from_text(name)) for name in ("graph", "eager")}
    with torch.no_grad():
        for turn in range(20):
            x = draw(2, 32, 256)
            right = model(x)
            for name, run in hosts.items():
                close(run(x)[0], right, f"{name}, turn {turn}")
            churn(turn)
            with torch.cuda.stream(torch.cuda.Stream()):
                other = hosts["graph"](x)[0]
                torch.cuda.current_stream().synchronize()
            close(other, right, f"another stream, turn {turn}")


def test_tensors_that_a_module_lets_go_are_kept():
    layer = nn.Linear(512, 512).to("cuda", torch.bfloat16)
    run, x = Graphed(lambda x: functional.linear(x, layer.weight, layer.bias), module=layer), draw(16, 512)
    with torch.no_grad():
        first = run(x)
        layer.weight.data, layer.bias.data = draw(512, 512), draw(512)
        for turn in range(4):
            churn(turn)
            assert torch.equal(run(x), first)  # the graph is of the weight as it was, and that is still there


def test_packed_weights_that_a_module_lets_go_are_kept():
    model, x = nn.Sequential(nn.Linear(4096, 4096)), draw(512, 4096)
    sparta.Spec.from_pattern(model, sparta.Block(64, 64), 0.95).apply(model)
    with forcing("triton-block"):
        fast = sparta.compile(model.to("cuda", torch.bfloat16).eval(), x, tune="off")
    assert fast.kernels, str(fast.report)
    run = hosted(fast.graph, Host.GRAPH)
    with torch.no_grad():
        first = run(x)[0]
        for layer in fast.kernels.values():
            layer.rebuild()
        for turn in range(4):
            churn(turn)
            assert torch.equal(run(x)[0], first)


@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor")
@pytest.mark.parametrize("host", [Host.INDUCTOR_GRAPH, Host.TUNED_GRAPH])
def test_what_inductor_compiled_outlives_its_place_in_dynamo(host):
    """Dynamo forgets what it compiled when someone asks for that, and Triton unloads kernels that no one holds."""
    model, x = stack(256, 1), draw(2, 32, 256)
    fast = sparta.compile(model, x, tune="off")
    run = hosted(fast.graph, host)
    with torch.no_grad():
        first = run(x)[0]
        assert not run.problem
        close(first, model(x), "recorded")
        for turn in range(4):
            torch._dynamo.reset()
            churn(turn)
            torch.compile(copy.deepcopy(model), dynamic=False)(draw(1, 16 + turn, 256))  # kernels in their place
            churn(turn)
            assert torch.equal(run(x)[0], first), turn


# ---------------------------------------------------------------- graphs of others, with our layers


@pytest.mark.parametrize("training", [True, False])
def test_a_sparse_layer_in_someone_elses_graph(training):
    mask = block_mask((320, 512), (64, 64), 0.8, seed=1)
    layer = SparseLinear(nn.Linear(512, 320).cuda().bfloat16(), weight_mask=mask).train(training)
    x = draw(16, 512)
    space = layer.get_search_space(x)
    config = next(config for config in space.samples() if config["_name"] == "triton-block")
    layer.build(config, (x,))
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        old = linear_reference(x, layer.weight, layer.bias, weight_mask=mask.cuda())
        for turn in range(4):
            layer.weight.mul_(-1.5)
            new = linear_reference(x, layer.weight, layer.bias, weight_mask=mask.cuda())
            check(layer(x), new, reduction=512)
            churn(turn)
            graph.replay()
            # In training the graph packs the weight itself; in evaluation it is of the weight as it was.
            check(y, new if training else old, reduction=512)
