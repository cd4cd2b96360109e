"""SparseInt8Linear: a linear layer of 8-bit integers with a sparse weight, run by the fastest implement there is.

``SparseInt8Linear.from_float(dense, weight_mask, calibration=inputs)`` rounds a trained layer to integers. It takes and
returns real numbers (or integers of its input's grid, which are not rounded again) and is for inference: it has no
gradients. Inputs are rounded to a grid that calibration found, or with ``dynamic=True`` to one of each token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.nn.inputs import ExampleInputs, as_inputs, need_operand, need_tensors, rows_to_check, weight_mask_of
from sparta.nn.operator import Chosen, OperatorBase
from sparta.specialize.int8_linear.op import Int8State, run_int8_linear
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import Int8Kernel, int8_linear_spec, requantization
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.tuning.select import Problem, build
from sparta.tesa.attribute import TeSA

__all__ = ["SparseInt8Linear"]


class SparseInt8Linear(OperatorBase):
    """A linear layer with a sparse int8 weight; make one with :meth:`from_float`.

    Parameters
    ----------
    weight
        (N, K), int8, zero where it is pruned.
    weight_scale
        (N,): a row stands for ``weight * weight_scale``.
    bias
        (N,) or None, in real numbers.
    weight_mask
        (N, K), bool, or a TeSA; None takes the nonzero weights as live.
    input_scale, input_zero_point, input_format
        The grid that inputs are rounded to, in ``'int8'`` or ``'uint8'``: ``(integer - zero_point) * scale``.
    dynamic
        Whether every token has a grid of its own instead, int8 with its largest absolute value as 127.

    Examples
    --------
    >>> dense, x = nn.Linear(64, 32), torch.randn(100, 64)
    >>> mask = torch.rand(8, 16).repeat_interleave(4, 0).repeat_interleave(4, 1) < 0.2
    >>> layer = SparseInt8Linear.from_float(dense, mask, calibration=x)
    >>> exact = nn.functional.linear(x, dense.weight * mask, dense.bias)
    >>> bool((layer(x) - exact).abs().max() < 0.05)
    True
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    weight_mask: Tensor
    input_scale: Tensor
    input_zero_point: Tensor

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        weight_mask: Tensor | TeSA | None = None,
        *,
        input_scale: float | None = None,
        input_zero_point: int = 0,
        input_format: str = "uint8",
        dynamic: bool = False,
    ) -> None:
        super().__init__()
        if weight.ndim != 2 or weight.dtype != torch.int8:
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)} and {weight.dtype}", "int8 (N, K)"))
        outputs, inputs = weight.shape
        for name, vector in (("weight_scale", weight_scale), ("bias", bias)):
            if vector is not None and vector.shape != (outputs,):
                raise ShapeError(message(f"{name} of shape {tuple(vector.shape)}", f"({outputs},)"))
        kept = weight_mask_of(weight_mask, weight)
        if not dynamic and input_scale is None:
            raise ValueRangeError(message("neither input_scale nor dynamic=True", "one of them"))
        grid = _given_grid(input_scale, input_zero_point, input_format, dynamic=dynamic)
        self.dynamic, input_format = dynamic, grid.format
        self.in_features, self.out_features, self.input_format = inputs, outputs, input_format
        self.register_buffer("weight", torch.where(kept, weight.detach(), 0))
        self.register_buffer("weight_scale", weight_scale.detach().float())
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.register_buffer("weight_mask", kept)
        self.register_buffer("input_scale", torch.tensor(grid.scale, dtype=torch.float64))
        self.register_buffer("input_zero_point", torch.tensor(grid.zero_point, dtype=torch.int32))
        self._grid_changed()

    @classmethod
    def from_float(
        cls,
        dense: nn.Linear,
        weight_mask: Tensor | TeSA | None = None,
        *,
        calibration: Tensor | Iterable[Tensor] | None = None,
        input_scale: float | None = None,
        input_zero_point: int = 0,
        input_format: str = "uint8",
        dynamic: bool = False,
    ) -> SparseInt8Linear:
        """Round a trained linear layer to integers: its weight symmetric with one scale per row, its input on one grid.

        Parameters
        ----------
        dense
            The layer; it is not changed.
        weight_mask
            (N, K), bool or 0/1, or a TeSA; None takes the nonzero weights as live.
        calibration
            Inputs (..., K) as they will be in use, one tensor or several: the grid covers all of them.
        input_scale, input_zero_point, input_format
            The grid itself, instead of `calibration`.
        dynamic
            A grid for each token, which needs no calibration.
        """
        if not isinstance(dense, nn.Linear):
            raise ValueRangeError(message(f"a {type(dense).__name__}", "a torch.nn.Linear"))
        if (calibration is not None) + (input_scale is not None) + dynamic != 1:
            given = "several or none of calibration, input_scale and dynamic=True"
            raise ValueRangeError(message(given, "one of them"))
        if calibration is not None:
            covering = _covering(calibration, dense.in_features, input_format)
            input_scale, input_zero_point = covering.scale, covering.zero_point
        real = dense.weight.detach()
        kept = weight_mask_of(weight_mask, real)
        live = torch.where(kept, real, 0.0)
        # A dead row has no largest weight; any scale will do for its zeros.
        largest = live.abs().amax(1) if live.shape[1] else live.new_zeros(len(live))
        scale = torch.where(largest > 0, largest / 127, 1.0)
        integers = (live / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        return cls(
            integers,
            scale,
            dense.bias,
            kept,
            input_scale=input_scale,
            input_zero_point=input_zero_point,
            input_format=input_format,
            dynamic=dynamic,
        )

    def _grid_changed(self) -> None:
        """Read the grid again and run dense: what was tuned has another grid in it."""
        scale, zero = float(self.input_scale), int(self.input_zero_point)
        self._grid = _given_grid(scale, zero, self.input_format, dynamic=self.dynamic)
        self._state: Int8State | None = None
        self.choice = None

    # ------------------------------------------------------------------ running

    def quantize(self, x: Tensor) -> Tensor:
        """Return inputs rounded to the layer's static grid, as 8-bit integers.

        >>> layer = SparseInt8Linear(torch.ones(2, 3, dtype=torch.int8), torch.ones(2), input_scale=0.5)
        >>> layer.quantize(torch.tensor([[0.0, 1.0, 1e9]])).tolist()
        [[0, 2, 255]]
        """
        return self._grid.integers(x.float())

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (..., N), float32, for x (..., K) in real numbers or as integers of its grid."""
        rows, state = self._flat(x), self._state
        if state is None:
            y = self._dense(rows)
        else:
            # A kernel of integers rounds in the same pass.
            given = rows if isinstance(state.forward, Int8Kernel) else self._real(rows)
            y = run_int8_linear(given, self.weight, self.bias, state)
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _flat(self, x: Tensor, what: str = "an input") -> Tensor:
        need_tensors(x=x)
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise ShapeError(message(f"{what} of shape {tuple(x.shape)}", f"(..., {self.in_features})"))
        need_operand(x, self.weight)
        wanted = self._grid.dtype
        if not x.is_floating_point() and (x.dtype != wanted or self.dynamic):
            allowed = "a floating-point dtype" + ("" if self.dynamic else f", or {wanted}")
            raise ValueRangeError(message(f"{what} of {x.dtype}", allowed))
        return x if x.dim() == 2 else x.reshape(-1, self.in_features)

    def _real(self, rows: Tensor) -> Tensor:
        """Return rows as the numbers that their integers stand for."""
        if not rows.is_floating_point():
            return self._grid.real(rows, torch.float32)
        return self._grid.rounded(rows.float())

    def _dense(self, rows: Tensor) -> Tensor:
        grid, token_scales = self._grid, None
        if grid.dynamic:
            rows, token_scales = grid.token_integers(rows)
        elif rows.is_floating_point():
            rows = grid.integers(rows.float())
        # Integers up to 2^53 are exact in float64, and the result is rounded once, as kernels do it.
        sums = ((rows.double() - grid.zero_point) @ self.weight.double().t()).float()
        multiplier, offset = requantization(self.weight_scale, grid.scale, bias=self.bias)
        y = (sums if token_scales is None else sums * token_scales).double() * multiplier.double()
        return (y if offset is None else y + offset.double()).float()

    # ------------------------------------------------------------------ choosing

    def _problem(self, inputs: ExampleInputs, *, backward: bool) -> Problem:
        del backward  # there are no gradients
        rows = self._real(self._flat(as_inputs(inputs, 1)[0].detach(), "an example input"))
        checked, some = rows_to_check(rows)
        expected = self._dense(some).double()
        given = (rows, self.bias, None)
        return Problem(self._spec_for(rows), self.weight, given, expected, max(1, self.in_features), checked=checked)

    def _spec(self, inputs: ExampleInputs, *, backward: bool = False) -> KernelSpec:
        del backward  # there are no gradients
        return self._spec_for(self._flat(as_inputs(inputs, 1)[0], "an example input"))

    def _spec_for(self, rows: Tensor) -> KernelSpec:
        weight = TeSA.from_mask(self.weight_mask).with_format("int8", scale=self.weight_scale.double())
        return int8_linear_spec(weight, len(rows), self._grid, epilogue=Epilogue(bias=self.bias is not None))

    def _install(self, chosen: Sequence[Chosen]) -> None:
        spec, choice = chosen[0]
        self._state = Int8State(spec["weight"], cast("LinearKernel", build(spec, choice.config)))
        self.choice = choice

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the integers, their mask and the grid; another mask or grid undoes what was tuned for the present."""
        before = (self.weight_mask.clone(), self.weight_scale.clone(), self.input_scale.clone())
        zero = int(self.input_zero_point)
        super()._load_from_state_dict(state_dict, prefix, *args)
        now = (self.weight_mask, self.weight_scale, self.input_scale)
        same = all(torch.equal(old, new.to(old.device)) for old, new in zip(before, now, strict=True))
        if not same or zero != int(self.input_zero_point):
            self._grid_changed()

    def extra_repr(self) -> str:
        """Say the sizes, the grid, the mask and what runs."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        grid = f"input {self.input_format}, scale {self._grid.scale:.3g}, zero point {self._grid.zero_point}"
        if self.dynamic:
            grid = f"input {self.input_format}, a scale for each token"
        density = self.weight_mask.float().mean().item() if self.weight_mask.numel() else 0.0
        return f"{sizes}, {grid}, density {density:.3g}, {super().extra_repr()}"


def _given_grid(scale: float | None, zero_point: int, format: str, *, dynamic: bool) -> Quantization:
    if dynamic:
        return Quantization.per_token()
    return Quantization(float("nan") if scale is None else float(scale), int(zero_point), format)


def _covering(calibration: Tensor | Iterable[Tensor], inputs: int, format: str) -> Quantization:
    """Return the integers of a format that cover all values of some inputs, and 0 exactly."""
    least, most = 0.0, 0.0
    for x in [calibration] if isinstance(calibration, Tensor) else calibration:
        if x.dim() < 1 or x.shape[-1] != inputs:
            raise ShapeError(message(f"a calibration input of shape {tuple(x.shape)}", f"(..., {inputs})"))
        if x.numel():
            low, high = torch.aminmax(x.detach())
            least, most = min(least, float(low)), max(most, float(high))
    if not math.isfinite(most - least):
        raise ValueRangeError(message("calibration inputs with NaN or inf", "finite ones"))
    return Quantization.covering(least, most, format)
