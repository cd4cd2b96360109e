"""Fake sparsity: what the forward pass sees of a weight while it is trained.

Each is a parametrization (:mod:`torch.nn.utils.parametrize`) of one weight: the stored weight stays dense and the layer
computes with its sparse version. Masks are buffers that only a scheduler changes, flags are plain Python, so a training
step is one graph for `torch.compile` and has no device synchronisation in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparta.errors import ValueRangeError, message
from sparta.scheduler.generators import MaskGenerator, ProbMaskGenerator
from sparta.scheduler.registry import register_fake_sparse

__all__ = ["FakeSparse", "FakeSparseBase", "ProbMaskFakeSparse", "STRFakeSparse", "Subnet"]

_EPSILON = 1e-20


class FakeSparseBase(nn.Module):
    """A parametrization that makes a weight sparse in the forward pass.

    Subclasses take the weight and their own keyword arguments, and say in :meth:`sparse` what the layer computes with.
    """

    generators: Sequence[str] = ()
    """Names of the mask generators it works with; empty: all that make masks from a sparsity."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True

    def begin(self, generator: MaskGenerator) -> None:
        """Take what the configuration's mask generator has to say; called once, when the model is prepared."""

    def sparse(self, weight: Tensor) -> Tensor:
        """Return the weight that the layer computes with."""
        # Abstract: nn.Module does not enforce `abstractmethod`, so a subclass without it is told here.
        raise NotImplementedError(f"{type(self).__name__} must define sparse(weight)")

    def forward(self, weight: Tensor) -> Tensor:
        """Return :meth:`sparse`, or the weight as it is while disabled."""
        return self.sparse(weight) if self.enabled else weight


@register_fake_sparse("FakeSparse", "DefaultFakeSparse")
class FakeSparse(FakeSparseBase):
    """The weight times its mask. The gradient of a pruned weight is exactly zero.

    Parameters
    ----------
    mask_is_static
        The first mask stays, whatever comes later.
    weight_correction
        When a mask is set, stretch and shift each output channel so that its mean and spread after pruning are those
        before.
    """

    mask: Tensor

    def __init__(self, weight: Tensor, mask_is_static: bool = False, weight_correction: bool = False) -> None:  # noqa: FBT001, FBT002
        super().__init__()
        self.mask_is_static = mask_is_static
        self.weight_correction = weight_correction
        self.is_set = False
        self.register_buffer("mask", torch.ones_like(weight, dtype=torch.bool), persistent=False)

    def sparse(self, weight: Tensor) -> Tensor:
        """Return the masked weight; unlike a product, exactly zero also where the weight is not finite."""
        return torch.where(self.mask, weight, 0.0)

    @torch.no_grad()
    def set_mask(self, mask: Tensor, weight: Tensor) -> None:
        """Take a new mask for the stored `weight`, which the correction changes in place."""
        if self.mask_is_static and self.is_set:
            return
        self.is_set = True
        self.mask.copy_(mask)
        if self.weight_correction and not bool(mask.all()):
            dims = tuple(range(1, weight.dim()))
            pruned = weight * mask
            stretch = weight.std(dims, keepdim=True) / (pruned.std(dims, keepdim=True) + 1e-9)
            shift = weight.mean(dims, keepdim=True) - (stretch * pruned).mean(dims, keepdim=True)
            weight.mul_(stretch).add_(shift)


@register_fake_sparse("STRFakeSparse")
class STRFakeSparse(FakeSparseBase):
    """Soft-threshold reparameterization: ``sign(W) · relu(|W| - sigmoid(s))`` with a learnt `s` a layer.

    Parameters
    ----------
    sInit_value
        First value of `s`. The threshold starts at its sigmoid: -5 gives 0.0067; below about -88 it is exactly zero in
        fp32, and weight decay alone raises it at first.

    Examples
    --------
    >>> fake = STRFakeSparse(torch.zeros(3), sInit_value=-2)
    >>> fake(torch.tensor([0.5, -0.2, 0.05])).detach().squeeze()
    tensor([ 0.3808, -0.0808,  0.0000])
    """

    generators = ("STRMaskGenerator",)

    def __init__(self, weight: Tensor, sInit_value: float = -200.0) -> None:  # noqa: N803 - the configuration's name
        super().__init__()
        if not sInit_value <= 0:
            raise ValueRangeError(message(f"sInit_value is {sInit_value}", "0 or less", "use -5, or far below"))
        self.scores = nn.Parameter(torch.full((1, 1), float(sInit_value), device=weight.device, dtype=weight.dtype))

    def sparse(self, weight: Tensor) -> Tensor:
        """Return the soft-thresholded weight."""
        threshold = torch.sigmoid(self.scores).view(())
        return torch.sign(weight) * torch.relu(weight.abs() - threshold)


