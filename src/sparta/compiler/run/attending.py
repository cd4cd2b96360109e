"""Attention without a mask by a call of ours, which has kernels for decode steps and for encoders.

What runs follows from the sizes with which a graph is called; where no kernel of ours does, it is PyTorch's own.
"""

from __future__ import annotations

import torch
from torch import fx

from sparta.aten import arguments_of
from sparta.compiler.graph.program import copied
from sparta.specialize.attention.unmasked import unmasked_attention

__all__ = ["with_own_attention"]

_SDPA = torch.ops.aten.scaled_dot_product_attention.default


def with_own_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph whose attentions to all keys are calls of ours; the same one where it has none.

    It shares tensors and layers with the module.
    """
    if not any(_is_plain(node) for node in module.graph.nodes):
        return module
    graph, _ = copied(module.graph)
    for node in [each for each in graph.nodes if _is_plain(each)]:
        call = arguments_of(node)
        arguments = (call["query"], call["key"], call["value"], call["scale"])
        with graph.inserting_before(node):
            own = graph.call_function(unmasked_attention, arguments, {"shared": bool(call["enable_gqa"])})
        node.replace_all_uses_with(own)
        graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(module, graph, "Attending")


def _is_plain(node: fx.Node) -> bool:
    """Whether a node is attention to all keys."""
    if node.target is not _SDPA:
        return False
    call = arguments_of(node)
    return call["attn_mask"] is None and not call["dropout_p"] and not call["is_causal"]
