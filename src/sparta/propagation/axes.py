"""Axes: which indices of which dims can be cut out of a graph, together and without changing what it computes.

Every dim of every tensor is an *axis* with one flag per index: kept or cut. Ops tie axes to each other: equal (the two
sides of an add), a product (a reshape of heads × width), or a concatenation (cat, split, slice). Flags start at "cut"
where every element of the slice is constant or dead, and the ties only ever turn "cut" into "kept", so the solution is
the largest cut that all ops agree on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, fx

from sparta.propagation import probing
from sparta.propagation.engine import Facts
from sparta.propagation.op import Op, dynamic_dims, is_tensor, place, shape_of, tensor_inputs
from sparta.propagation.registry import rule_for
from sparta.propagation.slices import slice_flags, slice_values, whole_blocks
from sparta.tesa.grid import Grid

__all__ = ["Axes", "Blocks", "Tie"]

Blocks = Mapping[str, Sequence[int]]
"""For the names of tensors the size of their blocks along each dim."""

_LOOKS_AT_SHAPE = frozenset({torch.ops.aten.sym_size.int, torch.ops.aten._assert_tensor_metadata.default})


@dataclass(frozen=True)
class Tie:
    """A relation of one axis with several others: a ``"product"``, a ``"concat"``, or a ``"select"`` by an index."""

    kind: str
    whole: int
    parts: tuple[int, ...]
    node: fx.Node
    index: Tensor | None = None


@dataclass
class Axes:
    """The axes of a graph, their ties, and who keeps what.

    Parameters
    ----------
    shapes_only
        Ask what could be cut if it were zero, whatever the values are.
    ties
        What rules said of axes that are products, concatenations or selections of others.
    sums
        The axes that each op sums over.
    """

    facts: Facts
    graph: fx.Graph
    shapes_only: bool = False
    ties: list[Tie] = field(default_factory=list)
    sums: dict[fx.Node, set[int]] = field(default_factory=dict)
    _ids: dict[tuple[fx.Node, int], int] = field(default_factory=dict)
    _parent: list[int] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _keep: dict[int, Tensor] = field(default_factory=dict)
    _needs: list[tuple[int, Tensor, str]] = field(default_factory=list)
    _live: list[tuple[int, Tensor, fx.Node]] = field(default_factory=list)

    # ------------------------------------------------------------------ what rules say

    def of(self, node: fx.Node, dim: int) -> int:
        """Return the axis of a tensor's dim (negative dims count from the end)."""
        key = node, dim % len(shape_of(node))
        if key not in self._ids:
            self._ids[key] = self.free(shape_of(node)[dim])
        return self._ids[key]

    def size(self, axis: int) -> int:
        """Return how many indices an axis has before the cut."""
        return self._sizes[axis]

    def free(self, size: int) -> int:
        """Return a new axis that belongs to no tensor."""
        self._parent.append(len(self._parent))
        self._sizes.append(size)
        return self._parent[-1]

    def equal(self, first: int, second: int) -> None:
        """Cut both axes alike."""
        a, b = self.find(first), self.find(second)
        self._parent[max(a, b)] = min(a, b)

    def broadcast(self, operand: fx.Node, out: fx.Node) -> None:
        """Cut an operand and the output it is broadcast to alike, along the dims that are not repeated."""
        lead = len(shape_of(out)) - len(shape_of(operand))
        for dim in range(len(shape_of(operand))):
            self.broadcast_dim((operand, dim), (out, dim + lead))

    def broadcast_dim(self, operand: tuple[fx.Node, int], out: tuple[fx.Node, int]) -> None:
        """Cut two dims alike if they have one size; a dim that is repeated stays."""
        if self._sizes[self.of(*operand)] == self._sizes[self.of(*out)]:
            self.equal(self.of(*operand), self.of(*out))
        else:
            self.keep(self.of(*operand), "a dim that is repeated")

    def product(self, whole: int, factors: Sequence[int], node: fx.Node) -> None:
        """Let an axis be the flattened product of others: its kept indices must be a product as well."""
        self.ties.append(Tie("product", whole, tuple(factors), node))

    def concat(self, whole: int, parts: Sequence[int], node: fx.Node) -> None:
        """Let an axis be others end to end."""
        self.ties.append(Tie("concat", whole, tuple(parts), node))

    def select(self, whole: int, part: int, index: Tensor, node: fx.Node) -> None:
        """Let an axis be ``whole[index]``: what is kept of it must be kept of the whole, and not the other way."""
        self.ties.append(Tie("select", whole, (part,), node, index))

    def keep(self, axis: int, reason: str, where: Tensor | None = None) -> None:
        """Keep all indices of an axis, or those that `where` flags."""
        mask = torch.ones(self._sizes[axis], dtype=torch.bool) if where is None else where
        if bool(mask.any()):
            self._needs.append((axis, mask, reason))

    def keep_all(self, node: fx.Node, reason: str) -> None:
        """Keep a tensor as it is."""
        if is_tensor(node):
            for dim in range(len(shape_of(node))):
                self.keep(self.of(node, dim), reason)

    def absorb(self, node: fx.Node, dim: int, by: fx.Node, *, fold: bool) -> None:
        """Say that an op sums over a dim: cut constants must be 0, or (`fold`) the same along all other dims.

        What is summed may be one of the model's own tensors, of which some elements are known and others are not: an
        index with any that is not known stays.
        """
        self.sums.setdefault(by, set()).add(self.of(node, dim))
        if self.shapes_only:
            return
        nonzero, uniform, live = slice_values(self.facts, node, dim)
        stuck = live | (nonzero & ~uniform if fold else nonzero)
        self.keep(self.of(node, dim), f"{place(by)} cannot fold the constants into its bias", stuck)

    def absorb_pair(self, first: tuple[fx.Node, int], second: tuple[fx.Node, int], by: fx.Node) -> None:
        """Say that an op sums over a dim of two tensors: a cut index must be 0 (or dead) on one side."""
        self.sums.setdefault(by, set()).add(self.of(*first))
        if self.shapes_only:
            return
        stuck = torch.ones(shape_of(first[0])[first[1]], dtype=torch.bool)
        for node, dim in (first, second):
            nonzero, _, live = slice_values(self.facts, node, dim)
            stuck &= nonzero | live
        self.keep(self.of(*first), f"{place(by)} sums over constants that are not 0", stuck)

    # ------------------------------------------------------------------ solving

    @classmethod
    def solved(
        cls,
        facts: Facts,
        graph: fx.Graph,
        round_to: int = 1,
        blocks: Blocks | None = None,
        share: float = 1.0,
        only: Mapping[tuple[str, int], Tensor] | None = None,
    ) -> Axes:
        """Return the axes of a graph with the largest cut that all its ops allow.

        Tensors in `blocks` are cut by whole blocks only, except along axes of which that `share` or more can be cut.
        With `only`, nothing else of the model's tensors goes than what it flags, by tensor and dim.
        """
        axes = cls(facts, graph)
        axes._solve(only)
        if blocks:
            axes._keep_blocks(blocks, share)
        if round_to > 1:
            axes._round(round_to)
        return axes

    @classmethod
    def cuttable(cls, facts: Facts, graph: fx.Graph) -> Axes:
        """Return the axes of a graph in which only that is kept which could not be cut whatever the values were."""
        axes = cls(facts, graph, shapes_only=True)
        axes._solve()
        return axes

    def _solve(self, only: Mapping[tuple[str, int], Tensor] | None = None) -> None:
        for node in self.graph.nodes:
            self._start(node)
            if only is not None and node.op == "get_attr" and is_tensor(node):
                for dim, size in enumerate(shape_of(node)):
                    going = only.get((str(node.target), dim), torch.zeros(size, dtype=torch.bool))
                    self.keep(self.of(node, dim), "not chosen", ~going)
        for node in self.graph.nodes:
            self._tie(node)
        for root in self.roots():
            self._keep[root] = torch.zeros(self._sizes[root], dtype=torch.bool)
        for axis, mask, _ in [*self._needs, *self._live]:
            self._keep[self.find(axis)] |= mask
        self.settle()

    def _start(self, node: fx.Node) -> None:
        """Keep what is live of a node, and the whole of what the caller sees."""
        if node.op == "output":
            for given in node.all_input_nodes:
                self.keep_all(given, "an output of the model")
        elif is_tensor(node):
            if node.op == "placeholder":
                self.keep_all(node, "an input of the model")
            for dim in dynamic_dims(node):
                self.keep(self.of(node, dim), "a dynamic dim")
            if node.op == "call_function" and not self.shapes_only:
                tesa = self.facts.tesa(node)
                live = Grid(tesa.shape, tesa.state.block, tesa.state.cells == 0)
                for dim in range(tesa.ndim):
                    self._live.append((self.of(node, dim), slice_flags(live, dim), node))

    def _tie(self, node: fx.Node) -> None:
        if node.op not in {"call_function", "call_module"} or node.target in _LOOKS_AT_SHAPE:
            return
        if str(node.target) == "_guards_fn":
            return
        rule = rule_for("axes", node.target) or (probing.axes if self.facts.probes(node) else None)
        inputs = tensor_inputs(node)
        if rule is not None and all(is_tensor(n) for n in inputs) and all(0 not in shape_of(n) for n in inputs):
            rule(Op(node, self.facts), self)
            return
        for tensor in (node, *inputs):
            self.keep_all(tensor, f"{place(node)} has no rule for cutting")

    def settle(self) -> None:
        """Apply all ties until nothing changes."""
        changed = True
        while changed:
            changed = False
            for tie in self.ties:
                changed |= _SETTLE[tie.kind](self, tie)

    def _product(self, tie: Tie) -> bool:
        sizes = [self._sizes[p] for p in tie.parts]
        flags = self._keep[self.find(tie.whole)].reshape(sizes)
        box = torch.ones(sizes, dtype=torch.bool)
        changed = False
        for position, part in enumerate(tie.parts):
            others = [d for d in range(len(sizes)) if d != position]
            line = flags.any(dim=others) if others else flags
            changed |= self._add(part, line, tie.node)
            view = [-1 if d == position else 1 for d in range(len(sizes))]
            box = box & self._keep[self.find(part)].reshape(view)
        return self._add(tie.whole, box.reshape(-1), tie.node) or changed

    def _concat(self, tie: Tie) -> bool:
        sizes = [self._sizes[p] for p in tie.parts]
        changed = False
        for part, piece in zip(tie.parts, torch.split(self._keep[self.find(tie.whole)], sizes), strict=True):
            changed |= self._add(part, piece.clone(), tie.node)
        whole = torch.cat([self._keep[self.find(p)] for p in tie.parts])
        return self._add(tie.whole, whole, tie.node) or changed

    def _select(self, tie: Tie) -> bool:
        taken = torch.zeros(self._sizes[tie.whole], dtype=torch.bool)
        if tie.index is not None:
            taken[tie.index[self._keep[self.find(tie.parts[0])]]] = True
        return self._add(tie.whole, taken, tie.node)

    def _add(self, axis: int, flags: Tensor, node: fx.Node) -> bool:
        old = self._keep[self.find(axis)]
        news = flags & ~old
        if not bool(news.any()):
            return False
        self._keep[self.find(axis)] = old | flags
        self._needs.append((axis, news, f"{place(node)} needs equal pieces"))
        return True

    def _round(self, multiple: int) -> None:
        """Keep a few more indices, so that widths are multiples; the first cut ones come back first."""
        while True:
            grown = False
            for (node, dim), axis in self._ids.items():
                flags = self._keep[self.find(axis)]
                count = int(flags.sum())
                wanted = min(math.ceil(count / multiple) * multiple, len(flags))
                if count in (0, wanted) or node.op != "get_attr":
                    continue
                back = (~flags).nonzero().flatten()[: wanted - count]
                more = torch.zeros_like(flags)
                more[back] = True
                self._keep[self.find(axis)] = flags | more
                self._needs.append((axis, more, f"rounding up to a multiple of {multiple}"))
                grown = True
                del dim
            if not grown:
                return
            self.settle()

    def _keep_blocks(self, blocks: Blocks, share: float) -> None:
        """Keep what shares a block of a tensor with something that is kept."""
        tied = [
            (axis, blocks[str(node.target)][dim])
            for (node, dim), axis in self._ids.items()
            if node.op == "get_attr" and str(node.target) in blocks and blocks[str(node.target)][dim] > 1
        ]
        tied = [(axis, size) for axis, size in tied if float((~self.flags(axis)).double().mean()) < share]
        grown = True
        while grown:
            grown = False
            for axis, size in tied:
                flags = self.flags(axis)
                more = whole_blocks(flags, size) & ~flags
                if bool(more.any()):
                    self._keep[self.find(axis)] = flags | more
                    self._needs.append((axis, more, f"whole blocks of {size}"))
                    grown = True
            self.settle()

    # ------------------------------------------------------------------ asking

    def kept(self, node: fx.Node, dim: int) -> Tensor:
        """Return which indices of a tensor's dim are kept: bool of shape ``(size,)``."""
        return self._keep[self.find(self.of(node, dim))]

    def is_cut(self, node: fx.Node) -> bool:
        """Whether anything is cut out of a tensor."""
        return any(not bool(self.kept(node, d).all()) for d in range(len(shape_of(node))))

    def empty_tensors(self) -> list[tuple[str, int]]:
        """Return the model's tensors of which nothing would remain, each with the dim."""
        found = [
            (str(node.target), dim)
            for (node, dim), axis in self._ids.items()
            if node.op == "get_attr" and self._sizes[axis] and not bool(self._keep[self.find(axis)].any())
        ]
        return sorted(found)

    def keep_one(self) -> None:
        """Keep the first index of every axis that would be empty: the smallest thing that every kernel takes."""
        for root, flags in self._keep.items():
            if len(flags) and not bool(flags.any()):
                flags[0] = True
                self._needs.append((root, flags.clone(), "the last one of its layer"))
        self.settle()

    def reasons(self, node: fx.Node, dim: int, where: Tensor) -> dict[str, Tensor]:
        """Return who keeps the flagged indices of a tensor's dim: for each reason the indices."""
        root = self.find(self.of(node, dim))
        found: dict[str, Tensor] = {}
        join = self._join(node, root)
        for mask, writer in self._writers.get(root, []):
            if bool((mask & where).any()):
                reason = f"{join} joins it with {place(writer)}" if join else f"live in {place(writer)}"
                found[reason] = found.get(reason, torch.zeros_like(where)) | (mask & where)
        for axis, mask, reason in self._needs:
            if self.find(axis) == root and bool((mask & where).any()):
                found[reason] = found.get(reason, torch.zeros_like(where)) | (mask & where)
        return found

    @cached_property
    def _writers(self) -> dict[int, list[tuple[Tensor, fx.Node]]]:
        """For each axis the nodes that write something live to it, instead of passing it on."""
        found: dict[int, list[tuple[Tensor, fx.Node]]] = {}
        for axis, mask, node in self._live:
            root = self.find(axis)
            if self._is_source(node, root):
                found.setdefault(root, []).append((mask, node))
        return found

    def _is_source(self, node: fx.Node, root: int) -> bool:
        """Whether a node writes an axis instead of passing it on."""
        inputs = [n for n in tensor_inputs(node) if n.op == "call_function" and is_tensor(n)]
        return node in self.sums or not any(self._carries(n, root) for n in inputs)

    def _carries(self, node: fx.Node, root: int) -> bool:
        return any(self.find(self.of(node, d)) == root for d in range(len(shape_of(node))))

    def _join(self, node: fx.Node, root: int) -> str:
        """Return the first op after a tensor that joins the axis with another value, for people; "" for none."""
        queue, seen = list(node.users), {node}
        while queue:
            user = queue.pop(0)
            if user in seen or user.op != "call_function" or not is_tensor(user) or not self._carries(user, root):
                continue
            seen.add(user)
            inputs = [n for n in tensor_inputs(user) if n.op != "get_attr" and is_tensor(n) and self._carries(n, root)]
            if len(inputs) > 1:
                return place(user)
            queue += list(user.users)
        return ""

    def roots(self) -> list[int]:
        """Return one axis for each set of axes that are equal."""
        return [a for a in range(len(self._parent)) if self.find(a) == a]

    def members(self, axis: int) -> list[tuple[fx.Node, int]]:
        """Return the dims of tensors that are on an axis."""
        root = self.find(axis)
        return [place for place, own in self._ids.items() if self.find(own) == root]

    def flags(self, axis: int) -> Tensor:
        """Return which indices of an axis are kept: bool of shape ``(size,)``."""
        return self._keep[self.find(axis)]

    def find(self, axis: int) -> int:
        """Return the axis that stands for all that are equal to this one."""
        while self._parent[axis] != axis:
            self._parent[axis] = self._parent[self._parent[axis]]
            axis = self._parent[axis]
        return axis


_SETTLE = {"product": Axes._product, "concat": Axes._concat, "select": Axes._select}
