"""Modules by dotted name: look a member up, put one in place, and find the model inside its wrappers.

Graphs and files name tensors and layers as ``named_parameters`` does, ``"encoder.0.weight"``. What walks such a name
stands here once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from sparta.errors import ValueRangeError, message

__all__ = ["member", "replace_module", "set_member", "unwrapped"]

_AROUND_MODULE = (nn.DataParallel, DistributedDataParallel, AveragedModel)
_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What `torch.compile`, FullyShardedDataParallel and activation checkpointing call the model inside them."""


def member(root: nn.Module, name: str) -> Any:
    """Return the tensor or module that a dotted name leads to.

    >>> member(nn.Sequential(nn.Linear(2, 3)), "0.bias").shape
    torch.Size([3])
    """
    path, _, last = name.rpartition(".")
    return getattr(root.get_submodule(path), last)


def set_member(root: nn.Module, name: str, value: Tensor | nn.Module) -> None:
    """Put a parameter, a buffer or a module at a dotted name; modules on the way are made where there are none.

    >>> root = nn.Module()
    >>> set_member(root, "layer.0.weight", nn.Parameter(Tensor(2, 2)))
    >>> [name for name, _ in root.named_parameters()]
    ['layer.0.weight']
    """
    *path, last = name.split(".")
    holder = root
    for part in path:
        if not hasattr(holder, part):
            holder.add_module(part, nn.Module())
        holder = getattr(holder, part)
        if not isinstance(holder, nn.Module):
            raise ValueRangeError(message(f"a tensor or layer named {name!r}", "a name that PyTorch leaves free"))
    if isinstance(value, nn.Module):
        holder.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        holder.register_parameter(last, value)
    else:
        holder.register_buffer(last, value)


def replace_module(root: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the module at a dotted name.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> replace_module(model, "1", nn.Identity())
    >>> model[1]
    Identity()
    """
    path, _, last = name.rpartition(".")
    root.get_submodule(path).register_module(last, new)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers that PyTorch puts around whole models, in any order and depth.

    These are `torch.compile`, DataParallel, DistributedDataParallel, FullyShardedDataParallel, activation
    checkpointing and AveragedModel.

    >>> unwrapped(AveragedModel(nn.DataParallel(nn.Linear(2, 3))))
    Linear(in_features=2, out_features=3, bias=True)
    """
    while True:
        if isinstance(model, _AROUND_MODULE):
            model = model.module
            continue
        inner = next((found for key in _INNER if (found := model._modules.get(key)) is not None), None)
        if inner is None:
            return model
        model = inner
