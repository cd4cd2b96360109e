"""Adapters of peft on a sparse base: its LoRA and DoRA layers get the mask of the spec, and merging keeps the zeros.

The update of a layer becomes ``mask · (B · A)`` while it trains as well as when it is merged; configuration, training,
saving and merging stay peft's own. Layers are known by what they have, so peft itself is not imported.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sparta.errors import ArgumentError, ShapeError, ValueRangeError, message
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec

__all__ = ["mask_peft"]

_PARTS = ("lora_A", "lora_B", "scaling", "base_layer", "get_delta_weight", "active_adapters")


class _MaskedUpdate(nn.Module):
    """Mixed into the class of a LoRA layer of peft: its update is masked."""

    sparta_live: Tensor

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return the update of the weight, in the weight's layout, zero where the base is pruned."""
        made: Tensor = super().get_delta_weight(adapter)  # type: ignore[misc]
        return made * self.sparta_live

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute with the masked update, or with what was merged."""
        own: Any = self
        if own.merged or own.disable_adapters or not own.active_adapters:
            return super().forward(x, *args, **kwargs)
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueRangeError(message("several adapters in one batch", "one set of adapters on a masked layer"))
        base = own.get_base_layer()
        result = base(x, *args, **kwargs)
        for adapter in own.active_adapters:
            if adapter in own.lora_A:
                result = result + self._updated(base, adapter, x).to(result.dtype)
        return result

    def _updated(self, base: Any, adapter: str, x: Tensor) -> Tensor:
        """Return what an adapter adds to the output."""
        own: Any = self
        delta = self.get_delta_weight(adapter)
        flip = bool(getattr(own, "fan_in_fan_out", False))
        x = own.lora_dropout[adapter](x.to(delta.dtype))
        if adapter not in getattr(own, "lora_magnitude_vector", {}):
            return linear(x, delta.t() if flip else delta)
        weight = (base.weight.t() if flip else base.weight).to(delta.dtype)
        changed = weight + (delta.t() if flip else delta)
        lengths = torch.linalg.vector_norm(changed, dim=1).detach().clamp(min=torch.finfo(changed.dtype).tiny)
        magnitude = own.lora_magnitude_vector[adapter].weight
        return linear(x, changed * (magnitude / lengths).unsqueeze(1) - weight)


def mask_peft(model: nn.Module, spec: Spec | None = None) -> list[str]:
    """Make the LoRA and DoRA layers of a peft model keep the zeros of their sparse base, in place.

    Parameters
    ----------
    model
        What ``peft.get_peft_model`` returned, before or after training.
    spec
        Where the zeros of the base model are, by the names that it had before peft; by default those that it has.

    Returns
    -------
    list of str
        The names of the weights whose updates are masked from now on.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(message(f"the model is a {type(model).__name__}", "a model with adapters of peft"))
    found = {name: module for name, module in model.named_modules() if all(hasattr(module, part) for part in _PARTS)}
    if not found:
        fix = "call peft.get_peft_model first, or use sparta.recovery.add_lora"
        raise ValueRangeError(message("the model has no LoRA layer of peft", fix=fix))
    masked = []
    for path, module in found.items():
        name = _base_name(path)
        tesa = _zeros(module, name, spec)
        if tesa is None:
            continue
        _mask(module, name, tesa)
        masked.append(name)
    if not masked:
        given = "none of the adapted layers has zeros"
        warnings.warn(message(given, fix="prune the model first, or pass its spec"), stacklevel=2)
    return masked


def _base_name(path: str) -> str:
    """Return the name that a layer's weight had before peft.

    >>> _base_name("base_model.model.encoder.0.query")
    'encoder.0.query.weight'
    """
    return f"{path.removeprefix('base_model.model.')}.weight"


def _zeros(module: Any, name: str, spec: Spec | None) -> TeSA | None:
    weight = module.get_base_layer().weight
    if spec is None:
        return TeSA.from_zeros(weight.detach()) if bool((weight == 0).any()) else None
    if not isinstance(spec, Spec):
        raise ArgumentError(message(f"the spec is a {type(spec).__name__}", "a sparta.Spec, or None"))
    return spec.get(name)


def _mask(module: Any, name: str, tesa: TeSA) -> None:
    weight = module.get_base_layer().weight
    if isinstance(module, _MaskedUpdate):
        raise ValueRangeError(message(f"the adapters of {name} are masked already", "one mask"))
    if weight.dim() != 2 or not weight.is_floating_point():
        given = f"{name} is {tuple(weight.shape)} of {weight.dtype}"
        raise ShapeError(message(given, "a linear layer with floating-point weights", "use sparta.recovery.add_lora"))
    live = tesa.mask(weight.device)
    if live.shape != weight.shape:
        raise ShapeError(message(f"the spec has {name} as {tuple(live.shape)}", f"{tuple(weight.shape)}"))
    if bool((weight.detach()[~live] != 0).any()):
        raise ValueRangeError(message(f"{name} is not zero where the spec prunes it", fix="call `spec.apply` first"))
    if getattr(module, "merged", False):
        raise ValueRangeError(message(f"the adapters of {name} are merged", "unmerged ones", "mask before merging"))
    rates = [getattr(one, "p", 0.0) for one in module.lora_dropout.values()]
    if any(rates) and len(getattr(module, "lora_magnitude_vector", {})):
        given = f"dropout in the DoRA adapters of {name} covers the whole layer here"
        warnings.warn(message(given, fix="set lora_dropout=0"), stacklevel=4)
    module.register_buffer("sparta_live", live, persistent=False)
    kind = type(module)
    module.__class__ = type(f"Masked{kind.__name__}", (_MaskedUpdate, kind), {"__module__": kind.__module__})
