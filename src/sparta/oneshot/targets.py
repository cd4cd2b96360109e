"""Targets: the weights that can be pruned at once, and what their layers compute from their inputs.

A target is a linear layer, a convolution of one or two dimensions, or the ``Conv1D`` of transformers (a linear layer
that stores its weight as inputs × outputs). Weights that an embedding shares and the output head of a language model
are left out unless they are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, unfold

from sparta.errors import NameNotFoundError, ShapeError, message
from sparta.oneshot.problem import Layout
from sparta.tesa import names
from sparta.tesa.patterns import Pattern

__all__ = ["Target", "find_targets"]


@dataclass(frozen=True, eq=False)
class Target:
    """One weight to prune.

    Parameters
    ----------
    name
        The parameter's name, without the components that wrappers add.
    transposed
        Whether the parameter is stored as inputs × outputs.
    """

    name: str
    module: nn.Module
    transposed: bool = False

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as the layer has it now."""
        weight: nn.Parameter = self.module._parameters["weight"]  # type: ignore[assignment]
        return weight

    @property
    def layout(self) -> Layout:
        """The layout of the weight as patterns see it: outputs first."""
        shape = tuple(self.parameter.shape)
        return Layout(shape[::-1] if self.transposed else shape, int(getattr(self.module, "groups", 1)))

    def seen(self, tensor: Tensor) -> Tensor:
        """Turn a tensor from the parameter's layout to outputs first, or back."""
        return tensor.t().contiguous() if self.transposed else tensor

    def fitted(self, pattern: Pattern) -> Pattern:
        """Return the pattern, or raise a `ShapeError` that names the layer it does not fit."""
        try:
            pattern.check_shape(self.layout.shape)
        except ShapeError as error:
            raise ShapeError(
                message(f"{self.name}: {str(error).rstrip('.')}", fix="leave it out with `ignore`")
            ) from error
        return pattern

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the tensor that the layer is called with."""
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(x, Tensor):
            raise ShapeError(message(f"{self.name} was called with {type(x).__name__}", "a tensor"))
        return x.detach()

    def rows(self, x: Tensor) -> Tensor:
        """Return an input as ``(groups, tokens, columns)``, columns in the layout's order."""
        if not isinstance(self.module, nn.Conv1d | nn.Conv2d):
            return x.reshape(1, -1, x.shape[-1])
        return _unfolded(self.module, x)


def find_targets(
    model: nn.Module, include: Sequence[str] | str | None = None, ignore: Sequence[str] | str | None = None
) -> list[Target]:
    """Return the weights of `model` to prune, in the model's order.

    Parameters
    ----------
    include, ignore
        Names of parameters, globs or ``re:`` patterns. By default all weights of linear layers and convolutions but
        those shared with an embedding and the output head of a language model.
    """
    every: dict[str, Target] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        target = _target(path, module)
        if target is not None:
            every[target.name] = target
    usual = every if include is not None else _without_heads(model, every)
    distinct: dict[int, Target] = {}
    for name in names.select(usual, include, ignore):
        distinct.setdefault(id(every[name].parameter), every[name])
    if not distinct:
        raise NameNotFoundError(
            message("the model has no weight to prune", "linear layers and convolutions", "name weights in `include`")
        )
    return list(distinct.values())


def _target(path: str, module: nn.Module) -> Target | None:
    name = names.canonical(f"{path}.weight" if path else "weight")
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
        return None
    if isinstance(module, nn.Linear):
        return Target(name, module)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return Target(name, module)
    if type(module).__name__ == "Conv1D" and weight.dim() == 2 and weight.shape[1] == getattr(module, "nf", None):
        return Target(name, module, transposed=True)
    return None


def _without_heads(model: nn.Module, every: dict[str, Target]) -> dict[str, Target]:
    shared = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    output = getattr(model, "get_output_embeddings", None)
    head = output() if callable(output) else None
    return {
        name: target
        for name, target in every.items()
        if id(target.parameter) not in shared and target.module is not head and name.split(".")[-2:-1] != ["lm_head"]
    }


def _unfolded(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return what a convolution multiplies its weight with: ``(groups, positions, kernel × channels)``."""
    flat = isinstance(module, nn.Conv1d)
    if x.dim() == (2 if flat else 3):
        x = x.unsqueeze(0)
    pads = tuple(module._reversed_padding_repeated_twice)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    if any(pads):
        x = pad(x, pads, mode=mode)
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    if flat:
        x = x.unsqueeze(2)
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
    columns = unfold(x, kernel, dilation, 0, stride)  # batch, channels × kernel, positions
    batch, _, positions = columns.shape
    split = columns.view(batch, module.groups, x.shape[1] // module.groups, -1, positions)
    return split.permute(1, 0, 4, 3, 2).reshape(module.groups, batch * positions, -1)


def gram_of(target: Target, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return inputs times inputs, ``(groups, columns, columns)``, in float64."""
    rows = target.rows(x.to(dtype))
    return (rows.transpose(1, 2) @ rows).double()
