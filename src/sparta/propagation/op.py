"""One op of the graph as a rule sees it: arguments by their schema names, shapes as numbers, and what is known so far.

Shapes come from the traced example even where a dim is dynamic; knowledge along a dynamic dim is dropped by the engine
after each rule, so rules need not care.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from sparta.aten import arguments_of

if TYPE_CHECKING:
    from sparta.propagation.constants import Known
    from sparta.propagation.engine import Facts

__all__ = ["Op", "dtype_of", "dynamic_dims", "is_tensor", "place", "shape_of", "tensor_inputs"]


def is_tensor(node: object) -> bool:
    """Whether a node's value is one tensor with sizes known at trace time."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and all(_hint(s) is not None for s in value.shape)


def _hint(size: Any) -> int | None:
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return hint if isinstance(hint, int) else None


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor in the traced example."""
    return tuple(_hint(s) or 0 for s in node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    """Return the dtype of a node's tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def dynamic_dims(node: fx.Node) -> list[int]:
    """Return the dims whose size may change at run time."""
    return [d for d, s in enumerate(node.meta["val"].shape) if not isinstance(s, int)]


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments of a node, each once, in order."""
    return [n for n in dict.fromkeys(node.all_input_nodes) if isinstance(n.meta.get("val"), Tensor)]


def place(node: fx.Node) -> str:
    """Return where in the model a node comes from, for people: ``"linear in layer1.fc"``."""
    if node.op == "get_attr":
        return str(node.target)
    if node.op == "placeholder":
        return f"input {node.name}"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    kind = str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")
    if node.target is operator.getitem:
        kind = "piece"
    return f"{kind} ({node.name})" + (f" in {path}" if path and not path.startswith("_empty") else "")


@dataclass(frozen=True)
class Op:
    """One ``call_function`` node and the facts so far."""

    node: fx.Node
    facts: Facts

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Every argument by its name in the op's schema, defaults filled in."""
        return arguments_of(self.node)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return shape_of(self.node)

    @property
    def inputs(self) -> list[fx.Node]:
        """The tensor arguments, each once."""
        return tensor_inputs(self.node)

    def known(self, node: fx.Node) -> Known:
        """Return what is known of an argument."""
        return self.facts.known_of(node)

    def frozen(self, node: fx.Node | None) -> Tensor | None:
        """Return the values of a parameter or buffer as the masked model has them, or None for anything else."""
        return self.facts.frozen(node) if node is not None else None

    def values(self, node: fx.Node | None) -> Callable[[], Tensor | None] | None:
        """Return what gives the values of a parameter or buffer (:meth:`frozen`, when called), or None."""
        return None if node is None or not self.facts.has_values(node) else lambda: self.facts.frozen(node)

    def dim(self, given: int, ndim: int | None = None) -> int:
        """Return a dim counted from the front."""
        rank = len(self.shape) if ndim is None else ndim
        return given % rank if rank else 0

    def dims(self, given: int | Sequence[int] | None, ndim: int) -> list[int]:
        """Return dims counted from the front; None and an empty list mean all."""
        listed = [given] if isinstance(given, int) else list(given or range(ndim))
        return sorted({d % ndim for d in listed}) if ndim else []
