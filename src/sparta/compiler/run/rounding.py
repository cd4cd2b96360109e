"""Rounding once: layers that read the same activation in fp8 share its codes and scales.

Without this each layer rounds x in a pass of its own, so the queries, keys and values of an attention round one tensor
three times. Rounding becomes a call of the graph: a kernel of ours where the graph runs eagerly, and PyTorch's own
calls where Inductor compiles it, which then writes the codes in the kernel of the norm or activation before.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx

from sparta.compiler.graph.program import copied
from sparta.compiler.run.kernel_module import KernelModule
from sparta.specialize.scaled_linear.inputs import InputRounding
from sparta.specialize.scaled_linear.spec import fp8_rows

__all__ = ["rounded_tokens", "traced_rounding", "with_shared_rounding"]


def rounded_tokens(x: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return x (..., K) in fp8, of the same shape, and the scales (M,) of its rows."""
    codes, scales = InputRounding(scale)(x.reshape(-1, x.shape[-1]))
    return codes.view(x.shape), scales


def traced_rounding(x: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return what :func:`rounded_tokens` does, by calls that a compiler can fuse with others."""
    codes, scales = fp8_rows(x, scale)
    return codes, scales.flatten()


def with_shared_rounding(module: fx.GraphModule, *, traced: bool = False) -> fx.GraphModule:
    """Return a graph in which activations are rounded to fp8 once; the same one where no layer rounds them.

    It shares tensors and layers with the module, and holds for the kernels as they are now.

    Parameters
    ----------
    traced
        Whether a compiler will look at it.
    """
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, KernelModule) and layer.rounds_inputs
    }
    if not layers:
        return module
    graph, _ = copied(module.graph)
    shared: dict[tuple[fx.Node, float | None], tuple[fx.Node, fx.Node]] = {}
    for node in list(graph.nodes):
        layer = layers.get(str(node.target)) if node.op == "call_module" else None
        if layer is None:
            continue
        x, scale = node.args[0], layer.fused.attributes["input_scale"]
        if (x, scale) not in shared:
            with graph.inserting_before(node):
                both = graph.call_function(traced_rounding if traced else rounded_tokens, (x, scale))
                shared[x, scale] = (
                    graph.call_function(operator.getitem, (both, 0)),
                    graph.call_function(operator.getitem, (both, 1)),
                )
        codes, scales = shared[x, scale]
        node.args, node.kwargs = (codes, *node.args[1:]), {"scales": scales}
    graph.lint()
    return fx.GraphModule(module, graph, "Rounded")
