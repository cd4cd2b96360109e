"""DynamicSparseMoE: a mixture of experts whose routing is known only at run time.

Each token goes through the linear layers of its own experts and no other. Experts are the given modules themselves, so
optimizers, checkpoints and later changes of their weights need nothing special.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.measure.references import moe_reference
from sparta.nn.inputs import ExampleInputs, as_optional_inputs, demand, need_tensors
from sparta.nn.kernel_operator import KernelOperator
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.moe.spec import DenseMoEKernel, moe_spec
from sparta.specialize.tuning.select import Problem

__all__ = ["DynamicSparseMoE"]


class DynamicSparseMoE(KernelOperator):
    """A layer of experts, of which each token visits one or a few.

    Parameters
    ----------
    exp_modules
        One ``nn.Linear`` per expert, all of one size, each with or without bias. Their parameters stay theirs.

    Notes
    -----
    An expert takes any number of tokens, none included; nothing is dropped.

    Examples
    --------
    >>> moe = DynamicSparseMoE([nn.Linear(8, 4) for _ in range(3)])
    >>> tokens, ids = torch.randn(10, 8), torch.randint(0, 3, (10, 2))
    >>> moe(tokens, ids, torch.rand(10, 2)).shape
    torch.Size([10, 4])
    """

    def __init__(self, exp_modules: Sequence[nn.Linear]) -> None:
        super().__init__()
        experts = list(exp_modules)
        wrong = [type(expert).__name__ for expert in experts if not isinstance(expert, nn.Linear)]
        if wrong or not experts:
            given = f"experts of type {', '.join(sorted(set(wrong)))}" if wrong else "no experts"
            raise ValueRangeError(message(given, "one torch.nn.Linear or more"))
        sizes = sorted({(expert.in_features, expert.out_features) for expert in experts})
        if len(sizes) > 1:
            raise ShapeError(message(f"experts of sizes {sizes}", "one size for all"))
        ((self.in_features, self.out_features),) = sizes
        self.experts = nn.ModuleList(experts)
        self._reset()

    def forward(self, tokens: Tensor, exp_ids: Tensor, gates: Tensor | None = None) -> Tensor:
        """Return the gated sum of the answers of each token's experts.

        Parameters
        ----------
        tokens
            (..., K).
        exp_ids
            (...) or (..., k), integers of any dtype from 0 to the number of experts: where each token goes. An expert
            that is named twice counts twice.
        gates
            The shape of `exp_ids`: the weight of each answer; None means 1.

        Returns
        -------
        Tensor
            (..., N).
        """
        rows, ids, shares = self._flat(tokens, exp_ids, gates)
        y = self._run(rows, ids, shares, *self._parameters_by_expert())
        return y.reshape(*tokens.shape[:-1], self.out_features)

    # ------------------------------------------------------------------ for KernelOperator

    def _parameters_by_expert(self) -> list[Tensor | None]:
        return [tensor for expert in self.experts for tensor in (expert.weight, expert.bias)]  # type: ignore[misc]

    def _flat(self, tokens: Tensor, exp_ids: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return tokens (T, K), ids (T, k) as int64 and gates (T, k); raises when anything does not fit."""
        need_tensors(tokens=tokens, exp_ids=exp_ids, **({} if gates is None else {"gates": gates}))
        if tokens.dim() < 1 or tokens.shape[-1] != self.in_features:
            raise ShapeError(message(f"tokens of shape {tuple(tokens.shape)}", f"(..., {self.in_features})"))
        lead = tuple(tokens.shape[:-1])
        visits = exp_ids.shape[-1] if exp_ids.dim() == tokens.dim() else 1
        if tuple(exp_ids.shape) != lead and (exp_ids.dim() != tokens.dim() or tuple(exp_ids.shape[:-1]) != lead):
            raise ShapeError(message(f"exp_ids of shape {tuple(exp_ids.shape)}", f"{lead} or {(*lead, 'k')}"))
        if exp_ids.is_floating_point() or exp_ids.is_complex() or exp_ids.dtype == torch.bool:
            raise ValueRangeError(message(f"exp_ids of dtype {exp_ids.dtype}", "integers"))
        if gates is not None and gates.shape != exp_ids.shape:
            given = f"gates of shape {tuple(gates.shape)} for exp_ids of shape {tuple(exp_ids.shape)}"
            raise ShapeError(message(given, "the same shape"))
        rows = tokens.reshape(math.prod(lead), self.in_features)
        ids = exp_ids.to(torch.int64).reshape(rows.shape[0], visits)
        demand((ids >= 0) & (ids < len(self.experts)), ids, f"exp_ids must be from 0 to {len(self.experts) - 1}")
        return rows, ids, None if gates is None else gates.reshape(ids.shape)

    def _dense(self) -> DenseMoEKernel:
        return DenseMoEKernel()

    def _spec(self, inputs: ExampleInputs, *, backward: bool = False) -> KernelSpec:
        rows, ids, _ = self._sample(inputs)
        return moe_spec(rows, ids, [expert.weight for expert in self.experts], backward=backward)  # type: ignore[misc]

    def _problem(self, inputs: ExampleInputs, *, backward: bool) -> Problem:
        spec = self._spec(inputs, backward=backward)
        rows, ids, gates = self._sample(inputs)
        parameters = [None if tensor is None else tensor.detach() for tensor in self._parameters_by_expert()]
        weights = [weight for weight in parameters[::2] if weight is not None]
        biases = [weights[0].new_zeros(self.out_features) if bias is None else bias for bias in parameters[1::2]]
        expected = moe_reference(rows, ids, weights, biases, gates)
        reduction = max(1, self.in_features * ids.shape[1])
        return Problem(spec, None, (rows, ids, gates, *parameters), expected, reduction, backward)

    def _sample(self, inputs: ExampleInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        tokens, ids, gates = as_optional_inputs(inputs, 2, 1)
        assert tokens is not None  # noqa: S101 - checked by as_optional_inputs
        assert ids is not None  # noqa: S101
        return self._flat(tokens.detach(), ids, None if gates is None else gates.detach())

    def extra_repr(self) -> str:
        """Say the sizes and what runs."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{len(self.experts)} experts, {sizes}, {super().extra_repr()}"
