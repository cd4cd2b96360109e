"""Put sparse modules in the place of dense ones, as a spec says."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sparta.modules import replace_module
from sparta.nn.conv import SparseConv1d, SparseConv2d
from sparta.nn.linear import SparseLinear
from sparta.nn.operator import OperatorBase
from sparta.tesa.spec import Spec

__all__ = ["swap"]

_MODULES: dict[type[nn.Module], Callable[..., OperatorBase]] = {
    nn.Linear: SparseLinear,
    nn.Conv1d: SparseConv1d,
    nn.Conv2d: SparseConv2d,
}


def swap(model: nn.Module, spec: Spec | None = None) -> dict[str, OperatorBase]:
    """Replace every linear layer and convolution whose weight the spec prunes by its sparse module, in place.

    Parameters
    ----------
    model
        Its parameters stay the same tensors under the same names; pruned weights are set to zero.
    spec
        What is pruned; None reads the zeros that are in the weights.

    Returns
    -------
    dict
        The new modules by name. Subclasses of `nn.Linear` and of convolutions are left alone: they may be called
        in other ways.

    Examples
    --------
    >>> import sparta
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> sorted(swap(model, sparta.Spec.from_pattern(model, sparta.NM(2, 4), include="0.weight")))
    ['0']
    """
    tesas = (Spec.from_zeros(model) if spec is None else spec).resolve(model)
    swapped: dict[str, OperatorBase] = {}
    for path, module in list(model.named_modules()):
        weight = f"{path}.weight" if path else "weight"
        make = _MODULES.get(type(module))
        if not path or make is None or weight not in tesas:
            continue
        swapped[path] = make(module, weight_mask=tesas[weight]).train(module.training)
        replace_module(model, path, swapped[path])
    return swapped
