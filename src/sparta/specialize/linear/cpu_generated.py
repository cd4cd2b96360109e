"""Generated kernels as an implement: ``cpu-generated`` for small layers and few tokens.

:class:`GeneratedLinear` compiles what :mod:`~sparta.specialize.linear.cpu_generate` writes for one mask. Its code grows
with the live weights and is compiled for each mask, so it is offered for small layers only, and competes there by
measurement like any other.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.errors import ShapeError, SpartaError, ValueRangeError, message
from sparta.specialize.cpu.device import compiles_here, runs_here
from sparta.specialize.cpu.library import PANEL_CALL, activation_code, fused_activation, load
from sparta.specialize.cpu.toolchain import build, chosen_isa
from sparta.specialize.implement import Cause, Implement, Params, Support, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cpu_generate import Generated, generate
from sparta.specialize.linear.spec import LinearKernel

__all__ = ["CpuGenerated", "GeneratedLinear"]

_ISAS = ("avx512", "avx2")
_MOST_LIVE = 100_000
_MOST_TOKENS = 16


class GeneratedLinear:
    """A linear layer's mask, compiled.

    Parameters
    ----------
    mask
        (N, K) bool, True = live.
    isa
        ``'avx512'`` or ``'avx2'``; ``None`` for the best.

    Examples
    --------
    >>> mask = torch.eye(3, dtype=torch.bool)
    >>> layer = GeneratedLinear(mask)  # doctest: +SKIP
    >>> layer(torch.ones(2, 3), layer.pack(torch.eye(3)))  # doctest: +SKIP
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """

    def __init__(self, mask: Tensor, *, isa: str | None = None) -> None:
        chosen = chosen_isa(isa)
        if chosen not in _ISAS or not _is_linux_on_x86():
            given = f"generated code for {chosen} on {sys.platform} {platform.machine()}"
            raise ValueRangeError(message(given, f"{' and '.join(_ISAS)} on Linux, x86-64"))
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ShapeError(message(f"a mask of shape {tuple(mask.shape)} and {mask.dtype}", "bool (N, K)"))
        code = generate(mask.cpu().numpy(), chosen)
        self.shape, self._positions = (mask.shape[0], mask.shape[1]), torch.from_numpy(code.positions)
        self._library, self._groups = load(chosen), _groups(code, chosen)

    def pack(self, weight: Tensor) -> Tensor:
        """Return the live values of a weight (N, K) in the order of the instructions."""
        if tuple(weight.shape) != self.shape:
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{self.shape}, as when compiled"))
        return weight.detach().to("cpu", torch.float32).reshape(-1)[self._positions].contiguous()

    def __call__(
        self,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Return ``activation(x W^T + bias) + residual`` for x (M, K); `values` are what :meth:`pack` returned."""
        outputs, inputs = self.shape
        rows = _floats(x, "x", (len(x), inputs))
        added = None if residual is None else _floats(residual, "residual", (len(x), outputs))
        shift = None if bias is None else _floats(bias, "bias", (outputs,))
        values = _floats(values, "values", (len(self._positions),))
        y = torch.empty(len(x), outputs)
        call = PANEL_CALL.pack(
            rows.data_ptr(),
            y.data_ptr(),
            len(x),
            inputs,
            outputs,
            0 if shift is None else shift.data_ptr(),
            0 if added is None else added.data_ptr(),
            outputs,
            activation_code(activation),
            torch.get_num_threads() if threads is None else threads,
            *(False, False),  # token-major at both ends
        )
        self._library.multiply_generated(self._groups, self.shape, values.data_ptr(), call)
        return y if x.dtype == torch.float32 else y.to(x.dtype)


class _GeneratedKernel(LinearKernel):
    def __init__(self, spec: KernelSpec) -> None:
        self._layer = GeneratedLinear(spec["weight"].mask("cpu"))
        self._activation = fused_activation(spec.epilogue)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (self._layer.pack(operand),)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (x,) = present(inputs[0])
        return self._layer(x, packed[0], inputs[1], self._activation, inputs[2])


class CpuGenerated(Implement):
    """Code generated for the mask, its indices part of the instructions."""

    name = "cpu-generated"
    op = "linear"
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Small layers for a few tokens, where code for x86-64 can be compiled."""
        for answer in (runs_here(spec), compiles_here()):
            if not answer:
                return answer
        if not _is_linux_on_x86() or chosen_isa() not in _ISAS:
            return Support.no(f"code is generated for {' and '.join(_ISAS)} on Linux only", Cause.CAPABILITY)
        if spec["weight"].count("live") > _MOST_LIVE:
            given = f"{spec['weight'].count('live')} live weights"
            return Support.no(f"{given}, more than the {_MOST_LIVE} code is made for", Cause.SHAPE)
        if not 1 < spec["input"].shape[0] <= _MOST_TOKENS:
            given = f"{spec['input'].shape[0]} rows"
            return Support.no(f"{given}, where generated code pays for 2 to {_MOST_TOKENS}", Cause.SHAPE)
        return Support.yes("code for this mask")

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Generate and compile."""
        del params
        return _GeneratedKernel(spec)


def _is_linux_on_x86() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _groups(code: Generated, isa: str) -> ctypes.Array[ctypes.c_int64]:
    """Return the table of compiled functions: for each its address, its first row and its first value."""
    path = build(isa, code.source)
    try:
        return (ctypes.c_int64 * (3 * code.groups)).in_dll(ctypes.CDLL(str(path)), "sparta_groups")
    except (OSError, ValueError) as error:
        given = f"the generated kernel does not load: {error}"
        raise SpartaError(message(given, fix=f"delete {path} to build it again")) from error


def _floats(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor as contiguous float32."""
    if tuple(tensor.shape) != shape or not tensor.is_floating_point() or not tensor.is_cpu:
        given = f"{name} of shape {tuple(tensor.shape)} and {tensor.dtype} on {tensor.device}"
        raise ShapeError(message(given, f"{shape}, a float dtype, on cpu"))
    return tensor.detach().resolve_neg().to(torch.float32).contiguous()
