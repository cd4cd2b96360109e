"""Constant pruning: zeros that are there stay, as in sparse transfer learning.

The mask is taken once, when the window begins, so that a weight which happens to pass through zero later is not lost.
A layer that is all zeros then is left out: a head or an adapter that begins so would never learn.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from sparta.create.modifiers.base import Run, modifier
from sparta.create.modifiers.masked import MaskedModifier
from sparta.create.modifiers.parameters import ALL_PRUNABLE, layers_for
from sparta.errors import message
from sparta.sparsify import Layer
from sparta.sparsify.shards import local, shards_of, summed

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
            self.set_masks(run, self._zeros_that_are_there())

    def chosen_layers(self, run: Run) -> list[Layer]:
        """Return the layers whose zeros stay; those of frozen ones do so by themselves, and are told too."""
        return layers_for(run, self.params, with_frozen=True)

    def _zeros_that_are_there(self) -> dict[str, Tensor]:
        found = {layer.name: local(layer.parameter) != 0 for layer in self._layers}
        counts = {
            layer.name: int(summed(torch.count_nonzero(found[layer.name]), shards_of(layer.parameter)))
            for layer in self._layers
        }
        empty = [name for name, count in counts.items() if not count and self.params in (ALL_PRUNABLE, [ALL_PRUNABLE])]
        if empty:
            text = f"{', '.join(empty[:5])}{' ...' if len(empty) > 5 else ''}: all zeros, taken for layers yet to learn"
            warnings.warn(message(text, fix="name them in params to hold their zeros"), stacklevel=2)
        return {name: mask for name, mask in found.items() if name not in empty}

    def preview(self, run: Run) -> dict[str, float]:
        """Return the sparsity the layers have."""
        return {layer.name: float((local(layer.parameter) == 0).float().mean()) for layer in self.chosen_layers(run)}
