"""How much memory a stored graph would take, found out without taking it.

A few bytes of a file can ask for a tensor of any size. Before a loaded graph is handed over, its calls are made once on
tensors without memory, and a call whose result is larger than the file's budget is refused. What cannot be followed
that way (sizes that depend on values) is judged by the numbers in the call itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from sparta.compiler.graph.signature import Input
from sparta.compiler.run.kernel_module import KernelModule
from sparta.files import Budget

__all__ = ["check_sizes"]

_UNKNOWN = object()
_ANY_SIZE = 8  # stands for dims that any size will do for
_LEAST, _GROWTH = 128 * 1024 * 1024, 64  # of one result: so many bytes, or so many times what goes in
_ROOM_MAKERS = frozenset(
    {
        "arange",
        "broadcast_to",
        "constant_pad_nd",
        "expand",
        "eye",
        "full",
        "linspace",
        "new_full",
        "new_ones",
        "new_zeros",
        "one_hot",
        "ones",
    }
    | {"pad", "rand", "randn", "repeat", "repeat_interleave", "tile", "zeros"}
)


def check_sizes(
    graph: fx.Graph,
    tensors: Mapping[str, Tensor],
    kernels: Mapping[str, KernelModule],
    inputs: Sequence[Input],
    budget: Budget,
    *,
    max_bytes: int | None = None,
) -> None:
    """Raise :class:`sparta.errors.FileFormatError` if a call of a graph makes a tensor beyond all proportion.

    Parameters
    ----------
    budget
        Of the file. One result of a call may also be 64 times as large as the inputs together, or 128 MiB.
    max_bytes
        The limit in place of these.
    """
    values: dict[fx.Node, Any] = {}
    places = iter(inputs)
    given = sum(_bytes(_example(each)) for each in inputs)
    most = max(budget.limit, _LEAST, _GROWTH * given) if max_bytes is None else max_bytes
    limit = Budget(most, budget.source)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = _example(next(places))
        elif node.op == "get_attr":
            values[node] = tensors[str(node.target)].to("meta")
        elif node.op == "call_module":
            values[node] = _followed(lambda n=node: _kernel_result(kernels[str(n.target)], values[n.args[0]]))
        elif node.op == "call_function":
            values[node] = _result(node, values, limit)
        for tensor in _tensors(values.get(node)):
            limit.check(tuple(tensor.shape), tensor.element_size(), f"the result of {node.target}")


def _result(node: fx.Node, values: Mapping[fx.Node, Any], limit: Budget) -> Any:
    """Return what a call returns on tensors without memory, or _UNKNOWN."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: values.get(used, _UNKNOWN))
    numbers = [n for n in _leaves((args, kwargs)) if isinstance(n, int) and n > 1]
    found = _UNKNOWN
    if all(leaf is not _UNKNOWN for leaf in _leaves((args, kwargs))):
        args, kwargs = _on_meta(args), dict(_on_meta(dict(kwargs)))
        if isinstance(node.target, torch._ops.OpOverload):
            named = {argument.name for argument in node.target._schema.arguments if argument.kwarg_only}
            kwargs |= {"device": torch.device("meta")} if "device" in named else {}
        found = _followed(lambda: node.target(*args, **kwargs))  # type: ignore[operator]
    makes_room = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name[6:] in _ROOM_MAKERS
    if found is _UNKNOWN and makes_room:
        limit.check((math.prod(numbers),), 1, f"the result of {node.target}")
    return found


def _followed(call: Any) -> Any:
    try:
        with torch.no_grad():
            return call()
    except Exception:  # noqa: BLE001 - not every op runs on tensors without memory, or with sizes that were guessed
        return _UNKNOWN


def _kernel_result(kernel: KernelModule, x: Tensor) -> Tensor:
    weight = torch.empty(kernel.fused.weight.shape, dtype=kernel.live.dtype, device="meta")
    return kernel.fused.lowering.dense(weight, x.to(kernel.live.dtype), None, kernel.fused.attributes)


def _example(given: Input) -> Any:
    if given.shape is None:
        return given.constant
    sizes = [_ANY_SIZE if size is None else size for size in given.shape]
    return torch.empty(sizes, dtype=getattr(torch, given.dtype), device="meta")


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(item) for item in value)
    return {name: _on_meta(item) for name, item in value.items()} if isinstance(value, dict) else value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        yield from _leaves(list(value.values()))
    elif isinstance(value, slice):
        yield from _leaves([value.start, value.stop, value.step])
    else:
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
