"""What the CUDA device and its tools can do: whether Triton kernels run here, or why not."""

from __future__ import annotations

import functools
import importlib.util

import torch

from sparta.errors import MissingPackageError, message

__all__ = ["need_triton", "obstacle"]

_AMPERE = (8, 0)


def need_triton() -> None:
    """Raise unless Triton is installed.

    >>> need_triton()  # doctest: +SKIP
    """
    if importlib.util.find_spec("triton") is None:
        raise MissingPackageError(message("Triton is not installed", fix="pip install triton"))


@functools.cache
def obstacle() -> str:
    """Return why no Triton kernel can run here; empty when one can.

    >>> isinstance(obstacle(), str)
    True
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return "" if torch.cuda.get_device_capability() >= _AMPERE else "it needs a GPU of compute capability 8.0 or more"
