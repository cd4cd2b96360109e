"""Stages: what lies between the layers of a graph is compiled by Inductor, and equal stretches of it only once.

Inductor fuses nothing into a layer that a kernel or a library runs, so a graph is cut there and nothing is lost. The
layers of a network are mostly alike, so a few short stretches (a norm, an attention, an activation) stand for all of
it: compiling takes seconds, however deep the network is. Meant for graphs that are replayed, where the calls of many
stretches cost nothing.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from sparta.compiler.graph.program import copied
from sparta.compiler.run.eager import with_fast_paths
from sparta.compiler.run.rounding import ROUNDING_CALLS
from sparta.specialize.attention.unmasked import unmasked_attention

__all__ = ["calls_to_compile", "staged", "tuned"]

_aten = torch.ops.aten
# Convolutions come from libraries: Inductor's own template for kernels larger than 1x1 gives wrong results with 8 warps
# for some shapes (pytorch/pytorch#173068, mended in PyTorch 2.13), and to time it on depthwise ones takes long.
_TUNED = {"max_autotune": True, "coordinate_descent_tuning": True, "max_autotune_conv_backends": "ATEN"}
_OWN_CALLS = ROUNDING_CALLS | {unmasked_attention}
Compiler = Callable[[fx.GraphModule], Callable[..., Any]]


def staged(module: fx.GraphModule, compiler: Compiler | None = None) -> Callable[..., Any]:
    """Return a function of flat inputs that runs a graph's layers as they are and compiles what lies between them.

    It holds the module's tensors as they are now, and is for inputs of one size.

    Parameters
    ----------
    compiler
        What compiles a stretch; Inductor if not given.

    Examples
    --------
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> _ = graph.output((graph.call_function(torch.ops.aten.relu.default, (x,)),))
    >>> staged(fx.GraphModule(torch.nn.Module(), graph), compiler=lambda stretch: stretch)(torch.tensor([-1.0, 2.0]))
    (tensor([0., 2.]),)
    """
    known: dict[Hashable, _Compiled] = {}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for layers, stretch in _stages(module.graph):
        for node in (*layers, *(() if stretch.computes else stretch.nodes)):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if stretch.computes:
            made = known.setdefault(stretch.key, _Compiled(stretch.module(), compiler or _inductor))
            call = graph.call_function(made.run, tuple(copies[node] for node in stretch.inputs))
            for number, node in enumerate(stretch.outputs):
                copies[node] = graph.call_function(operator.getitem, (call, number))
    graph.output(fx.map_arg(next(iter(reversed(module.graph.nodes))).args[0], copies.__getitem__))
    graph.lint()
    return with_fast_paths(fx.GraphModule(module, graph, "Staged"))


def tuned(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a graph as Inductor compiles it when it tries all that it can, for inputs of one size.

    >>> tuned(fx.symbolic_trace(torch.nn.ReLU())).__class__.__name__
    'OptimizedModule'
    """
    return _inductor(module, _TUNED)


def calls_to_compile(graph: fx.Graph) -> int:
    """Return how many calls :func:`staged` compiles: those of equal stretches count once."""
    unique = {stretch.key: len(stretch.nodes) for _, stretch in _stages(graph) if stretch.computes}
    return sum(unique.values())


@dataclass(frozen=True)
class _Stretch:
    """Calls that run between layers, in the order of the graph."""

    nodes: tuple[fx.Node, ...]

    @property
    def inputs(self) -> list[fx.Node]:
        """What it reads, in the order in which it reads it."""
        own = set(self.nodes)
        read = (source for node in self.nodes for source in node.all_input_nodes)
        return list(dict.fromkeys(source for source in read if source not in own))

    @property
    def outputs(self) -> list[fx.Node]:
        """What others read of it."""
        own = set(self.nodes)
        return [node for node in self.nodes if any(user not in own for user in node.users)]

    @property
    def computes(self) -> bool:
        """Whether it does more than to look at tensors in another shape."""
        return any(node.target is not operator.getitem and not _is_view(node.target) for node in self.nodes)

    @property
    def key(self) -> Hashable:
        """Equal for stretches that compute the same of their inputs."""
        place = {node: f"%{number}" for number, node in enumerate([*self.inputs, *self.nodes])}
        calls = [(node.target, _text(node.args, place), _text(node.kwargs, place)) for node in self.nodes]
        return tuple(calls), tuple(place[node] for node in self.outputs)

    def module(self) -> fx.GraphModule:
        """Return it as a graph of its own that returns a tuple."""
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"input_{number}") for number, node in enumerate(self.inputs)}
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.outputs))
        return fx.GraphModule(torch.nn.Module(), graph, "Stretch")


@dataclass(eq=False)
class _Compiled:
    """A stretch, compiled at its first call for inputs of some sizes."""

    module: fx.GraphModule
    compiler: Compiler
    _made: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)

    def run(self, *inputs: Any) -> Any:
        """Return what the stretch computes."""
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in inputs)
        made = self._made.get(key)
        if made is None:
            # A module of its own, because what is compiled for several sizes of one is soon not compiled any more.
            made = self._made[key] = self.compiler(fx.GraphModule(self.module, copied(self.module.graph)[0], "Stretch"))
            with warnings.catch_warnings():  # Inductor's own, at the call that compiles
                warnings.simplefilter("ignore")
                return made(*inputs)
        return made(*inputs)


def _inductor(module: fx.GraphModule, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return a graph as Inductor compiles it, for inputs of one size.

    What is compiled lives as long as what is returned. It would be Dynamo's otherwise, which forgets it whenever it is
    told to, and Triton then unloads kernels that a CUDA graph still replays.
    """
    made: list[Callable[..., Any]] = []

    def compiled_by(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        made.append(cast("Callable[..., Any]", compile_fx(graph, inputs, config_patches=dict(options or {}))))
        return made[-1]

    compiled: Callable[..., Any] = torch.compile(module, dynamic=False, backend=compiled_by)
    return compiled


def _stages(graph: fx.Graph) -> list[tuple[list[fx.Node], _Stretch]]:
    """Return layers and the calls after them, by how many layers come one after the other before these."""
    depth: dict[fx.Node, int] = {}
    layers: dict[int, list[fx.Node]] = {}
    calls: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        depth[node] = max((depth[source] for source in node.all_input_nodes), default=0) + _is_layer(node)
        if _is_layer(node) or _is_part_of_layer(node):
            layers.setdefault(depth[node], []).append(node)
        elif node.op == "call_function":
            calls.setdefault(depth[node], []).append(node)
    depths = sorted({*layers, *calls})
    return [(layers.get(each, []), _Stretch(tuple(calls.get(each, ())))) for each in depths]


def _is_layer(node: fx.Node) -> bool:
    return node.op == "call_module" or node.target is _aten.linear.default or node.target in _OWN_CALLS


def _is_part_of_layer(node: fx.Node) -> bool:
    """Whether a node is one of several results of a layer: a stretch is to be given tensors."""
    return node.target is operator.getitem and _is_layer(node.all_input_nodes[0])


def _is_view(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.is_view


def _text(argument: Any, place: dict[fx.Node, str]) -> str:
    """Return arguments as text, in which nodes are known by their places."""
    return repr(fx.map_arg(argument, lambda node: _Place(place[node])))


class _Place(str):
    """The place of a node; not the text of an argument that looks like one."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
