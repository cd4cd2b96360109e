"""The two calls that users make: `propagate` derives, `compact` derives and shrinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from sparta.errors import CheckError, ValueRangeError, message
from sparta.modules import unwrapped
from sparta.propagation.capture import Captured, capture
from sparta.propagation.compact import CompactModel
from sparta.propagation.engine import derive
from sparta.propagation.result import PropagationResult
from sparta.propagation.sizes import AUTO
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec

__all__ = ["compact", "given_tesas", "propagate"]


def propagate(
    model: nn.Module,
    example_inputs: Any,
    spec: Spec | None = None,
    dynamic_shapes: Any = AUTO,
    *,
    train: bool = False,
    probe: bool | str | Sequence[str] = False,
    assume_finite: bool = True,
    cell_limit: int = 2**24,
) -> PropagationResult:
    """Derive from the TeSAs of some tensors those of all tensors of a model.

    Parameters
    ----------
    example_inputs
        A tensor, a tuple of positional arguments, or a dict of keyword arguments; anything that the model takes.
    spec
        What is known; None reads the zeros that are in the weights.
    dynamic_shapes
        Dims that may change their size, as in :func:`torch.export.export`. By default all that the model lets change
        are found; None: none, so that everything is known that holds for the sizes of the example.
    train
        Derive for the model as it is trained (batch norms use the batch's statistics, dropout is on) instead of as it
        is used. The model's own mode does not matter and is left alone.
    probe
        Names of ops without a rule (``"mylib.blur"``; True: all of them) that are run on random inputs to see which
        outputs never move, which inputs never matter, and which dims can be cut. What follows is likely, not proven:
        the ops must be pure functions, and the table says where it was done.
    assume_finite
        Take 0 × x for 0, that is: no value inside the model is infinite or NaN. With False a zero weight proves
        nothing, because it could meet an infinity.
    cell_limit
        Facts that need more cells than this are given up, and the diagnosis says so.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> _ = nn.init.zeros_(model[2].weight[:, 3:])
    >>> result = propagate(model, torch.randn(5, 4))
    >>> result.spec["0.weight"].count("dead"), result.spec["0.bias"].count("dead")
    (20, 5)
    >>> small = result.compact()
    >>> tuple(small.get_parameter("0.weight").shape), tuple(small.get_parameter("2.weight").shape)
    ((3, 4), (2, 3))
    """
    model = unwrapped(model)
    captured = capture(model, example_inputs, dynamic_shapes, train=train)
    given = given_tesas(model, captured, spec)
    asked = probe if isinstance(probe, bool) else frozenset([probe] if isinstance(probe, str) else probe)
    facts = derive(
        captured, given, assume_finite=assume_finite, cell_limit=cell_limit, as_read=spec is None, probe=asked
    )
    return PropagationResult(captured, facts)


def given_tesas(model: nn.Module, captured: Captured, spec: Spec | None) -> dict[str, TeSA]:
    """Return what a spec knows of a captured model's tensors, by name; None reads the zeros that are in them."""
    if spec is None:
        if any(t.is_meta for t in captured.tensors.values()):
            raise ValueRangeError(
                message("a model on the meta device, which has no zeros to read", "a spec for it", "pass `spec`")
            )
        spec = Spec.from_zeros(model)
    given: dict[str, TeSA] = {}
    for name, tesa in spec.resolve(model).items():
        used = captured.tied.get(name, name)
        if given.get(used) is tesa:
            continue
        if used in given and (clash := given[used].conflicts(tesa)):
            raise CheckError(
                message(
                    f"the spec contradicts itself on {clash} elements of {name!r}, which is tied to {used!r}",
                    "one value per element",
                )
            )
        given[used] = given[used] | tesa if used in given else tesa
    return given


def compact(
    model: nn.Module,
    example_inputs: Any,
    spec: Spec | None = None,
    dynamic_shapes: Any = AUTO,
    *,
    train: bool = False,
    round_to: int = 1,
    allow_empty: bool = False,
) -> CompactModel:
    """Return a smaller model that computes what the masked model computes; see :func:`propagate`.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> _ = nn.init.zeros_(model[0].weight[:5])
    >>> compact(model, torch.randn(5, 4)).get_parameter("2.weight").shape
    torch.Size([2, 3])
    """
    return propagate(model, example_inputs, spec, dynamic_shapes, train=train).compact(
        round_to, allow_empty=allow_empty
    )
