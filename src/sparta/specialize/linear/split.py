"""Split: an irregular weight runs as a sum of regular ones, ``W = W1 + W2 (+ W3)``, each by a kernel that suits it.

The transformation policy of :mod:`sparta.tesa.cover`, and of N:M parts, as one more implement of ``linear``: it takes
the weight apart, builds a registered kernel for every part, and chains them. A part adds its product to what the parts
before it left, as its residual, so bias, activation and the caller's residual come in once and no part is stored on its
own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.common.tuning import TunableItemCfg
from sparta.errors import ValueRangeError, message
from sparta.specialize.implement import (
    Cause,
    Implement,
    Kernel,
    KernelLayout,
    Params,
    Support,
    implement_named,
    implements_of,
    present,
)
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import LinearKernel, apply_epilogue
from sparta.tesa.attribute import TeSA
from sparta.tesa.bits import bit_format
from sparta.tesa.cover import block_cover
from sparta.tesa.patterns import NM, Unstructured

__all__ = ["Part", "SplitLinear", "parts_of"]

_WAYS = {"cpu": ("4x1+1x1", "16x16+1x1", "16x16+4x1+1x1"), "cuda": ("2:4+1x1", "32x32+1x1")}
_BLOCK_COST = 0.55  # of an element in a block, where an element on its own costs 1: blocks run about twice as fast
_LEAST_SHARE = 0.1  # of the live weights in every part but the last; with less, the second pass is not paid for
_SMALLEST = 2**14  # elements of a weight; below, starting a second kernel costs more than it can save
_SAMPLE = 2**18  # elements of a weight that plans are made from, about: all of a large one would take a second
_BAND = 16  # rows that stay together in a sample, as high as blocks are
_MOST_KERNELS = 2  # implements that are tried for each part
_IRREGULAR = str(Unstructured())
_PREFERRED = ("cpu", "triton-block", "cuda-24", "cuda-24-matrix", "cusparselt")
_NOT_FOR_PARTS = ("dense", "split")  # dense takes as long for a part as for the whole


@dataclass(frozen=True, eq=False)
class Part:
    """One regular part of a weight.

    Parameters
    ----------
    name
        Its pattern as a way spells it: ``"4x1"``, ``"2:4"``.
    tesa
        Of the weight's shape: live in all of its blocks.
    owned
        bool of that shape: the live weights of the whole that this part holds; each is in exactly one part.
    """

    name: str
    tesa: TeSA
    owned: Tensor


@lru_cache(maxsize=4)
def parts_of(weight: TeSA, way: str) -> tuple[Part, ...]:
    """Return a weight taken apart; parts that nothing falls into are left out.

    Parameters
    ----------
    weight
        (N, K).
    way
        Patterns joined by ``+``: first an optional ``N:M``, which takes the first live ones of each group, then blocks
        ``HxW``, which share the rest by weighted cover, ``1x1`` taking what no block is worth.

    Examples
    --------
    >>> mask = torch.zeros(8, 4, dtype=torch.bool)
    >>> mask[:4, 0] = mask[6, 2] = True
    >>> [(part.name, int(part.owned.sum())) for part in parts_of(TeSA.from_mask(mask), "4x1+1x1")]
    [('4x1', 4), ('1x1', 1)]
    """
    first, blocks = _parsed(way)
    rest, parts = weight.mask(), []
    if first is not None:
        owned = first.project(rest.float()) & rest
        parts.append(Part(str(first), TeSA.from_mask(owned), owned))
        rest = rest & ~owned
    costs = {block: math.prod(block) * (1.0 if block == (1, 1) else _BLOCK_COST) for block in blocks}
    fitting = {
        block: cost for block, cost in costs.items() if all(b <= s for b, s in zip(block, rest.shape, strict=True))
    }
    for covered in block_cover(rest, fitting or {(1, 1): 1.0}).parts:
        height, width = covered.block
        parts.append(Part(f"{height}x{width}", covered.tesa, covered.owned))
    return tuple(part for part in parts if bool(part.owned.any()))


def _parsed(way: str) -> tuple[NM | None, list[tuple[int, int]]]:
    first, blocks = None, []
    for number, name in enumerate(way.split("+")):
        sides = name.split(":" if ":" in name else "x")
        if len(sides) != 2 or not all(side.isdigit() and int(side) for side in sides) or (number and ":" in name):
            raise ValueRangeError(message(f"the way {way!r}", "one N:M and then blocks, as in '2:4+4x1+1x1'"))
        if ":" in name:
            first = NM(int(sides[0]), int(sides[1]))
        else:
            blocks.append((int(sides[0]), int(sides[1])))
    return first, blocks or [(1, 1)]


class _SplitKernel(LinearKernel):
    def __init__(self, spec: KernelSpec, parts: Sequence[Part], kernels: Sequence[Kernel]) -> None:
        self._owned, self._kernels, self._epilogue = [part.owned for part in parts], kernels, spec.epilogue
        dtype = bit_format(spec["input"].format).dtype
        nothing = torch.zeros((), dtype=dtype, device=spec.device).expand(spec["weight"].shape)
        self._counts = [len(kernel.pack(nothing)) for kernel in kernels]

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        zero = torch.zeros((), dtype=operand.dtype, device=operand.device)
        packed: list[Tensor] = []
        for owned, kernel in zip(self._owned, self._kernels, strict=True):
            packed += kernel.pack(torch.where(owned.to(operand.device), operand.detach(), zero))
        return tuple(packed)

    def layout(self) -> KernelLayout | None:
        parts = [kernel.layout() for kernel in self._kernels]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        arrays = {f"{n}.{name}": array for n, part in enumerate(known) for name, array in part.arrays.items()}
        launch = {"parts": [dict(part.launch) for part in known]}
        return KernelLayout(arrays, launch, sum(part.nbytes for part in known))

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (x,), bias, residual = present(inputs[0]), inputs[1], inputs[2]
        activated = self._epilogue.activation is not None
        y, last, at = None if activated else residual, len(self._kernels) - 1, 0
        for number, (kernel, count) in enumerate(zip(self._kernels, self._counts, strict=True)):
            y = kernel.run(packed[at : at + count], x, bias if number == last else None, y)
            at += count
        (result,) = present(y)
        return apply_epilogue(result, self._epilogue, residual) if activated else result


class SplitLinear(Implement):
    """A sum of regular parts, each by another implement with its default parameters, or with those that are given."""

    name = "split"
    op = "linear"
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Take an irregular weight of some size, with enough of it in blocks or N:M, and a kernel for every part."""
        answer = _may_pay(spec)
        if not answer:
            return answer
        plans = _plans(spec)
        if not plans:
            return Support.no("no way to split leaves two parts that are worth a kernel and have one", Cause.PATTERN)
        return Support.yes(f"a sum of regular parts: {plans[0]}")

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the ways to split and the kernels for their parts."""
        return {"plan": TunableItemCfg("choice", _value=list(_plans(spec)))}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the first plan."""
        return {"plan": _plans(spec)[0]}

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Build a kernel for each part; ``params`` may hold their parameters, by the part's name, beside the plan."""
        wanted = dict(_plan_items(str(params["plan"])))
        parts = parts_of(spec["weight"], "+".join(wanted))
        kernels = []
        for number, part in enumerate(parts):
            part_spec = _part_spec(spec, part, first=number == 0, last=number == len(parts) - 1)
            implement = implement_named(wanted[part.name], spec.op)
            answer = implement.supports(part_spec)
            if not answer:
                given = f"{implement.name} for the part {part.name}: {answer.reason}"
                raise ValueRangeError(message(given, fix="choose another plan"))
            kernels.append(implement.build(part_spec, params.get(part.name, implement.default(part_spec))))
        return _SplitKernel(spec, parts, kernels)


