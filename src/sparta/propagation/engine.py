"""The engine: what follows for every tensor of a graph, to the fixpoint.

Constants flow from inputs to outputs, observation flows from outputs to inputs (and, at ops such as a product, from one
input to another); an element that no one observes is *dead*. Both kinds of knowledge only ever grow, so a worklist
ends. Constants never depend on what is dead, so that the two flows cannot support each other in a circle: a zero may
make its partner in a product dead, and is itself kept for it.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from sparta.propagation import probing
from sparta.propagation.capture import Captured
from sparta.propagation.constants import Known, any_over, nothing
from sparta.propagation.op import Op, dtype_of, dynamic_dims, is_tensor, place, shape_of, tensor_inputs
from sparta.propagation.registry import is_ruled_by_pieces, rule_for
from sparta.tesa.attribute import CONSTANT, DEAD, LIVE, TeSA
from sparta.tesa.bits import ANY, FORMATS, BitFormat
from sparta.tesa.grid import Grid

__all__ = ["Facts", "derive"]

_FORMAT_OF = {found.dtype: found for found in FORMATS if found.dtype is not None}

_SMALL = 65_536
"""Tensors of up to this many elements are computed outright when all that they depend on is constant."""

_aten = torch.ops.aten
_UNDEFINED = frozenset(
    {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_permuted, _aten.empty_strided, _aten.new_empty_strided}
)


@dataclass
class Facts:
    """All that has been derived for one graph.

    Parameters
    ----------
    given
        The TeSA of each of the model's tensors that the user knows something about, by name.
    tensors
        The model's tensors by name.
    assume_finite
        Whether 0 × x is taken for 0, that is: no intermediate value is infinite or NaN.
    cell_limit
        A fact that needs more cells than this is given up.
    as_read
        Whether the given TeSAs were read off the tensors, which then need no masking.
    """

    given: Mapping[str, TeSA]
    tensors: Mapping[str, Tensor]
    assume_finite: bool = True
    cell_limit: int = 2**24
    as_read: bool = False
    known: dict[fx.Node, Known] = field(default_factory=dict)
    observed: dict[fx.Node, Grid] = field(default_factory=dict)
    derived_by: dict[fx.Node, str] = field(default_factory=dict)
    seen_by: dict[fx.Node, dict[str, int]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    formats: dict[fx.Node, BitFormat] = field(default_factory=dict)
    needed: dict[fx.Node, BitFormat] = field(default_factory=dict)
    probe: bool | frozenset[str] = False
    steps: int = 0
    _frozen: dict[fx.Node, Tensor | None] = field(default_factory=dict)
    _obeying: dict[str, int] = field(default_factory=dict)

    def known_of(self, node: fx.Node) -> Known:
        """Return what is known of a node's value."""
        found = self.known.get(node)
        return found if found is not None else Known.live(shape_of(node))

    def observed_of(self, node: fx.Node) -> Grid:
        """Return which elements of a node's value are observed."""
        found = self.observed.get(node)
        return found if found is not None else nothing(shape_of(node))

    def frozen(self, node: fx.Node) -> Tensor | None:
        """Return the values that a parameter or buffer has in the masked model, on the CPU, or None."""
        if node not in self._frozen:
            self._frozen[node] = self._masked(node)
        return self._frozen[node]

    def _masked(self, node: fx.Node) -> Tensor | None:
        if not self.has_values(node):
            return None
        return self.masked(str(node.target)).cpu()

    def has_values(self, node: fx.Node) -> bool:
        """Whether a node is a parameter or buffer that has one value for good."""
        tensor = self.tensors.get(str(node.target)) if node.op == "get_attr" else None
        return tensor is not None and not tensor.is_meta and not self.is_written(node)

    def masked(self, name: str) -> Tensor:
        """Return a tensor of the model with the constants of its given TeSA in their places; itself if it has them."""
        tensor, given = self.tensors[name].detach(), self.given.get(name)
        if given is None or self.as_read or tensor.is_meta:
            return tensor
        version = -1 if tensor.is_inference() else tensor._version
        if self._obeying.get(name, -1) == version >= 0:
            return tensor  # looked at before, and not changed since
        masked = given.apply(tensor)
        if torch.equal(masked, tensor):
            self._obeying[name] = version
        return masked

    def format_of(self, node: fx.Node) -> BitFormat:
        """Return the bit format of a node's elements: derived, given, or that of its dtype."""
        if node in self.formats:
            return self.formats[node]
        given = self.given.get(str(node.target)) if node.op == "get_attr" else None
        own = given.format if given is not None else None
        if own is not None and own != ANY and _own_format(node) != own:
            return own
        if node in self.needed:
            return self.needed[node]
        return _own_format(node) if dtype_of(node).is_floating_point else ANY

    def is_written(self, node: fx.Node) -> bool:
        """Whether some op of the graph writes to a parameter or buffer, which then has no fixed value."""
        return any(_writes(user) for user in node.users)

    def tesa(self, node: fx.Node) -> TeSA:
        """Return the TeSA of a node: live, constant or dead elements, and the format."""
        base = TeSA.dense(shape_of(node), format=self.format_of(node))
        if node.op == "get_attr":
            given = self.given.get(str(node.target))
            # A given format that is the dtype's own says nothing; what is derived may be smaller.
            plain = given is not None and given.format in {ANY, _own_format(node)}
            base = base if given is None else replace(given, code=base.code) if plain else given
            const, value = base._where(CONSTANT), base.value
        else:
            known = self.known_of(node)
            const, value = known.const, known.value
        seen = self.observed_of(node)
        state = Grid.combine(
            lambda c, s: torch.where(s, torch.where(c, CONSTANT, LIVE), DEAD).to(torch.uint8), const, seen
        )
        value = Grid.combine(lambda s, v: torch.where(s == CONSTANT, v, 0.0), state, value)
        return TeSA(state, value, base.code, base.scale, base.zero_point)

    def probes(self, node: fx.Node) -> bool:
        """Whether what a node does shall be found out by running it, because no rule says so and the user asked."""
        if not self.probe or not isinstance(node.target, torch._ops.OpOverload):
            return False
        known = any(rule_for(direction, node.target) for direction in ("constants", "observed", "axes"))
        wanted = self.probe is True or {str(node.target), str(node.target.overloadpacket)} & set(self.probe)
        return bool(wanted) and not known and probing.is_pure(node.target)

    def note(self, node: fx.Node, text: str) -> None:
        """Remember why something could not be derived at a node."""
        self.notes.setdefault(place(node), text)


