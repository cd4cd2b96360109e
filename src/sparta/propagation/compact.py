"""Compaction: the same function with smaller tensors.

The captured graph is copied, the model's tensors are sliced to what the solved axes keep, shapes written into ops are
rewritten, and constants that were cut are added to the next bias. Nothing is handed over unseen; the compact model is
run next to the masked dense one, on the example and on other inputs, and must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparta.aten import argument_of, set_argument
from sparta.errors import CheckError, ShapeError, ValueRangeError, message
from sparta.modules import set_member
from sparta.propagation.axes import Axes, Blocks
from sparta.propagation.capture import Captured
from sparta.propagation.edit import Edit
from sparta.propagation.engine import Facts
from sparta.propagation.inputs import fresh_inputs
from sparta.propagation.op import Op, is_tensor, shape_of
from sparta.propagation.registry import rule_for
from sparta.propagation.seams import Seams

__all__ = ["CompactModel", "Origin", "compacted", "masked_tensors"]

_ASSERT = torch.ops.aten._assert_tensor_metadata.default


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
        Keep one index of a dim of which nothing would remain, instead of an error.
    check
        Compare with the masked dense model before returning.
    seams
        Gather what a layer reads and scatter what it writes where its neighbours need more, if that saves this many
        multiply-adds for each element that is moved; None: never.
    round_to
        Sizes at seams are multiples of this.
    blocks
        At seams, tensors are cut by whole blocks of these sizes.
    """
    empty = axes.empty_tensors()
    if empty and not allow_empty:
        name, dim = empty[0]
        raise ShapeError(
            message(
                f"nothing of {name!r} would remain along dim {dim}"
                + (f" (and of {len(empty) - 1} other tensors)" if len(empty) > 1 else ""),
                "layers with at least one live channel",
                "keep a channel of it, remove the layer from the model, or pass allow_empty=True to keep one channel",
            )
        )
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
    for node in graph.nodes:
        node.meta.pop("val", None)  # sizes of before the cut
    root = _tree(captured, tensors)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph.lint()
    small = CompactModel(root, graph, "CompactModel")
    small.mapping = mapping
    if check and not any(t.is_meta for t in masked.values()):
        check_equal(captured, masked, small)
    return small


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
    """Return the model's tensors that the graph uses, with the constants of the given TeSAs in their places."""
    found = {}
    for name in captured.nodes():
        if name in facts.tensors:
            found[name] = facts.masked(name)
    return found


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


# ---------------------------------------------------------------------- the check


def check_equal(captured: Captured, masked: Mapping[str, Tensor], small: nn.Module) -> float:
    """Raise :class:`CheckError` unless both models agree on the example and on other inputs; returns the difference."""
    worst = 0.0
    state = {name: buffer.clone() for name, buffer in small.named_buffers()}
    example = (captured.args, dict(captured.kwargs))
    for args, kwargs in (example, fresh_inputs(example, seed=0)):
        # A forward in train mode writes to buffers: both sides get copies.
        own = {n: t if isinstance(captured.tensors.get(n), nn.Parameter) else t.clone() for n, t in masked.items()}
        with torch.no_grad(), _without_dropout(captured.module), _without_dropout(small):
            expected = torch.func.functional_call(captured.module, own, args, kwargs)
            actual = torch.func.functional_call(small, {n: t.clone() for n, t in state.items()}, args, kwargs)
        for one, two in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
            if isinstance(one, Tensor):
                worst = max(worst, _difference(one, two))
    return worst


_DROPOUT = {
    torch.ops.aten.dropout.default: "p",
    torch.ops.aten.feature_dropout.default: "p",
    torch.ops.aten.scaled_dot_product_attention.default: "dropout_p",
}


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Set the probabilities of all dropout ops to 0 for a while: two models do not drop the same elements."""
    if not isinstance(model, fx.GraphModule):
        yield
        return
    names = {node: _DROPOUT[node.target] for node in model.graph.nodes if node.target in _DROPOUT}
    changed = [(node, name, argument_of(node, name)) for node, name in names.items() if argument_of(node, name)]
    try:
        for node, name, _ in changed:
            set_argument(node, name, 0.0)
        if changed:
            model.recompile()
        yield
    finally:
        for node, name, value in changed:
            set_argument(node, name, value)
        if changed:
            model.recompile()


def _difference(expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape:
        raise CheckError(
            message(f"the compact model gives {tuple(actual.shape)}, the masked one {tuple(expected.shape)}")
        )
    if not expected.is_floating_point():
        wrong = int((expected != actual).sum())
        if wrong:
            raise CheckError(message(f"{wrong} elements of an integer output differ from the masked model's"))
        return 0.0
    one, two = expected.to(torch.float64), actual.to(torch.float64)
    scale = max(1.0, float(one.nan_to_num(0, 0, 0).abs().max())) if one.numel() else 1.0
    bound = scale * torch.finfo(expected.dtype).eps * 4096
    gap = (one - two).abs()
    wrong_places = ~((gap <= bound) | (one == two) | (one.isnan() & two.isnan()))
    if bool(wrong_places.any()):
        raise CheckError(
            message(
                f"{int(wrong_places.sum())} output elements of the compact model differ from the masked model's by up "
                f"to {float(gap.nan_to_num(torch.inf).max()):.3g}",
                f"a difference of {bound:.1g}",
                "this is a defect of a rule: please report the model; `result.why(name)` shows the rules involved",
            )
        )
    return float(gap.nan_to_num(0.0, 0.0, 0.0).max()) if gap.numel() else 0.0


def check_round_to(round_to: int) -> None:
    """Raise unless `round_to` is a whole number of at least 1."""
    if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
        raise ValueRangeError(message(f"round_to={round_to!r}", "a whole number of at least 1"))


def check_share(share: float | None) -> None:
    """Raise unless a share is None or a number from 0 to 1."""
    if share is not None and (isinstance(share, bool) or not 0 <= share <= 1):
        raise ValueRangeError(message(f"keep_blocks={share!r}", "a number from 0 to 1, or None"))