def _may_pay(spec: KernelSpec) -> Support:
    """Say whether a split can pay for a weight, as far as that is quick to see, or why not."""
    weight = spec["weight"]
    if spec.device not in _WAYS:
        return Support.no(f"no way to split is known for {spec.device}", Cause.DEVICE)
    if weight.numel < _SMALLEST:
        size = "×".join(map(str, weight.shape))
        return Support.no(f"a weight of {size} is too small for two kernels to pay", Cause.SHAPE)
    if not 0 < weight.density < 1:
        return Support.no("a weight without zeros, or of nothing else, has no parts", Cause.PATTERN)
    if weight.describe_pattern() != _IRREGULAR:
        regular = weight.describe_pattern()
        return Support.no(f"the weight is regular ({regular}): one kernel runs it whole", Cause.PATTERN)
    sample = _sample(weight)
    shares = {way: _share(sample, way) for way in _WAYS[spec.device]}
    best = max(shares, key=lambda way: shares[way])
    if shares[best] < _LEAST_SHARE:
        reason = f"{best} would put only {shares[best]:.0%} of the live weights into its regular parts"
        return Support.no(reason, Cause.PATTERN)
    return Support.yes()


def _part_spec(spec: KernelSpec, part: Part, *, first: bool, last: bool) -> KernelSpec:
    """Return the kernel spec of one part: what is chained comes in as its residual, the bias with the last one."""
    given = spec.epilogue
    residual = not first or (given.residual and given.activation is None)
    weight = part.tesa.with_format(spec["input"].format or "fp32")
    return replace(
        spec,
        operands={**spec.operands, "weight": weight},
        epilogue=Epilogue(bias=given.bias and last, residual=residual),
    )


