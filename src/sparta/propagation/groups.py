"""Groups: which slices of which tensors can only be pruned together, read off the ties between axes.

Cutting one channel means cutting it out of every tensor that carries it: the rows that write it, the norm that scales
it, the columns that read it. The same ties that compaction obeys say this. Each index of an axis is a label; labels
flow along the ties, and indices that get two labels belong together.

`sparta.scheduler.channels` answers a similar question for permutations, on modules and without an example input; its
header says why there are two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes, Tie
from sparta.propagation.engine import Facts
from sparta.propagation.op import is_tensor, shape_of

__all__ = ["KINDS", "Group", "Slot", "find_slots"]

KINDS = ("channel", "neuron", "head", "width", "query", "stream")
"""What can be pruned: see :class:`Slot`."""


_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.scaled_dot_product_attention.default, _aten.matmul.default, _aten.bmm.default})
_REPEATS = frozenset({_aten.expand.default, _aten.broadcast_to.default, _aten.expand_copy.default})
_ADDS = frozenset({_aten.add.Tensor})


@dataclass(frozen=True, eq=False)
class Group:
    """Slices that go together.

    Parameters
    ----------
    slices
        For each tensor and dim the flags of the indices that go: ``{("fc.weight", 0): bool tensor of the dim's size}``.
    """

    slices: Mapping[tuple[str, int], Tensor]


@dataclass(frozen=True, eq=False)
class Slot:
    """An axis of the model of which groups can be removed.

    Parameters
    ----------
    name
        The first tensor whose outputs it is (``"fc1.weight"``), for people.
    kind
        ``"channel"`` (of a convolution), ``"neuron"`` (of linear layers), ``"head"`` (of attention: queries, keys,
        values and outputs together), ``"width"`` (the same position in every head), ``"query"`` (one query head of
        every group that shares keys and values) or ``"stream"`` (of the residual stream of linear layers).
    writers
        The tensors whose rows it is.
    groups
        What can be removed, one after the other.
    """

    name: str
    kind: str
    writers: tuple[str, ...]
    groups: tuple[Group, ...]

    def unit(self) -> int:
        """Return how many rows of its first writer one group takes."""
        sizes = (int(f.sum()) for group in self.groups for (name, _), f in group.slices.items() if name == self.name)
        return max(1, min(sizes))


def find_slots(facts: Facts, graph: fx.Graph) -> list[Slot]:
    """Return every axis of the model that could lose some of its indices, in the order of the graph.

    Parameters
    ----------
    facts
        What is known of the graph; only shapes matter, so facts of a model without zeros do.
    """
    axes = Axes.cuttable(facts, graph)
    free = {root for root in axes.roots() if axes.size(root) > 1 and not bool(axes.flags(root).any())}
    at: dict[int, list[Tie]] = {}
    for tie in axes.ties:
        for root in {axes.find(a) for a in (tie.whole, *tie.parts)}:
            at.setdefault(root, []).append(tie)
    places = _places(axes, graph)
    order = {str(n.target): position for position, n in enumerate(graph.nodes) if n.op == "get_attr"}
    slots: list[Slot] = []
    done: set[int] = set()
    # The smallest axes first: a factor before the product, a part before the whole, a group of heads before the heads.
    for root in sorted(free, key=lambda r: (axes.size(r), r)):
        if root in done:
            continue
        labels = _Labels(axes, root, free, at)
        if labels.run():
            done |= set(labels.labels)
            slot = _slot(axes, labels, places)
            if slot is not None:
                slots.append(slot)
    return sorted(slots, key=lambda s: order[s.name])


def _places(axes: Axes, graph: fx.Graph) -> dict[int, list[tuple[fx.Node, int]]]:
    """Return for each axis the dims of the model's own tensors that are on it."""
    found: dict[int, list[tuple[fx.Node, int]]] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) in axes.facts.tensors:
            for dim in range(len(shape_of(node))):
                found.setdefault(axes.find(axes.of(node, dim)), []).append((node, dim))
    return found


