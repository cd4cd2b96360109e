"""Compensation: what removed channels contributed is folded into the channels that stay, by least squares on data.

A layer that loses some of its inputs can still come close to what it computed, because channels are correlated: each
removed one is predicted from those that stay (ridge regression in closed form, with a constant where the layer has a
bias to take it), and the prediction goes through the old weights into the new ones. The Gram matrix of a layer's inputs
is all that is needed of the data, so batches are seen once and not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import _pytree as fx_pytree

from sparta.aten import argument_of
from sparta.propagation.capture import Captured
from sparta.propagation.op import shape_of

__all__ = ["compensated"]

_aten = torch.ops.aten
_LINEAR, _ADDMM = _aten.linear.default, _aten.addmm.default
_CONVOLUTIONS = (_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default)
_RIDGE = 1e-4


@dataclass
class _Reader:
    """A layer that loses inputs, and the statistics of what it reads.

    Parameters
    ----------
    removed
        Which inputs go: bool, one per input.
    gram, total, count
        Sum of x xᵀ and of x over all rows seen, and their number.
    """

    node: fx.Node
    removed: Tensor
    gram: Tensor | None = None
    total: Tensor | None = None
    count: int = 0

    @property
    def weight(self) -> str:
        return str(self._operand("mat2" if self.node.target is _ADDMM else "weight"))

    @property
    def bias(self) -> str | None:
        name = self._operand("self" if self.node.target is _ADDMM else "bias")
        return None if name is None else str(name)

    @property
    def source(self) -> fx.Node:
        node: fx.Node = argument_of(self.node, "mat1" if self.node.target is _ADDMM else "input")
        return node

    def _operand(self, name: str) -> Any:
        node = argument_of(self.node, name)
        return None if node is None else node.target

    def constant_fits(self) -> bool:
        """Whether a constant of the inputs is a constant of the outputs, which a bias can take."""
        if self.bias is None:
            return False
        bias = argument_of(self.node, "self" if self.node.target is _ADDMM else "bias")
        return len(bias.users) == 1 and (self.node.target not in _CONVOLUTIONS or not any(_padding(self.node)))

    def see(self, x: Tensor) -> None:
        """Add the rows of one batch."""
        if self.node.target in _CONVOLUTIONS:
            channel = x.dim() - 1 - len(shape_of(argument_of(self.node, "weight"))[2:])
            x = x.movedim(channel, -1)
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float64)
        gram, total = rows.T @ rows, rows.sum(0)
        self.gram = gram if self.gram is None else self.gram + gram
        self.total = total if self.total is None else self.total + total
        self.count += len(rows)

    def prediction(self) -> tuple[Tensor, Tensor] | None:
        """Return (kept, removed) coefficients and a constant per removed input; None where nothing was seen."""
        if self.gram is None or self.total is None or not bool(self.gram.isfinite().all()):
            return None
        removed = self.removed.to(self.gram.device)
        gram, mean = self.gram / self.count, self.total / self.count
        if not self.constant_fits():
            mean = torch.zeros_like(mean)
        gram = gram - torch.outer(mean, mean)
        among, across = gram[~removed][:, ~removed], gram[~removed][:, removed]
        if not len(among):
            return torch.zeros_like(across), mean[removed]
        ridge = _RIDGE * float(among.diagonal().mean()) + torch.finfo(torch.float64).tiny
        coefficients = torch.linalg.solve(among + ridge * torch.eye(len(among)).to(among), across)
        return coefficients, mean[removed] - mean[~removed] @ coefficients


def _padding(node: fx.Node) -> tuple[Any, ...]:
    given = argument_of(node, "padding")
    return (given,) if isinstance(given, str | int) else tuple(given)


def compensated(
    captured: Captured, removed: Mapping[tuple[str, int], Tensor], batches: Iterable[Any]
) -> tuple[Captured, int]:
    """Return the captured model with weights that make up for inputs that will go, and how many layers changed.

    Parameters
    ----------
    removed
        For tensors and dims the flags of the indices that go.
    batches
        What the model takes, each as an example.
    """
    readers = {reader.node: reader for reader in _readers(captured, removed)}
    if not readers:
        return captured, 0
    recorder = _Recorder(captured.module, readers)
    for batch in batches:
        args, kwargs = captured.arguments(batch)
        with torch.no_grad():
            recorder.run(*_flat(captured.module, args, kwargs), enable_io_processing=False)
    tensors = dict(captured.tensors)
    changed = 0
    for reader in readers.values():
        found = reader.prediction()
        if found is not None:
            tensors.update(_updated(captured, reader, *found))
            changed += 1
    return replace(captured, tensors=tensors), changed


def _readers(captured: Captured, removed: Mapping[tuple[str, int], Tensor]) -> list[_Reader]:
    """Return the layers of which some inputs, but not all, will go."""
    found = []
    for node in captured.graph.nodes:
        grouped = node.target in _CONVOLUTIONS and argument_of(node, "groups") != 1
        if node.target not in (_LINEAR, _ADDMM, *_CONVOLUTIONS) or grouped:
            continue
        weight = argument_of(node, "mat2" if node.target is _ADDMM else "weight")
        flags = (
            removed.get((str(weight.target), 0 if node.target is _ADDMM else 1)) if weight.op == "get_attr" else None
        )
        plain = isinstance(captured.tensors.get(str(weight.target)), nn.Parameter) and len(weight.users) == 1
        bias = argument_of(node, "self" if node.target is _ADDMM else "bias")
        if flags is not None and plain and bool(flags.any()) and (bias is None or bias.op == "get_attr"):
            found.append(_Reader(node, flags))
    return found


class _Recorder(fx.Interpreter):
    """Runs a graph and shows readers what they read."""

    def __init__(self, module: fx.GraphModule, readers: Mapping[fx.Node, _Reader]) -> None:
        super().__init__(module)
        self.readers = readers

    def run_node(self, node: fx.Node) -> Any:
        """Run one node."""
        reader = self.readers.get(node)
        if reader is not None:
            reader.see(self.env[reader.source])
        return super().run_node(node)


def _flat(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call in the order of the graph's inputs."""
    info = getattr(module.graph._codegen, "pytree_info", None)
    if info is None:
        return [*args, *kwargs.values()]
    names = info.in_spec.children()[1].context
    ordered = {name: kwargs[name] for name in names}
    flat: list[Any] = fx_pytree.tree_flatten_spec((args, ordered), info.in_spec)
    return flat


def _updated(captured: Captured, reader: _Reader, coefficients: Tensor, constant: Tensor) -> dict[str, Tensor]:
    """Return the new weight and bias of a layer."""
    old = captured.tensors[reader.weight]
    dim = 0 if reader.node.target is _ADDMM else 1
    weight = old.detach().to(torch.float64).movedim(dim, -1)
    removed = reader.removed.to(weight.device)
    lost = weight[..., removed]
    new = weight.clone()
    new[..., ~removed] += lost @ coefficients.T.to(weight.device)
    found: dict[str, Tensor] = {reader.weight: _like(old, new.movedim(-1, dim))}
    if reader.bias is not None and reader.constant_fits():
        shift = lost @ constant.to(weight.device)
        if reader.node.target in _CONVOLUTIONS:
            shift = shift.reshape(len(shift), -1).sum(1)
        bias = captured.tensors[reader.bias]
        found[reader.bias] = _like(bias, bias.detach().to(torch.float64) + shift)
    return found


def _like(old: Tensor, values: Tensor) -> Tensor:
    values = values.to(old.dtype).contiguous()
    return nn.Parameter(values, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else values