@lru_cache(maxsize=8)
def _sample(weight: TeSA) -> TeSA:
    """Return bands of rows from all over a large weight, which tell how it falls apart."""
    rows, columns = weight.shape
    bands, most = rows // _BAND, max(1, _SAMPLE // max(1, columns * _BAND))
    if bands <= most:
        return weight
    first = torch.arange(most) * bands // most * _BAND
    return weight.take(0, (first[:, None] + torch.arange(_BAND)).flatten())


def _share(weight: TeSA, way: str) -> float:
    """Return the share of the live weights in the regular parts of a way, or a bound of it that is quick to count."""
    first, blocks = _parsed(way)
    mask, live = weight.mask(), max(1, weight.count("live"))
    if first is not None:
        return float(_counts(mask, (1, first.m)).clamp_max(first.n).sum()) / live
    best = 0.0
    for block in blocks:
        if block != (1, 1):
            counts = _counts(mask, block)
            best = max(best, float(counts[counts > _BLOCK_COST * math.prod(block)].sum()) / live)
    return best


def _counts(mask: Tensor, block: tuple[int, int]) -> Tensor:
    """Return how many elements of each block are live."""
    (h, w), (rows, columns) = block, mask.shape
    padded = functional.pad(mask.to(torch.int32), (0, -columns % w, 0, -rows % h))
    return padded.reshape(padded.shape[0] // h, h, padded.shape[1] // w, w).sum((1, 3))


@lru_cache(maxsize=8)
def _plans(spec: KernelSpec) -> tuple[str, ...]:
    """Return the plans worth timing, such as ``"4x1 by cpu + 1x1 by cpu"``, the best guess first."""
    weight = _sample(spec["weight"])
    live = weight.count("live")
    plans: list[str] = []
    for way in _WAYS[spec.device]:
        if _share(weight, way) < _LEAST_SHARE:
            continue
        parts = parts_of(weight, way)
        large = all(int(part.owned.sum()) >= _LEAST_SHARE * live for part in parts[:-1])
        if len(parts) != len(way.split("+")) or not large:
            continue
        choices = [
            _able(_part_spec(spec, part, first=number == 0, last=number == len(parts) - 1))
            for number, part in enumerate(parts)
        ]
        for position in range(_MOST_KERNELS if all(choices) else 0):
            # Of all combinations: the preferred kernels, then the next one for each part.
            names = [names[min(position, len(names) - 1)] for names in choices]
            plan = " + ".join(f"{part.name} by {name}" for part, name in zip(parts, names, strict=True))
            plans += [plan] if plan not in plans else []
    return tuple(plans)


def _able(spec: KernelSpec) -> list[str]:
    """Return the names of the implements that run a part, preferred ones first."""
    rank = {name: place for place, name in enumerate(_PREFERRED)}
    names = [i.name for i in implements_of(spec.op) if i.name not in _NOT_FOR_PARTS and i.supports(spec)]
    return sorted(names, key=lambda name: rank.get(name, len(rank)))


def _plan_items(plan: str) -> list[tuple[str, str]]:
    """Return (part, implement) of each part of a plan."""
    items = [item.split(" by ") for item in plan.split(" + ")]
    if not all(len(item) == 2 for item in items):
        raise ValueRangeError(
            message(f"the plan {plan!r}", "'PART by IMPLEMENT + ...', as in '4x1 by cpu + 1x1 by cpu'")
        )
    return [(item[0], item[1]) for item in items]
