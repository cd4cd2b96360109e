"""Channels that go together: which weights must be permuted alike for a network to compute the same.

The model is traced once; every value gets a *space* of channels (a concatenation several, side by side), and residual
additions, norms and activations tie spaces together. A space may be permuted when everything that makes or reads it is
known, and is left alone when anything is not, so that the output never changes.

`sparta.propagation` ties channels too (`axes`, `groups`), and there are two for a reason. A scheduler prepares a model
before it has seen an input, while propagation needs an example to capture the graph; and a permutation must not mix
convolution groups, which cutting does not care about. So this walk is over modules, knows fewer ops, and gives up
earlier.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from sparta.errors import ValueRangeError, message
from sparta.scheduler.fuse import traced
from sparta.scheduler.spaces import Part, Space

__all__ = ["find_spaces"]

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.ELU, nn.LeakyReLU,
    nn.Mish, nn.Softplus, nn.Dropout, nn.Identity, nn.PReLU,
)  # fmt: skip
_POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
)  # fmt: skip
_SAME: tuple[Callable[..., Any], ...] = (
    torch.relu, torch.sigmoid, torch.tanh, functional.relu, functional.relu6, functional.gelu, functional.silu,
    functional.hardswish, functional.dropout, functional.leaky_relu,
)  # fmt: skip
_SAME_METHODS = frozenset({"relu", "relu_", "sigmoid", "tanh", "contiguous", "float", "half", "to", "clone"})
_BINARY: tuple[Callable[..., Any], ...] = (
    operator.add, operator.iadd, operator.mul, operator.imul, operator.sub, torch.add, torch.mul, torch.sub,
)  # fmt: skip
_OF_WORDS = frozenset({nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.Embedding})
_FIRST, _LAST, _FLAT = "after the batch", "last", "after the batch and last"  # where the channels of a value are


def find_spaces(model: nn.Module, leaves: Sequence[type[nn.Module]] = ()) -> list[Space]:
    """Return the spaces of channels of `model` that something reads, the fixed ones too.

    Where the model cannot be traced, its parts are, each for itself: what lies between them then stays in its order.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    shared = {key for key, count in owners.items() if count > 1}
    return _spaces(model, leaves, shared, model)


def _spaces(part: nn.Module, leaves: Sequence[type[nn.Module]], shared: set[int], model: nn.Module) -> list[Space]:
    if part is not model and isinstance(part, tuple(leaves)):
        return []
    if type(part) is nn.TransformerEncoderLayer and part is not model:
        return [] if any(id(parameter) in shared for parameter in part.parameters()) else [_inside(part)]
    try:
        graph = traced(part, leaves, "allow_permutation")
    except ValueRangeError as error:
        if part is model:
            told = str(error).split("; allowed", maxsplit=1)[0]
            warnings.warn(message(told, fix="its parts are looked at, each for itself"), stacklevel=5)
        return [space for child in part.children() for space in _spaces(child, leaves, shared, model)]
    walk = _Walk(part, shared)
    walk.run(graph)
    return [space for space in walk.spaces if space.joined is None and space.readers]


def _inside(layer: nn.TransformerEncoderLayer) -> Space:
    """Return the hidden channels of an encoder layer, which nothing outside of it sees."""
    return Space(layer.linear1.out_features, [layer.linear1], [(layer.linear2, 0)])


_Value = tuple[tuple[Space, ...], str]  # the spaces side by side, and where their channels are


