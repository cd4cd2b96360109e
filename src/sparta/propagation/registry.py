"""The registry of rules: one small function for an ATen op and a direction.

There are six directions. ``constants`` goes from inputs to outputs, ``observed`` from outputs to inputs and from one
input to another, ``axes`` says which dims of an op's tensors can only be cut together, ``rewrite`` changes an op's
arguments once dims have been cut, ``bits`` carries a bit format forwards and ``needs`` backwards. A missing rule is
never an error; it means "nothing is known, everything is observed, nothing can be cut", and the diagnosis names the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from sparta.errors import ValueRangeError, message

__all__ = ["Direction", "is_pointwise", "is_ruled_by_pieces", "pieces_of", "rule", "rule_for", "ruled_by_pieces"]

Direction = Literal["constants", "observed", "axes", "rewrite", "bits", "needs"]
_DIRECTIONS = ("constants", "observed", "axes", "rewrite", "bits", "needs")
_Function = TypeVar("_Function", bound=Callable[..., Any])

_aten = torch.ops.aten
# Element-wise ops that torch forgot to tag.
_POINTWISE_TOO = frozenset(
    {
        *(_aten.hardswish.default, _aten.log_sigmoid.default, _aten.rsub.Tensor, _aten.masked_fill.Tensor),
        *(_aten.floor_divide.default, _aten.floor_divide.Scalar, _aten.multiply.Tensor, _aten.multiply.Scalar),
        *(_aten.subtract.Tensor, _aten.divide.Tensor, _aten.true_divide.Tensor, _aten.negative.default),
        *(_aten.where.ScalarOther, _aten.where.ScalarSelf, _aten.where.Scalar),
        *(getattr(packet, name) for packet in (_aten.__and__, _aten.__or__) for name in ("Tensor", "Scalar")),
    }
)

_rules: dict[str, dict[object, Callable[..., Any]]] = {direction: {} for direction in _DIRECTIONS}
_in_pieces: set[object] = set()


def rule(direction: Direction, *ops: object) -> Callable[[_Function], _Function]:
    """Register a function as the rule of some ops in one direction; a later rule replaces an earlier one.

    Parameters
    ----------
    direction
        ``"constants"``: ``f(op) -> Known | None``, what is known of the output (None: nothing).
        ``"observed"``: ``f(op, seen) -> list[(node, Grid)]``, what of each input is observed when `seen` of the
        output is; inputs that are not listed are observed whole.
        ``"axes"``: ``f(op, axes) -> None``, which dims can only be cut together.
        ``"rewrite"``: ``f(op, edit) -> None``, change the op's arguments after the cut.
        ``"bits"``: ``f(op) -> BitFormat | None``, the format of the output's elements (None: its dtype's).
        ``"needs"``: ``f(op, node) -> BitFormat | None``, the format that is enough for an input (None: its own).
    ops
        ATen overloads (``torch.ops.aten.relu.default``), packets (``torch.ops.aten.relu``: all its overloads), or
        ops of your own made with :mod:`torch.library`. An op of a package that may not be there is given by its name,
        ``"transformers.grouped_mm_fallback.default"``.

    Examples
    --------
    >>> @rule("constants", torch.ops.aten.special_zeta.default)
    ... def nothing_known(op):
    ...     return None
    >>> rule_for("constants", torch.ops.aten.special_zeta.default) is nothing_known
    True
    """
    if direction not in _DIRECTIONS:
        raise ValueRangeError(message(f"direction {direction!r}", ", ".join(map(repr, _DIRECTIONS))))

    def register(function: _Function) -> _Function:
        for op in ops:
            packet = isinstance(op, torch._ops.OpOverloadPacket)
            for overload in [getattr(op, name) for name in op.overloads()] if packet else [op]:  # type: ignore[attr-defined]
                _rules[direction][overload] = function
        return function

    return register


def rule_for(direction: Direction, op: object) -> Callable[..., Any] | None:
    """Return the rule of an op, or None where there is none; element-wise ops share one that torch's tags select."""
    found = _rules[direction].get(op)
    if found is None and isinstance(op, torch._ops.OpOverload):
        found = _rules[direction].get(str(op))
    if found is None and is_pointwise(op):
        found = _rules[direction].get("pointwise")
    return found


def ruled_by_pieces(*ops: object) -> tuple[object, ...]:
    """Note that ops with several outputs, such as splits, leave it to the rules of each output; returns the ops."""
    _in_pieces.update(ops)
    return ops


def pieces_of(op: object) -> tuple[str, object]:
    """Return what the results of an op with several are registered under: ``rule("constants", pieces_of(op))``.

    Such a rule is called with the ``operator.getitem`` that takes one result; the op itself is its first argument.
    """
    return "piece of", op


def is_ruled_by_pieces(op: object) -> bool:
    """Whether the rules of each output (``operator.getitem``) speak for an op."""
    return op in _in_pieces


def is_pointwise(op: object) -> bool:
    """Whether torch itself marks an op as a deterministic function of the elements at one position.

    >>> is_pointwise(torch.ops.aten.hardswish.default), is_pointwise(torch.ops.aten.cumsum.default)
    (True, False)
    """
    return (
        isinstance(op, torch._ops.OpOverload)
        and (torch.Tag.pointwise in op.tags or op in _POINTWISE_TOO)
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.is_mutable
    )
