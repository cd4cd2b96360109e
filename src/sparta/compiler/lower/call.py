"""Calls with several activations: each is measured on what it really gets, and becomes an op that names its kernel.

A finder says of a call in a graph that it is not its business (None), that it stays as it is (the reason), or how it is
measured and rewritten (:class:`Call`); the rest is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from sparta.specialize.tuning.select import Problem
from sparta.tesa.attribute import TeSA

__all__ = ["Call"]


@dataclass(frozen=True)
class Call:
    """One call that an op of ours can run.

    Parameters
    ----------
    op
        The operation of the specialiser.
    name
        Of the layer, or of its fixed tensor.
    node
        The call.
    activations
        The nodes whose values the problem is made of.
    problem
        From these values to what is measured.
    target, args
        The op that takes the call's place, and its arguments but the last one, the choice.
    known
        What is known of the fixed operand.
    flops
        Of one call, from the values of the activations, if nothing were pruned.
    added
        Fixed tensors that the op reads beside the program's own, by the names that stand for them in `args`.
    present
        The choice that the call has already, as text; empty for one that is no op of ours yet.
    """

    op: str
    name: str
    node: fx.Node
    activations: tuple[fx.Node, ...]
    problem: Callable[[Sequence[Tensor]], Problem]
    target: OpOverload[..., Any]
    args: tuple[Any, ...]
    known: TeSA
    flops: Callable[[Sequence[Tensor]], int]
    added: Mapping[str, Tensor] = field(default_factory=dict)
    present: str = ""
