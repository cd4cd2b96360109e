"""Pack the linear layers of a language model, and put a decode program or packed layers in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from sparta.compiler.plan import LayerPlan
from sparta.generation.decoder import Decoder
from sparta.generation.layers import is_linear, weight_of
from sparta.generation.matrices import PackedMatrix, best_form, packed
from sparta.generation.model import GenerativeModel
from sparta.generation.packed_linear import PackedLinear
from sparta.generation.program import DecodeProgram
from sparta.modules import replace_module
from sparta.specialize.cpu.library import load
from sparta.specialize.tuning.select import DENSE, Choice
from sparta.tesa.attribute import TeSA

__all__ = ["balanced", "packed_layers", "program_plans", "put_program"]

_FORMS = {"dense": DENSE, "bitmap": "decode bitmap", "columns": "decode columns"}


def put_program(
    model: GenerativeModel, decoder: Decoder, masks: Mapping[str, Tensor], *, int8: bool
) -> dict[str, PackedMatrix]:
    """Pack a decoder's layers in place, and let a decode program run its steps; return the matrices by name."""
    matrices: dict[str, PackedMatrix] = {}
    for block in decoder.blocks:
        names = block.linears
        halves = [names["gate_proj"], names["up_proj"]]
        form = _common_form([masks.get(name) for name in halves], int8=int8)
        for name in names.values():
            matrices[name] = _packed(model, name, masks, int8=int8, form=form if name in halves else None)
        matrices.update(zip(halves, balanced([matrices[name] for name in halves]), strict=True))
    matrices[decoder.head] = _packed(model, decoder.head, masks, int8=int8, form=None)
    for name, matrix in matrices.items():
        replace_module(model, name, PackedLinear(matrix))
    model._sparta.program = DecodeProgram(decoder, matrices)
    return matrices


def packed_layers(model: nn.Module, masks: Mapping[str, Tensor], *, int8: bool) -> dict[str, PackedMatrix]:
    """Pack all linear layers of a model in place, for its own code to run; return the matrices by name."""
    names = [name for name, module in model.named_modules() if is_linear(module)]
    matrices = {name: _packed(model, name, masks, int8=int8, form=None) for name in names}
    for name, matrix in matrices.items():
        replace_module(model, name, PackedLinear(matrix))
    return matrices


def balanced(halves: list[PackedMatrix]) -> list[PackedMatrix]:
    """Return matrices of one form with the sum of their costs, so that threads get the same rows of each."""
    total = cast("Tensor", sum(half.costs for half in halves))
    return [replace(half, costs=total) for half in halves]


def program_plans(matrices: Mapping[str, PackedMatrix], masks: Mapping[str, Tensor]) -> list[LayerPlan]:
    """Return what a report says of packed layers."""
    plans = []
    for name, matrix in matrices.items():
        tesa = TeSA.from_mask(masks[name]) if name in masks else TeSA.dense(matrix.shape)
        kind = "int8" if matrix.scales is not None else "fp32"
        per_weight = matrix.nbytes / max(1, matrix.shape[0] * matrix.shape[1])
        reason = f"{per_weight:.2f} bytes per weight, {kind}"
        form = _FORMS[matrix.form.partition(":")[0]]
        choice = Choice(form, {"form": matrix.form, "values": kind} if form != DENSE else {}, reason)
        flops = 2 * tesa.numel
        plans.append(
            LayerPlan(
                name,
                "linear",
                tesa.describe_pattern(),
                tesa.density,
                matrix.shape,
                {1: choice},
                flops,
                2 * tesa.count("live"),
            )
        )
    return plans


def _packed(model: nn.Module, name: str, masks: Mapping[str, Tensor], *, int8: bool, form: str | None) -> PackedMatrix:
    layer: Any = model.get_submodule(name)
    weight = weight_of(layer)
    mask = masks.get(name)
    return packed(weight, mask, getattr(layer, "bias", None), int8=int8, form=form or _form(mask, int8=int8))


def _form(mask: Tensor | None, *, int8: bool) -> str:
    """Return the form of a matrix by itself; without a mask, a few zeros do not count."""
    if mask is None:
        return "dense"
    return best_form(mask, 1 if int8 else 4, expands=int8 and load().byte_products)


def _common_form(masks: list[Tensor | None], *, int8: bool) -> str:
    """Return one form for several matrices: their own if it is the same, else a bitmap, else dense."""
    forms = {_form(mask, int8=int8) for mask in masks}
    if len(forms) == 1:
        return forms.pop()
    return "bitmap" if "dense" not in forms else "dense"
