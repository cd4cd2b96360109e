"""What CUDA devices here can do, and which bit formats kernels take: the only place that asks the hardware."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Collection

import torch

from sparta.errors import MissingPackageError, message
from sparta.specialize.implement import Cause, Support
from sparta.specialize.kernel_spec import KernelSpec
from sparta.tesa.bits import BitFormat, bit_format

__all__ = [
    "AMPERE",
    "FORMATS",
    "HALF_FORMATS",
    "HOPPER",
    "bulk_copies",
    "capability",
    "cuda_here",
    "itemsize",
    "need_triton",
    "on_cuda",
    "takes",
    "triton_here",
]

AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities by the names of their generations."""
FORMATS = ("fp32", "bf16", "fp16")
"""The bit formats that Triton kernels take."""
HALF_FORMATS = {name: dtype for name in ("bf16", "fp16") if (dtype := bit_format(name).dtype) is not None}
"""The bit formats that kernels in CUDA C++ take, and their dtypes."""


def need_triton() -> None:
    """Raise unless Triton is installed.

    >>> need_triton()  # doctest: +SKIP
    """
    if not _has_triton():
        raise MissingPackageError(message("Triton is not installed", fix="pip install triton"))


@functools.cache
def capability(device: torch.device | None = None) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, of the current one if none is given; (0, 0) without CUDA.

    >>> capability() >= (0, 0)
    True
    """
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def bulk_copies() -> bool:
    """Return whether the device has the bulk copy engine.

    >>> isinstance(bulk_copies(), bool)
    True
    """
    return capability() >= HOPPER


def itemsize(format: BitFormat | str | None) -> int:
    """Return the bytes of one number of a bit format.

    >>> itemsize("bf16")
    2
    """
    return bit_format(format).bits // 8


def on_cuda(device: str) -> Support:
    """Say whether a kernel spec is for CUDA.

    >>> on_cuda("cpu").reason
    'it runs on CUDA, not on cpu'
    """
    return Support.yes() if device == "cuda" else Support.no(f"it runs on CUDA, not on {device}", Cause.DEVICE)


def takes(spec: KernelSpec, formats: Collection[str], operand: str = "input") -> Support:
    """Say whether a spec is for CUDA with an operand in one of these formats.

    >>> from sparta.tesa.attribute import TeSA
    >>> takes(KernelSpec("linear", {"input": TeSA.dense((1, 1), format="fp64")}, device="cuda"), FORMATS).reason
    'it computes fp32, bf16, fp16, not fp64'
    """
    if spec.device != "cuda":
        return on_cuda(spec.device)
    if str(spec[operand].format) not in formats:
        return Support.no(f"it computes {', '.join(formats)}, not {spec[operand].format}", Cause.DTYPE)
    return Support.yes()


def cuda_here(least: tuple[int, int] = AMPERE, device: torch.device | None = None) -> Support:
    """Say whether there is a CUDA device of this compute capability or more.

    >>> isinstance(cuda_here(), Support)
    True
    """
    if not torch.cuda.is_available():
        return Support.no("there is no CUDA device", Cause.DEVICE)
    if capability(device) < least:
        return Support.no(f"it needs a GPU of compute capability {least[0]}.{least[1]} or more", Cause.CAPABILITY)
    return Support.yes()


def triton_here() -> Support:
    """Say whether a Triton kernel can run here.

    >>> isinstance(triton_here(), Support)
    True
    """
    if not _has_triton():
        return Support.no("Triton is not installed: pip install triton", Cause.MISSING_TOOL)
    return cuda_here()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
