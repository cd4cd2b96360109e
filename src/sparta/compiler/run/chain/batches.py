"""Batches in parts: a large batch of images or sequences, a few of them at a time through the whole chain.

Layer by layer, the activations of a large batch go to memory and come back from there, and in every layer threads wait
for each other and read what another one wrote. A few images stay in the caches from the first layer to the last, all
threads at the same images or each at its own, but read all weights again. Which is fastest is measured where it can be.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from sparta.compiler.graph.program import copied
from sparta.compiler.run.chain.program import Program
from sparta.compiler.run.kernel_module import KernelModule
from sparta.modules import member

__all__ = ["InParts", "SideBySide", "parts_of", "quicker_of", "resized", "separable", "side_by_side"]

_aten = torch.ops.aten
_LARGE_BYTES = 1 << 24  # activations that leave the caches
_SHARED_BYTES = 1 << 21  # activations of a batch from which threads gain by images of their own
_PART_BYTES = (1 << 23, 1 << 21)  # of two levels of caches
_CLEARLY, _HOPELESS = 0.97, 1.3
_TIMES = 3
_FEWEST_THREADS = 2
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
_SHAPES = frozenset({_aten.reshape.default, _aten.view.default})
# Calls that take parts of a dim, and which argument that is.
_CUTS = {
    _aten.chunk.default: 2,
    _aten.split.Tensor: 2,
    _aten.split_with_sizes.default: 2,
    _aten.slice.Tensor: 1,
    _aten.select.int: 1,
}
_MOST_DIMS = 4  # of attention
_Shapes = Mapping[fx.Node, torch.Size]
_Make = Callable[[fx.GraphModule, Sequence[Any]], Program | None]


def separable(module: fx.GraphModule, shapes: _Shapes, leaves: Sequence[Any]) -> bool:
    """Whether a graph computes every image of a batch by itself, as far as its calls are known to.

    Parameters
    ----------
    shapes
        Of the tensors of the graph.
    """
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() > 1 for leaf in leaves):
        return False
    return len({leaf.shape[0] for leaf in leaves}) == 1 and all(_alone(module, shapes, n) for n in module.graph.nodes)


def _alone(module: fx.GraphModule, shapes: _Shapes, node: fx.Node) -> bool:
    """Whether the first dim of a node is the batch if that of its inputs is."""
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op == "output":
        results = node.args[0]
        return isinstance(results, (list, tuple)) and all(isinstance(r, fx.Node) and _is_made(r) for r in results)
    return _called_alone(module, shapes, node)


def _called_alone(module: fx.GraphModule, shapes: _Shapes, node: fx.Node) -> bool:
    x = node.args[0] if node.args else None
    if not isinstance(x, fx.Node) or not _is_made(x):
        return False
    if node.target is operator.getitem:
        return x.target in _CUTS  # of which every part was looked at
    if x not in shapes:
        return False
    rank = len(shapes[x])
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return isinstance(layer, KernelModule) and rank > 1 and all(_is_like(module, shapes, x, n) for n in node.args)
    if node.target in _SHAPES:
        return len(node.args) > 1 and node in shapes and shapes[node][:1] == shapes[x][:1]
    return _joins_alike(module, shapes, x, node) or node.target in _NUMBERS or _keeps_the_first(rank, node)


def _joins_alike(module: fx.GraphModule, shapes: _Shapes, x: fx.Node, node: fx.Node) -> bool:
    """Whether a call of x with other tensors takes those of the same image, or fixed ones."""
    others = [each for each in (*node.args[1:], *node.kwargs.values()) if isinstance(each, fx.Node)]
    alike, rank = all(_is_like(module, shapes, x, each) for each in others), len(shapes[x])
    if node.target in _LAYERS:
        return rank in _LAYERS[node.target] and not any(map(_is_made, others)) and not node.kwargs
    if node.target is _aten.layer_norm.default:
        numbers = node.args[1]
        return isinstance(numbers, (list, tuple)) and len(numbers) < rank and not any(map(_is_made, others))
    attention = node.target is _aten.scaled_dot_product_attention.default and rank == _MOST_DIMS
    return alike and (attention or node.target in _PAIRS)


def _keeps_the_first(rank: int, node: fx.Node) -> bool:
    """Whether a call on a tensor of so many dims leaves the first as it is."""
    numbers = node.args[1] if len(node.args) > 1 else None
    if node.target is _aten.transpose.int:
        return all(isinstance(each, int) and each % rank for each in node.args[1:3])
    if node.target in _CUTS:
        dim = node.args[_CUTS[node.target]] if len(node.args) > _CUTS[node.target] else node.kwargs.get("dim", 0)
        return isinstance(dim, int) and dim % rank > 0
    if node.target is _aten.flatten.using_ints:
        return isinstance(numbers, int) and numbers % rank > 0
    if not isinstance(numbers, (list, tuple)) or not numbers or not all(isinstance(each, int) for each in numbers):
        return False
    if node.target is _aten.permute.default:
        return int(numbers[0]) % rank == 0
    return node.target is _aten.mean.dim and all(each % rank for each in numbers)


def _is_made(node: fx.Node) -> bool:
    return node.op != "get_attr"


def _is_like(module: fx.GraphModule, shapes: _Shapes, x: fx.Node, other: object) -> bool:
    """Whether an operand beside x is a number, a value with as many dims, or a fixed tensor that all images share."""
    if not isinstance(other, fx.Node):
        return isinstance(other, (int, float))
    if _is_made(other):
        return other in shapes and len(shapes[other]) == len(shapes[x])
    tensor = member(module, str(other.target))
    return isinstance(tensor, Tensor) and tensor.dim() < len(shapes[x])


def resized(module: fx.GraphModule, batch: int, images: int) -> fx.GraphModule:
    """Return a separable graph for another batch: shapes that name the first dim name the new one."""
    graph, _ = copied(module.graph)
    for node in graph.nodes:
        if node.target in _SHAPES and isinstance(node.args[1], (list, tuple)) and node.args[1][:1] == [batch]:
            node.args = (node.args[0], [images, *node.args[1][1:]])
    return fx.GraphModule(module, graph)


class InParts:
    """A batch that runs in parts of so many images; see :func:`parts_of`."""

    def __init__(self, program: Program, images: int) -> None:
        self.program, self.images = program, images

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        """Return the flat results of all parts."""
        each = self.images
        found = self._results([[leaf[at : at + each] for leaf in leaves] for at in range(0, leaves[0].shape[0], each)])
        return type(found[0])(torch.cat(results) for results in zip(*found, strict=True))

    def _results(self, parts: Sequence[Sequence[Tensor]]) -> list[Any]:
        return [self.program(part) for part in parts]


class SideBySide(InParts):
    """The same, where each part is computed by one of so many threads; see :func:`side_by_side`."""

    def __init__(self, program: Program, images: int, threads: int) -> None:
        super().__init__(program, images)
        self.threads = threads

    def _results(self, parts: Sequence[Sequence[Tensor]]) -> list[Any]:
        return self.program.side_by_side(parts, min(self.threads, len(parts)))


def parts_of(program: Program, module: fx.GraphModule, leaves: Sequence[Any], made: _Make) -> list[InParts]:
    """Return a batch in parts whose activations stay in caches; none where it fits as it is or is not separable.

    Parameters
    ----------
    program
        Of the whole batch.
    made
        Makes the program of a part from the graph for it and inputs.
    """
    if program.arena_bytes < _LARGE_BYTES or not separable(module, program.shapes, leaves):
        return []
    batch = leaves[0].shape[0]
    return [InParts(part, images) for part, images in _cut(program, module, leaves, made, most=batch - 1)]


def side_by_side(
    program: Program, module: fx.GraphModule, leaves: Sequence[Any], made: _Make, threads: int
) -> list[SideBySide]:
    """Return a batch in parts of which every thread computes its own; none where it is small or is not separable.

    Parameters
    ----------
    program
        Of the whole batch.
    made
        Makes the program of a part, for one thread, from the graph for it and inputs.
    threads
        How many there are; with one, or for a single image, there is nothing to share.
    """
    if threads < _FEWEST_THREADS or not program.in_one_call or program.arena_bytes < _SHARED_BYTES:
        return []
    if not separable(module, program.shapes, leaves):
        return []
    most = leaves[0].shape[0] // threads
    found = _cut(program, module, leaves, made, most=most)
    return [SideBySide(part, images, threads) for part, images in found if part.in_one_call]


def _cut(
    program: Program, module: fx.GraphModule, leaves: Sequence[Any], made: _Make, most: int
) -> Iterator[tuple[Program, int]]:
    """Yield programs of parts, with their images: no more than `most`, and as many as caches hold."""
    batch = leaves[0].shape[0]
    fit = [part * batch // max(1, program.arena_bytes) for part in _PART_BYTES]
    sizes = {max((n for n in range(1, most + 1) if batch % n == 0 and n <= max(1, each)), default=0) for each in fit}
    for images in sorted(sizes - {0}, reverse=True):
        part = made(resized(module, batch, images), [leaf[:images] for leaf in leaves])
        if part is not None:
            yield part, images


def quicker_of(program: Program, parts: Sequence[InParts], leaves: Sequence[Any]) -> Program | InParts:
    """Return which is clearly faster with these inputs, the first where none is; no cold run rules one out."""
    seconds: dict[Program | InParts, list[float]] = {program: [], **{each: [] for each in parts}}
    for _ in range(_TIMES):
        best = min((min(taken) for taken in seconds.values() if taken), default=float("inf"))
        for each, taken in seconds.items():
            if len(taken) > 1 and min(taken) > _HOPELESS * best:
                continue
            begin = time.perf_counter()
            each(leaves)
            taken.append(time.perf_counter() - begin)
    quickest = min(parts, key=lambda each: min(seconds[each]))
    return quickest if min(seconds[quickest]) < _CLEARLY * min(seconds[program]) else program
