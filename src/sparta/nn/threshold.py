"""ThresholdLinear: a linear layer that treats small inputs as 0 and, for few tokens, does not read their weights.

Decoding one token reads every weight once; where many activations are near 0, most of that reading changes little. What
is computed is ``linear(where(|x| > threshold, x, 0))`` on every device and for every size; only how much of the weight
is read differs, and :meth:`ThresholdLinear.reason` says when nothing is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.nn.inputs import need_operand, need_tensors
from sparta.specialize.linear.threshold import threshold_linear, threshold_obstacle

__all__ = ["ThresholdLinear"]

_MOST_GATHERED = 0.25  # of the inputs: where more are live, copying their weights costs more than it saves
_FEW = 8  # tokens on the CPU; the CUDA kernel has its own limit


class ThresholdLinear(nn.Module):
    """A linear layer on inputs of which the small ones count as 0.

    Parameters
    ----------
    dense
        Its weight and bias are taken over. The weight keeps its shape (N, K) and its name, but is stored input by
        input, so that the weights of one input are side by side.
    threshold
        ``|x| <= threshold`` counts as 0; 0 changes no result. Rounded to float32, saved with the state.

    Notes
    -----
    Each token has its own zeros; a weight is skipped if its input is 0 for all tokens of the call, so the gain fades
    with every further token; on CUDA, weights are skipped for one token only. NaN is never small. Where autograd
    records, all weights are read, and gradients are those of the formula: 0 for small inputs.

    Examples
    --------
    >>> layer = ThresholdLinear(nn.Linear(4, 2, bias=False), threshold=0.5)
    >>> x = torch.tensor([[0.1, -2.0, 0.5, 3.0]])
    >>> expected = layer.weight[:, 1] * -2 + layer.weight[:, 3] * 3
    >>> torch.allclose(layer(x), expected)
    True
    """

    def __init__(self, dense: nn.Linear, threshold: float = 0.0) -> None:
        super().__init__()
        self.out_features, self.in_features = dense.weight.shape
        stored = dense.weight.detach().t().contiguous()
        self.weight = nn.Parameter(stored.t(), requires_grad=dense.weight.requires_grad)
        self.bias = dense.bias
        self.threshold = threshold

    @property
    def threshold(self) -> float:
        """What ``|x|`` must exceed to count."""
        return self._threshold

    @threshold.setter
    def threshold(self, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ValueRangeError(message(f"a threshold of {value}", "a number from 0 on"))
        self._threshold = torch.tensor(value, dtype=torch.float32).item()

    def calibrate(self, samples: Tensor | Iterable[Tensor], sparsity: float = 0.5) -> float:
        """Set and return the least threshold that makes this share of the samples' elements 0.

        Parameters
        ----------
        samples
            Inputs (..., K) as the layer will see them, one tensor or several.
        sparsity
            Share of their elements, from 0 to 1.

        Examples
        --------
        >>> ThresholdLinear(nn.Linear(4, 2)).calibrate(torch.tensor([[1.0, -2.0, 3.0, -4.0]]), 0.5)
        2.0
        """
        if not 0 <= sparsity <= 1:
            raise ValueRangeError(message(f"a sparsity of {sparsity}", "from 0 to 1"))
        inputs = [samples] if isinstance(samples, Tensor) else list(samples)
        sizes = (
            torch.cat([self._rows(x).detach().abs().flatten().float() for x in inputs]) if inputs else torch.empty(0)
        )
        if not sizes.numel() or not bool(sizes.isfinite().all()):
            raise ValueRangeError(message("samples without elements, or with NaN or infinity", "finite samples"))
        count = round(sparsity * sizes.numel())
        self.threshold = sizes.kthvalue(count).values.item() if count else 0.0
        return self.threshold

    def reason(self, x: Tensor) -> str:
        """Return why a call with this input reads all weights; empty if it skips those of small inputs.

        On the CPU it skips them only where at most a quarter of the inputs is live.
        """
        rows = self._rows(x)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, self.weight, self.bias)):
            return "autograd records the call"
        if rows.device.type == "cpu" and torch.compiler.is_compiling():
            return "torch.compile wants sizes that do not depend on values"
        if rows.device.type == "cpu":
            return "" if 0 < len(rows) <= _FEW else f"{len(rows)} tokens; weights are skipped for 1 to {_FEW}"
        return threshold_obstacle(rows, self.weight.t())

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., N) for x (..., K)."""
        rows = self._rows(x)
        if self.reason(x):
            y = functional.linear(self._kept(rows), self.weight, self.bias)
        elif rows.device.type == "cpu":
            y = self._gathered(rows)
        else:
            y = threshold_linear(rows, self.weight.t(), self.bias, self._threshold)
        return y.view(*x.shape[:-1], self.out_features)

    def _rows(self, x: Tensor) -> Tensor:
        need_tensors(x=x)
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise ShapeError(message(f"an input of shape {tuple(x.shape)}", f"(..., {self.in_features})"))
        need_operand(x, self.weight)
        return x.reshape(math.prod(x.shape[:-1]), self.in_features)

    def _kept(self, rows: Tensor) -> Tensor:
        # `not <=` rather than `>`: NaN stays
        return torch.where(rows.abs().float() <= self._threshold, torch.zeros((), dtype=rows.dtype), rows)

    def _gathered(self, rows: Tensor) -> Tensor:
        """Multiply by the weights of live inputs only, where these are few."""
        kept = self._kept(rows)
        live = (kept != 0).any(0).nonzero().squeeze(1)
        if len(live) > _MOST_GATHERED * self.in_features:
            return functional.linear(kept, self.weight, self.bias)
        few = self.weight.t().index_select(0, live)
        return functional.linear(kept.index_select(1, live), few.t(), self.bias)

    def get_extra_state(self) -> Tensor:
        """Return the threshold, so that it is saved with the parameters."""
        return torch.tensor(self._threshold, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over a saved threshold."""
        self.threshold = float(state)

    def extra_repr(self) -> str:
        """Say the sizes and the threshold."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, threshold={self._threshold:g}"
