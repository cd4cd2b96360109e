"""Sparse linear layers inside a model of transformers: its own code runs, and pruned layers run sparse kernels.

Each layer keeps the parameters it had, so everything that transformers does with a model goes on working. Kernels are
chosen by measurement for the rows of one decoding step and for those of the example, as for any compiled layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparta.compiler.choose.layers import choice_for
from sparta.compiler.lower import lowering_of
from sparta.compiler.plan import LayerPlan
from sparta.compiler.run.kernel_module import Fused, KernelModule
from sparta.compiler.session import Session
from sparta.generation.parts import PartOfProduct
from sparta.modules import replace_module
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.scaled_linear.spec import FP8
from sparta.specialize.scaled_linear.spec import OP as SCALED_OP
from sparta.specialize.tuning.select import DENSE, Choice, Problem
from sparta.specialize.tuning.store import key_of
from sparta.tesa.attribute import TeSA
from sparta.tesa.prunable import input_axis

__all__ = [
    "SparseLayer",
    "is_linear",
    "is_transposed",
    "kernel_of",
    "layer_plans",
    "layer_problem",
    "layer_spec",
    "put_layers",
    "row_counts",
    "weight_of",
]

_OP = "linear"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: PyTorch's own, or the one of GPT-2, whose weight is (inputs, outputs).

    >>> is_linear(nn.Linear(2, 2)), is_linear(nn.ReLU())
    (True, False)
    """
    return type(module) is nn.Linear or is_transposed(module)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight (N, K) of a linear layer."""
    weight = cast("Tensor", module.weight).detach()
    return weight.t() if is_transposed(module) else weight


class SparseLayer(nn.Module):
    """A linear layer that runs the kernel chosen for its rows.

    Parameters
    ----------
    layer
        The dense layer, whose parameters it shares.
    kernel
        The kernels and their packed weights, its own or those of a product that it is part of.
    """

    def __init__(self, layer: nn.Module, kernel: KernelModule | PartOfProduct) -> None:
        super().__init__()
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        if getattr(layer, "bias", None) is None:
            self.register_parameter("bias", None)
        self.transposed = is_transposed(layer)
        # Not a sub-module: the state of this layer is that of the dense one.
        object.__setattr__(self, "kernel", kernel)

    kernel: KernelModule | PartOfProduct

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., N) for x (..., K)."""
        live = self.kernel.live
        if x.dtype == live.dtype and x.device == live.device and x.dim() > 1 and x.numel():
            return self.kernel(x)
        weight = cast("Tensor", self.weight)
        return functional.linear(x, weight.t() if self.transposed else weight, cast("Tensor | None", self.bias))

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseLayer:
        copied = SparseLayer(self, self.kernel)
        copied.transposed = self.transposed
        return copied

    def extra_repr(self) -> str:
        """Say what runs."""
        return self.kernel.extra_repr()


def row_counts(model: nn.Module, names: Mapping[str, Any], calls: list[Callable[[], Any]]) -> dict[str, list[int]]:
    """Return how many rows each of the named layers gets in each of several calls, without repetition.

    A call that the model does not take tells nothing.
    """
    seen: dict[str, list[int]] = {name: [] for name in names}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].numel():
                rows = inputs[0].numel() // inputs[0].shape[-1]
                if rows not in seen[name]:
                    seen[name].append(rows)

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        with torch.no_grad():
            for call in calls:
                with suppress(Exception):
                    call()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def put_layers(
    model: nn.Module, tesas: Mapping[str, TeSA], rows: Mapping[str, list[int]], session: Session
) -> dict[str, SparseLayer]:
    """Replace the layers for which a sparse kernel wins, in place; return them by name.

    Parameters
    ----------
    tesas
        What is known of the weights (N, K) of linear layers, by the names of the layers.
    rows
        The numbers of rows that kernels are chosen for, by layer.
    """
    put: dict[str, SparseLayer] = {}
    known = _measured(model, tesas, rows, session)
    for name, tesa in tesas.items():
        layer = model.get_submodule(name)
        kernel = _chosen(layer, tesa, rows.get(name) or [1], known)
        if kernel is not None:
            put[name] = SparseLayer(layer, kernel)
            replace_module(model, name, put[name])
    return put


