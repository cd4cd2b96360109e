"""Layers: which parameters of a model can be pruned, under which names, along which axis N:M runs.

Everything that prunes starts from this list. A layer is one *parameter*, so a weight that two modules share appears
once, and the names are those without what `torch.compile`, DDP, FSDP or checkpointing add.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from sparta.errors import NameNotFoundError, ShapeError, message
from sparta.tesa import names
from sparta.tesa.patterns import Pattern
from sparta.tesa.prunable import embedded, input_axis, is_prunable

__all__ = ["Layer", "along_inputs", "find_layers", "without_frozen", "without_misfits"]


@dataclass(frozen=True, eq=False)
class Layer:
    """One parameter that can be pruned, and the module that owns it.

    Parameters
    ----------
    name
        The parameter's name, without the components that wrappers add.
    parameter
        The parameter itself; a sharded one is a ``DTensor``.
    module, attribute
        Where it lives: ``getattr(module, attribute)``.
    input_axis
        The axis of the input channels: 1, or 0 in a transposed convolution and in the linear layer of GPT-2.
    """

    name: str
    parameter: Tensor
    module: nn.Module
    attribute: str
    input_axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, also of a sharded one."""
        return tuple(self.parameter.shape)

    @property
    def module_name(self) -> str:
        """Name of the module that owns the parameter."""
        return self.name.rpartition(".")[0]


def find_layers(
    model: nn.Module,
    include: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str | None = None,
) -> list[Layer]:
    """Return the layers of `model` to prune, in the model's order.

    Parameters
    ----------
    include
        Names of parameters, globs, or ``re:`` patterns. By default the weights of linear, convolution (also
        transposed) and attention layers that no embedding shares; an embedding, a head tied to it or any other
        parameter is pruned when it is named here.
    ignore
        The same, for what is left out. A name that matches nothing is an error.

    Examples
    --------
    >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4), nn.ConvTranspose1d(4, 2, 3))
    >>> [(layer.name, layer.input_axis) for layer in find_layers(model)]
    [('1.weight', 1), ('2.weight', 0)]
    >>> [layer.name for layer in find_layers(model, include="0.weight")]
    ['0.weight']
    """
    every: dict[str, Layer] = {}
    usual: list[str] = []
    shared = embedded(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{attribute}" if path else attribute
            axis = min(input_axis(module), parameter.dim() - 1)
            every[full] = Layer(names.canonical(full), parameter, module, attribute, axis)
            if is_prunable(module, attribute, parameter) and id(parameter) not in shared:
                usual.append(full)
    chosen = names.select(usual if include is None else every, include, ignore)
    distinct: dict[int, Layer] = {}
    for name in chosen:
        distinct.setdefault(id(every[name].parameter), every[name])
    if not distinct:
        raise NameNotFoundError(
            message(
                "the model has no parameter to prune",
                "linear, convolution or attention layers that no embedding shares, or what `include` names",
                "name the parameters in `include`",
            )
        )
    return list(distinct.values())


def without_frozen(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers that train, with a warning that names the others; all of them where none trains.

    A frozen layer could not recover from being pruned.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).requires_grad_(False)
    >>> [layer.name for layer in without_frozen(find_layers(model))]
    ['0.weight', '1.weight']
    """
    trained = [layer for layer in layers if layer.parameter.requires_grad]
    frozen = [layer.name for layer in layers if not layer.parameter.requires_grad]
    if not trained or not frozen:
        return list(layers)
    text = f"{', '.join(frozen[:5])}{' ...' if len(frozen) > 5 else ''}: frozen, and left out of pruning"
    warnings.warn(message(text, fix="name them to prune them all the same"), stacklevel=3)
    return trained


def without_misfits(layers: Sequence[Layer], pattern: Pattern) -> list[Layer]:
    """Return the layers that `pattern` fits, with a warning that names the others; an error where it fits none.

    >>> from sparta.tesa.patterns import Block
    >>> [layer.name for layer in without_misfits(find_layers(nn.Linear(8, 4)), Block(1, 4))]
    ['weight']
    """
    fitting, small = [], []
    for layer in layers:
        try:
            along_inputs(pattern, layer)
        except ShapeError:
            small.append(layer.name)
        else:
            fitting.append(layer)
    if not fitting and layers:
        along_inputs(pattern, layers[0])
    if small:
        text = f"{', '.join(small[:5])}{' ...' if len(small) > 5 else ''}: too small for {pattern}, and left dense"
        warnings.warn(message(text, fix="name the layers to prune to say so"), stacklevel=3)
    return fitting


def along_inputs(pattern: Pattern, layer: Layer) -> Pattern:
    """Return `pattern` as it lies on `layer`, its shape checked: N:M and blocks turned to the input channels.

    >>> from sparta.tesa.patterns import NM
    >>> layer, = find_layers(nn.ConvTranspose1d(8, 4, 3))
    >>> along_inputs(NM(2, 4), layer)
    NM(n=2, m=4, axis=0)
    """
    pattern = pattern.along(layer.input_axis)
    try:
        pattern.check_shape(layer.shape)
    except ShapeError as error:
        raise ShapeError(
            message(f"{layer.name}: {str(error).rstrip('.')}", fix="leave it out with `ignore`")
        ) from error
    return pattern
