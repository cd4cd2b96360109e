"""Channels that go together: which weights must be permuted alike for a network to compute the same.

The model is traced once; every value gets a *space* of channels, and residual additions, norms and activations tie
spaces together. The one idea to know: a space may be permuted when everything that makes or reads it is known, and is
left alone when anything is not, so that the output never changes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from sparta.scheduler.fuse import traced

__all__ = ["Space", "find_spaces", "permute_space"]

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
    makers, readers
        Linear layers and convolutions whose outputs, or inputs, the channels are.
    followers
        Norms and depthwise convolutions that have one parameter a channel.
    fixed
        Why it must not be permuted; empty when it may be.
    """

    size: int | None = None
    makers: list[nn.Module] = field(default_factory=list)
    readers: list[nn.Module] = field(default_factory=list)
    followers: list[nn.Module] = field(default_factory=list)
    fixed: str = ""
    joined: Space | None = None


def find_spaces(model: nn.Module, leaves: Sequence[type[nn.Module]] = ()) -> list[Space]:
    """Return the spaces of channels of `model` that something reads, the fixed ones too."""
    walk = _Walk(model)
    walk.run(traced(model, leaves, "allow_permutation"))
    return [space for space in walk.spaces if space.joined is None and space.readers]


@torch.no_grad()
def permute_space(space: Space, order: Tensor) -> None:
    """Permute everything that makes, carries or reads the channels of a space, in place."""
    for module in space.makers + space.followers:
        for name in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                value.copy_(value[order.to(value.device)].clone())
    for module in space.readers:
        weight: Tensor = module.weight  # type: ignore[assignment]
        weight.copy_(weight[:, order.to(weight.device)].clone())


class _Walk:
    """Walks a graph once and ties the spaces together."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.spaces: list[Space] = []
        self.values: dict[fx.Node, tuple[Space, str]] = {}
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
        elif isinstance(module, _CONVS) and module.groups == 1:
            self._weighted(node, module, before, (module.in_channels, module.out_channels), _FIRST)
        elif isinstance(module, nn.Linear):
            self._weighted(node, module, before, (module.in_features, module.out_features), _LAST)
        elif isinstance(module, _CONVS) and module.groups == module.in_channels == module.out_channels:
            self._follow(node, module, before, module.in_channels, _FIRST)
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

    def _weighted(
        self, node: fx.Node, module: nn.Module, before: tuple[Space, str], sizes: tuple[int, int], where: str
    ) -> None:
        space = self._sized(before[0], sizes[0])
        if before[1] not in {where, _FLAT} or (where, before[1]) == (_FIRST, _FLAT):
            self._fix(space, f"{node.target} reads its channels from another axis")
        space.readers.append(module)
        made = self._new()
        made.size = sizes[1]
        made.makers.append(module)
        self.values[node] = (made, _FLAT if before[1] == _FLAT else where)

    def _follow(self, node: fx.Node, module: nn.Module, before: tuple[Space, str], size: int, where: str) -> None:
        space = self._sized(before[0], size)
        if before[1] not in {where, _FLAT}:
            self._fix(space, f"{node.target} normalises another axis")
        space.followers.append(module)
        self.values[node] = (space, before[1])

    def _tie(self, node: fx.Node, tensors: Sequence[fx.Node]) -> None:
        (first, where), (second, other) = (self._value(tensor) for tensor in tensors)
        joined = self._join(first, second)
        if where != other:
            self._fix(joined, f"{node.target} of values with channels on different axes")
        self.values[node] = (joined, where)

    def _unknown(self, node: fx.Node, why: str) -> None:
        for before in node.all_input_nodes:
            self._fix(self._value(before)[0], why)
        made = self._new()
        self._fix(made, why)
        self.values[node] = (made, _FIRST)

    def _input(self, node: fx.Node) -> tuple[Space, str] | None:
        """Return the value of a node's one tensor input, or None when it has none or several."""
        if len(node.all_input_nodes) == 1 and node.args and isinstance(node.args[0], fx.Node):
            return self._value(node.args[0])
        return None

    def _value(self, node: fx.Node) -> tuple[Space, str]:
        space, where = self.values[node]
        return self._root(space), where

    def _new(self) -> Space:
        self.spaces.append(Space())
        return self.spaces[-1]

    def _root(self, space: Space) -> Space:
        while space.joined is not None:
            space = space.joined
        return space

    def _fix(self, space: Space, why: str) -> None:
        root = self._root(space)
        root.fixed = root.fixed or why

    def _sized(self, space: Space, size: int) -> Space:
        root = self._root(space)
        if root.size not in {None, size}:
            self._fix(root, f"{root.size} channels are read as {size}")
        root.size = root.size or size
        return root

    def _join(self, first: Space, second: Space) -> Space:
        first, second = self._root(first), self._root(second)
        if first is second:
            return first
        if None not in {first.size, second.size} and first.size != second.size:
            self._fix(first, "values of different sizes are combined")
        first.size = first.size or second.size
        first.makers += second.makers
        first.readers += second.readers
        first.followers += second.followers
        first.fixed = first.fixed or second.fixed
        second.joined = first
        return first