class Subnet(ABC):
    """The network that the probabilities of several layers stand for; chosen once per change to evaluation."""

    def __init__(self) -> None:
        self._is_present = False

    @abstractmethod
    def choose(self) -> None:
        """Write the present hard masks into the layers that are not fixed."""

    def switched(self, *, evaluating: bool) -> None:
        """Choose the masks when the first of the layers goes to evaluation; training makes them out of date."""
        if evaluating and not self._is_present:
            self.choose()
        self._is_present = evaluating


@register_fake_sparse("ProbMaskFakeSparse")
class ProbMaskFakeSparse(FakeSparseBase):
    """The weight times a mask drawn with learnt probabilities `scores`, relaxed so that gradients reach them.

    In training a fresh soft mask is drawn in each forward pass. In evaluation the weights of `subnet` are kept, which a
    scheduler gives: the highest probabilities of all its layers, as many as its budget; without one, those of one half
    or more. After :meth:`fix` the given hard mask is used in both.

    Parameters
    ----------
    score_init_constant
        First probability of every weight.
    """

    generators = ("ProbMaskGenerator",)
    mask: Tensor
    tau: Tensor

    def __init__(self, weight: Tensor, score_init_constant: float = 1.0) -> None:
        super().__init__()
        if not 0 <= score_init_constant <= 1:
            raise ValueRangeError(message(f"score_init_constant is {score_init_constant}", "a probability in [0, 1]"))
        self.fixed = False
        self.subnet: Subnet | None = None
        self.scores = nn.Parameter(torch.full_like(weight, score_init_constant))
        self.register_buffer("mask", torch.ones_like(weight, dtype=torch.bool), persistent=False)
        # a tensor, so that a new temperature is no new graph
        self.register_buffer("tau", torch.ones((), device=weight.device), persistent=False)

    def begin(self, generator: MaskGenerator) -> None:
        """Start at the generator's inverse temperature."""
        if isinstance(generator, ProbMaskGenerator):
            self.tau.fill_(generator.tau)

    def sparse(self, weight: Tensor) -> Tensor:
        """Return the weight under a soft mask (training), a hard one (evaluation) or the fixed one."""
        if self.fixed or (self.subnet is not None and not self.training):
            return torch.where(self.mask, weight, 0.0)
        if not self.training:
            return torch.where(self.scores >= 0.5, weight, 0.0)
        return weight * self.soft_mask()

    def soft_mask(self) -> Tensor:
        """Draw a relaxed Bernoulli sample of `scores` at the inverse temperature `tau`."""
        # fp32 also under autocast or half weights: the constants below vanish in less
        scores = self.scores.float()
        first, second = torch.rand_like(scores), torch.rand_like(scores)
        noise = -torch.log(torch.log(first + _EPSILON) / torch.log(second + _EPSILON) + _EPSILON)
        logits = torch.log(scores + _EPSILON) - torch.log(1 - scores + _EPSILON)
        return torch.sigmoid(self.tau * (logits + noise)).to(self.scores.dtype)

    @torch.no_grad()
    def fix(self, mask: Tensor) -> None:
        """Use `mask` from now on; the scores no longer matter."""
        self.mask.copy_(mask)
        self.fixed = True

    def release(self) -> None:
        """Draw masks again."""
        self.fixed = False
        self.train(self.training)

    def train(self, mode: bool = True) -> ProbMaskFakeSparse:  # noqa: FBT001, FBT002 - as torch has it
        """Switch between training and evaluation, for which the subnet of the present probabilities is chosen."""
        super().train(mode)
        if self.subnet is not None:
            self.subnet.switched(evaluating=not mode)
        return self
