"""Compaction: the same function with smaller tensors.

The captured graph is copied, the model's tensors are sliced to what the solved axes keep, shapes written into ops are
rewritten, and constants that were cut are added to the next bias. Nothing is handed over unseen; the compact model is
run next to the masked dense one, on the example and on other inputs, and must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.modules import set_member
from sparta.propagation.axes import Axes, Blocks
from sparta.propagation.capture import Captured
from sparta.propagation.checking import check_equal
from sparta.propagation.edit import Edit
from sparta.propagation.engine import Facts, derive
from sparta.propagation.op import Op, is_tensor, shape_of
from sparta.propagation.registry import rule_for
from sparta.propagation.seams import Seams
from sparta.propagation.stored import StoredGraph, plain_tree, restored, stored

__all__ = ["CompactModel", "Origin", "compacted", "masked_tensors"]

_ASSERT = torch.ops.aten._assert_tensor_metadata.default
_AS_COMPLEX = torch.ops.aten.view_as_complex.default
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


@dataclass(frozen=True)
class Origin:
    """Where a tensor of the compact model came from.

    Parameters
    ----------
    name
        The tensor of the original model, or None for a bias that was created to hold folded constants.
    kept
        For each dim the indices that remain, in order; None where all do.
    """

    name: str | None
    kept: tuple[Tensor | None, ...]

    def take(self, tensor: Tensor) -> Tensor:
        """Return the slice of a tensor of the original's shape, such as an optimizer's state, that remains.

        >>> Origin("fc.weight", (torch.tensor([0, 2]), None)).take(torch.arange(6).reshape(3, 2)).tolist()
        [[0, 1], [4, 5]]
        """
        for dim, index in enumerate(self.kept):
            if index is not None:
                tensor = tensor.index_select(dim, index.to(tensor.device))
        return tensor


class CompactModel(fx.GraphModule):
    """A smaller model that computes what the masked one does; it is called as the original is.

    ``mapping`` tells for each parameter and buffer where it came from, see :class:`Origin`.
    """

    mapping: Mapping[str, Origin]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (plain_tree(self), stored(self.graph), dict(self.mapping))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompactModel:
        copied = _rebuilt(copy.deepcopy(plain_tree(self), memo), stored(self.graph), dict(self.mapping))
        memo[id(self)] = copied
        return copied


def _rebuilt(tree: nn.Module, graph: StoredGraph, mapping: dict[str, Origin]) -> CompactModel:
    """Return a compact model from its parts."""
    small = CompactModel(tree, restored(graph), "CompactModel")
    small.mapping = mapping
    small.train(tree.training)
    return small


def compacted(
    captured: Captured,
    facts: Facts,
    axes: Axes,
    *,
    allow_empty: bool = False,
    check: bool = True,
    seams: float | None = None,
    round_to: int = 1,
    blocks: Blocks | None = None,
) -> CompactModel:
    """Return the compact model of a captured one.

    Parameters
    ----------
    allow_empty
        Keep one index of a dim of which nothing would remain, instead of an error where a spec empties it.
    check
        Compare with the masked dense model, as it is and as a graph, before returning.
    seams
        Gather what a layer reads and scatter what it writes where its neighbours need more, if that saves this many
        multiply-adds for each element that is moved; None: never.
    round_to
        Sizes at seams are multiples of this.
    blocks
        At seams, tensors are cut by whole blocks of these sizes.
    """
    if not allow_empty:
        _refuse_empty(captured, facts, axes)
    axes.keep_one()
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(captured.graph, copies))
    graph.set_codegen(captured.graph._codegen)
    edit = Edit(axes, copies)
    for node in captured.graph.nodes:
        rule = rule_for("rewrite", node.target) if node.op == "call_function" else None
        if rule is not None and _touched(axes, node):
            rule(Op(node, facts), edit)
        if node.target is _ASSERT:
            graph.erase_node(copies[node])
    masked = masked_tensors(captured, facts)
    mapping, tensors = _sliced(captured, axes, edit, masked)
    if seams is not None:
        _sew(graph, mapping, tensors, worth=seams, round_to=round_to, blocks=blocks or {})
    _take_any_layout(graph)
    for node in graph.nodes:
        node.meta.pop("val", None)  # sizes of before the cut
    root = _tree(captured, tensors)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph.lint()
    small = CompactModel(root, graph, "CompactModel")
    small.mapping = mapping
    small.train(captured.train)
    if check and not any(t.is_meta for t in masked.values()):
        check_equal(captured, masked, small)
    return small


def _take_any_layout(graph: fx.Graph) -> None:
    """Let ops take memory of any layout: what was cut may begin, or step, at another place than what was traced.

    Attention may return another layout for other widths, so views are reshapes; a piece that is read as complex numbers
    is copied.
    """
    for node in graph.nodes:
        if node.target in _VIEWS:
            node.target = torch.ops.aten.reshape.default
        elif node.target is _AS_COMPLEX:
            with graph.inserting_before(node):
                form: dict[str, Any] = {"memory_format": torch.contiguous_format}
                node.update_arg(0, graph.call_function(torch.ops.aten.clone.default, (node.args[0],), form))


def _refuse_empty(captured: Captured, facts: Facts, axes: Axes) -> None:
    """Raise for layers that the user's spec empties; what is dead in the model as it comes is no one's mistake."""
    empty = [] if facts.as_read else axes.empty_tensors()
    if empty:
        before = Axes.solved(derive(captured, {}), captured.graph)
        empty = sorted(set(empty) - set(before.empty_tensors()))
    if empty:
        name, dim = empty[0]
        raise ShapeError(
            message(
                f"nothing of {name!r} would remain along dim {dim}"
                + (f" (and of {len(empty) - 1} other tensors)" if len(empty) > 1 else ""),
                "layers with at least one live channel",
                "keep a channel of it, remove the layer from the model, or pass allow_empty=True to keep one channel",
            )
        )


def _sew(
    graph: fx.Graph,
    mapping: dict[str, Origin],
    tensors: dict[str, Tensor],
    *,
    worth: float,
    round_to: int,
    blocks: Blocks,
) -> None:
    """Make the seams that pay, and keep track of where the rest of each weight came from."""

    def cut(name: str, dim: int, index: Tensor) -> None:
        old = mapping[name]
        before = old.kept[dim]
        kept = index if before is None else before[index]
        mapping[name] = Origin(old.name, (*old.kept[:dim], kept, *old.kept[dim + 1 :]))
        tensors[name] = tensors[name].index_select(dim, index.to(tensors[name].device))

    def literal(index: Tensor) -> str:
        name = f"_seam_{sum(key.startswith('_seam_') for key in tensors)}"
        device = next(iter(tensors.values())).device
        mapping[name], tensors[name] = Origin(None, ()), index.to(device)
        return name

    Seams(tensors, worth, round_to, blocks, cut, literal).sew(graph)


def _touched(axes: Axes, node: fx.Node) -> bool:
    """Whether the cut reaches an op: its inputs or its output are smaller."""
    tensors = [n for n in (node, *node.all_input_nodes) if is_tensor(n) and 0 not in shape_of(n)]
    return any(axes.is_cut(n) for n in tensors)


def masked_tensors(captured: Captured, facts: Facts) -> dict[str, Tensor]:
    """Return the model's tensors that the graph uses, with the constants of the given TeSAs in their places.

    Those that are given and that the graph does not read any more are among them, for the model itself reads them.
    """
    names = dict.fromkeys([*captured.nodes(), *facts.given])
    return {name: facts.masked(name) for name in names if name in facts.tensors}


def _sliced(
    captured: Captured, axes: Axes, edit: Edit, masked: Mapping[str, Tensor]
) -> tuple[dict[str, Origin], dict[str, Tensor]]:
    """Return where each tensor of the compact model comes from, and its values."""
    mapping: dict[str, Origin] = {}
    tensors: dict[str, Tensor] = {}
    for name, node in captured.nodes().items():
        if name in masked and is_tensor(node):
            mapping[name] = origin = _origin(axes, name, node)
            tensors[name] = origin.take(masked[name]).clone()
    for name, (bias, weight, shift) in edit.biases.items():
        values = masked[str(weight.target)]
        if bias is None:
            mapping[name] = Origin(None, ())
            tensors[name] = shift.to(values)
        else:
            mapping[name] = origin = _origin(axes, str(bias.target), bias)
            kept = origin.take(masked[str(bias.target)])
            tensors[name] = (kept.to(torch.float64).cpu() + shift).to(kept)
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    for name, value in edit.literals.items():
        mapping[name], tensors[name] = Origin(None, ()), value.to(device)
    return mapping, tensors


def _origin(axes: Axes, name: str, node: fx.Node) -> Origin:
    flags = [axes.kept(node, d) for d in range(len(shape_of(node)))] if 0 not in shape_of(node) else []
    return Origin(name, tuple(None if bool(f.all()) else f.nonzero().flatten() for f in flags))


def _tree(captured: Captured, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module with the tensors under their names, and the sub-modules that the graph calls."""
    root = nn.Module()
    for name, tensor in tensors.items():
        original = captured.tensors.get(name)
        if isinstance(original, nn.Parameter):
            set_member(root, name, nn.Parameter(tensor, requires_grad=original.requires_grad))
        elif original is None and name.rpartition(".")[2].startswith("bias"):
            set_member(root, name, nn.Parameter(tensor))
        else:
            set_member(root, name, tensor)
    for node in captured.graph.nodes:
        if node.op == "call_module":
            root.add_module(str(node.target), captured.module.get_submodule(str(node.target)))
    return root


def check_round_to(round_to: int) -> None:
    """Raise unless `round_to` is a whole number of at least 1."""
    if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
        raise ValueRangeError(message(f"round_to={round_to!r}", "a whole number of at least 1"))


def check_share(share: float | None) -> None:
    """Raise unless a share is None or a number from 0 to 1."""
    if share is not None and (isinstance(share, bool) or not 0 <= share <= 1):
        raise ValueRangeError(message(f"keep_blocks={share!r}", "a number from 0 to 1, or None"))
