"""Siblings in a language model: layers that its code calls with one tensor, such as queries, keys and values.

They may run as one product, of which each is a part (:mod:`sparta.generation.parts`). Which layers are siblings is
seen in a step of the model, and whether a product is faster than its layers is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparta.compiler.choose.layers import choice_for
from sparta.compiler.choose.siblings import milliseconds_of, share_of
from sparta.compiler.lower.joined import stacked
from sparta.compiler.plan import choice_from_dict
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.session import Session
from sparta.errors import FileFormatError, SpartaError, message
from sparta.generation.layers import SparseLayer, kernel_of, layer_problem, layer_spec, weight_of
from sparta.generation.parts import PartOfProduct
from sparta.modules import replace_module
from sparta.specialize.tuning.select import Choice
from sparta.specialize.tuning.shipped import misfit
from sparta.specialize.tuning.store import key_of

__all__ = ["find_siblings", "join_siblings", "product_fields", "products_of", "put_product", "put_stored_products"]

_AS_FAST = 1.02  # what a product may take at other sizes than that of a step


def join_siblings(
    model: nn.Module, layers: Mapping[str, SparseLayer], step: Callable[[], Any], session: Session
) -> dict[str, SparseLayer]:
    """Let layers that a step gives one tensor run as one product where that is faster, in place; return those that do.

    Where the model's code does not take views of a product, all run one by one.
    """
    groups = _join_layers(model, find_siblings(model, list(layers), step), session)
    joined = [name for names in groups for name in names]
    try:
        with torch.no_grad():
            step()
    except Exception as error:  # noqa: BLE001 - whatever its code does with them
        session.gave_up("layers as one product", error)
        for name in joined:
            replace_module(model, name, layers[name])
        return {}
    return {name: cast("SparseLayer", model.get_submodule(name)) for name in joined}


def find_siblings(model: nn.Module, names: Sequence[str], call: Callable[[], Any]) -> list[tuple[str, ...]]:
    """Return the groups of named layers that a call of the model gives the same tensor; none where it does not run."""
    seen: list[tuple[str, Tensor]] = []  # which are kept, so that no other tensor takes the place of one

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                seen.append((name, inputs[0]))

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        with torch.no_grad(), suppress(Exception):
            call()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[int, dict[str, None]] = {}
    for name, x in seen:
        groups.setdefault(id(x), {})[name] = None
    return list(dict.fromkeys(tuple(group) for group in groups.values() if len(group) > 1))


def _join_layers(model: nn.Module, groups: Sequence[tuple[str, ...]], session: Session) -> list[tuple[str, ...]]:
    """Let siblings run as one product where that is faster, in place; return the groups that do."""
    known: dict[str, Choice] = {}
    joined = []
    for names in groups:
        layers = [model.get_submodule(name) for name in names]
        with suppress(SpartaError):  # such as scales that no kernel takes together
            choices = _choices(layers, known, session)
            if choices is not None:
                put_product(model, names, choices)
                joined.append(names)
    return joined


def _choices(layers: Sequence[nn.Module], known: dict[str, Choice], session: Session) -> dict[int, Choice] | None:
    """Return what runs the product of layers, by rows; None where it cannot be, or is not faster."""
    kernels = [layer.kernel for layer in layers if isinstance(layer, SparseLayer)]
    kinds = {(kernel.fused.op, repr(kernel.fused.attributes), kernel.live.dtype) for kernel in kernels}
    sizes = {tuple(kernel.choices) for kernel in kernels}
    if len(kernels) != len(layers) or len(kinds) != 1 or len(sizes) != 1:
        return None
    whole, tesa = _joined(layers), stacked([kernel.fused.weight for kernel in kernels])
    chosen: dict[int, Choice] = {}
    for place, rows in enumerate(sizes.pop()):
        apart = [kernel.choices[rows][1] for kernel in kernels]
        if any(choice.entry is None for choice in apart):
            return None
        spec = layer_spec(whole, tesa, rows)
        if key_of(spec) not in known:
            session.show(f"as one product: {tuple(tesa.shape)}, {rows} rows")
        like = max(apart, key=milliseconds_of)
        problem = partial(layer_problem, whole, tesa, rows)
        choice = choice_for(spec, problem, known, session, share=0.5, like=like)
        most = sum(milliseconds_of(each) for each in apart) * (_AS_FAST if place else 1.0)
        if choice.entry is None or milliseconds_of(choice) >= most:
            return None
        chosen[rows] = choice
    return chosen


def put_product(model: nn.Module, names: Sequence[str], choices: Mapping[int, Choice]) -> None:
    """Let layers run as one product, in place.

    Parameters
    ----------
    choices
        What runs the product, by rows.
    """
    layers = [cast("SparseLayer", model.get_submodule(name)) for name in names]
    tesas = [layer.kernel.fused.weight for layer in layers]
    whole, tesa = _joined(layers), stacked(tesas)
    specs = {rows: (layer_spec(whole, tesa, rows), choice) for rows, choice in choices.items()}
    with torch.no_grad():
        product = kernel_of(whole, tesa, specs)
    first = 0
    for name, layer, part in zip(names, layers, tesas, strict=True):
        end = first + part.shape[0]
        others = [other for other in names if other != name]
        share = (end - first) / tesa.shape[0]
        own = {rows: (layer_spec(layer, part, rows), share_of(c, share, others)) for rows, c in choices.items()}
        kernel = PartOfProduct(product, tuple(names), layer.kernel.fused, (first, end), own)
        replace_module(model, name, SparseLayer(layer, kernel))
        first = end


def _joined(layers: Sequence[nn.Module]) -> nn.Linear:
    """Return one linear layer with the weights of several; those without a bias get one of zeros."""
    weights = [weight_of(layer) for layer in layers]
    biases = [cast("Tensor | None", layer.bias) for layer in layers]
    weight = torch.cat(weights)
    biased = any(bias is not None for bias in biases)
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=biased, device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if biased:
        parts = [w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
        whole.bias = nn.Parameter(torch.cat(parts), requires_grad=False)
    return whole


def products_of(model: nn.Module) -> dict[tuple[str, ...], KernelModule]:
    """Return the products of a model, by the names of their layers."""
    layers = (module for module in model.modules() if isinstance(module, SparseLayer))
    parts = (layer.kernel for layer in layers if isinstance(layer.kernel, PartOfProduct))
    return {part.names: part.product for part in parts}


def product_fields(model: nn.Module) -> list[dict[str, Any]]:
    """Return the products of a model as JSON values."""
    return [
        {"layers": list(names), "choices": {str(rows): c.to_dict() for rows, (_, c) in product.choices.items()}}
        for names, product in products_of(model).items()
    ]


def put_stored_products(model: nn.Module, stored: Sequence[Mapping[str, Any]]) -> None:
    """Join the layers that a file says, whose own kernels are in place; where a kernel does not run here, they stay so.

    Raises
    ------
    sparta.errors.FileFormatError
        If they are no layers of one input with kernels.
    """
    named = dict(model.named_modules())
    for fields in stored:
        names = [str(name) for name in fields["layers"]]
        layers = [layer for layer in map(named.get, names) if isinstance(layer, SparseLayer)]
        kinds = {(part.kernel.fused.op, part.kernel.fused.weight.shape[1], part.kernel.live.dtype) for part in layers}
        if len(layers) != len(names) or len(set(names)) != len(names) or len(names) < 2 or len(kinds) != 1:
            given = f"a product of {', '.join(names)[:100]}"
            raise FileFormatError(message(given, "several sparse layers of one input", "save it again"))
        choices = {int(rows): choice_from_dict(choice) for rows, choice in fields["choices"].items()}
        tesa = stacked([layer.kernel.fused.weight for layer in layers])
        whole = _joined(layers)
        fits = choices and not any(
            misfit(layer_spec(whole, tesa, rows), cast("Any", choice)) for rows, choice in choices.items()
        )
        if fits:
            put_product(model, names, choices)
