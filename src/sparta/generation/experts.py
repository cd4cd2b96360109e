"""Experts of transformers with sparse or rounded weights: each token through the packed matrices of its own experts.

Models keep the weights of all experts of a layer in two tensors, (experts, outputs, inputs) or the other way round,
with or without biases, and gate in their own ways. :class:`PackedExperts` takes the place of such a module under the
same parameters; the gate stays the module's own function.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparta.generation.matrices import PackedMatrix, packed
from sparta.modules import replace_module

__all__ = ["PackedExperts", "experts_of", "put_experts"]

_SPARSE = 0.95


class PackedExperts(nn.Module):
    """A layer of experts over packed matrices.

    Parameters
    ----------
    experts
        The module of transformers, whose parameters it shares.
    int8
        Store integers with a scale per row.
    """

    def __init__(self, experts: nn.Module, *, int8: bool) -> None:
        super().__init__()
        for name, parameter in experts.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.int8 = int8
        # Not sub-modules: the state of this layer is that of the dense one.
        object.__setattr__(self, "experts", experts)
        self._signature = inspect.signature(experts.forward)
        self._up = self._packed("gate_up_proj" if _has(experts, "gate_up_proj") else "up_proj")
        self._down = self._packed("down_proj")

    experts: nn.Module

    def _packed(self, name: str) -> list[PackedMatrix]:
        weights = cast("Tensor", getattr(self, name)).detach()
        bias = getattr(self, f"{name}_bias", None)
        turned = bool(getattr(self.experts, "is_transposed", False))
        rows = weights.transpose(1, 2) if turned else weights
        shifts = [None] * len(rows) if bias is None else list(cast("Tensor", bias))
        return [packed(w.contiguous(), bias=b, int8=self.int8) for w, b in zip(rows, shifts, strict=True)]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the gated sum of the experts' answers, as the module it stands for does."""
        tokens, ids, gates = self._signature.bind(*args, **kwargs).arguments.values()
        flat = tokens.reshape(-1, tokens.shape[-1])
        ids, gates = ids.reshape(flat.shape[0], -1), gates.reshape(flat.shape[0], -1)
        total = torch.zeros_like(flat)
        for expert in ids.unique().tolist():
            if not 0 <= expert < len(self._up):
                continue  # how transformers marks what no expert of this process answers
            rows, places = (ids == expert).nonzero(as_tuple=True)
            inner = self._gated(self._up[expert].multiply(flat[rows]))
            answer = self._down[expert].multiply(inner) * gates[rows, places, None]
            total.index_add_(0, rows, answer.to(total.dtype))
        return total.reshape(tokens.shape)

    def _gated(self, both: Tensor) -> Tensor:
        experts: Any = self.experts
        if not getattr(experts, "has_gate", True):
            return cast("Tensor", experts.act_fn(both))
        return cast("Tensor", experts._apply_gate(both))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        return sum(matrix.nbytes for matrix in (*self._up, *self._down))

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedExperts:
        return PackedExperts(self.experts, int8=self.int8)

    def extra_repr(self) -> str:
        """Say how many experts there are, and their forms."""
        forms = sorted({matrix.form for matrix in (*self._up, *self._down)})
        return f"{len(self._up)} experts, {', '.join(forms)} in {'int8' if self.int8 else 'fp32'}"


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of experts of a model by name that can be packed: those of transformers, on the CPU in fp32.

    >>> experts_of(nn.Linear(2, 2))
    {}
    """
    return {name: module for name, module in model.named_modules() if _fits(module)}


def put_experts(model: nn.Module, *, int8: bool) -> dict[str, PackedExperts]:
    """Replace layers of experts whose weights are sparse, or all of them for int8, in place; return them by name."""
    put: dict[str, PackedExperts] = {}
    for name, module in experts_of(model).items():
        weights = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        live = sum(int(torch.count_nonzero(w)) for w in weights)
        if int8 or live < _SPARSE * sum(w.numel() for w in weights):
            put[name] = PackedExperts(module, int8=int8)
            replace_module(model, name, put[name])
    return put


def _has(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, None), nn.Parameter)


def _fits(module: nn.Module) -> bool:
    down: Any = getattr(module, "down_proj", None)
    known = hasattr(module, "is_transposed") and hasattr(module, "is_concatenated") and hasattr(module, "has_bias")
    if (
        not known
        or not isinstance(down, nn.Parameter)
        or down.dim() != 3
        or getattr(module, "_is_expert_parallel", False)
    ):
        return False
    if getattr(module, "has_post_expert_norm", False) or len(inspect.signature(module.forward).parameters) != 3:
        return False
    gated = not getattr(module, "has_gate", True) or callable(getattr(module, "_apply_gate", None))
    plain = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in module.parameters())
    return gated and plain and (_has(module, "gate_up_proj") or _has(module, "up_proj"))
