"""Curvature from gradients: how much the loss rises when a weight goes, and how the others make up for it.

Both estimates stand for the empirical Fisher matrix ``F = damp·I + mean(g gᵀ)``, block by block of consecutive weights:
one holds the blocks, the other holds only the gradients and never forms a matrix of the size of a block. A pruned set Q
is compensated by all survivors S of its block *jointly*, ``ΔW_S = F_SS⁻¹ F_SQ W_Q``, not one pruned weight after the
other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message

__all__ = ["BlockFisher", "Curvature", "GradientFisher"]

_CHUNK = 1 << 22  # entries of blocks handled at once: bounds the memory of the factorisations


class BlockFisher:
    """Explicit blocks of the Fisher matrix of one weight.

    Parameters
    ----------
    weight
        The weight, of any shape; gradients are added with :meth:`add`.
    damp
        Added to the diagonal.
    block
        Size of a block; memory is ``weight.numel() * block`` floats, doubles for a weight of doubles.

    Examples
    --------
    >>> weight = torch.tensor([1.0, 2.0])
    >>> fisher = BlockFisher(weight, damp=1.0, block=2)
    >>> fisher.add(torch.tensor([1.0, 1.0]))
    >>> fisher.saliency(weight)  # F = [[2, 1], [1, 2]], its inverse has 2/3 on the diagonal
    tensor([0.7500, 3.0000])
    >>> fisher.compensated(weight, torch.tensor([False, True]))
    tensor([0.0000, 2.5000])
    """

    def __init__(self, weight: Tensor, damp: float, block: int) -> None:
        self.block = max(1, min(block, weight.numel()))
        self.damp = damp
        blocks = -(-weight.numel() // self.block)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._sum = torch.zeros(blocks, self.block, self.block, device=weight.device, dtype=dtype)
        self._count = 0

    def add(self, gradient: Tensor) -> None:
        """Take one more gradient of the weight."""
        rows = self._in_blocks(gradient)
        self._sum.baddbmm_(rows.unsqueeze(2), rows.unsqueeze(1))
        self._count += 1

    def saliency(self, weight: Tensor) -> Tensor:
        """Return ``w² / (2 · (F⁻¹)_ii)``: the rise of the loss when only this weight goes, others making up for it."""
        # (F⁻¹)_ii is never below 1 / F_ii; where it is, a sum in float32 has made the matrix indefinite
        diagonals = [
            torch.linalg.inv(part).diagonal(dim1=1, dim2=2).maximum(1 / part.diagonal(dim1=1, dim2=2))
            for part in self._parts()
        ]
        inverse = torch.cat(diagonals).flatten()[: weight.numel()].view(weight.shape)
        return (weight.double().square() / (2 * inverse)).float()

    def compensated(self, weight: Tensor, kept: Tensor) -> Tensor:
        """Return the weight with pruned elements zero and the survivors of each block moved to make up for them."""
        weights = self._in_blocks(weight).double()
        stay = self._in_blocks(kept).double()
        done, start = [], 0
        for part in self._parts():
            w, s = weights[start : start + len(part)], stay[start : start + len(part)]
            start += len(part)
            among = part * s.unsqueeze(2) * s.unsqueeze(1) + torch.diag_embed(1 - s)
            wanted = (part @ (w * (1 - s)).unsqueeze(2)).squeeze(2) * s
            done.append((w + torch.linalg.solve(among, wanted)) * s)
        return torch.cat(done).flatten()[: weight.numel()].view(weight.shape).to(weight.dtype)

    def _in_blocks(self, values: Tensor) -> Tensor:
        flat = values.detach().reshape(-1).to(self._sum.dtype)
        return torch.nn.functional.pad(flat, (0, -flat.numel() % self.block)).view(-1, self.block)

    def _parts(self) -> list[Tensor]:
        """Return the blocks in float64, some at a time."""
        if not self._count:
            raise ValueRangeError(message("a Fisher matrix of no gradients", "one gradient or more"))
        size = max(1, _CHUNK // self.block**2)
        damping = self.damp * torch.eye(self.block, device=self._sum.device, dtype=torch.float64)
        return [part.double() / self._count + damping for part in torch.split(self._sum, size)]


class GradientFisher:
    """The same matrix from the gradients alone: memory goes with their number, not with the size of a block.

    Parameters
    ----------
    gradients
        Shape ``(count, elements)``.

    Examples
    --------
    >>> weight = torch.tensor([1.0, 2.0])
    >>> fisher = GradientFisher(torch.tensor([[1.0, 1.0]]), damp=1.0, block=2)
    >>> fisher.saliency(weight), fisher.compensated(weight, torch.tensor([False, True]))
    (tensor([0.7500, 3.0000]), tensor([0.0000, 2.5000]))
    """

    def __init__(self, gradients: Tensor, damp: float, block: int) -> None:
        if not len(gradients):
            raise ValueRangeError(message("a Fisher matrix of no gradients", "one gradient or more"))
        self.block = max(1, block)
        self.damp = damp
        self._gradients = gradients

    def saliency(self, weight: Tensor) -> Tensor:
        """Return ``w² / (2 · (F⁻¹)_ii)``."""
        inverse = []
        for rows in self._parts(weight):
            whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(self._gram(rows)), rows, upper=False)
            inverse.append((1 - whitened.square().sum(0)).clamp(min=1e-12) / self.damp)
        diagonal = torch.cat(inverse).view(weight.shape) if inverse else torch.ones_like(weight)
        return (weight.double().square() / (2 * diagonal)).float()

    def compensated(self, weight: Tensor, kept: Tensor) -> Tensor:
        """Return the weight with pruned elements zero and the survivors of each block moved to make up for them."""
        flat, stay = weight.detach().reshape(-1).double(), kept.reshape(-1).double()
        done, start = [], 0
        for rows in self._parts(weight):
            w, s = flat[start : start + rows.shape[1]], stay[start : start + rows.shape[1]]
            start += rows.shape[1]
            among = rows * s
            moved = among.T @ torch.linalg.solve(self._gram(among), rows @ (w * (1 - s)))
            done.append((w + moved) * s)
        return torch.cat(done).view(weight.shape).to(weight.dtype) if done else weight

    def _gram(self, rows: Tensor) -> Tensor:
        count = len(rows)
        return rows @ rows.T + count * self.damp * torch.eye(count, device=rows.device, dtype=rows.dtype)

    def _parts(self, weight: Tensor) -> list[Tensor]:
        rows = self._gradients.to(weight.device).double()
        return list(torch.split(rows, self.block, dim=1)) if rows.shape[1] else []


Curvature = BlockFisher | GradientFisher
