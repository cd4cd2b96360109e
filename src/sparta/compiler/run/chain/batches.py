"""Batches in parts: a large batch of images, a few of them at a time through the whole chain.

Layer by layer, the activations of a large batch go to memory and come back from there; a few images stay in the caches
from the first layer to the last, but read all weights again. Which is faster is measured where both can be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from sparta.compiler.run.chain.program import Program
from sparta.compiler.run.kernel_module import KernelModule
from sparta.modules import member

__all__ = ["InParts", "parts_of", "quicker_of", "separable"]

_aten = torch.ops.aten
_LARGE_BYTES = 1 << 24  # activations that leave the caches
_PART_BYTES = 1 << 23
_CLEARLY = 0.97
_TIMES = 3
# Layers, with the dims of a batch; and calls that treat each number alone.
_LAYERS: dict[object, tuple[int, ...]] = {
    _aten.conv1d.default: (3,),
    _aten.conv2d.default: (4,),
    _aten.batch_norm.default: (2, 3, 4),
    _aten.linear.default: (2, 3, 4),
    _aten.max_pool2d.default: (4,),
    _aten.avg_pool2d.default: (4,),
    _aten.adaptive_avg_pool2d.default: (4,),
}
_NUMBERS = frozenset(
    {
        *(_aten.relu.default, _aten.relu6.default, _aten.silu.default, _aten.gelu.default, _aten.hardtanh.default),
        *(_aten.sigmoid.default, _aten.hardswish.default, _aten.hardsigmoid.default, _aten.tanh.default),
        *(_aten.contiguous.default, _aten.clone.default),
    }
)
_PAIRS = frozenset({_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor})
_Ranks = Mapping[fx.Node, int]


def separable(module: fx.GraphModule, ranks: _Ranks, leaves: Sequence[Any]) -> bool:
    """Whether a graph computes every image of a batch by itself, as far as its calls are known to.

    Parameters
    ----------
    ranks
        How many dims the tensors of the graph have.
    """
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() > 1 for leaf in leaves):
        return False
    return len({leaf.shape[0] for leaf in leaves}) == 1 and all(_alone(module, ranks, n) for n in module.graph.nodes)


def _alone(module: fx.GraphModule, ranks: _Ranks, node: fx.Node) -> bool:
    """Whether the first dim of a node is the batch if that of its inputs is."""
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op == "output":
        results = node.args[0]
        return isinstance(results, (list, tuple)) and all(isinstance(r, fx.Node) and _is_made(r) for r in results)
    return _called_alone(module, ranks, node)


def _called_alone(module: fx.GraphModule, ranks: _Ranks, node: fx.Node) -> bool:
    x = node.args[0] if node.args else None
    if not isinstance(x, fx.Node) or not _is_made(x) or x not in ranks:
        return False
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return (
            isinstance(layer, KernelModule) and ranks[x] > 1 and all(_is_like(module, ranks, x, n) for n in node.args)
        )
    if node.target in _LAYERS:
        fixed = (each for each in node.args[1:] if isinstance(each, fx.Node))
        return ranks[x] in _LAYERS[node.target] and not any(map(_is_made, fixed)) and not node.kwargs
    if node.target in _PAIRS:
        return all(_is_like(module, ranks, x, each) for each in node.args[1:2])
    return node.target in _NUMBERS or _keeps_the_first(ranks[x], node)


def _keeps_the_first(rank: int, node: fx.Node) -> bool:
    """Whether a call on a tensor of so many dims leaves the first as it is."""
    numbers = node.args[1] if len(node.args) > 1 else None
    if node.target is _aten.flatten.using_ints:
        return isinstance(numbers, int) and numbers % rank > 0
    if not isinstance(numbers, (list, tuple)) or not numbers or not all(isinstance(each, int) for each in numbers):
        return False
    if node.target is _aten.permute.default:
        return int(numbers[0]) % rank == 0
    return node.target is _aten.mean.dim and all(each % rank for each in numbers)


def _is_made(node: fx.Node) -> bool:
    return node.op != "get_attr"


def _is_like(module: fx.GraphModule, ranks: _Ranks, x: fx.Node, other: object) -> bool:
    """Whether an operand beside x is a number, a value with as many dims, or a fixed tensor that all images share."""
    if not isinstance(other, fx.Node):
        return isinstance(other, (int, float))
    if _is_made(other):
        return ranks.get(other) == ranks[x]
    tensor = member(module, str(other.target))
    return isinstance(tensor, Tensor) and tensor.dim() < ranks[x]


class InParts:
    """A batch that runs in parts of so many images; see :func:`parts_of`."""

    def __init__(self, program: Program, images: int) -> None:
        self.program, self.images = program, images

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        """Return the flat results of all parts."""
        each = self.images
        found = [self.program([leaf[at : at + each] for leaf in leaves]) for at in range(0, leaves[0].shape[0], each)]
        return type(found[0])(torch.cat(results) for results in zip(*found, strict=True))


def parts_of(
    program: Program, module: fx.GraphModule, leaves: Sequence[Any], made: Callable[..., Program | None]
) -> InParts | None:
    """Return a batch in parts whose activations stay in caches; None where it fits as it is or is not separable.

    Parameters
    ----------
    program
        Of the whole batch.
    made
        Makes the program of a part.
    """
    if program.arena_bytes < _LARGE_BYTES or not separable(module, program.ranks, leaves):
        return None
    batch = leaves[0].shape[0]
    most = _PART_BYTES * batch // max(1, program.arena_bytes)
    images = max((n for n in range(1, batch) if batch % n == 0 and n <= max(1, most)), default=None)
    part = None if images is None else made(*[leaf[:images] for leaf in leaves])
    return None if part is None or images is None else InParts(part, images)


def quicker_of(program: Program, parts: InParts, leaves: Sequence[Any]) -> Program | InParts:
    """Return which of two is clearly faster with these inputs, the first where neither is."""
    seconds: dict[Program | InParts, list[float]] = {program: [], parts: []}
    for _ in range(_TIMES):
        for each, taken in seconds.items():
            begin = time.perf_counter()
            each(leaves)
            taken.append(time.perf_counter() - begin)
    return parts if min(seconds[parts]) < _CLEARLY * min(seconds[program]) else program
