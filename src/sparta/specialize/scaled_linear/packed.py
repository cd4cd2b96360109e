"""What CUDA kernels share that read a weight in few bits and multiply in bf16 or fp16: formats, codes and scales.

``native/few_bits.cuh`` widens values in registers; what it cannot do there is done here once, when a weight is packed:
integers become sign and magnitude, the rest of a power of two goes into the scales, and an output with a NaN among its
weights gets NaN as its scale.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import torch
from torch import Tensor

from sparta.errors import SpartaError
from sparta.specialize.cuda.device import HALF_FORMATS, takes
from sparta.specialize.implement import Cause, Support
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.scaled_linear.spec import FP8, codes_of, group_of
from sparta.tesa.attribute import TeSA

__all__ = ["FORMAT_NUMBERS", "packed_codes", "row_scales", "takes_scaled"]

FORMAT_NUMBERS: Final = {FP8: 1, "int8": 2, "int4": 3}
"""FORMAT of the CUDA sources."""


def takes_scaled(spec: KernelSpec, formats: Collection[str], *, groups: int = 0) -> Support:
    """Say whether a spec is for CUDA in bf16 or fp16 with a weight in one of these formats and scales that fit.

    Parameters
    ----------
    groups
        Scales may be those of groups of a multiple of so many inputs; 0: of whole rows only.
    """
    answer = takes(spec, HALF_FORMATS)
    if not answer:
        return answer
    weight = spec["weight"]
    if str(weight.format) not in formats:
        return Support.no(f"it reads {', '.join(formats)}, not {weight.format}", Cause.DTYPE)
    if min(weight.shape) < 1:
        return Support.no("the weight is empty", Cause.SHAPE)
    try:
        size = group_of(weight)
    except SpartaError as error:
        return Support.no(str(error), Cause.DTYPE)
    if size < weight.shape[1] and (not groups or size % groups):
        allowed = f"multiples of {groups}, or whole rows" if groups else "whole rows"
        return Support.no(f"scales of groups of {size} inputs; it takes {allowed}", Cause.DTYPE)
    return Support.yes()


def row_scales(codes: Tensor, scales: Tensor) -> Tensor:
    """Return scales (N, groups), NaN in each group of a row that has a NaN among its codes (N, K).

    >>> codes = torch.tensor([[1.0, torch.nan], [2.0, 3.0]]).to(torch.float8_e4m3fn)
    >>> row_scales(codes, torch.ones(2, 1)).tolist()
    [[nan], [1.0]]
    """
    if not codes.is_floating_point():
        return scales
    broken = (codes.view(torch.uint8) & 0x7F == 0x7F).any(1, keepdim=True)
    return torch.where(broken, torch.nan, scales)


def packed_codes(weight: Tensor, tesa: TeSA, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes (N, K) of 8 bits as the kernels store them, and scales (N, groups) with their power of two.

    Int8 becomes sign and magnitude, int4 stays; so do the bits of fp8, but for NaN, which becomes 0.

    Parameters
    ----------
    dtype
        In which they are multiplied.

    Examples
    --------
    >>> from sparta.specialize.scaled_linear.spec import scaled_weight
    >>> weight = torch.tensor([[127.0, -1.0]])
    >>> packed_codes(weight, scaled_weight(weight, format="int8"), torch.bfloat16)[0].tolist()
    [[127, 129]]
    """
    codes, scales = codes_of(weight, tesa)
    format = str(tesa.format)
    if format == FP8:
        bits = codes.view(torch.uint8)
        return torch.where(bits & 0x7F == 0x7F, 0, bits), row_scales(codes, scales)
    if format == "int4":
        return codes, scales
    signed = torch.where(codes < 0, codes.abs() | -128, codes).view(torch.uint8)
    return signed, scales * (2.0**9 if dtype == torch.float16 else 2.0**13)