def derive(
    captured: Captured,
    given: Mapping[str, TeSA],
    *,
    assume_finite: bool = True,
    cell_limit: int = 2**24,
    as_read: bool = False,
    probe: bool | frozenset[str] = False,
) -> Facts:
    """Derive all facts of a captured model from the TeSAs that are given for some of its tensors.

    Parameters
    ----------
    given
        TeSAs by the names of :attr:`Captured.tensors`.
    as_read
        Whether they are the zeros that the tensors hold anyway.
    probe
        Ops without a rule that shall be run to find out what they do; True: all of them.

    Examples
    --------
    >>> from sparta.propagation.capture import capture
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> captured = capture(model, torch.randn(4, 2))
    >>> second = TeSA.from_mask(torch.tensor([[True, False, True]]))
    >>> facts = derive(captured, {"2.weight": second})
    >>> facts.tesa(captured.nodes()["0.weight"]).states().tolist()
    [[0, 0], [2, 2], [0, 0]]
    """
    import sparta.propagation.rules  # noqa: F401 - registers the rules that come with the package

    facts = Facts(given, {**captured.tensors, **captured.literals}, assume_finite, cell_limit, as_read)
    facts.probe = probe
    order = {node: position for position, node in enumerate(captured.graph.nodes)}
    for node in order:
        if node.op == "get_attr" and is_tensor(node):
            facts.known[node] = _known_tensor(facts, node)
    _worklist(order, 1, lambda node: _forward(facts, node))
    _worklist(order, 1, lambda node: _bits(facts, node))
    _worklist(order, -1, lambda node: _needs(facts, node))
    _worklist(order, -1, lambda node: _backward(facts, node))
    return facts


