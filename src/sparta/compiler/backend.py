"""The back end of `torch.compile`: ``torch.compile(model, backend="sparta")`` for people who stay in that API.

Dynamo hands over a graph with the parameters among its inputs; here they become fixed again, and the graph is compiled
as any model is, when it is first called with a set of sizes. Fixed weights are only good as long as they do not change,
so they are checked at each call, and where one did change the plain graph runs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparta.compiler.api import compile_model
from sparta.compiler.run.compiled_model import CompiledModel
from sparta.errors import NameNotFoundError, SpartaError, did_you_mean
from sparta.modules import member, set_member

__all__ = ["sparta_backend"]

_OPTIONS = ("tune", "budget_s", "verify", "inductor", "cuda_graphs", "progress")
_MOST_SIZES = 8
_PART = re.compile(r"\['?([^'\]]+)'?\]")


def sparta_backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a callable that runs a graph of Dynamo as :func:`sparta.compile` does.

    Parameters
    ----------
    graph, example_inputs
        As Dynamo gives them.
    options
        For :func:`sparta.compile`: ``tune``, ``budget_s``, ``verify``, ``inductor``, ``cuda_graphs``, ``progress``.
        Pass them as ``torch.compile(model, backend="sparta", options={...})``.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    >>> fast = torch.compile(model, backend=sparta_backend, options={"tune": "off"})
    >>> with torch.no_grad():
    ...     fast(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """
    chosen = dict(options or {})
    for name in chosen:
        if name not in _OPTIONS:
            raise NameNotFoundError(did_you_mean(name, _OPTIONS, "option of the back end"))
    wants_gradients = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in example_inputs)
    if wants_gradients:
        warnings.warn(
            "the back end 'sparta' is for inference: with gradients the graph runs as it is. Call the model under "
            "torch.no_grad() or torch.inference_mode()",
            stacklevel=2,
        )
        return graph.forward
    return _Specialized(graph, example_inputs, chosen)


class _Specialized:
    """A graph of Dynamo with its parameters fixed, compiled once for each set of sizes."""

    def __init__(self, graph: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> None:
        self._graph, self._options = graph, dict(options)
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._fixed = {
            index: (_name(node), value)
            for index, (node, value) in enumerate(zip(places, example_inputs, strict=True))
            if isinstance(value, Tensor) and _is_fixed(node, value)
        }
        self._state = [_state_of(value) for _, value in self._fixed.values()]
        self._compiled: dict[tuple[Any, ...], CompiledModel | None] = {}

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        if [_state_of(args[index]) for index in self._fixed] != self._state:
            return self._graph(*args)
        free = {index: value for index, value in enumerate(args) if index not in self._fixed}
        key = tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in free.values())
        if key not in self._compiled and len(self._compiled) < _MOST_SIZES:
            self._compiled[key] = self._compile(free)
        model = self._compiled.get(key)
        tensors = [value for value in free.values() if isinstance(value, Tensor)]
        return self._graph(*args) if model is None else model(*tensors)

    def _compile(self, free: Mapping[int, Any]) -> CompiledModel | None:
        model = _Fixed(self._graph, dict(self._fixed.values()), list(self._fixed), free)
        tensors = tuple(value.detach() for value in free.values() if isinstance(value, Tensor))
        try:
            found = compile_model(model, tensors, dynamic_shapes=None, **self._options)
        except (SpartaError, RuntimeError) as error:
            warnings.warn(
                f"sparta could not compile this graph, which runs as it is: {str(error).splitlines()[0]}", stacklevel=2
            )
            return None
        return found if isinstance(found, CompiledModel) else None


class _Fixed(nn.Module):
    """The graph as a function of its free tensors alone."""

    def __init__(
        self, graph: fx.GraphModule, tensors: Mapping[str, Tensor], places: Sequence[int], free: Mapping[int, Any]
    ) -> None:
        super().__init__()
        self._graph = [graph]  # in a list, so that its own attributes are not this module's
        self._places = dict(zip(places, tensors, strict=True))
        self._count = len(places) + len(free)
        self._numbers = {index: value for index, value in free.items() if not isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            fixed = tensor.detach()
            is_parameter = isinstance(tensor, nn.Parameter)
            set_member(self, name, nn.Parameter(fixed, requires_grad=False) if is_parameter else fixed)

    def forward(self, *tensors: Tensor) -> Any:
        """Run the graph with everything in its place."""
        rest = iter(tensors)
        arguments = []
        for index in range(self._count):
            if index in self._places:
                arguments.append(member(self, self._places[index]))
            else:
                arguments.append(self._numbers[index] if index in self._numbers else next(rest))
        return self._graph[0](*arguments)


def _is_fixed(node: fx.Node, value: Tensor) -> bool:
    """Whether an input of Dynamo's graph is a parameter or buffer of the model."""
    static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    return isinstance(value, nn.Parameter) or static is not None


def _state_of(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _name(node: fx.Node) -> str:
    """Return the name of a parameter in the user's model, as far as Dynamo's source tells it.

    >>> _PART.findall("L['self']._modules['0']._parameters['weight']")[1:]
    ['0', 'weight']
    """
    source = getattr(node.meta.get("_dynamo_source") or getattr(node.meta.get("grapharg"), "source", None), "name", "")
    parts = _PART.findall(source() if callable(source) else str(source))[1:]
    return ".".join(parts) if parts and all(part.isidentifier() or part.isdigit() for part in parts) else node.name