def _measured(
    model: nn.Module, tesas: Mapping[str, TeSA], rows: Mapping[str, list[int]], session: Session
) -> dict[str, Choice]:
    """Return what runs each kind of layer, measured once for all that cost alike, the most expensive ones first."""
    first: dict[str, tuple[nn.Module, TeSA, int]] = {}
    costs: dict[str, int] = {}
    for name, tesa in tesas.items():
        layer = model.get_submodule(name)
        for count in rows.get(name) or [1]:
            kind = key_of(layer_spec(layer, tesa, count))
            first.setdefault(kind, (layer, tesa, count))
            costs[kind] = costs.get(kind, 0) + count * tesa.numel
    session.begin_measuring(0)
    known: dict[str, Choice] = {}
    for number, kind in enumerate(sorted(first, key=lambda kind: -costs[kind])):
        layer, tesa, count = first[kind]
        session.show(f"kind of layer {number + 1}/{len(first)}: {tuple(tesa.shape)}, {count} rows")
        left = sum(cost for other, cost in costs.items() if other not in known)
        share = max(costs[kind] / max(1, left), 0.5 / (len(first) - number))
        choice_for(layer_spec(layer, tesa, count), partial(layer_problem, *first[kind]), known, session, share=share)
    return known


def layer_problem(layer: nn.Module, tesa: TeSA, count: int) -> Problem:
    """Return what is measured for a layer and a number of rows."""
    weight, bias = weight_of(layer), cast("Tensor | None", layer.bias)
    x = torch.randn(count, weight.shape[1], generator=torch.Generator().manual_seed(0))
    shift = None if bias is None else bias.detach()
    lowering, spec = lowering_of(_operation(tesa)[0]), layer_spec(layer, tesa, count)
    with torch.no_grad():
        return lowering.problem(spec, tesa.apply(weight), x.to(weight.device, weight.dtype), shift, None)


def _chosen(layer: nn.Module, tesa: TeSA, rows: list[int], known: Mapping[str, Choice]) -> KernelModule | None:
    """Return the kernels of a layer by what is known of its kind; None where dense runs all its sizes."""
    specs = {count: layer_spec(layer, tesa, count) for count in rows}
    choices = {count: (spec, known[key_of(spec)]) for count, spec in specs.items()}
    if all(choice.implement == DENSE for _, choice in choices.values()):
        return None
    with torch.no_grad():
        return kernel_of(layer, tesa, choices)


def kernel_of(layer: nn.Module, tesa: TeSA, choices: Mapping[int, tuple[KernelSpec, Choice]]) -> KernelModule:
    """Return the kernels of a linear layer that were chosen for its rows."""
    weight, bias = weight_of(layer), cast("Tensor | None", layer.bias)
    op, attributes = _operation(tesa)
    fused = Fused(op, _formatted(tesa, weight.dtype), attributes, Epilogue(bias=bias is not None))
    live = weight[tesa.mask(weight.device)].clone()
    return KernelModule(fused, live, None if bias is None else bias.detach().clone(), choices)


def layer_spec(layer: nn.Module, tesa: TeSA, rows: int) -> KernelSpec:
    """Return the kernel spec of a linear layer for a number of rows."""
    weight = weight_of(layer)
    x = torch.empty(rows, weight.shape[1], dtype=weight.dtype, device="meta")
    epilogue = Epilogue(bias=layer.bias is not None)
    op, attributes = _operation(tesa)
    return lowering_of(op).spec(_formatted(tesa, weight.dtype), x, attributes, epilogue, device=weight.device.type)


def _operation(tesa: TeSA) -> tuple[str, dict[str, Any]]:
    """Return the operation of a layer and its attributes, by the bits of its weight."""
    return (SCALED_OP, {"activations": FP8, "input_scale": None}) if _in_fp8(tesa) else (_OP, {})


def _formatted(tesa: TeSA, dtype: torch.dtype) -> TeSA:
    return tesa if _in_fp8(tesa) else tesa.with_format(dtype)


def _in_fp8(tesa: TeSA) -> bool:
    return str(tesa.format) == FP8


def layer_plans(layers: Mapping[str, SparseLayer]) -> list[LayerPlan]:
    """Return what a report says of the layers."""
    plans = []
    for name, layer in layers.items():
        kernel = layer.kernel
        tesa = kernel.fused.weight
        choices = {size: choice for size, (_, choice) in kernel.choices.items()}
        rows = next(iter(choices))
        flops = 2 * rows * tesa.numel
        live = 2 * rows * tesa.count("live")
        plans.append(
            LayerPlan(
                name,
                kernel.fused.op,
                tesa.describe_pattern(),
                tesa.density,
                tuple(tesa.shape),
                choices,
                flops,
                live,
                joined=kernel.names if isinstance(kernel, PartOfProduct) else (),
            )
        )
    return plans


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is the linear layer of GPT-2.

    >>> is_transposed(nn.Linear(2, 2))
    False
    """
    if isinstance(module, SparseLayer):
        return module.transposed
    return type(module).__name__ == "Conv1D" and input_axis(module) == 0
