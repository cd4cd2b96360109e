"""Fresh inputs: others of the kind that an example is of, to check a changed model on what it was not made from.

A rule that holds for one input by luck shows on the next. Fresh inputs are drawn from a seed, so a check that fails
can be repeated.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["fresh_inputs"]

T = TypeVar("T")


def fresh_inputs(example: T, seed: int) -> T:
    """Return other inputs of the same structure: normal values, and whole numbers in another order.

    Parameters
    ----------
    example
        Any nesting of tuples, lists and dicts. What is not a tensor is returned as it is.

    Examples
    --------
    >>> fresh_inputs([torch.tensor([3, 1, 2]), 5], 0)[1]
    5
    """
    generator = torch.Generator().manual_seed(seed)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.numel() == 0:
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator).to(leaf)
        # Whole numbers are often indices: a shuffle keeps them in range.
        order = torch.randperm(leaf.numel(), generator=generator).to(leaf.device)
        return leaf.reshape(-1)[order].reshape(leaf.shape)

    fresh: T = pytree.tree_map(other, example)
    return fresh
