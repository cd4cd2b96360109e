"""Structured pruning in one call: choose channels, neurons or heads, set them to zero, and cut them out.

What must go together is found by the engine that compaction uses (:mod:`sparta.propagation.groups`), so no group ever
breaks a shape. Unlike compaction this *does* change what the model computes, and the report says by how much, on the
data that you give. With such data, what the removed channels contributed is folded into those that stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.propagation.api import propagate
from sparta.propagation.axes import Axes
from sparta.propagation.capture import Captured
from sparta.propagation.compact import CompactModel, check_round_to, compacted
from sparta.propagation.compensate import compensated
from sparta.propagation.engine import derive
from sparta.propagation.groups import KINDS, Group, Slot, find_slots
from sparta.propagation.op import is_tensor, shape_of
from sparta.propagation.result import PropagationResult
from sparta.propagation.sizes import AUTO
from sparta.tables import table
from sparta.tesa import names
from sparta.tesa.attribute import TeSA

__all__ = ["SCORES", "PrunedSlot", "PruningReport", "prune_structured"]

Score = Callable[[str, Tensor], Tensor]
_AUTO = ("channel", "neuron", "head")


def _taylor(name: str, tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        raise ValueRangeError(
            message(
                f"{name!r} has no gradient", "gradients for the score 'taylor'", "run a backward pass before pruning"
            )
        )
    return (tensor.detach() * tensor.grad).abs()


def _random(name: str, tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.rand(tensor.shape, generator=generator).to(tensor.device)


SCORES: Mapping[str, Score] = {
    "l1": lambda _, tensor: tensor.detach().abs(),
    "l2": lambda _, tensor: tensor.detach().square(),
    "taylor": _taylor,
    "random": _random,
}
"""Scores by name: how much each element matters; a group scores the mean of its weights. ``"magnitude"`` is l1."""


@dataclass(frozen=True)
class PrunedSlot:
    """What happened to one axis of the model.

    Parameters
    ----------
    name, kind
        As in :class:`~sparta.propagation.groups.Slot`.
    before, after
        Groups before and after.
    removed
        Which groups went.
    tensors
        The tensors that became smaller with it.
    """

    name: str
    kind: str
    before: int
    after: int
    removed: tuple[int, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class PruningReport:
    """What was removed, and by how much the function changed.

    Parameters
    ----------
    slots
        Every axis that could be pruned.
    parameters, parameters_compact
        Elements of the model's parameters and buffers that the graph uses.
    change
        ``|pruned - original| / |original|`` over all floating-point outputs, on the given data.
    largest
        The largest absolute difference of one output element.
    samples
        Batches that were compared.
    folded
        Layers whose weights make up for inputs that were removed; 0 without data.
    """

    slots: tuple[PrunedSlot, ...]
    parameters: int
    parameters_compact: int
    change: float
    largest: float
    samples: int
    folded: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as data."""
        return {
            "slots": [
                vars(slot) | {"removed": list(slot.removed), "tensors": list(slot.tensors)} for slot in self.slots
            ],
            "parameters": self.parameters,
            "parameters_compact": self.parameters_compact,
            "change": self.change,
            "largest": self.largest,
            "samples": self.samples,
            "folded": self.folded,
        }

    def table(self) -> str:
        """Return one row per axis, and the change of the function."""
        rows: list[list[object]] = [
            [slot.name, slot.kind, f"{slot.before} → {slot.after}", len(slot.tensors)] for slot in self.slots
        ]
        rows.append([f"{len(self.slots)} axes", "", f"{self.parameters} → {self.parameters_compact} parameters", ""])
        text = table(["axis", "kind", "groups", "tensors"], rows)
        compared = f"on {self.samples} batch{'es' if self.samples != 1 else ''}"
        if self.folded:
            compared += f", with what was removed folded into {self.folded} layers"
        return f"{text}\n\noutputs changed by {self.change:.3g} of their norm {compared}, at most {self.largest:.3g}"

    def __str__(self) -> str:
        return self.table()


