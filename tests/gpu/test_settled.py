"""In a graph, kernels read packed weights while those before them still run, and x only when it is there."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpu.cases import two_four
from sparta.nn import SparseLinear
from sparta.specialize.cuda import graphs
from sparta.specialize.cuda.device import HOPPER, capability
from sparta.specialize.cuda.graphs import recorded, weights_settled
from sparta.specialize.implement import implement_named
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.scaled_linear.spec import FP8, OP, scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, linear_reference

if capability() != HOPPER:
    pytest.skip("these kernels are for Hopper GPUs", allow_module_level=True)

LAYERS, REPLAYS = 6, 30
PATTERNS = {
    "2:4": two_four,
    "blocks": lambda n, k: block_mask((n, k), (64, 64), 0.8, seed=0),
    "unstructured": lambda n, k: torch.rand(n, k) < 0.3,
    "scattered": lambda n, k: torch.rand(n, k) < 0.15,
}
CASES = [
    ("cuda-24-resident", "2:4", 1),
    ("cuda-24-resident", "2:4", 13),
    ("cuda-24", "2:4", 7),
    ("cuda-24-matrix", "2:4", 16),
    ("cuda-24-matrix", "2:4", 300),
    ("cuda-banks", "unstructured", 1),
    ("cuda-banks", "unstructured", 3),
    ("cuda-lanes", "unstructured", 11),
    ("cuda-24-twice", "unstructured", 8),
    ("cuda-24-twice", "unstructured", 14),
    ("cuda-gather", "scattered", 2),
    ("cuda-block-few", "blocks", 1),
    ("cuda-block-few", "blocks", 30),
    ("cuda-block", "blocks", 64),
    ("cuda-block", "blocks", 300),
]
SCALED = [
    ("cuda-24-resident", "2:4", 1),
    ("cuda-24", "2:4", 7),
    ("cuda-24-matrix-fp8", "2:4", 40),
    ("cuda-banks", "unstructured", 1),
    ("cuda-block-few", "blocks", 9),
    ("cuda-block-fp8", "blocks", 64),
]


def layers_of(name, pattern, m, size, *, scaled):
    """Yield the tile, and a call of a chain of layers, for tiles of an implement."""
    mask = PATTERNS[pattern](size, size)
    scale = (mask.float().mean() * size).rsqrt().item()
    weights = [torch.randn(size, size, device="cuda").mul_(mask.cuda()).mul_(scale) for _ in range(LAYERS)]
    if scaled:
        spec = scaled_linear_spec(scaled_weight(weights[0], TeSA.from_mask(mask), FP8), m, activations=FP8)
    else:
        spec = linear_spec(TeSA.from_mask(mask), m, torch.bfloat16, device="cuda")
        weights = [weight.bfloat16() for weight in weights]
    implement = implement_named(name, OP if scaled else "linear")
    assert implement.answer(spec), implement.answer(spec).reason
    for tile in implement.space(spec)["tile"].domain.values[:4]:
        kernel = implement.build(spec, {"tile": tile})
        held = [kernel.pack(weight) for weight in weights]

        def chain(x, kernel=kernel, held=held):
            y = functional.silu(x)
            for packed in held:
                y = kernel.run(packed, y, None, None)
            return y

        yield tile, chain


EVERY = [(*case, False) for case in CASES] + [(*case, True) for case in SCALED]


@pytest.mark.parametrize(("name", "pattern", "m", "scaled"), EVERY, ids=str)
def test_chains_in_graphs(name, pattern, m, scaled):
    """Replays equal the same kernels one by one, whose weights nobody takes for old."""
    x = torch.randn(m, 2048, device="cuda").bfloat16()
    for tile, chain in layers_of(name, pattern, m, 2048, scaled=scaled):
        assert not weights_settled()
        graph, (result, settled) = recorded(lambda chain=chain: (chain(x), weights_settled()))
        assert settled
        for turn in range(REPLAYS):
            x.normal_()
            expected = chain(x)
            graph.replay()
            assert torch.equal(result, expected), f"{tile}, turn {turn}"
        assert expected.isfinite().all()
        assert expected.any()


@pytest.mark.parametrize(("name", "pattern", "m", "scaled"), EVERY, ids=str)
def test_layers_in_a_row(monkeypatch, name, pattern, m, scaled):
    """The same without a graph, on a ragged size."""
    size = 2056 if "resident" in name else 520 if not scaled else 528
    x = torch.randn(m, size, device="cuda").bfloat16()
    for tile, chain in layers_of(name, pattern, m, size, scaled=scaled):
        expected = chain(x)
        torch.cuda.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(graphs._recording, "settled", True)
            assert torch.equal(chain(x), expected), tile


@pytest.mark.parametrize(("name", "pattern"), [("cuda-24-resident", "2:4"), ("cuda-block-few", "blocks")])
def test_a_weight_that_the_graph_packs_is_waited_for(name, pattern):
    mask = PATTERNS[pattern](2048, 2048)
    layer = SparseLinear(nn.Linear(2048, 2048, bias=False).cuda().bfloat16(), weight_mask=mask).train()
    x = torch.randn(1, 2048, device="cuda").bfloat16()
    config = next(each for each in layer.get_search_space(x).samples() if each["_name"] == name)
    layer.build(config, (x,))

    def step():
        layer.weight.mul_(-0.99)
        return layer(x), weights_settled()

    with torch.no_grad():
        graph, (y, settled) = recorded(step)
        assert not settled
        for _ in range(REPLAYS):
            graph.replay()
            check(y, linear_reference(x, layer.weight, weight_mask=mask.cuda()), reduction=2048)
