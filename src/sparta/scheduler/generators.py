"""Mask generators: from a weight and a sparsity to a mask with an exact number of zeros.

They are the `mask_generator` of a configuration. A generator has no state of its own; which layer is how sparse, and
when masks are made, is the scheduler's business.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.scheduler.registry import register_mask_generator
from sparta.tesa.patterns import NM, Unstructured
from sparta.tesa.select import check_sparsity, lowest, pruned_count

__all__ = [
    "FPGMMaskGenerator",
    "MaskGenerator",
    "NMMaskGenerator",
    "NormalMaskGenerator",
    "NuclearMaskGenerator",
    "ProbMaskGenerator",
    "STRMaskGenerator",
]


class MaskGenerator(ABC):
    """Makes masks from weights.

    Subclass it and decorate the class with :func:`~sparta.scheduler.registry.register_mask_generator` to use it in a
    configuration.
    """

    @abstractmethod
    def generate_mask(self, weight: Tensor, sparsity: float, input_axis: int = 1) -> Tensor:
        """Return a bool mask of the shape of `weight`, True for kept.

        Parameters
        ----------
        weight
            Shape (O, I, ...), or (I, O, ...) with `input_axis` 0 as in a transposed convolution.
        sparsity
            Fraction to prune, in [0, 1].
        """

    def max_sparsity(self, shape: Sequence[int], input_axis: int = 1) -> float:  # noqa: ARG002
        """Return the largest sparsity that a weight of this shape can get."""
        return 1.0


@register_mask_generator("NormalMaskGenerator")
class NormalMaskGenerator(MaskGenerator):
    """By magnitude: single weights, or whole filters by their norm.

    Parameters
    ----------
    structured
        Whether whole filters (output channels) are pruned.
    func
        Norm of a filter: ``"p1"`` or ``"p2"`` (the default). Only with `structured`.

    Examples
    --------
    >>> NormalMaskGenerator().generate_mask(torch.tensor([[3.0, -1.0], [2.0, -4.0]]), 0.5)
    tensor([[ True, False],
            [False,  True]])
    """

    def __init__(self, structured: bool = False, func: Literal["p1", "p2"] | None = None) -> None:  # noqa: FBT001, FBT002
        if func is not None and not structured:
            raise ValueRangeError(message(f"func is {func!r} without structured", "structured=True with a func"))
        self.structured = structured
        self.power = 1 if func == "p1" else 2

    def generate_mask(self, weight: Tensor, sparsity: float, input_axis: int = 1) -> Tensor:
        """Keep the largest weights, or the filters of the largest norm."""
        if not self.structured:
            return Unstructured().project(weight.detach().abs(), sparsity)
        filters = _filters(weight, input_axis)
        return _keep_filters(weight, filters.norm(self.power, dim=1), sparsity, input_axis)


@register_mask_generator("NMMaskGenerator")
class NMMaskGenerator(MaskGenerator):
    """N:M along input channels: `n` kept of every `m`. A lower sparsity is a step on the way to the full pattern.

    >>> NMMaskGenerator().generate_mask(torch.tensor([[0.1, -0.5, 0.3, 0.2]]), 0.5)
    tensor([[False,  True,  True, False]])
    """

    def __init__(self, n: int = 2, m: int = 4) -> None:
        self.pattern = NM(n, m)

    def generate_mask(self, weight: Tensor, sparsity: float, input_axis: int = 1) -> Tensor:
        """Keep the largest of each group; a shorter last group keeps at most n."""
        pattern = NM(self.pattern.n, self.pattern.m, input_axis)
        own = self.max_sparsity(weight.shape, input_axis)
        return pattern.project(weight.detach().abs(), min(check_sparsity(sparsity), own))

    def max_sparsity(self, shape: Sequence[int], input_axis: int = 1) -> float:
        """Return the sparsity of the full pattern."""
        return 1 - NM(self.pattern.n, self.pattern.m, input_axis).capacity(shape)


@register_mask_generator("FPGMMaskGenerator")
class FPGMMaskGenerator(MaskGenerator):
    """Filters nearest to all the others go first: what they compute, others nearly do too.

    Parameters
    ----------
    structured
        Always True: whole filters are pruned.
    func
        Distance between two filters: ``"l1"``, ``"l2"`` or ``"cos"`` (one minus the cosine).
    """

    def __init__(self, structured: bool = True, func: Literal["l1", "l2", "cos"] = "l2") -> None:  # noqa: FBT001, FBT002
        _check_structured(type(self).__name__, structured=structured)
        self.func = func

    def generate_mask(self, weight: Tensor, sparsity: float, input_axis: int = 1) -> Tensor:
        """Keep the filters with the largest mean distance to the others."""
        filters = _filters(weight, input_axis).double()
        if self.func == "cos":
            unit = torch.nn.functional.normalize(filters, dim=1)
            distances = 1 - unit @ unit.T
        else:
            power = 1.0 if self.func == "l1" else 2.0
            distances = torch.cdist(filters, filters, p=power, compute_mode="donot_use_mm_for_euclid_dist")
        return _keep_filters(weight, distances.mean(1), sparsity, input_axis)


@register_mask_generator("NuclearMaskGenerator")
class NuclearMaskGenerator(MaskGenerator):
    """Filters whose loss shrinks the nuclear norm of the layer least go first.

    Parameters
    ----------
    structured
        Always True: whole filters are pruned.
    """

    def __init__(self, structured: bool = True) -> None:  # noqa: FBT001, FBT002
        _check_structured(type(self).__name__, structured=structured)

    def generate_mask(self, weight: Tensor, sparsity: float, input_axis: int = 1) -> Tensor:
        """Keep the filters with the largest ``‖W‖ - ‖W without the filter‖``, nuclear norms."""
        rows = _filters(weight, input_axis).double()
        if rows.shape[1] > rows.shape[0]:  # the same row space and the same norms in fewer columns
            rows = torch.linalg.qr(rows.T, mode="r").R.T
        whole = torch.linalg.svdvals(rows).sum()
        places = torch.arange(len(rows), device=rows.device)
        without = [torch.linalg.svdvals(rows[places != place]).sum() for place in range(len(rows))]
        return _keep_filters(weight, whole - torch.stack(without), sparsity, input_axis)


@register_mask_generator("STRMaskGenerator")
class STRMaskGenerator(MaskGenerator):
    """Soft thresholds are learnt: the mask is where the weight exceeds the threshold, whatever sparsity that is."""

    def generate_mask(self, weight: Tensor, sparsity: float, input_axis: int = 1) -> Tensor:  # noqa: ARG002
        """Refuse: an STR layer's sparsity is learnt, not set."""
        raise ValueRangeError(
            message(
                f"a sparsity of {sparsity} for STR",
                "no sparsity: thresholds are learnt",
                "steer it with sInit_value and weight decay, or use NormalMaskGenerator",
            )
        )


