"""Attention to all keys becomes a call of ours in a graph; any other stays as it is."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparta.compiler.run.attending import with_own_attention
from sparta.compiler.run.stages import staged
from sparta.specialize.attention.unmasked import unmasked_attention


class Attention(nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.given = given

    def forward(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, **self.given)


def graph_of(queries, **given):
    inputs = (torch.randn(1, 4, queries, 64), *(torch.randn(1, 2, 9, 64) for _ in range(2)))
    program = torch.export.export(Attention(enable_gqa=True, **given), inputs)
    return program.graph_module, inputs


def own_calls(module):
    return [node for node in module.graph.nodes if node.target is unmasked_attention]


@pytest.mark.parametrize("queries", [1, 3])
def test_attention_without_a_mask_is_ours(queries):
    module, inputs = graph_of(queries, scale=0.3)
    own = with_own_attention(module)
    assert len(own_calls(own)) == 1
    torch.testing.assert_close(own(*inputs)[0], module(*inputs)[0])
    kept = []
    stages = staged(own, compiler=lambda stretch: kept.append(stretch) or stretch)
    torch.testing.assert_close(stages(*inputs)[0], module(*inputs)[0])
    assert not kept  # a compiler would find nothing to fuse


@pytest.mark.parametrize("given", [{"is_causal": True}, {"dropout_p": 0.5}, {"attn_mask": torch.ones(1, 9) > 0}])
def test_what_is_not_that_stays(given):
    module, _ = graph_of(1, **given)
    assert with_own_attention(module) is module
