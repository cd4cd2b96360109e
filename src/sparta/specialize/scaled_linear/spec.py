"""The operation ``scaled_linear``: ``linear`` with a weight (N, K) that is stored in few bits, with scales.

Bits and scales are those of the weight's TeSA: fp8 (e4m3), int8 or int4, one scale for each row, group of inputs, or
for all. Kernels take x in bf16 or fp16 and pack the real weight, as those of ``linear`` do. Where the spec allows it,
they may also round x to fp8 with one scale for each token, which is what the matrix unit of Hopper multiplies fastest.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.measure.references import linear_reference
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import apply_epilogue
from sparta.tesa.attribute import TeSA
from sparta.tesa.bits import bit_format

__all__ = [
    "FP8",
    "FP8_IMPLEMENTS",
    "LARGEST",
    "OP",
    "codes_of",
    "group_of",
    "reference",
    "rounded_rows",
    "rounded_weight",
    "rounds_inputs",
    "scaled_linear_spec",
    "scaled_weight",
]

OP: Final = "scaled_linear"
FP8: Final = "fp8_e4m3"
LARGEST: Final = {FP8: 448.0, "int8": 127.0, "int4": 7.0}
"""What the largest weight of a group is rounded to, by format."""
FP8_IMPLEMENTS: Final = frozenset({"cuda-24-matrix-fp8", "cuda-block-fp8", "dense-fp8", "triton-block-fp8"})
"""The implements of :data:`OP` that round x to fp8; the others read few bits and multiply in bf16 or fp16."""
_LOWEST = {"int8": -127, "int4": -8}
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)
_TINY = torch.finfo(torch.float32).tiny


def scaled_weight(
    weight: Tensor,
    tesa: TeSA | None = None,
    format: str = FP8,
    *,
    group: int | None = None,
    per_tensor: bool = False,
) -> TeSA:
    """Return the TeSA of a weight with a bit format and the scales that fit its live values.

    Parameters
    ----------
    weight
        (N, K) of real numbers.
    tesa
        What is known of it; all of it is live if not given. A live weight that is rounded to 0 stays live.
    format
        ``'fp8_e4m3'``, ``'int8'`` or ``'int4'``.
    group
        How many neighbouring inputs share a scale; a whole row if not given.
    per_tensor
        Whether there is one scale for all.

    Examples
    --------
    >>> scaled = scaled_weight(torch.tensor([[1.0, -2.0], [4.0, 0.5]]), format="int8")
    >>> [round(127 * scale, 4) for scale in scaled.scale.dense()[:, 0].tolist()]
    [2.0, 4.0]
    """
    known = tesa or TeSA.dense(weight.shape)
    if format not in LARGEST:
        raise NameNotFoundError(did_you_mean(format, LARGEST, "format of a scaled weight"))
    if weight.dim() != 2 or tuple(weight.shape) != tuple(known.shape):
        given = f"a weight of shape {tuple(weight.shape)} with what is known of {tuple(known.shape)}"
        raise ShapeError(message(given, "(N, K), both of the same shape"))
    if group is not None and (group < 1 or per_tensor):
        raise ValueRangeError(
            message(f"groups of {group} with per_tensor={per_tensor}", "a group of 1 or more, or one")
        )
    live = known.apply(weight.detach().float()).abs()
    live = torch.where(live.isfinite(), live, 0.0)
    if per_tensor:
        largest = live.max().cpu().reshape(()) if live.numel() else torch.zeros(())
        return known.with_format(format, scale=_scales(largest, format).item())
    size = min(group or weight.shape[1], weight.shape[1]) or 1
    padded = torch.nn.functional.pad(live, (0, -weight.shape[1] % size))
    largest = torch.unflatten(padded, 1, (-1, size)).amax(2) if padded.numel() else padded.new_zeros(weight.shape[0], 1)
    return known.with_format(format, scale=_scales(largest.cpu(), format), group=size)


def _scales(largest: Tensor, format: str) -> Tensor:
    """Return positive scales, which float32 holds exactly; 1 where there is nothing to scale."""
    scales = (largest.double() / LARGEST[format]).float()
    return torch.where(scales >= _TINY, scales, 1.0).double()


def group_of(weight: TeSA) -> int:
    """Return how many neighbouring inputs of a scaled weight (N, K) share a scale; K where all of a row do.

    >>> group_of(scaled_weight(torch.randn(4, 256), format="int4", group=64))
    64
    """
    if not bool((weight.zero_point.cells == 0).all()):
        raise ValueRangeError(message("a weight with zero points", "a scaled weight has none: its grid is symmetric"))
    if not bool(weight.scale.cells.isfinite().all()):
        raise ValueRangeError(message("a weight without scales", fix="make them with scaled_weight"))
    rows, inputs = weight.scale.block
    if rows not in {1, max(1, weight.shape[0])}:
        raise ValueRangeError(message(f"a scale for {rows} rows", "one for each row, or one for all"))
    return inputs


def _format_of(tesa: TeSA) -> str:
    """Return the bit format of a scaled weight; a weight of which nothing is live has none, and any will do."""
    format = FP8 if not tesa.count("live") else str(tesa.format)
    if format not in LARGEST:
        raise NameNotFoundError(did_you_mean(format, LARGEST, "format of a scaled weight"))
    return format


def codes_of(weight: Tensor, tesa: TeSA) -> tuple[Tensor, Tensor]:
    """Return a weight as it is stored: codes (N, K), float8_e4m3fn or int8, and scales (N, groups), float32.

    A weight that lies on its grid is found again exactly; others are rounded to the nearest, and saturate. In fp8, what
    is not finite becomes NaN; integers refuse it.

    Examples
    --------
    >>> weight = torch.tensor([[1.0, -7.0], [14.0, 3.8]])
    >>> codes, scales = codes_of(weight, scaled_weight(weight, format="int4"))
    >>> codes.tolist(), scales.tolist()
    ([[1, -7], [7, 2]], [[1.0], [2.0]])
    """
    format, size = _format_of(tesa), group_of(tesa)
    if tuple(weight.shape) != tuple(tesa.shape):
        raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{tuple(tesa.shape)}, as it was scaled"))
    rows, inputs = weight.shape
    groups = -(-inputs // size)
    scales = tesa.scale.cells.to(weight.device, torch.float32).expand(rows, groups)
    real = tesa.apply(weight.detach().float())
    exact = real / scales.repeat_interleave(size, 1)[:, :inputs]
    if format == FP8:
        clamped = exact.clamp(-LARGEST[FP8], LARGEST[FP8])
        return torch.where(real.isfinite(), clamped, torch.nan).to(torch.float8_e4m3fn), scales
    if not bool(real.isfinite().all()):
        raise ValueRangeError(message(f"a weight that is not finite in {format}", "finite numbers", "use fp8 or bf16"))
    return exact.round().clamp(_LOWEST[format], LARGEST[format]).to(torch.int8), scales


def rounded_weight(weight: Tensor, tesa: TeSA) -> Tensor:
    """Return the real numbers (N, K), float32, that the codes of a weight stand for.

    >>> weight = torch.tensor([[1.3, -7.0]])
    >>> rounded_weight(weight, scaled_weight(weight, format="int4")).tolist()
    [[1.0, -7.0]]
    """
    codes, scales = codes_of(weight, tesa)
    return codes.float() * scales.repeat_interleave(group_of(tesa), 1)[:, : weight.shape[1]]


def rounded_rows(x: Tensor, scale: float | None = None) -> Tensor:
    """Return x (..., K) on the grid that fp8 kernels round it to, in its own dtype: the simulation of their inputs.

    Parameters
    ----------
    scale
        Of all rows; that of each row is its largest element / 448 if not given.

    Examples
    --------
    >>> rounded_rows(torch.tensor([[448.0, 100.0]])).tolist()
    [[448.0, 96.0]]
    """
    codes, scales = fp8_rows(x, scale)
    return (codes.float() * scales).to(x.dtype)


def fp8_rows(x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return x (..., K) as float8_e4m3fn, row by row in memory, and the scales (..., 1), float32.

    See :func:`rounded_rows`.
    """
    real = x.float()
    if scale is None:
        most = real.abs().amax(-1, keepdim=True) if x.shape[-1] else real.new_zeros(*x.shape[:-1], 1)
        scales = torch.where(most < _TINY * LARGEST[FP8], 1.0, most / LARGEST[FP8])
    else:
        scales = real.new_full((*x.shape[:-1], 1), scale)
    exact = real / scales
    codes = torch.where(real.isfinite(), exact.clamp(-LARGEST[FP8], LARGEST[FP8]), torch.nan)
    return codes.to(torch.float8_e4m3fn).contiguous(), scales