@register_mask_generator("ProbMaskGenerator")
class ProbMaskGenerator(MaskGenerator):
    """Masks are drawn with learnt probabilities, at a temperature that starts here.

    Parameters
    ----------
    tau
        Inverse temperature of the relaxed samples; larger is closer to 0 and 1. ProbMaskPruneScheduler sets its own
        from its first call on.
    """

    def __init__(self, tau: float = 3.0) -> None:
        if not (tau > 0 and math.isfinite(tau)):
            raise ValueRangeError(message(f"tau is {tau}", "a number above 0"))
        self.tau = tau

    def generate_mask(self, weight: Tensor, sparsity: float, input_axis: int = 1) -> Tensor:  # noqa: ARG002
        """Refuse: the probabilities decide, and ProbMaskPruneScheduler sets their budget."""
        raise ValueRangeError(
            message(
                f"a sparsity of {sparsity} for one layer of ProbMask",
                "one budget over all layers",
                "use ProbMaskPruneScheduler",
            )
        )


def _check_structured(name: str, *, structured: bool) -> None:
    if not structured:
        raise ValueRangeError(
            message(f"{name} with structured=False", "structured=True", "use NormalMaskGenerator for single weights")
        )


def _filters(weight: Tensor, input_axis: int) -> Tensor:
    """Return the filters as rows: shape (O, everything else)."""
    outputs = weight.detach().movedim(1, 0) if input_axis == 0 and weight.dim() > 1 else weight.detach()
    return outputs.reshape(outputs.shape[0], -1).float()


def _keep_filters(weight: Tensor, importance: Tensor, sparsity: float, input_axis: int) -> Tensor:
    """Prune the least important filters, exactly as many as asked for, but never all of them."""
    count = pruned_count(len(importance), sparsity)
    if sparsity < 1:
        count = min(count, len(importance) - 1)
    kept = ~lowest(importance, count)
    axis = 1 if input_axis == 0 and weight.dim() > 1 else 0
    return kept.view([-1 if dim == axis else 1 for dim in range(weight.dim())]).expand(weight.shape).contiguous()
