"""SparseLinear: a linear layer whose weight, input or output is masked, run by the fastest implement there is.

``SparseLinear(dense, weight_mask=mask)`` takes the place of ``dense`` and shares its parameters. The weight parameter
stays dense in memory and zero where pruned; kernels see only its live values, and its gradient is exactly zero where it
is pruned, so training cannot bring pruned weights back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.measure.references import linear_reference
from sparta.nn.masked_linear import MaskedLinear, check_rows, masked_problem, masked_spec
from sparta.nn.operator import OperatorBase, SampleInputs, Store, as_inputs, need_tensors, rows_to_check
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.op import LinearState, run_linear
from sparta.specialize.linear.spec import LinearKernel, linear_spec
from sparta.specialize.tuning.forgiving import ForgivingStore
from sparta.specialize.tuning.select import DENSE, Choice, Problem, build, choose, right_choice
from sparta.specialize.tuning.store import key_of
from sparta.tesa.attribute import TeSA
from sparta.tesa.mask import as_mask

__all__ = ["SparseLinear"]

_MASKS = ("input_mask", "weight_mask", "output_mask")


class SparseLinear(OperatorBase):
    """A linear layer with one sparse operand.

    Parameters
    ----------
    raw_module
        The dense layer; its parameters are shared, and pruned weights are set to zero in place.
    input_mask, weight_mask, output_mask
        Exactly one of them: a bool or 0/1 mask of shape (M, K), (N, K) or (M, N). A TeSA is taken for the weight too.
        Input and output masks apply to the last two dims of the input or output; any leading dims share them.

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
        input_mask: Tensor | None = None,
        weight_mask: Tensor | TeSA | None = None,
        output_mask: Tensor | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(raw_module, nn.Linear):
            raise ValueRangeError(message(f"a {type(raw_module).__name__}", "a torch.nn.Linear"))
        self.in_features, self.out_features = raw_module.in_features, raw_module.out_features
        self.weight = raw_module.weight
        self.register_parameter("bias", raw_module.bias)
        self._state: LinearState | None = None
        self._masked: MaskedLinear | None = None
        for name in _MASKS:
            self.register_buffer(name, None)
        self.update_mask(input_mask, weight_mask, output_mask)

    def update_mask(
        self,
        input_mask: Tensor | None = None,
        weight_mask: Tensor | TeSA | None = None,
        output_mask: Tensor | None = None,
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
        mask = cast("Tensor | TeSA", given[present[0]])
        kept = mask.mask(self.weight.device) if isinstance(mask, TeSA) else as_mask(mask)
        widths = {"input_mask": (None, self.in_features), "output_mask": (None, self.out_features)}
        expected = widths.get(present[0], (self.out_features, self.in_features))
        if kept.dim() != 2 or any(e not in (None, s) for e, s in zip(expected, kept.shape, strict=True)):
            shape = tuple("M" if e is None else e for e in expected)
            raise ShapeError(message(f"{present[0]} of shape {tuple(kept.shape)}", f"shape {shape}"))
        for name in _MASKS:
            setattr(self, name, kept.to(self.weight.device, copy=True) if name == present[0] else None)
        if self.weight_mask is not None:
            with torch.no_grad():
                self.weight.masked_fill_(~self.weight_mask, 0)
        self._reset()

    def _reset(self) -> None:
        """Run dense: nothing is tuned for the present mask."""
        self._state, self._masked, self.choice = None, None, None

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
            return self._dense(x) if self._masked is None else self._masked(x, self.weight, self.bias)
        flat = len(shape) == 2
        rows = x if flat else x.reshape(-1, self.in_features)
        y = None
        if not torch.compiler.is_compiling() and (fast_path := self._state.fast_path) is not None:
            held = self._parameters  # to ask the module for them takes longer than a small layer
            y = fast_path(rows, held.get("weight"), held.get("bias"))
        if y is None:
            y = run_linear(rows, self.weight, self.bias, self._state, keep=not self.training)
        return y if flat else y.reshape(*shape[:-1], self.out_features)

    def _unfit(self, x: object, what: str = "an input") -> ShapeError:
        """Return the error that an input of another shape is; raises for what is no tensor."""
        need_tensors(x=x)
        return ShapeError(message(f"{what} of shape {tuple(cast('Tensor', x).shape)}", f"(..., {self.in_features})"))

    def _dense(self, x: Tensor) -> Tensor:
        """Return the output, computed densely and masked."""
        if self.input_mask is not None:
            return functional.linear(torch.where(self.input_mask, x, 0.0), self.weight, self.bias)
        if self.output_mask is not None:
            return torch.where(self.output_mask, functional.linear(x, self.weight, self.bias), 0.0)
        return functional.linear(x, torch.where(cast("Tensor", self.weight_mask), self.weight, 0.0), self.bias)

    # ------------------------------------------------------------------ choosing

    def tune(
        self,
        inputs: SampleInputs,
        *,
        backward: bool = False,
        store: Store = None,
        **options: Any,
    ) -> Choice:
        """Measure all implements on these inputs and keep the fastest; dense stays if nothing is faster.

        Parameters
        ----------
        inputs
            ``(x,)``, as they will be in use: the number of rows decides which implement wins. Others run as well.
        backward
            Whether to choose a kernel for the gradient of the input too; with an input or output mask, whether to
            measure forward and backward together.
        store
            Where results are looked up and kept: None for the user's store on disk, False for nowhere.
        options
            ``algo``, ``max_trials``, ``max_seconds``, ``seed``, ``progress``, see
            :func:`sparta.specialize.tuning.select.tune_kernel`; and ``known``, a dict of what equal layers of this run
            chose.
        """
        problem = self._problem(inputs, backward=backward)
        choice = self._measured(problem, store=store, **options)
        back: tuple[KernelSpec, Choice] | None = None
        if backward and self.weight_mask is not None:
            gradient = self._backward_problem(as_inputs(inputs, 1)[0])
            back = gradient.spec, self._measured(gradient, store=store, **options)
        self._install(problem.spec, choice, back)
        self._tuned_for = key_of(problem.spec)
        return choice

    def build(self, config: Mapping[str, Any] | None, sample_inputs: SampleInputs) -> None:
        """Build as every sparse module does; None also takes the kernel for gradients that was tuned, if one was."""
        super().build(config, sample_inputs)
        if config is not None or self._state is None:
            return
        x = as_inputs(sample_inputs, 1)[0]
        stored = choose(self._backward_spec(x), ForgivingStore())
        if stored.entry is not None and stored.implement != DENSE:
            problem = self._backward_problem(x)
            right = right_choice(problem, stored)
            self._state.backward = cast("LinearKernel", build(problem.spec, right.config))

    def _install(self, spec: KernelSpec, choice: Choice, back: tuple[KernelSpec, Choice] | None = None) -> None:
        if self.weight_mask is None:
            self._masked = MaskedLinear(build(spec, choice.config), getattr(self, self._mask_name))
            self.choice = choice
            return
        forward = cast("LinearKernel", build(spec, choice.config))
        backward = None if back is None else cast("LinearKernel", build(back[0], back[1].config))
        self._state = LinearState(spec["weight"], forward, backward)
        self.choice = choice

    def _spec(self, inputs: SampleInputs, *, backward: bool = False) -> KernelSpec:
        x = as_inputs(inputs, 1)[0]
        if not x.dim() or x.shape[-1] != self.in_features:
            raise self._unfit(x, "a sample input")
        if self.weight_mask is None:
            name = self._mask_name
            return masked_spec(x, self.weight, self.bias, getattr(self, name), name, backward=backward)
        # The gradient of a sparse weight's layer has a spec of its own, see `_backward_problem`.
        return _weight_spec(x, self.weight_mask, bias=self.bias is not None, device=x.device.type)

    def _problem(self, inputs: SampleInputs, *, backward: bool) -> Problem:
        spec, x = self._spec(inputs, backward=backward), as_inputs(inputs, 1)[0].detach()
        bias = None if self.bias is None else self.bias.detach()
        if self.weight_mask is None:
            name = self._mask_name
            return masked_problem(spec, x, self.weight.detach(), bias, getattr(self, name), name, backward=backward)
        rows = x.reshape(-1, self.in_features)
        return _weight_problem(spec, rows, self.weight.detach(), bias, self.weight_mask)

    def _backward_spec(self, x: Tensor) -> KernelSpec:
        grad = torch.empty(math.prod(x.shape[:-1]), self.out_features, dtype=x.dtype, device="meta")
        return _weight_spec(grad, cast("Tensor", self.weight_mask).t(), bias=False, device=x.device.type)

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
            self._reset()

    def extra_repr(self) -> str:
        """Say the sizes, the mask and what runs."""
        name = self._mask_name
        density = getattr(self, name).float().mean().item()
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {name} density {density:.3g}, {super().extra_repr()}"


def _weight_spec(x: Tensor, mask: Tensor, *, bias: bool, device: str) -> KernelSpec:
    rows = math.prod(x.shape[:-1])
    return linear_spec(TeSA.from_mask(mask), rows, x.dtype, epilogue=Epilogue(bias=bias), device=device)


def _weight_problem(spec: KernelSpec, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor) -> Problem:
    checked, some = rows_to_check(x)
    expected = linear_reference(some, weight, bias, weight_mask=mask)
    return Problem(spec, weight, (x, bias, None), expected, x.shape[1], checked=checked)
