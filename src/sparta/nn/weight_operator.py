"""WeightOperator: an operator whose weight is sparse: linear layers and convolutions.

The weight parameter stays dense in memory and zero where pruned, so the state of such a module is that of the dense
layer: its mask is saved only where the zeros of the weight do not tell it, and read from them where it was not saved.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from sparta.nn.inputs import weight_mask_of
from sparta.nn.operator import OperatorBase
from sparta.tesa.attribute import TeSA

__all__ = ["WeightOperator"]

_MASK = "weight_mask"


class WeightOperator(OperatorBase):
    """Base of the operators with a sparse weight; subclasses say in `_reset` how to run dense."""

    weight: nn.Parameter
    weight_mask: Tensor | None

    def _hold_mask(self, mask: Tensor | TeSA) -> None:
        """Take a mask of the weight, and set what it prunes to zero."""
        self.register_buffer(_MASK, weight_mask_of(mask, self.weight), persistent=False)
        with torch.no_grad():
            self.weight.masked_fill_(~cast("Tensor", self.weight_mask), 0)

    def _reset(self) -> None:
        """Run dense: what was tuned was tuned for another mask."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        super()._save_to_state_dict(destination, prefix, keep_vars)
        mask = self.weight_mask
        if mask is not None and not mask.is_meta and not torch.equal(mask, self.weight.detach() != 0):
            destination[f"{prefix}{_MASK}"] = mask

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load parameters and mask; a mask other than the present one undoes what was tuned for it."""
        before = self.weight_mask
        if before is None:
            super()._load_from_state_dict(state_dict, prefix, *args)
            return
        given = f"{prefix}{_MASK}" in state_dict
        before = before.clone()
        if given:
            self._non_persistent_buffers_set.discard(_MASK)
        try:
            super()._load_from_state_dict(state_dict, prefix, *args)
        finally:
            self._non_persistent_buffers_set.add(_MASK)
        if not given and f"{prefix}weight" in state_dict and not self.weight.is_meta:
            self.weight_mask = self.weight.detach() != 0
        if not torch.equal(before, cast("Tensor", self.weight_mask).to(before.device)):
            self._reset()