def prune_structured(  # noqa: PLR0913 - all but three have defaults
    model: nn.Module,
    example_inputs: Any,
    sparsity: float | Mapping[str, float],
    *,
    score: str | Score = "l2",
    granularity: str | Sequence[str] = "auto",
    data: Iterable[Any] | None = None,
    compensate: bool = True,
    dynamic_shapes: Any = AUTO,
    round_to: int = 1,
    allow_empty: bool = False,
) -> tuple[CompactModel, PruningReport]:
    """Remove the least important channels, neurons and heads of a model; the model itself is left as it is.

    Exactly the chosen groups go: a branch that happens to be dead, such as a residual block whose last norm starts at
    0, stays for training to wake it.

    Parameters
    ----------
    example_inputs
        A tensor, a tuple of positional arguments, or a dict of keyword arguments.
    sparsity
        The fraction of its groups that every axis loses, or one fraction for each layer: names or globs of weights or
        modules whose outputs shall go, ``{"layers.*.fc1": 0.5}``; what they do not name stays.
    score
        ``"l2"``, ``"l1"`` (or ``"magnitude"``), ``"taylor"`` (needs gradients), ``"random"``, or a function
        ``f(name, tensor) -> scores`` of the tensor's shape. A group's score is the mean over all its weights.
    granularity
        ``"channel"`` (of convolutions), ``"neuron"`` (of linear layers), ``"head"`` (of attention; queries, keys,
        values and the output projection together, and heads that share keys and values together), ``"width"`` (the
        same position in every head), ``"query"`` (one query head of every group), ``"stream"`` (of a residual stream
        between linear layers), several of them, or ``"auto"``: channels, neurons and heads.
    data
        Batches, each as `example_inputs`: what the removed channels contributed is folded into those that stay, by
        least squares on them, and the change is measured on them. Without data nothing is folded, and the change is
        that on the example.
    compensate
        False: fold nothing, even with data.
    dynamic_shapes
        Dims that may change their size, as in :func:`torch.export.export`; by default all that may are found.
    round_to
        Remove fewer groups, so that widths are multiples of this.
    allow_empty
        Let a sparsity of 1 remove all groups of an axis but what every kernel needs, one index, of value zero.

    Returns
    -------
    tuple
        The compact model, and a :class:`PruningReport`.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> small, report = prune_structured(model, torch.randn(5, 4), 0.5)
    >>> tuple(small.get_parameter("0.weight").shape), tuple(small.get_parameter("2.weight").shape)
    ((4, 4), (2, 4))
    >>> 0 < report.change < 1
    True
    """
    check_round_to(round_to)
    kinds = _kinds(granularity)
    result = propagate(model, example_inputs, dynamic_shapes=dynamic_shapes)
    slots = [slot for slot in find_slots(result.facts, result.captured.graph) if slot.kind in kinds]
    wanted = _sparsities(slots, sparsity)
    chosen = _chosen(score)
    parameters = {name: p for name, p in result.captured.tensors.items() if isinstance(p, nn.Parameter)}
    pruned, removed = [], []
    scores: dict[str, Tensor] = {}
    for slot in slots:
        lowest = _lowest(slot, wanted[slot], (chosen, parameters, scores), round_to=round_to, allow_empty=allow_empty)
        removed += [slot.groups[i] for i in lowest]
        touched = tuple(dict.fromkeys(name for name, _ in slot.groups[0].slices))
        pruned.append(
            PrunedSlot(slot.name, slot.kind, len(slot.groups), len(slot.groups) - len(lowest), tuple(lowest), touched)
        )
    going = _going(removed)
    batches = None if data is None else list(data)
    captured, folded = result.captured, 0
    if batches and compensate:
        fixed = _slices_of(slots, "stream")
        captured, folded = compensated(captured, {k: v for k, v in going.items() if k not in fixed}, batches)
    facts = derive(captured, _with_zeros(result, removed, parameters))
    axes = Axes.solved(facts, captured.graph, only=going)
    small = compacted(captured, facts, axes, allow_empty=True, seams=None)
    change, largest, samples = _change(result.captured, small, batches)
    return small, PruningReport(tuple(pruned), *_sizes(captured, axes), change, largest, samples, folded)


def _going(removed: list[Group]) -> dict[tuple[str, int], Tensor]:
    """Return which indices of which dims of the model's tensors go."""
    found: dict[tuple[str, int], Tensor] = {}
    for group in removed:
        for key, flags in group.slices.items():
            found[key] = found[key] | flags if key in found else flags
    return found


def _slices_of(slots: list[Slot], kind: str) -> set[tuple[str, int]]:
    """Return the tensors and dims that axes of a kind lie along."""
    return {key for slot in slots if slot.kind == kind for group in slot.groups for key in group.slices}


def _sizes(captured: Captured, axes: Axes) -> tuple[int, int]:
    """Return the elements of the tensors that the graph uses, before and after."""
    nodes = [n for name, n in captured.nodes().items() if name in captured.tensors and is_tensor(n)]
    after = (math.prod(int(axes.kept(n, d).sum()) for d in range(len(shape_of(n)))) for n in nodes)
    return sum(math.prod(shape_of(n)) for n in nodes), sum(after)


def _kinds(granularity: str | Sequence[str]) -> set[str]:
    listed = [granularity] if isinstance(granularity, str) else list(granularity)
    for kind in listed:
        if kind not in (*KINDS, "auto"):
            raise NameNotFoundError(did_you_mean(kind, [*KINDS, "auto"], "granularity"))
    return {k for kind in listed for k in (_AUTO if kind == "auto" else (kind,))}


def _chosen(score: str | Score) -> Score:
    if not isinstance(score, str):
        return score
    name = "l1" if score == "magnitude" else score
    if name not in SCORES:
        raise NameNotFoundError(did_you_mean(score, [*SCORES, "magnitude"], "score"))
    return SCORES[name]


