"""Constant pruning: zeros that are there stay, as in sparse transfer learning.

The mask is taken once, when the window begins, so that a weight which happens to pass through zero later is not lost.
"""

from __future__ import annotations

from typing import Literal

from sparta.create.modifiers.base import Run, modifier
from sparta.create.modifiers.masked import MaskedModifier
from sparta.sparsify.shards import local

__all__ = ["ConstantPruningModifier"]


@modifier
class ConstantPruningModifier(MaskedModifier):
    """Keeps the zeros of some layers as they are.

    Examples
    --------
    >>> import torch
    >>> from sparta.create import Manager
    >>> model = torch.nn.Linear(4, 2)
    >>> model.weight.data[0] = 0
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> manager = Manager([ConstantPruningModifier()])
    >>> manager.attach(model, optimizer, steps_per_epoch=1)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> (model.weight == 0).sum().item()
    4
    """

    leave_enabled: bool = False
    mask_type: Literal["unstructured"] = "unstructured"

    def update_ready(self, epoch: float) -> bool:
        """Return whether it starts or ends now."""
        return self.start_pending(epoch) or self.end_pending(epoch)

    def update(self, run: Run) -> None:
        """Take the mask at the start; let go at the end."""
        if self._started:
            self.release()
        else:
            self.set_masks(run, {layer.name: local(layer.parameter) != 0 for layer in self._layers})

    def preview(self, run: Run) -> dict[str, float]:
        """Return the sparsity the layers have."""
        return {layer.name: float((local(layer.parameter) == 0).float().mean()) for layer in self.chosen_layers(run)}
