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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from sparta.scheduler.fuse import traced

__all__ = ["Space", "columns_read", "find_spaces", "permute_space"]

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.ELU, nn.LeakyReLU,
    nn.Mish, nn.Softplus, nn.Dropout, nn.Identity,
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
_FIRST, _LAST, _FLAT = "after the batch", "last", "after the batch and last"  # where the channels of a value are


@dataclass(eq=False)
class Space:
    """One set of channels that can only be permuted together.

    Parameters
    ----------
    size
        How many channels, or None where it is not known.
    makers
        Linear layers and convolutions whose outputs the channels are.
    readers
        Those whose inputs they are, and from which of its input channels on: not 0 after a concatenation.
    followers
        Norms and depthwise convolutions that have one parameter per channel, and from which on.
    block
        Channels may only change places within blocks of so many, as convolutions with groups want; 0: anywhere.
    fixed
        Why it must not be permuted; empty when it may be.
    """

    size: int | None = None
    makers: list[nn.Module] = field(default_factory=list)
    readers: list[tuple[nn.Module, int]] = field(default_factory=list)
    followers: list[tuple[nn.Module, int]] = field(default_factory=list)
    block: int = 0
    fixed: str = ""
    joined: Space | None = None

    def blocks(self) -> list[slice]:
        """Return the runs of channels within which they may change places."""
        size = self.size or 0
        step = self.block or max(1, size)
        return [slice(start, start + step) for start in range(0, size, step)]


def find_spaces(model: nn.Module, leaves: Sequence[type[nn.Module]] = ()) -> list[Space]:
    """Return the spaces of channels of `model` that something reads, the fixed ones too."""
    walk = _Walk(model)
    walk.run(traced(model, leaves, "allow_permutation"))
    return [space for space in walk.spaces if space.joined is None and space.readers]


@torch.no_grad()
def permute_space(space: Space, order: Tensor) -> None:
    """Permute everything that makes, carries or reads the channels of a space, in place.

    Parameters
    ----------
    order
        Channel ``j`` becomes what channel ``order[j]`` was; shape (size,). It stays within :meth:`Space.blocks`.
    """
    for module, start in [*((maker, 0) for maker in space.makers), *space.followers]:
        for name in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                _reorder(value[start : start + len(order)], order)
    for module, start in space.readers:
        weight: Tensor = module.weight.detach().transpose(0, 1)  # type: ignore[operator]
        groups = int(getattr(module, "groups", 1))
        if groups == 1:
            _reorder(weight[start : start + len(order)], order)
            continue
        for group, rows in enumerate(weight.chunk(groups, 1)):  # each group of filters reads channels of its own
            here = slice(group * len(rows), (group + 1) * len(rows))
            _reorder(rows, order[here] - here.start)


def columns_read(module: nn.Module, start: int, channels: slice) -> Tensor:
    """Return the weights with which `module` reads some channels of a space, as a matrix with one column per channel.

    Parameters
    ----------
    start
        Which input channel of the module is the first of the space.
    channels
        A block of the space; with groups, it lies within one of them.

    Returns
    -------
    Tensor
        Shape (output channels × kernel positions, channels).
    """
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    first, last, groups = start + channels.start, start + channels.stop, int(getattr(module, "groups", 1))
    if groups > 1:
        width = weight.shape[1]
        weight = weight.chunk(groups, 0)[first // width]
        first, last = first % width, first % width + last - first
    return weight[:, first:last].movedim(1, -1).reshape(-1, last - first)


def _reorder(rows: Tensor, order: Tensor) -> None:
    rows.copy_(rows[order.to(rows.device)].clone())


_Value = tuple[tuple[Space, ...], str]  # the spaces side by side, and where their channels are


class _Walk:
    """Walks a graph once and ties the spaces together."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.spaces: list[Space] = []
        self.values: dict[fx.Node, _Value] = {}
        owners: dict[int, int] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        self.shared = {key for key, count in owners.items() if count > 1}

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
        if any(id(parameter) in self.shared for parameter in module.parameters(recurse=False)):
            self._unknown(node, f"{node.target} shares a parameter")
        elif before is None:
            self._unknown(node, f"{node.target} has no single input")
        elif isinstance(module, _CONVS) and module.groups == module.in_channels == module.out_channels:
            self._follow(node, module, before, module.in_channels, _FIRST)
        elif isinstance(module, _CONVS):
            self._weighted(node, module, before, (module.in_channels, module.out_channels), _FIRST)
        elif isinstance(module, nn.Linear):
            self._weighted(node, module, before, (module.in_features, module.out_features), _LAST)
        elif isinstance(module, _BATCH_NORMS):
            self._follow(node, module, before, module.num_features, _FIRST)
        elif isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
            self._follow(node, module, before, module.normalized_shape[0], _LAST)
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
        elif target is torch.flatten and before is not None and node.args[1:] in {(1,), (1, -1)} and not node.kwargs:
            self.values[node] = (before[0], _FLAT)
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
        elif before is not None and node.target == "flatten" and node.args[1:] in {(1,), (1, -1)}:
            self.values[node] = (before[0], _FLAT)
        elif (
            node.target in {"add", "add_", "mul", "mul_"} and len(node.args) == 2 and isinstance(node.args[1], fx.Node)
        ):
            self._tie(node, [arg for arg in node.args if isinstance(arg, fx.Node)])
        else:
            self._unknown(node, f"the method {node.target}")

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


def _placed(spaces: Sequence[Space]) -> Iterator[tuple[Space, int]]:
    """Yield each space with the place of its first channel among all."""
    start = 0
    for space in spaces:
        yield space, start
        start += space.size or 0
