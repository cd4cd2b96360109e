"""Norms by kernels of ours: the graph computes what it did, and norms that they do not take stay as they are."""

import torch
from torch import fx

from sparta.compiler.run.rounding import with_own_norms
from sparta.specialize.scaled_linear.producers import norm

_aten = torch.ops.aten


def graph_of(*calls):
    """Return a graph of calls in a row, of (target, arguments)."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target, arguments in calls:
        x = graph.call_function(target, (x, *arguments))
    graph.output((x,))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_norms_of_the_last_dim_are_ours():
    module = graph_of(
        (_aten.layer_norm.default, ([8],)),
        (_aten.rms_norm.default, ([8], None, 1e-3)),
        (_aten.layer_norm.default, ([8], None, None, 0.5)),
    )
    own = with_own_norms(module)
    assert [node.target for node in own.graph.nodes if node.op == "call_function"] == [norm] * 3
    x = torch.randn(2, 4, 8)
    torch.testing.assert_close(own(x), module(x))
    leaf = x.clone().requires_grad_()
    own(leaf)[0].square().sum().backward()
    other = x.clone().requires_grad_()
    module(other)[0].square().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_other_norms_stay_as_they_are():
    module = graph_of((_aten.layer_norm.default, ([4, 8],)), (_aten.rms_norm.default, ([8],)))
    own = with_own_norms(module)
    assert norm not in {node.target for node in own.graph.nodes}
    plain = graph_of((_aten.relu.default, ()))
    assert with_own_norms(plain) is plain
