"""Copies of a user's model: its modules and plain tensors, never its optimizer or hooks of others' state.

A model that `torch.nn.utils.prune` has touched, or whose weights are parametrized, computes its weights at each call;
in a folded copy they are plain parameters again, zeros and all, so that kernels can be chosen for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from sparta.tesa.spec import Spec

__all__ = ["folded_copy", "is_folded", "model_copy"]

_OLD_NORMS = {"WeightNorm": "remove_weight_norm", "SpectralNorm": "remove_spectral_norm"}


def model_copy(model: nn.Module, shared: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a copy of a model in evaluation mode.

    Parameters
    ----------
    shared
        What tensors of the model become in the copy, by identity; others are copied.
    """
    memo: dict[int, Any] = dict(shared or {})
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # such as a weight that pruning computed
                memo.setdefault(id(value), value.detach().clone())
    return deepcopy(model, memo).eval()


def is_folded(model: nn.Module) -> bool:
    """Whether all weights of a model are plain tensors, none computed at each call.

    >>> layer = prune.l1_unstructured(nn.Linear(4, 2), "weight", 0.5)
    >>> is_folded(nn.Linear(4, 2)), is_folded(layer)
    (True, False)
    """
    return not any(True for module in model.modules() for _ in _computed(module))


def folded_copy(model: nn.Module, spec: Spec | None) -> tuple[nn.Module, Spec | None]:
    """Return a copy whose weights are plain parameters, and the spec by their names.

    >>> layer = prune.l1_unstructured(nn.Linear(4, 2), "weight", 0.5)
    >>> folded, _ = folded_copy(nn.Sequential(layer), None)
    >>> sorted(dict(folded.named_parameters())), int((folded[0].weight == 0).sum())
    (['0.bias', '0.weight'], 4)
    """
    copy = model_copy(model)
    names: dict[str, str] = {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for path, module in copy.named_modules():
            for kind, tensor in list(_computed(module)):
                stem = f"{path}.{tensor}" if path else tensor
                names[f"{stem}_orig"] = names[f"{stem}_v"] = stem
                prefix = f"{path}.parametrizations" if path else "parametrizations"
                names[f"{prefix}.{tensor}.original"] = names[f"{prefix}.{tensor}.original1"] = stem
                _fold(module, kind, tensor)
    if spec is None:
        return copy, None
    return copy, Spec({names.get(name, name): tesa for name, tesa in spec.items()})


def _computed(module: nn.Module) -> Any:
    """Yield (how, name) of the tensors of a module that are computed at each call."""
    if parametrize.is_parametrized(module):
        for name in list(module.parametrizations):  # type: ignore[arg-type]
            yield "parametrization", str(name)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, prune.BasePruningMethod):
            yield "prune", hook._tensor_name
        elif type(hook).__name__ in _OLD_NORMS:
            yield type(hook).__name__, hook.name  # type: ignore[attr-defined]


def _fold(module: nn.Module, kind: str, name: str) -> None:
    if kind == "parametrization":
        own = type(module)  # which the model itself has too, and which loses a property below
        module.__class__ = type(own.__name__, own.__bases__, dict(own.__dict__))
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    elif kind == "prune":
        prune.remove(module, name)  # type: ignore[no-untyped-call]
    else:
        getattr(torch.nn.utils, _OLD_NORMS[kind])(module, name)