class _Labels:
    """Labels of one axis on their way through the ties."""

    def __init__(self, axes: Axes, root: int, free: set[int], at: Mapping[int, list[Tie]]) -> None:
        self.axes, self.free, self.at = axes, free, at
        self.labels: dict[int, Tensor] = {root: torch.arange(axes.size(root))}
        self.parent = list(range(axes.size(root)))
        self.root = root

    def run(self) -> bool:
        """Spread to the fixpoint; returns whether every index that is labelled can go."""
        steps = {"product": self._product, "concat": self._concat, "select": self._select}
        while True:
            changed = False
            for tie in [tie for root in list(self.labels) for tie in self.at.get(root, [])]:
                step = steps[tie.kind](tie)
                if step is None:
                    return False
                changed |= step
            if not changed:
                return True

    def _find(self, label: int) -> int:
        while self.parent[label] != label:
            label = self.parent[label]
        return label

    def _canonical(self, labels: Tensor) -> Tensor:
        table = torch.tensor([self._find(i) for i in range(len(self.parent))] + [-1])
        return table[labels]

    def of(self, axis: int) -> Tensor:
        """Return the labels of an axis, -1 where there are none."""
        root = self.axes.find(axis)
        return self._canonical(self.labels.get(root, torch.full((self.axes.size(root),), -1)))

    def _give(self, axis: int, labels: Tensor) -> bool | None:
        """Add labels to an axis; None where it cannot be cut."""
        root = self.axes.find(axis)
        old, new = self.of(axis), self._canonical(labels)
        both = (old >= 0) & (new >= 0) & (old != new)
        for one, two in set(zip(old[both].tolist(), new[both].tolist(), strict=True)):
            a, b = self._find(one), self._find(two)
            self.parent[max(a, b)] = min(a, b)
        merged = torch.where(old >= 0, old, new)
        if bool((merged >= 0).any()) and root not in self.free and self.axes.size(root) > 1:
            return None
        grown = bool((merged != old).any()) or bool(both.any())
        self.labels[root] = merged
        return grown

    def _product(self, tie: Tie) -> bool | None:
        sizes = [self.axes.size(p) for p in tie.parts]
        changed = False
        for position, part in enumerate(tie.parts):
            labels = self.of(part)
            if bool((labels >= 0).any()):
                view = [-1 if d == position else 1 for d in range(len(sizes))]
                step = self._give(tie.whole, labels.reshape(view).expand(sizes).reshape(-1))
                if step is None:
                    return None
                changed |= step
        labels = self.of(tie.whole)
        if not bool((labels >= 0).any()):
            return changed
        open_parts = [i for i, p in enumerate(tie.parts) if self._free(p) and sizes[i] > 1]
        carried = [i for i in open_parts if bool((self.of(tie.parts[i]) >= 0).any())]
        if not carried and len(open_parts) > 1:
            # A factor whose slices have one label each is the one that shrinks.
            carried = [i for i in open_parts if _one_label_each(labels.reshape(sizes), i)]
        if not carried and len(open_parts) != 1:
            return None  # which factor would shrink is not decided here: each factor is an axis of its own
        position = carried[0] if carried else open_parts[0]
        step = self._give(tie.parts[position], self._lines(labels.reshape(sizes), position))
        return None if step is None else changed or step

    def _free(self, axis: int) -> bool:
        return self.axes.find(axis) in self.free

    def _lines(self, labels: Tensor, position: int) -> Tensor:
        """Return one label for each index of a factor, after joining all labels of its slice."""
        rows = labels.movedim(position, 0).reshape(labels.shape[position], -1)
        found = torch.full((len(rows),), -1)
        for index, row in enumerate(rows):
            known = row[row >= 0].unique().tolist()
            for other in known[1:]:
                a, b = self._find(known[0]), self._find(other)
                self.parent[max(a, b)] = min(a, b)
            if known:
                found[index] = self._find(known[0])
        return found

    def _concat(self, tie: Tie) -> bool | None:
        sizes = [self.axes.size(p) for p in tie.parts]
        changed = False
        for part, piece in zip(tie.parts, torch.split(self.of(tie.whole), sizes), strict=True):
            if bool((piece >= 0).any()):
                step = self._give(part, piece)
                if step is None:
                    return None
                changed |= step
        whole = torch.cat([self.of(p) for p in tie.parts])
        step = self._give(tie.whole, whole) if bool((whole >= 0).any()) else False
        return None if step is None else changed or step

    def _select(self, tie: Tie) -> bool | None:
        """Give what is taken the label of where it was taken from; a part alone may go without its source."""
        labels = self.of(tie.whole)
        if tie.index is None or not bool((labels >= 0).any()):
            return False
        return self._give(tie.parts[0], labels[tie.index])