def _worklist(order: Mapping[fx.Node, int], sign: int, visit: Callable[[fx.Node], list[fx.Node]]) -> None:
    """Visit every node, and again the nodes that a visit names, in the order of the graph (sign 1) or against it."""
    nodes = list(order)
    queue = sorted(sign * position for position in order.values())
    waiting = set(queue)
    while queue:
        position = heapq.heappop(queue)
        waiting.discard(position)
        for node in visit(nodes[sign * position]):
            again = sign * order[node]
            if again not in waiting:
                waiting.add(again)
                heapq.heappush(queue, again)


# ---------------------------------------------------------------------- inputs to outputs


def _known_tensor(facts: Facts, node: fx.Node) -> Known:
    """Return what is known of one of the model's tensors: small ones whole, large ones where they are pruned."""
    small = _size(node) <= _SMALL and (len(shape_of(node)) < 2 or str(node.target) not in facts.given)
    frozen = facts.frozen(node) if small else None
    if frozen is not None:
        return Known.of(frozen) if not frozen.is_complex() else Known.live(shape_of(node))
    given = facts.given.get(str(node.target))
    if given is None or facts.is_written(node):
        return Known.live(shape_of(node))
    return Known(given._where(CONSTANT), given.value)


def _forward(facts: Facts, node: fx.Node) -> list[fx.Node]:
    if node.op != "call_function" or not is_tensor(node):
        return []
    facts.steps += 1
    known = _computed(facts, node)
    name = "constant folding"
    if known is None:
        rule = rule_for("constants", node.target) or (probing.constants if facts.probes(node) else None)
        sized = all(is_tensor(n) for n in tensor_inputs(node))
        name = getattr(rule, "__name__", "").strip("_")
        if rule is None or not sized or 0 in shape_of(node):
            if rule is None and any(facts.known_of(n).any for n in tensor_inputs(node) if is_tensor(n)):
                facts.note(node, "no rule for this op: its output is taken for live")
            return []
        known = rule(Op(node, facts))
    if known is None:
        return []
    known = _same_along_dynamic(known, node)
    if known.cells > facts.cell_limit:
        facts.note(node, f"the fact needs {known.cells} cells, over the limit of {facts.cell_limit}: taken for live")
        return []
    old = facts.known.get(node)
    if not known.any or (old is not None and old.const.same_as(known.const)):
        return []
    facts.known[node], facts.derived_by[node] = known, name
    return list(node.users)


def _bits(facts: Facts, node: fx.Node) -> list[fx.Node]:
    """Derive the bit format of a node; news goes to its users."""
    rule = rule_for("bits", node.target) if node.op == "call_function" and is_tensor(node) else None
    found = rule(Op(node, facts)) if rule is not None else None
    own = _own_format(node) if found is not None else ANY
    if found is None or found == facts.format_of(node) or own == ANY or not own.holds(found):
        return []
    facts.formats[node] = found
    return list(node.users)


def _needs(facts: Facts, node: fx.Node) -> list[fx.Node]:
    """Derive the bits that are enough for a node because all its users round it in the same way."""
    if node.op == "placeholder" or not is_tensor(node) or not dtype_of(node).is_floating_point:
        return []
    found = set()
    for user in node.users:
        split = is_ruled_by_pieces(user.target)
        for reader in user.users if split else [user]:
            rule = rule_for("needs", reader.target) if reader.op == "call_function" else None
            found.add(rule(Op(reader, facts), node) if rule is not None else None)
    wanted = found.pop() if len(found) == 1 else None
    if wanted is None or wanted == facts.needed.get(node) or not _own_format(node).holds(wanted):
        return []
    facts.needed[node] = wanted
    return node.all_input_nodes


def _own_format(node: fx.Node) -> BitFormat:
    """Return the format of a node's dtype; `any` for dtypes that are not one real number, such as bool and complex."""
    return _FORMAT_OF.get(dtype_of(node), ANY)


