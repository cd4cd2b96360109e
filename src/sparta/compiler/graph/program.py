"""The program: a model between capture and kernels, as a flat graph of pure ATen calls and named tensors.

Every pass of the compiler takes a :class:`Program` and returns another one. A program owns copies of the model's
tensors with what the spec prunes at zero, so that neither side sees the other's later changes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparta.modules import member, set_member
from sparta.propagation.checking import check_equal
from sparta.propagation.compact import Origin, masked_tensors
from sparta.propagation.result import PropagationResult
from sparta.tesa.attribute import DEAD, TeSA

__all__ = ["Program", "assemble", "original_program", "reduced_program", "run_without_values"]

_aten = torch.ops.aten
_CHECKS = frozenset(
    {
        _aten._assert_tensor_metadata.default,
        _aten._assert_scalar.default,
        _aten.sym_constrain_range.default,
        _aten.sym_constrain_range_for_size.default,
    }
)
_IDENTITIES = frozenset({_aten.dropout.default, _aten.feature_dropout.default, _aten.alpha_dropout.default})

_WORTH_A_PATTERN = 0.4
"""The share of channels from which on cutting them is worth more than whole blocks: kernels run blocks about twice as
fast, and what lies between the kernels gains from the cut as well."""
_MOVED = {"cpu": 64.0, "cuda": 1000.0}
"""Multiply-adds that moving an element costs about as much as: where less is gained, no layer picks what it reads."""


@dataclass(frozen=True)
class Program:
    """A flat graph and its tensors.

    Parameters
    ----------
    graph
        ``placeholder`` nodes take the flat inputs, ``get_attr`` nodes name tensors, all else calls functions.
    tensors
        The tensors by the names that the graph uses.
    origins
        Where tensors came from, by name, in a program that was cut; others are the model's own.
    """

    graph: fx.Graph
    tensors: Mapping[str, Tensor]
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def source(self, name: str) -> str:
        """Return the name that a tensor had in the model as given."""
        origin = self.origins.get(name)
        return name if origin is None or origin.name is None else origin.name

    def module(self) -> fx.GraphModule:
        """Return the program as it stands, to run."""
        return assemble(self.graph, self.tensors)

    def values(self, inputs: Iterable[Any], wanted: Iterable[fx.Node] | None = None) -> dict[fx.Node, Any]:
        """Run the program and return what nodes compute: the `wanted` ones, or shape and dtype of all tensors.

        Shapes come as ``meta`` tensors, so that no activation is held longer than it is used.
        """
        observer = _Observer(self.module(), None if wanted is None else {node.name for node in wanted})
        with torch.no_grad():
            observer.run(*inputs)
        return {node: observer.seen[node.name] for node in self.graph.nodes if node.name in observer.seen}

    def shapes(self, inputs: Sequence[Any], *, computed: bool = True) -> dict[fx.Node, Tensor]:
        """Return a ``meta`` tensor of the shape and dtype of every tensor that the program makes.

        Parameters
        ----------
        computed
            Whether the program is run for that; else shapes are derived without computing anything, which is worth it
            where a call takes long, and it runs only where they cannot be derived.
        """
        if computed:
            return self.values(inputs)
        observer = _Observer(self.module(), None)
        if not run_without_values(observer, inputs):
            return self.values(inputs)
        seen = {node: observer.seen[node.name] for node in self.graph.nodes if node.name in observer.seen}
        return {
            node: torch.empty_like(torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="meta"))
            for node, found in seen.items()
        }

    def copy(self) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """Return a copy of the graph to edit, and the copy of each node."""
        return copied(self.graph)


class _Observer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, wanted: set[str] | None) -> None:
        super().__init__(module)
        self._wanted = wanted
        self.seen: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self._wanted is None and isinstance(result, Tensor):
            self.seen[n.name] = torch.empty_like(result, device="meta")
        elif self._wanted is not None and n.name in self._wanted:
            self.seen[n.name] = result
        return result


def run_without_values(interpreter: fx.Interpreter, inputs: Sequence[Any]) -> bool:
    """Run a graph on tensors that have a shape and no values; False where that is not enough to run it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.no_grad(), mode:
            interpreter.run(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs))
    except Exception:  # noqa: BLE001 - whatever an op raises that has no rule for shapes, or that asks for a value
        return False
    return True


def original_program(result: PropagationResult) -> Program:
    """Return the captured model with the constants of its spec in place, nothing cut."""
    captured = result.captured
    tensors = masked_tensors(captured, result.facts)
    graph = _flat(captured.graph)
    return Program(graph, _owned(graph, {**captured.literals, **tensors}, captured.module))


