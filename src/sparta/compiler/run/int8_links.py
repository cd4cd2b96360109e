"""Links: an int8 layer that feeds another one hands over integers, rounded to the other's grid by its own kernel.

Without a link a kernel returns real numbers, which the next one rounds in passes of its own. A link is an attribute of
the first layer (the grid of its output); a layer that cannot run its int8 kernel any more still takes and gives
integers, so that either end may change without the other.
"""

from __future__ import annotations

from torch import fx, nn

from sparta.compiler.run.kernel_module import KernelModule
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.quantized import INT8_IMPLEMENTS

__all__ = ["link_layers"]


def link_layers(graph: fx.Graph, modules: dict[str, nn.Module]) -> int:
    """Link neighbouring int8 layers of a graph, replacing modules; return how many links there are."""
    links = 0
    for node in graph.nodes:
        if node.op != "call_module" or len(node.users) != 1:
            continue
        reader = next(iter(node.users))
        first, second = modules.get(str(node.target)), modules.get(str(reader.target))
        feeds = reader.op == "call_module" and reader.args[0] is node and node not in reader.args[1:]
        if not feeds or not isinstance(first, KernelModule) or not isinstance(second, KernelModule):
            continue
        plain = not first.fused.epilogue.residual and first.fused.epilogue.activation in (None, "relu")
        if plain and _all_int8(first) and _all_int8(second):
            grid = Quantization.from_dict(second.fused.attributes)
            if grid.dynamic:  # the scale of a token is known only when all of it is there
                continue
            modules[str(node.target)] = first.with_attributes(grid.to_dict("output"))
            links += 1
    return links


def _all_int8(module: KernelModule) -> bool:
    return all(choice.implement in INT8_IMPLEMENTS for _, choice in module.choices.values())