def _same_along_dynamic(known: Known, node: fx.Node) -> Known:
    dims = [d for d in dynamic_dims(node) if known.const.varies_along(d) or known.value.varies_along(d)]
    return known.uniform_over(dims).map(lambda g: g.broadcast_to(shape_of(node))) if dims else known


def _computed(facts: Facts, node: fx.Node) -> Known | None:
    """Return the value of a small tensor that depends on constants only, by running the op."""
    target = node.target
    inputs = node.all_input_nodes
    if (
        not isinstance(target, torch._ops.OpOverload)
        or target._schema.is_mutable
        or torch.Tag.nondeterministic_seeded in target.tags
        or target.overloadpacket in _UNDEFINED
        or dynamic_dims(node)
        or dtype_of(node).is_complex
        or any(not is_tensor(n) or dtype_of(n).is_complex for n in inputs)
        or any(s > _SMALL for s in (_size(n) for n in (node, *inputs)))
        or not all(facts.known_of(n).all for n in inputs)
    ):
        return None

    def value(n: fx.Node) -> Tensor:
        return facts.known_of(n).value.dense().to(dtype_of(n))

    args = fx.map_arg(node.args, value)
    kwargs = {**fx.map_arg(node.kwargs, value)}
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    try:
        result = target(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # an op that does not run on the CPU or on such values: nothing is known of its result
    return Known.of(result) if isinstance(result, Tensor) and tuple(result.shape) == shape_of(node) else None


def _size(node: fx.Node) -> int:
    return int(torch.Size(shape_of(node)).numel())


# ---------------------------------------------------------------------- outputs to inputs


def _backward(facts: Facts, node: fx.Node) -> list[fx.Node]:
    if node.op == "output":
        found = [(n, None) for n in node.all_input_nodes]
    elif node.op in {"call_function", "call_module"}:
        found = list(_seen_inputs(facts, node))
    else:
        return []
    return [n for n, seen in found if _observe(facts, n, seen, node)]


def _seen_inputs(facts: Facts, node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Return what is observed of each input of a node; None means all of it."""
    inputs = node.all_input_nodes
    if str(node.target) == "_guards_fn" or node.target is _aten.sym_size.int or node.target is _ASSERT:
        return []  # these look at shapes only
    value = node.meta.get("val")
    if isinstance(value, list | tuple) and is_ruled_by_pieces(node.target):
        return []  # each `getitem` of a split speaks for itself
    if not is_tensor(node) or _writes(node):
        return [(n, None) for n in inputs]
    facts.steps += 1
    seen = facts.observed_of(node)
    if not bool(seen.cells.any()):
        return []
    rule = rule_for("observed", node.target) or (probing.observed if facts.probes(node) else None)
    if rule is None or 0 in shape_of(node) or not all(is_tensor(n) for n in tensor_inputs(node)):
        return [(n, None) for n in inputs]
    stated = list(rule(Op(node, facts), seen))
    named = {n for n, _ in stated}
    return stated + [(n, None) for n in inputs if n not in named]


def _observe(facts: Facts, node: fx.Node, seen: Grid | None, by: fx.Node) -> bool:
    """Add to what is observed of a node; returns whether that is news."""
    if not is_tensor(node):
        # A split, a topk, ...: not one tensor. Mark its own inputs whole through the worklist.
        return False
    shape = shape_of(node)
    seen = Grid.uniform(shape, 1, torch.bool) if seen is None else seen
    seen = any_over(seen, dynamic_dims(node)).broadcast_to(shape)
    if seen.cells.numel() > facts.cell_limit:
        facts.note(by, "what it observes needs too many cells: taken for all")
        seen = Grid.uniform(shape, 1, torch.bool)
    facts.seen_by.setdefault(node, {})[place(by)] = seen.count()
    old = facts.observed_of(node)
    new = Grid.combine(torch.logical_or, old, seen)
    facts.observed[node] = new
    return not new.same_as(old)


_ASSERT = _aten._assert_tensor_metadata.default


def _writes(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable) and target is not operator.getitem
    )
