"""SparseLinear: a linear layer whose weight, input or output is masked, run by the fastest implement there is.

``SparseLinear(dense, weight_mask=mask)`` takes the place of ``dense`` and shares its parameters. The weight parameter
stays dense in memory and zero where pruned; kernels see only its live values, and its gradient is exactly zero where it
is pruned, so training cannot bring pruned weights back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.measure.references import linear_reference
from sparta.nn.inputs import ExampleInputs, as_inputs, need_operand, need_tensors, rows_to_check
from sparta.nn.kernel_operator import PackedIndex
from sparta.nn.masked_linear import check_rows, masked_problem, masked_spec
from sparta.nn.operator import Chosen
from sparta.nn.weight_operator import WeightOperator
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.op import LinearState, run_linear
from sparta.specialize.linear.spec import LinearKernel, linear_spec
from sparta.specialize.tuning.forgiving import ForgivingStore
from sparta.specialize.tuning.select import DENSE, Problem, build, choose, right_choice
from sparta.tesa.attribute import TeSA
from sparta.tesa.mask import as_mask

__all__ = ["SparseLinear"]

_MASKS = ("input_mask", "weight_mask", "output_mask")


class SparseLinear(PackedIndex, WeightOperator):
    """A linear layer with one sparse operand.

    Parameters
    ----------
    raw_module
        The dense layer; its parameters are shared, and pruned weights are set to zero in place.
    input_mask, weight_mask, output_mask
        Exactly one of them, best by name: a bool or 0/1 mask, or a TeSA, of shape (M, K), (N, K) or (M, N). Input and
        output masks apply to the last two dims of the input or output; any leading dims share them.

    Examples
    --------
    >>> dense = nn.Linear(64, 32)
    >>> mask = torch.rand(32, 64) < 0.1
    >>> sparse = SparseLinear(dense, weight_mask=mask)
    >>> sparse(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 32])
    >>> sparse.weight is dense.weight
    True
    """

    bias: nn.Parameter | None
    weight_mask: Tensor | None
    input_mask: Tensor | None
    output_mask: Tensor | None

    def __init__(
        self,
        raw_module: nn.Linear,
        input_mask: Tensor | TeSA | None = None,
        weight_mask: Tensor | TeSA | None = None,
        output_mask: Tensor | TeSA | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(raw_module, nn.Linear):
            raise ValueRangeError(message(f"a {type(raw_module).__name__}", "a torch.nn.Linear"))
        self.in_features, self.out_features = raw_module.in_features, raw_module.out_features
        self.weight = cast("nn.Parameter", raw_module.weight)
        self.register_parameter("bias", raw_module.bias)
        self._state: LinearState | None = None
        for name in _MASKS:
            self.register_buffer(name, None)
        self.update_mask(input_mask, weight_mask, output_mask)

    def update_mask(
        self,
        input_mask: Tensor | TeSA | None = None,
        weight_mask: Tensor | TeSA | None = None,
        output_mask: Tensor | TeSA | None = None,
    ) -> None:
        """Take another mask; the parameters stay the same tensors with the same values where they stay live.

        What was tuned was tuned for the old mask, so dense runs until it is tuned or built again.
        """
        given = {"input_mask": input_mask, "weight_mask": weight_mask, "output_mask": output_mask}
        present = [name for name, mask in given.items() if mask is not None]
        if len(present) != 1:
            raise ValueRangeError(
                message(f"{len(present)} masks ({', '.join(present) or 'none'})", "exactly one of " + ", ".join(_MASKS))
            )
        name, mask = present[0], cast("Tensor | TeSA", given[present[0]])
        if name == "weight_mask":
            self._hold_mask(mask)
        else:
            setattr(self, name, self._checked(name, mask))
        for other in _MASKS:
            if other != name:
                setattr(self, other, None)
        self._reset()

    def _checked(self, name: str, mask: Tensor | TeSA) -> Tensor:
        """Return the mask of the input or output as bool, where the weight is."""
        kept = mask.mask(self.weight.device) if isinstance(mask, TeSA) else as_mask(mask)
        width = self.in_features if name == "input_mask" else self.out_features
        if kept.dim() != 2 or kept.shape[1] != width:
            raise ShapeError(message(f"{name} of shape {tuple(kept.shape)}", f"shape ('M', {width})"))
        return kept.to(self.weight.device, copy=True)

    def _reset(self) -> None:
        """Run dense: nothing is tuned for the present mask."""
        self._release()
        self._state, self.choice = None, None

    @property
    def _mask_name(self) -> str:
        return next(name for name in _MASKS if getattr(self, name) is not None)

    # ------------------------------------------------------------------ running

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (..., N) for an input (..., K)."""
        # To ask for the exact type first is what takes the host the least time.
        shape = x.shape if type(x) is Tensor or isinstance(x, Tensor) else ()
        if not shape or shape[-1] != self.in_features:
            raise self._unfit(x)
        if self._state is None:  # asked first: to look a mask up costs the host time, and only weights have a state
            if self.weight_mask is not None:
                return self._dense(x)
            name = self._mask_name
            check_rows(x, getattr(self, name), name)
            return self._run(x, self.weight, self.bias) if self.ready else self._dense(x)
        flat = len(shape) == 2
        rows = x if flat else x.reshape(-1, self.in_features)
        y, held = None, self._parameters  # to ask the module for them takes longer than a small layer
        if not torch.compiler.is_compiling() and (fast_path := self._state.fast_path) is not None:
            y = fast_path(rows, held.get("weight"), held.get("bias"))
        if y is None:
            # A parametrization has taken what is not there.
            weight = self.weight if held.get("weight") is None else held["weight"]
            bias = held["bias"] if "bias" in held else self.bias  # noqa: SIM401 - it would ask the module always
            y = run_linear(rows, cast("Tensor", weight), bias, self._state, keep=not self.training)
        return y if flat else y.reshape(*shape[:-1], self.out_features)

    def _unfit(self, x: object, what: str = "an input") -> ShapeError:
        """Return the error that an input of another shape is; raises for what is no tensor."""
        need_tensors(x=x)
        return ShapeError(message(f"{what} of shape {tuple(cast('Tensor', x).shape)}", f"(..., {self.in_features})"))

    def _dense(self, x: Tensor) -> Tensor:
        """Return the output, computed densely and masked."""
        need_operand(x, self.weight)
        if self.input_mask is not None:
            return functional.linear(torch.where(self.input_mask, x, 0.0), self.weight, self.bias)
        if self.output_mask is not None:
            return torch.where(self.output_mask, functional.linear(x, self.weight, self.bias), 0.0)
        return functional.linear(x, torch.where(cast("Tensor", self.weight_mask), self.weight, 0.0), self.bias)

    # ------------------------------------------------------------------ choosing

    def _problems(self, inputs: ExampleInputs, *, backward: bool) -> tuple[Problem, ...]:
        problem = self._problem(inputs, backward=backward)
        if not backward or self.weight_mask is None:
            return (problem,)
        return problem, self._backward_problem(as_inputs(inputs, 1)[0])

    def _build(self, inputs: ExampleInputs, config: Mapping[str, Any] | None) -> None:
        """Build as every sparse module does; None also takes the kernel for gradients that was tuned, if one was."""
        super()._build(inputs, config)
        if config is not None or self._state is None:
            return
        x = as_inputs(inputs, 1)[0]
        stored = choose(self._backward_spec(x), ForgivingStore())
        if stored.entry is not None and stored.implement != DENSE:
            problem = self._backward_problem(x)
            right = right_choice(problem, stored)
            self._state.backward = cast("LinearKernel", build(problem.spec, right.config))

    def _install(self, chosen: Sequence[Chosen]) -> None:
        kernels = [build(spec, choice.config) for spec, choice in chosen]
        if self.weight_mask is None:
            self._hold(kernels[0], getattr(self, self._mask_name))
        else:
            self._state = LinearState(chosen[0][0]["weight"], *cast("list[LinearKernel]", kernels))
        self.choice = chosen[0][1]

    def _spec(self, inputs: ExampleInputs, *, backward: bool = False) -> KernelSpec:
        x = as_inputs(inputs, 1)[0]
        if not x.dim() or x.shape[-1] != self.in_features:
            raise self._unfit(x, "an example input")
        if self.weight_mask is None:
            name = self._mask_name
            return masked_spec(x, self.weight, self.bias, getattr(self, name), name, backward=backward)
        # The gradient of a sparse weight's layer has a spec of its own, see `_backward_problem`.
        bias, device = self.bias is not None, x.device.type
        return _weight_spec(x, self.weight_mask, bias=bias, device=device, trained=backward)

    def _problem(self, inputs: ExampleInputs, *, backward: bool) -> Problem:
        spec, x = self._spec(inputs, backward=backward), as_inputs(inputs, 1)[0].detach()
        bias = None if self.bias is None else self.bias.detach()
        if self.weight_mask is None:
            name = self._mask_name
            return masked_problem(spec, x, self.weight.detach(), bias, getattr(self, name), name, backward=backward)
        rows = x.reshape(-1, self.in_features)
        return _weight_problem(spec, rows, self.weight.detach(), bias, self.weight_mask)

    def _backward_spec(self, x: Tensor) -> KernelSpec:
        grad = torch.empty(math.prod(x.shape[:-1]), self.out_features, dtype=x.dtype, device="meta")
        mask = cast("Tensor", self.weight_mask).t()
        return _weight_spec(grad, mask, bias=False, device=x.device.type, trained=True)

    def _backward_problem(self, x: Tensor) -> Problem:
        spec, mask = self._backward_spec(x), cast("Tensor", self.weight_mask).t()
        grad = torch.randn(spec["input"].shape, dtype=x.dtype, device=x.device)
        return _weight_problem(spec, grad, self.weight.detach().t(), None, mask)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load parameters and mask; a mask other than the present one undoes what was tuned for it."""
        name = self._mask_name
        before = getattr(self, name).clone()
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.ready and not torch.equal(before, getattr(self, name).to(before.device)):
            self._reset()  # an input or output mask; that of a weight has done so

    def extra_repr(self) -> str:
        """Say the sizes, the mask and what runs."""
        name = self._mask_name
        density = getattr(self, name).float().mean().item()
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {name} density {density:.3g}, {super().extra_repr()}"


def _weight_spec(x: Tensor, mask: Tensor, *, bias: bool, device: str, trained: bool) -> KernelSpec:
    """Return the kernel spec of a layer; one that is trained says so, for it is packed again in every step."""
    rows = math.prod(x.shape[:-1])
    spec = linear_spec(TeSA.from_mask(mask), rows, x.dtype, epilogue=Epilogue(bias=bias), device=device)
    return replace(spec, attributes={"trained": True}) if trained else spec


def _weight_problem(spec: KernelSpec, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor) -> Problem:
    checked, some = rows_to_check(x)
    expected = linear_reference(some, weight, bias, weight_mask=mask)
    return Problem(spec, weight, (x, bias, None), expected, x.shape[1], checked=checked)