def _sparsities(slots: list[Slot], sparsity: float | Mapping[str, float]) -> dict[Slot, float]:
    """Return the fraction that each axis loses."""
    if not isinstance(sparsity, Mapping):
        _check_fraction(sparsity, "sparsity")
        return dict.fromkeys(slots, float(sparsity))
    writers = {writer: slot for slot in slots for writer in slot.writers}
    layers = {writer.rpartition(".")[0]: slot for writer, slot in writers.items()}
    known = {**layers, **writers}
    wanted: dict[Slot, float] = dict.fromkeys(slots, 0.0)
    said: dict[Slot, str] = {}
    for key, value in sparsity.items():
        _check_fraction(value, f"the sparsity of {key!r}")
        try:
            found = names.resolve(key, known)
        except (NameNotFoundError, ValueError) as error:
            raise NameNotFoundError(did_you_mean(key, list(known), "layer whose outputs can be pruned")) from error
        for name in found:
            slot = known[name]
            if slot in said and wanted[slot] != value:
                raise ValueRangeError(
                    message(
                        f"{key!r} asks for {value}, {said[slot]!r} for {wanted[slot]}, but their outputs go together",
                        "one sparsity for layers that are coupled",
                        f"give one of {', '.join(slot.writers)} only",
                    )
                )
            wanted[slot], said[slot] = float(value), key
    return wanted


def _check_fraction(value: float, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueRangeError(message(f"{what} is {value!r}", "a number from 0 to 1"))


def _lowest(
    slot: Slot,
    sparsity: float,
    scoring: tuple[Score, Mapping[str, Tensor], dict[str, Tensor]],
    *,
    round_to: int,
    allow_empty: bool,
) -> list[int]:
    """Return the groups of an axis that go: those with the lowest scores, ties by position."""
    total = len(slot.groups)
    # A fraction of the number that was written, not of its nearest float: 0.7 of 10 groups is 7.
    count = math.floor(Fraction(str(sparsity)) * total)
    unit = round_to // math.gcd(round_to, slot.unit())
    kept = min(total, math.ceil((total - count) / unit) * unit)
    if kept == 0 and not allow_empty:
        raise ShapeError(
            message(
                f"a sparsity of {sparsity} would leave nothing of {slot.name!r}",
                "layers with at least one group",
                "lower the sparsity of that layer, or pass allow_empty=True",
            )
        )
    if kept == total:
        return []
    values = torch.stack([_group_score(group, *scoring) for group in slot.groups])
    return sorted(values.sort(stable=True).indices[: total - kept].tolist())


def _group_score(group: Group, score: Score, parameters: Mapping[str, Tensor], cache: dict[str, Tensor]) -> Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for (name, dim), flags in group.slices.items():
        if name not in parameters or parameters[name].dim() < 2:
            continue
        if name not in cache:
            found = score(name, parameters[name])
            if found.shape != parameters[name].shape:
                raise ShapeError(
                    message(f"the score of {name!r} is {tuple(found.shape)}", f"{tuple(parameters[name].shape)}")
                )
            cache[name] = found.detach().to("cpu", torch.float64)
        taken = cache[name].index_select(dim, flags.nonzero().flatten())
        total, count = total + taken.sum(), count + taken.numel()
    return total / max(1, count)


def _with_zeros(result: PropagationResult, removed: list[Group], parameters: Mapping[str, Tensor]) -> dict[str, TeSA]:
    """Return the TeSAs of the model with the slices of all removed groups set to zero."""
    masks: dict[str, Tensor] = {}
    # The direction of a normed weight must not be zero; its length alone makes it so.
    normed = [n for n in result.captured.graph.nodes if n.target is torch.ops.aten._weight_norm.default]
    directions = {(str(n.args[0].target), n.args[2] if len(n.args) > 2 else 0) for n in normed}
    for group in removed:
        for (name, dim), flags in group.slices.items():
            if name in parameters and (name, dim) not in directions:
                shape = parameters[name].shape
                mask = masks.setdefault(name, torch.ones(shape, dtype=torch.bool))
                mask.index_fill_(dim, flags.nonzero().flatten(), value=False)
    given = dict(result.facts.given)
    for name, mask in masks.items():
        tesa = TeSA.from_mask(mask, format=parameters[name].dtype)
        given[name] = given[name] | tesa if name in given else tesa
    return given


def _change(captured: Captured, small: nn.Module, data: Iterable[Any] | None) -> tuple[float, float, int]:
    """Return the relative change of all outputs, the largest difference, and the number of batches."""
    difference = norm = largest = 0.0
    samples = 0
    batches = [(captured.args, dict(captured.kwargs))] if data is None else map(captured.arguments, data)
    for args, kwargs in batches:
        with torch.no_grad():
            expected, actual = captured.module(*args, **kwargs), small(*args, **kwargs)
        samples += 1
        for one, two in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
            if isinstance(one, Tensor) and one.is_floating_point() and one.numel():
                gap = (one - two).to(torch.float64)
                difference += float(gap.square().sum())
                norm += float(one.to(torch.float64).square().sum())
                largest = max(largest, float(gap.abs().max()))
    return math.sqrt(difference / norm) if norm else 0.0, largest, samples