class _Walk:
    """Walks a graph once and ties the spaces together."""

    def __init__(self, model: nn.Module, shared: set[int]) -> None:
        self.modules = dict(model.named_modules())
        self.spaces: list[Space] = []
        self.values: dict[fx.Node, _Value] = {}
        self.shared = shared

    def run(self, graph: fx.Graph) -> None:
        calls: dict[str, int] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                calls[str(node.target)] = calls.get(str(node.target), 0) + 1
        for node in graph.nodes:
            if node.op == "call_module" and calls[str(node.target)] == 1:
                self._module(node, self.modules[str(node.target)])
            elif node.op == "call_function":
                self._function(node)
            elif node.op == "call_method":
                self._method(node)
            else:  # inputs, outputs, attributes, modules that run twice
                self._unknown(node, f"{node.op} {node.target}")

    def _module(self, node: fx.Node, module: nn.Module) -> None:
        before = self._input(node)
        if any(id(parameter) in self.shared for parameter in module.parameters()):
            self._unknown(node, f"{node.target} shares a parameter")
        elif type(module) in _OF_WORDS:
            self._of_words(node, module)
        elif before is None:
            self._unknown(node, f"{node.target} has no single input")
        else:
            self._layer(node, module, before)

    def _of_words(self, node: fx.Node, module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention):
            self._attention(node, module)
        elif isinstance(module, nn.Embedding):
            self._embedding(node, module)
        else:
            self._encoder(node, module)

    def _layer(self, node: fx.Node, module: nn.Module, before: _Value) -> None:
        if isinstance(module, _CONVS) and module.groups == module.in_channels == module.out_channels:
            self._follow(node, module, before, module.in_channels, _FIRST)
        elif isinstance(module, _CONVS):
            self._weighted(node, module, before, (module.in_channels, module.out_channels), _FIRST)
        elif isinstance(module, nn.Linear):
            self._weighted(node, module, before, (module.in_features, module.out_features), _LAST)
        elif isinstance(module, _BATCH_NORMS):
            self._follow(node, module, before, module.num_features, _FIRST)
        elif isinstance(module, nn.LayerNorm):
            self._layer_norm(node, module, before)
        elif isinstance(module, nn.PReLU) and module.num_parameters > 1:
            self._follow(node, module, before, module.num_parameters, _FIRST)
        elif isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            self.values[node] = (before[0], _FLAT)
        elif isinstance(module, _ELEMENTWISE) or (isinstance(module, _POOLS) and before[1] == _FIRST):
            self.values[node] = before
        else:
            self._unknown(node, f"{node.target} ({type(module).__name__})")

    def _function(self, node: fx.Node) -> None:
        before, target = self._input(node), node.target
        tensors = [arg for arg in node.args if isinstance(arg, fx.Node)]
        if (target in _SAME and before is not None) or (target in _BINARY and len(tensors) == 1 and before is not None):
            self.values[node] = before
        elif target in _BINARY and len(tensors) == 2:
            self._tie(node, tensors)
        elif target in {torch.cat, torch.concat}:
            self._concatenate(node)
        elif target is torch.flatten and before is not None and _is_from_one(node):
            self.values[node] = (before[0], _FLAT)
        elif target is getattr and node.args[1] in {"shape", "dtype", "device", "ndim"}:
            self.values[node] = ((), _FIRST)
        elif target is operator.getitem and isinstance(node.args[0], fx.Node) and self._picked(node, node.args[0]):
            pass
        elif target in {functional.adaptive_avg_pool2d, functional.avg_pool2d, functional.max_pool2d} and before:
            if before[1] == _FIRST:
                self.values[node] = before
            else:
                self._unknown(node, str(target))
        else:
            self._unknown(node, str(target))

    def _method(self, node: fx.Node) -> None:
        before = self._input(node)
        if before is not None and node.target in _SAME_METHODS:
            self.values[node] = before
        elif before is not None and node.target == "flatten" and _is_from_one(node):
            self.values[node] = (before[0], _FLAT)
        elif node.target in {"size", "dim"}:
            self.values[node] = ((), _FIRST)  # numbers
        elif before is not None and node.target == "mean" and before[1] == _LAST and _axes(node) == {-2}:
            self.values[node] = before
        elif before is not None and node.target == "mean" and before[1] == _FIRST and _axes(node) in _SPATIAL:
            self.values[node] = (before[0], _FLAT)
        elif node.target in {"view", "reshape"} and len(node.args) == 3 and node.args[2] == -1 and self._is_count(node):
            self.values[node] = (self._value(node.args[0])[0], _FLAT)  # type: ignore[arg-type]
        elif (
            node.target in {"add", "add_", "mul", "mul_"} and len(node.args) == 2 and isinstance(node.args[1], fx.Node)
        ):
            self._tie(node, [arg for arg in node.args if isinstance(arg, fx.Node)])
        else:
            self._unknown(node, f"the method {node.target}")

    def _is_count(self, node: fx.Node) -> bool:
        """Whether a view keeps the batch and makes one axis of the rest of a value with channels after the batch."""
        source, count = node.args[0], node.args[1]
        if not isinstance(source, fx.Node) or self._value(source)[1] != _FIRST:
            return False
        if isinstance(count, fx.Node) and count.op == "call_method":
            return bool(count.target == "size" and count.args[1:] == (0,))
        return isinstance(count, fx.Node) and count.target is operator.getitem and bool(count.args[1] == 0)

    def _picked(self, node: fx.Node, source: fx.Node) -> bool:
        """Note what a pick out of a tuple is: a number of a shape, or the first output of attention."""
        spaces, where = self._value(source)
        if not spaces:
            self.values[node] = ((), where)
            return True
        is_attention = source.op == "call_module" and type(self.modules[str(source.target)]) is nn.MultiheadAttention
        if is_attention and node.args[1] == 0:
            self.values[node] = (spaces, where)
        elif is_attention:
            self.values[node] = ((), where)  # weights of attention: no channels
        return is_attention

    def _layer_norm(self, node: fx.Node, module: nn.LayerNorm, before: _Value) -> None:
        """Follow a norm over the last axes: of channels alone, of channels and space, or of space alone."""
        count = len(module.normalized_shape)
        if before[1] != _FIRST:
            if count == 1:
                self._follow(node, module, before, module.normalized_shape[0], _LAST)
            else:
                self._unknown(node, f"{node.target} normalises several axes")
            return
        kinds = {type(maker) for space in before[0] for maker in self._root(space).makers}
        axes = _CONVS.index(kinds.pop()) + 2 if len(kinds) == 1 and kinds <= set(_CONVS) else None
        if axes is None or count > axes:
            self._unknown(node, f"{node.target} normalises axes of an unknown place")
        elif count == axes and len(before[0]) == 1:
            self._follow(node, module, before, module.normalized_shape[0], _FIRST)
        elif count < axes:
            self.values[node] = before
        else:
            self._unknown(node, f"{node.target} normalises a concatenation")

    def _attention(self, node: fx.Node, module: nn.MultiheadAttention) -> None:
        given = [node.args[place] if len(node.args) > place else node.kwargs.get(name)
                 for place, name in enumerate(("query", "key", "value"))]  # fmt: skip
        sources = [one for one in given if isinstance(one, fx.Node)]
        if len(sources) != 3 or module.in_proj_weight is None:
            self._unknown(node, f"{node.target} (attention with projections of its own)")
            return
        for source, weight in zip(sources, module.in_proj_weight.detach().chunk(3), strict=True):
            self._read(node, Part(weight, module), self._value(source), module.embed_dim)
        made = self._new()
        made.size = module.embed_dim
        made.makers.append(module.out_proj)
        self.values[node] = ((made,), _LAST)

    def _encoder(self, node: fx.Node, module: nn.Module) -> None:
        """Follow an encoder layer, or a stack of them: the sum that runs through is one space, each inside another."""
        source = node.args[0] if node.args else node.kwargs.get("src")
        layers = [module] if isinstance(module, nn.TransformerEncoderLayer) else list(module.layers)  # type: ignore[arg-type]
        known = all(type(layer) is nn.TransformerEncoderLayer for layer in layers)
        if not isinstance(source, fx.Node) or not known:
            self._unknown(node, f"{node.target} ({type(module).__name__})")
            return
        before = self._value(source)
        for layer in layers:
            one: Any = layer
            width = one.self_attn.embed_dim
            self._read(node, Part(one.self_attn.in_proj_weight.detach(), one.self_attn), before, width)
            self._read(node, one.linear1, before, width)
            for space in before[0]:
                root = self._root(space)
                root.makers += [one.self_attn.out_proj, one.linear2]
                root.followers += [(one.norm1, 0), (one.norm2, 0)]
            self.spaces.append(_inside(one))
        self.values[node] = (before[0], before[1])
        norm = getattr(module, "norm", None)
        if norm is not None:
            self._layer_norm(node, norm, before)

    def _embedding(self, node: fx.Node, module: nn.Embedding) -> None:
        for before in node.all_input_nodes:
            self._fix(self._value(before)[0], "numbers of rows")
        made = self._new()
        made.size = module.embedding_dim
        made.makers.append(Part(module.weight.detach().t(), module))  # type: ignore[arg-type]
        self.values[node] = ((made,), _LAST)

    def _read(self, node: fx.Node, module: Any, before: _Value, size: int) -> None:
        """Note that a weight reads the last axis of a value."""
        spaces = self._sized(before[0], size)
        if before[1] != _LAST or len(spaces) != 1:
            self._fix(spaces, f"{node.target} reads its channels from another axis")
        for space, start in _placed(spaces):
            space.readers.append((module, start))

    def _weighted(self, node: fx.Node, module: nn.Module, before: _Value, sizes: tuple[int, int], where: str) -> None:
        groups = int(getattr(module, "groups", 1))
        spaces = self._sized(before[0], sizes[0])
        if before[1] not in {where, _FLAT} or (where, before[1]) == (_FIRST, _FLAT):
            self._fix(spaces, f"{node.target} reads its channels from another axis")
        if groups > 1 and len(spaces) > 1:
            self._fix(spaces, f"{node.target} has groups and reads a concatenation")
        for space, start in _placed(spaces):
            space.readers.append((module, start))
            space.block = math.gcd(space.block, sizes[0] // groups) if groups > 1 else space.block
        made = self._new()
        made.size = sizes[1]
        made.block = sizes[1] // groups if groups > 1 else 0
        made.makers.append(module)
        self.values[node] = ((made,), _FLAT if before[1] == _FLAT else where)

    def _follow(self, node: fx.Node, module: nn.Module, before: _Value, size: int, where: str) -> None:
        spaces = self._sized(before[0], size)
        if before[1] not in {where, _FLAT}:
            self._fix(spaces, f"{node.target} normalises another axis")
        for space, start in _placed(spaces):
            space.followers.append((module, start))
        self.values[node] = (spaces, before[1])

    def _tie(self, node: fx.Node, tensors: Sequence[fx.Node]) -> None:
        (first, where), (second, other) = (self._value(tensor) for tensor in tensors)
        if len(first) != len(second):
            self._fix((*first, *second), f"{node.target} of values that are put together from different parts")
            self.values[node] = (first, where)
            return
        joined = tuple(self._join(one, two) for one, two in zip(first, second, strict=True))
        if where != other:
            self._fix(joined, f"{node.target} of values with channels on different axes")
        self.values[node] = (tuple(self._root(space) for space in joined), where)

    def _concatenate(self, node: fx.Node) -> None:
        parts = node.args[0] if node.args else node.kwargs.get("tensors")
        axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        nodes = [part for part in parts if isinstance(part, fx.Node)] if isinstance(parts, (list, tuple)) else []
        values = [self._value(part) for part in nodes]
        axes = {_FIRST: {1}, _LAST: {-1}, _FLAT: {1, -1}}
        where = values[0][1] if values else _FIRST
        known = all(space.size is not None for spaces, _ in values for space in spaces)
        if not values or not known or axis not in axes[where] or any(place != where for _, place in values):
            self._unknown(node, "a concatenation along another axis, or of parts of unknown sizes")
        else:
            self.values[node] = (tuple(space for spaces, _ in values for space in spaces), where)

    def _unknown(self, node: fx.Node, why: str) -> None:
        for before in node.all_input_nodes:
            self._fix(self._value(before)[0], why)
        made = (self._new(),)
        self._fix(made, why)
        self.values[node] = (made, _FIRST)

    def _input(self, node: fx.Node) -> _Value | None:
        """Return the value of a node's one tensor input, or None when it has none or several."""
        if len(node.all_input_nodes) == 1 and node.args and isinstance(node.args[0], fx.Node):
            return self._value(node.args[0])
        return None

    def _value(self, node: fx.Node) -> _Value:
        spaces, where = self.values[node]
        return tuple(self._root(space) for space in spaces), where

    def _new(self) -> Space:
        self.spaces.append(Space())
        return self.spaces[-1]

    def _root(self, space: Space) -> Space:
        while space.joined is not None:
            space = space.joined
        return space

    def _fix(self, spaces: Sequence[Space], why: str) -> None:
        for space in spaces:
            root = self._root(space)
            root.fixed = root.fixed or why

    def _sized(self, spaces: Sequence[Space], size: int) -> tuple[Space, ...]:
        """Note that these channels, side by side, are read as so many; return their roots."""
        roots = tuple(self._root(space) for space in spaces)
        found = None if any(root.size is None for root in roots) else sum(root.size or 0 for root in roots)
        if found is None and len(roots) == 1:
            roots[0].size = size
        elif found != size:
            self._fix(roots, f"{found} channels are read as {size}")
        return roots

    def _join(self, first: Space, second: Space) -> Space:
        first, second = self._root(first), self._root(second)
        if first is second:
            return first
        if None not in {first.size, second.size} and first.size != second.size:
            self._fix((first,), "values of different sizes are combined")
        first.size = first.size or second.size
        first.block = math.gcd(first.block, second.block)
        first.makers += second.makers
        first.readers += second.readers
        first.followers += second.followers
        first.fixed = first.fixed or second.fixed
        second.joined = first
        return first


_SPATIAL = ({2, 3}, {-1, -2}, {2}, {2, 3, 4}, {-1, -2, -3})


def _axes(node: fx.Node) -> set[int]:
    """Return the axes that a mean is over; nothing where it keeps them or they are not known."""
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    kept = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    listed = [given] if isinstance(given, int) else list(given) if isinstance(given, list | tuple) else []
    return set() if kept or not all(isinstance(axis, int) for axis in listed) else set(listed)


def _is_from_one(node: fx.Node) -> bool:
    """Whether a flatten keeps the batch and makes one axis of all the others."""
    places = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | dict(node.kwargs)
    return bool(places.get("start_dim", 0) == 1 and places.get("end_dim", -1) == -1)


def _placed(spaces: Sequence[Space]) -> Iterator[tuple[Space, int]]:
    """Yield each space with the place of its first channel among all."""
    start = 0
    for space in spaces:
        yield space, start
        start += space.size or 0