def scaled_linear_spec(
    weight: TeSA,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    activations: str | None = None,
    input_scale: float | None = None,
    epilogue: Epilogue | None = None,
    device: str = "cuda",
) -> KernelSpec:
    """Return the kernel spec of a linear operator with a scaled weight.

    Parameters
    ----------
    weight
        TeSA (N, K) with bits and scales, as :func:`scaled_weight` makes it.
    rows
        The M that is measured; any other M runs as well.
    dtype
        Of x and of the result.
    activations
        ``'fp8_e4m3'`` if kernels may round x to it; None if x must stay as it is.
    input_scale
        One scale for all of x, from calibration; each token gets its own if not given.

    Examples
    --------
    >>> spec = scaled_linear_spec(scaled_weight(torch.randn(8, 4)), 16, activations="fp8_e4m3")
    >>> str(spec["weight"].format), rounds_inputs(spec)
    ('fp8_e4m3', True)
    """
    if activations not in {None, FP8}:
        raise NameNotFoundError(did_you_mean(str(activations), [FP8], "format of activations"))
    if dtype not in _INPUTS:
        raise ValueRangeError(message(f"inputs in {dtype}", "bfloat16, float16 or float32"))
    if input_scale is not None and (activations is None or not 0 < input_scale < float("inf")):
        given = f"input_scale={input_scale} with activations={activations}"
        raise ValueRangeError(message(given, f"a positive number, with activations={FP8!r}"))
    return KernelSpec(
        OP,
        {"input": TeSA.dense((rows, weight.shape[1]), format=dtype, dynamic=[0]), "weight": weight},
        epilogue=epilogue or Epilogue(),
        attributes={"activations": activations, "group": group_of(weight), "input_scale": input_scale},
        device=device,
    )


def rounds_inputs(spec: KernelSpec) -> bool:
    """Return whether kernels may round x to fp8."""
    return bool(spec.attributes["activations"] == FP8)


def reference(
    spec: KernelSpec, weight: Tensor, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return the right result (M, N) in float64 for x (M, K) as it is given: the reference of all kernels.

    Where kernels round x, it is theirs for an x that :func:`rounded_rows` has put on the grid.

    Examples
    --------
    >>> weight = torch.tensor([[448.0, 100.0]])
    >>> spec = scaled_linear_spec(scaled_weight(weight), 1, torch.float32)
    >>> reference(spec, weight, torch.ones(1, 2)).item()
    544.0
    """
    dtype = bit_format(spec["input"].format).dtype
    if x.dtype != dtype:
        raise ValueRangeError(message(f"an input in {x.dtype}", f"{dtype}, as the spec says", "cast it"))
    y = linear_reference(x, rounded_weight(weight, spec["weight"]).double(), bias)
    return apply_epilogue(y, spec.epilogue, None if residual is None else residual.double())
