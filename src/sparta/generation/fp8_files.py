"""Layers in fp8 in files of language models: a byte per live weight, a scale per output, a bit per element of a mask.

What is stored are the codes that kernels multiply, so a loaded model computes what the saved one did, on any device:
where a kernel in fp8 does not run, the layer multiplies the real numbers that the codes stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparta.errors import FileFormatError, message
from sparta.files import Budget
from sparta.generation.layers import SparseLayer, weight_of
from sparta.specialize.scaled_linear.spec import FP8, OP, codes_of
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.mask_bits import pack_bits, unpack_bits

__all__ = ["fp8_fields", "fp8_weight", "is_fp8"]


def is_fp8(module: object) -> bool:
    """Whether a module is a layer whose weight is in fp8."""
    return isinstance(module, SparseLayer) and module.kernel.fused.op == OP


def fp8_fields(name: str, layer: SparseLayer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what a layer in fp8 is, and put its tensors among the others."""
    tesa = layer.kernel.fused.weight
    codes, scales = codes_of(weight_of(layer), tesa)
    mask = tesa.mask(codes.device)
    tensors[f"fp8/{name}/codes"] = codes.view(torch.uint8)[mask].cpu()
    tensors[f"fp8/{name}/scales"] = scales[:, 0].contiguous().cpu()
    if tesa.density < 1:
        tensors[f"fp8/{name}/mask"] = pack_bits(mask).cpu()
    return {"shape": list(tesa.shape), "pruned": tesa.density < 1}


def fp8_weight(
    name: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], shape: tuple[int, int], budget: Budget
) -> tuple[Tensor, TeSA]:
    """Return the real weight (N, K), float32, of a layer in fp8, and what is known of it.

    Parameters
    ----------
    shape
        What the model says of it.
    budget
        What tensors of the file may take.

    Raises
    ------
    sparta.errors.FileFormatError
        If the tensors are not those of such a weight.
    """
    if tuple(int(size) for size in fields["shape"]) != shape:
        raise FileFormatError(message(f"a weight of {fields['shape']} for {name}", f"{shape}", "save it again"))
    budget.take(shape, 4, f"the weight of {name}")
    codes, scales = tensors[f"fp8/{name}/codes"], tensors[f"fp8/{name}/scales"]
    mask = torch.ones(shape, dtype=torch.bool)
    if fields["pruned"]:
        bits = tensors[f"fp8/{name}/mask"]
        if bits.shape != (shape[0], -(-shape[1] // 8)) or bits.dtype != torch.uint8:
            raise FileFormatError(message(f"a mask of {tuple(bits.shape)} for {name}", f"one bit each of {shape}"))
        mask = unpack_bits(bits, shape[1])
    live = int(mask.count_nonzero())
    fits = codes.shape == (live,) and codes.dtype == torch.uint8 and scales.shape == (shape[0],)
    if not fits or scales.dtype != torch.float32 or not bool((scales.isfinite() & (scales > 0)).all()):
        given = f"{codes.numel()} codes and {scales.numel()} scales for {name}"
        raise FileFormatError(message(given, f"{live} bytes, and {shape[0]} positive numbers", "save it again"))
    real = torch.zeros(shape)
    real[mask] = codes.view(torch.float8_e4m3fn).float()
    known = TeSA.from_mask(mask) if fields["pruned"] else TeSA.dense(shape)
    tesa = known.with_format(FP8, scale=scales.double()[:, None], group=shape[1])
    return real * scales[:, None], tesa