def reduced_program(result: PropagationResult, *, brief: bool = False) -> tuple[Program, int]:
    """Return the model with what nothing observes cut out, or at zero, and how many parameters were cut.

    A cut shifts the channels after it, so pruned weights are cut by whole blocks, except along channels of which a
    large share goes. Raises what :meth:`PropagationResult.compact` raises.

    Parameters
    ----------
    brief
        Whether calls take long: what was cut is then compared on the example alone, and a model from which nothing was
        cut is not compared at all.
    """
    masked = masked_tensors(result.captured, result.facts)
    device = next((t.device.type for t in masked.values()), "cpu")
    seams = _MOVED.get(device, _MOVED["cpu"])
    small = result.compact(allow_empty=True, seams=seams, keep_blocks=_WORTH_A_PATTERN, check=not brief)
    read = result.captured.nodes()
    cut = sum(t.numel() for name, t in masked.items() if name in read) - sum(
        member(small, name).numel() for name in small.mapping
    )
    graph = _flat(small.graph)
    if brief and (cut or len(graph.nodes) != len(_flat(result.captured.graph).nodes)):
        check_equal(result.captured, masked, small, brief=True)
    tensors = {}
    for name, origin in small.mapping.items():
        value = member(small, name)
        tensors[name] = value if origin.name is None else _zeroed(result, origin.name, value, origin)
    return Program(graph, _owned(graph, tensors, small), dict(small.mapping)), cut


def _zeroed(result: PropagationResult, name: str, value: Tensor, origin: Origin | None = None) -> Tensor:
    """Return a tensor with zeros where nothing observes it, unless that would break up the blocks it is pruned in."""
    node = result._nodes.get(result.captured.tied.get(name, name))
    if node is None or not value.is_floating_point() or bool(result.facts.observed_of(node).cells.all()):
        return value  # before all its TeSAs are made, which takes long for a large model
    dead = result.spec[name].states(value.device) == DEAD
    given = None if result.facts.as_read else result.facts.given.get(name)
    live = value != 0 if given is None else _left(given.mask(value.device), origin)
    dead = _left(dead, origin)
    if value.dim() >= 2 and _block_height(live & ~dead) < _block_height(live):
        return value
    return torch.where(dead, torch.zeros((), dtype=value.dtype, device=value.device), value)


def _left(tensor: Tensor, origin: Origin | None) -> Tensor:
    return tensor if origin is None else origin.take(tensor)


def _block_height(live: Tensor) -> int:
    """Return how many output channels are pruned together; 1 for a weight without zeros, or of all zeros."""
    height = TeSA.from_mask(live).state.block[0]
    return 1 if height >= live.shape[0] else height


def assemble(
    graph: fx.Graph, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module] | None = None
) -> fx.GraphModule:
    """Return a module that runs a graph: tensors become buffers under their names, modules are called by theirs."""
    root = nn.Module()
    used = {str(node.target) for node in graph.nodes if node.op in {"get_attr", "call_module"}}
    members: list[tuple[str, Tensor | nn.Module]] = [*tensors.items(), *(modules or {}).items()]
    for name, value in members:
        if name in used:
            set_member(root, name, value.data if isinstance(value, nn.Parameter) else value)
    return fx.GraphModule(root, graph, "Compiled")


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a copy of a graph with flat inputs and outputs, and the copy of each of its nodes."""
    fresh = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    fresh.output(fresh.graph_copy(graph, copies))
    return fresh, copies


def _flat(graph: fx.Graph) -> fx.Graph:
    """Return a graph without the checks of the capture and the ops that do nothing in evaluation."""
    fresh, _ = copied(graph)
    for node in list(fresh.nodes):
        if node.op == "call_module" or node.target in _CHECKS:
            fresh.erase_node(node)
        elif node.target in _IDENTITIES and node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
            fresh.erase_node(node)
    drop_unused(fresh)
    return fresh


def free_name(tensors: Mapping[str, Tensor], name: str) -> str:
    """Return `name`, or one like it that no tensor has.

    >>> free_name({"fc.weight": torch.ones(1)}, "fc.weight")
    'fc.weight_2'
    """
    number, found = 1, name
    while found in tensors:
        number += 1
        found = f"{name}_{number}"
    return found


def drop_unused(graph: fx.Graph) -> None:
    """Erase tensors and pure calls that nothing uses."""
    for node in reversed(list(graph.nodes)):
        pure = node.target is operator.getitem or (
            isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
        )
        if not node.users and (node.op == "get_attr" or (node.op == "call_function" and pure)):
            graph.erase_node(node)


def _owned(graph: fx.Graph, tensors: Mapping[str, Tensor], module: fx.GraphModule) -> dict[str, Tensor]:
    """Return copies of the tensors that a graph uses, looked up in the module where they are not given."""
    names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
    found = {name: tensors[name] if name in tensors else member(module, name) for name in names}
    return {name: tensor.detach().clone() for name, tensor in found.items()}
