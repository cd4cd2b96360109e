"""Watching the products of a model: which weight meets which input, whatever code calls them.

A dispatch mode sees every matrix product, convolution and embedding while a model runs, and finds out by the memory it
lies in which parameter the weight is. So modules, functions and attention blocks need no cases of their own, and the
model itself is never changed: a visitor may look at the operands, or have others take their place for one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Kind", "Product", "Products", "Weights", "quietly"]

_aten = torch.ops.aten
Kind = Literal["linear", "conv", "embedding"]
_OPERANDS: Mapping[Any, tuple[int | None, int]] = {  # places of the input and of the weight
    _aten.addmm.default: (1, 2),
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.convolution.default: (0, 1),
    _aten.embedding.default: (None, 0),
}
_TRANSPOSED = 6  # the place of that flag among a convolution's arguments


class Product(NamedTuple):
    """One product that ran.

    Parameters
    ----------
    name
        The parameter.
    kind
        What it is multiplied by: rows of a matrix, images, or the choice of rows.
    axis
        The axis of the parameter that has the output channels; None where only a part of it is used at once.
    x
        The input; None for an embedding.
    weight
        The weight as the op takes it, which may be a view of the parameter.
    call
        Runs the op with another input and weight.
    """

    name: str
    kind: Kind
    axis: int | None
    x: Tensor | None
    weight: Tensor
    call: Callable[[Tensor | None, Tensor], Tensor]


@dataclass(frozen=True)
class _Place:
    begin: int
    end: int
    name: str


class Weights:
    """The tensors of a model that products may use, found again by the memory they lie in.

    Parameters
    ----------
    model
        Its parameters and buffers of two dims and more, in floating point; tied ones go by their first name.

    Examples
    --------
    >>> layer = nn.Linear(2, 3)
    >>> Weights(layer).name_of(layer.weight.t())
    'weight'
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[int, list[_Place]] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() >= 2 and tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
                self.tensors[name] = tensor.detach()
                extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                begin = int(tensor.storage_offset())
                places = self._places.setdefault(tensor.untyped_storage().data_ptr(), [])
                places.append(_Place(begin, begin + int(extent) + 1, name))

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter that a tensor is, or is a view of."""
        places = self._places.get(tensor.untyped_storage().data_ptr(), ())
        offset = tensor.storage_offset()
        return next((place.name for place in places if place.begin <= offset < place.end), None)

    def in_place_of(self, name: str, view: Tensor, other: Tensor) -> Tensor:
        """Return the view of another tensor that `view` is of the parameter; both have the parameter's strides."""
        offset = view.storage_offset() - self.tensors[name].storage_offset()
        return other.as_strided(view.shape, view.stride(), other.storage_offset() + offset)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, shows every product with a weight of the model to a visitor, which returns its result or None.

    Examples
    --------
    >>> model, seen = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), []
    >>> with quietly(model), Products(Weights(model), lambda product: seen.append(product.name)):
    ...     _ = model(torch.ones(4, 2))
    >>> seen
    ['0.weight', '1.weight']
    """

    def __init__(self, weights: Weights, visit: Callable[[Product], Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._visit = weights, visit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Show a product, and run everything else as it is."""
        del types
        keywords = kwargs or {}
        product = self._product(func, args, keywords) if func in _OPERANDS else None
        result = None if product is None else self._visit(product)
        return func(*args, **keywords) if result is None else result

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
        at_x, at_weight = _OPERANDS[func]
        weight = args[at_weight]
        name = self._weights.name_of(weight)
        if name is None:
            return None

        others = [None if place in (at_x, at_weight) else value for place, value in enumerate(args)]

        def call(x: Tensor | None, other: Tensor) -> Tensor:
            given = list(others)  # which hold no operand alive
            given[at_weight] = other
            if at_x is not None:
                given[at_x] = x
            result: Tensor = func(*given, **kwargs)
            return result

        kind: Kind = "linear" if at_x is not None else "embedding"
        flipped = False
        if func is _aten.convolution.default:
            kind, flipped = "conv", bool(args[_TRANSPOSED])
        axis = _output_axis(kind, self._weights.tensors[name], weight, flipped=flipped)
        return Product(name, kind, axis, None if at_x is None else args[at_x], weight, call)


def _output_axis(kind: Kind, parameter: Tensor, used: Tensor, *, flipped: bool) -> int | None:
    """Return the axis of a parameter that has the output channels, given how an op takes it."""
    if kind != "linear":
        whole = used.shape == parameter.shape and used.stride() == parameter.stride()
        return (1 if flipped else 0) if whole else None
    if parameter.dim() != 2:
        return None
    for axis, view in ((0, parameter.t()), (1, parameter)):
        if used.dim() >= 2 and used.shape[-2:] == view.shape and used.stride()[-2:] == view.stride():
            return axis
    return None


@contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, without gradients and without fused attention, which would hide its products."""
    modes = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in modes.items():
            module.training = training