def _one_label_each(labels: Tensor, position: int) -> bool:
    """Whether all elements of each slice along a dim have the same label."""
    rows = labels.movedim(position, 0).reshape(labels.shape[position], -1)
    return bool((rows == rows[:, :1]).all())


def _slot(axes: Axes, spread: _Labels, places: Mapping[int, list[tuple[fx.Node, int]]]) -> Slot | None:
    """Return the groups of a labelled axis, or None where no weight carries it."""
    on = [(node, dim, spread.of(root)) for root in spread.labels for node, dim in places.get(root, [])]
    on = [(node, dim, labels) for node, dim, labels in on if bool((labels >= 0).any())]
    writers = tuple(dict.fromkeys(str(n.target) for n, dim, _ in on if len(shape_of(n)) > 1 and _writes(axes, n, dim)))
    if not writers:
        return None
    roots = sorted({spread._find(i) for i in range(len(spread.parent))})
    groups = []
    for label in roots:
        slices = {(str(n.target), dim): labels == label for n, dim, labels in on if bool((labels == label).any())}
        groups.append(Group(slices))
    if len(groups) < 2:
        return None
    kind = _kind(axes, spread, groups[0].slices, [node for node, _, _ in on], writers)
    return Slot(writers[0], kind, writers, tuple(groups))


def _writes(axes: Axes, node: fx.Node, dim: int) -> bool:
    """Whether the slices of a weight along a dim are what a layer writes, and not what it reads."""
    layer = node
    while len(layer.users) and not _is_layer(axes, layer):
        layer = next(iter(layer.users))
    name = str(layer.target)
    if name.startswith("aten.conv_transpose"):
        return dim == 1
    if name.startswith(("aten.linear", "aten.conv")):
        return dim == 0
    if name.startswith("aten.embedding"):
        return dim == 1
    return axes.find(axes.of(node, dim)) not in {axes.find(a) for a in axes.sums.get(layer, ())}


def _is_layer(axes: Axes, node: fx.Node) -> bool:
    return node in axes.sums or str(node.target).startswith("aten.embedding")


def _kind(
    axes: Axes,
    spread: _Labels,
    slices: Mapping[tuple[str, int], Tensor],
    nodes: list[fx.Node],
    writers: tuple[str, ...],
) -> str:
    if any(str(user.target).startswith("aten.conv") for node in nodes for user in node.users):
        return "channel"
    tensors = [n for n in axes.graph.nodes if n.op == "call_function" and is_tensor(n)]
    for node in tensors:
        shape = shape_of(node)
        if node.target in _PRODUCTS and len(shape) > 3 and axes.find(axes.of(node, -3)) in spread.labels:
            born = axes.members(spread.root)[:1]
            return "query" if all(n.target in _REPEATS for n, _ in born) else "head"
    weights = {str(n.target) for n in nodes if len(shape_of(n)) > 1}
    if min(int(flags.sum()) for (name, _), flags in slices.items() if name in weights) > 1:
        return "width"
    adds = (n for n in tensors if n.target in _ADDS and len(n.all_input_nodes) == 2 and shape_of(n))
    shared = len(writers) > 1 and any(_on_stream(axes, node, spread.labels) for node in adds)
    return "stream" if shared else "neuron"


def _on_stream(axes: Axes, node: fx.Node, labels: Mapping[int, Tensor]) -> bool:
    """Whether an add of two values of one shape goes along an axis."""
    first, second = node.all_input_nodes
    alike = is_tensor(first) and is_tensor(second) and shape_of(first) == shape_of(second)
    computed = all(n.op == "call_function" for n in (first, second))
    return alike and computed and axes.find(axes.of(node, -1)) in labels
