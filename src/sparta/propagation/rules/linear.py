"""Linear layers and products of matrices: sums over a shared dim, in which a zero on either side ends a term.

All ops of this family are one contraction written as an einsum over grid cells. A term a × b is *open* unless one
factor is 0 or both are constants; an output without open terms is a constant, and its value is the sum of its closed
terms and the bias, which is not 0 in general.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, aligned, einsum_any, grid_of_letters, unbroadcast
from sparta.propagation.edit import Edit
from sparta.propagation.op import Op, dynamic_dims, shape_of
from sparta.propagation.registry import rule
from sparta.tesa.grid import Grid

__all__ = ["contraction", "contraction_observed"]

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]
_BATCH = "abcdefghij"


class Letters(NamedTuple):
    """The dims of both operands and of the output of a contraction."""

    first: str
    second: str
    out: str


def contraction(
    op: Op,
    first: Known,
    second: Known,
    letters: Letters,
    weight: Callable[[], Tensor | None] | None = None,
    *,
    summed_dynamic: bool = False,
) -> Known | None:
    """Return what is known of an einsum of two tensors.

    Parameters
    ----------
    summed_dynamic
        Whether the size of a dim that is summed over may change at run time.
    weight
        Returns the values of the second tensor if it is a parameter: then a constant of the first needs no constant
        partner. It is called only where there are such constants.
    """
    if not op.facts.assume_finite:
        return None
    first, second = first.finite(), second.finite()
    if summed_dynamic:
        # How many terms are added is known at run time only; a sum of zeros is 0 however many there are.
        first, second = first.only(first.zero()), second.only(second.zero())
    grids = [first.zero(), first.fixed(), first.value, second.zero(), second.fixed(), second.value]
    words = [letters.first] * 3 + [letters.second] * 3
    (zero_1, fixed_1, value_1, zero_2, fixed_2, value_2), blocks = aligned(grids, words)
    equation = f"{letters.first},{letters.second}->{letters.out}"
    has_fixed = bool(fixed_1.any())
    if weight is not None:
        opened = torch.einsum(equation, (~zero_1 & ~fixed_1).float(), (~zero_2).float())
    else:
        opened = torch.einsum(equation, (~zero_1).float(), (~zero_2).float())
        opened -= torch.einsum(equation, fixed_1.float(), fixed_2.float())
    const = grid_of_letters(opened < 0.5, letters.out, blocks)
    if not has_fixed:
        return Known(const, Grid.uniform(const.shape, 0.0, torch.float64))
    if weight is not None:
        # The values of the parameter are needed element by element, but only under the constants of the first.
        values = weight()
        if values is None:
            return None
        dense = Grid(tuple(values.shape), (1,) * values.dim(), values.to(torch.float64))
        (value_1, value_2), blocks = aligned([first.value, dense], letters[:2])
    words, operands = [*letters[:2]], [value_1, value_2]
    for summed in [name for name in letters.first if name not in letters.out]:
        size, block = blocks[summed]
        counts = torch.full((value_1.shape[letters.first.index(summed)],), float(block), dtype=torch.float64)
        counts[-1] = size - block * (len(counts) - 1)
        words.append(summed)
        operands.append(counts)
    total = torch.einsum(f"{','.join(words)}->{letters.out}", *operands)
    return Known(const, grid_of_letters(total, letters.out, blocks)).only(const)


def contraction_observed(op: Op, first: Known, second: Known, letters: Letters, seen: Grid) -> tuple[Grid, Grid]:
    """Return what of both tensors of an einsum is observed; of two zeros in a term the first one is kept."""
    if not op.facts.assume_finite:
        everything = [Grid.uniform(k.shape, 1, torch.bool) for k in (first, second)]
        return everything[0], everything[1]
    alive_1, alive_2 = (_not(k.zero()) for k in (first, second))
    of_first = einsum_any(seen, alive_2, (letters.out, letters.second, letters.first))
    anyone = einsum_any(seen, Grid.uniform(second.shape, 1, torch.bool), (letters.out, letters.second, letters.first))
    kept = Grid.combine(torch.logical_and, anyone, first.zero())
    of_second = einsum_any(seen, alive_1, (letters.out, letters.first, letters.second))
    return Grid.combine(torch.logical_or, of_first, kept), of_second


def _sums_dynamic(nodes: list[fx.Node], letters: Letters) -> bool:
    """Whether the size of a summed dim may change at run time."""
    for node, word in zip(nodes, letters[:2], strict=True):
        own = word[len(word) - len(shape_of(node)) :]
        if any(own[dim] not in letters.out for dim in dynamic_dims(node)):
            return True
    return False


def _not(grid: Grid) -> Grid:
    return Grid(grid.shape, grid.block, ~grid.cells)


def with_bias(known: Known | None, bias: Known | None) -> Known | None:
    """Return what is known of a sum with a bias that is broadcast to it."""
    if known is None or bias is None:
        return known
    wide = bias.map(lambda g: g.broadcast_to(known.shape))
    const = Grid.combine(torch.logical_and, known.const, wide.const)
    return Known(const, Grid.combine(torch.add, known.value, wide.value)).only(const)


# ---------------------------------------------------------------------- linear


def _linear_letters(rank: int) -> Letters:
    lead = _BATCH[: rank - 1]
    return Letters(lead + "k", "nk", lead + "n")


@rule("constants", _aten.linear.default)
def linear(op: Op) -> Known | None:
    """Know an output channel whose weights meet no live input: it is its bias plus what the constants give."""
    source, weight, bias = op["input"], op["weight"], op["bias"]
    letters = _linear_letters(len(shape_of(source)))
    known = contraction(op, op.known(source), op.known(weight), letters, op.values(weight))
    return with_bias(known, None if bias is None else op.known(bias))


@rule("observed", _aten.linear.default)
def linear_observed(op: Op, seen: Grid) -> _Seen:
    """Observe an input channel through the weights that are not 0, and a weight where its input is not 0."""
    source, weight, bias = op["input"], op["weight"], op["bias"]
    letters = _linear_letters(len(shape_of(source)))
    of_source, of_weight = contraction_observed(op, op.known(source), op.known(weight), letters, seen)
    found = [(source, of_source), (weight, of_weight)]
    return found if bias is None else [*found, (bias, unbroadcast(seen, shape_of(bias)))]


@rule("axes", _aten.linear.default)
def linear_axes(op: Op, axes: Axes) -> None:
    """Cut inputs with columns, outputs with rows; constants that are cut go into the bias."""
    source, weight, bias = op["input"], op["weight"], op["bias"]
    last = len(shape_of(source)) - 1
    for dim in range(last):
        axes.equal(axes.of(source, dim), axes.of(op.node, dim))
    axes.equal(axes.of(source, last), axes.of(weight, 1))
    axes.equal(axes.of(op.node, last), axes.of(weight, 0))
    if bias is not None:
        axes.equal(axes.of(bias, 0), axes.of(weight, 0))
    foldable = op.values(weight) is not None and (bias is None or op.values(bias) is not None)
    axes.absorb(source, last, op.node, fold=foldable)


@rule("rewrite", _aten.linear.default)
def fold_into_linear(op: Op, edit: Edit) -> None:
    """Add what the cut constants contributed to the bias."""
    source, weight, bias = op["input"], op["weight"], op["bias"]
    values = edit.cut_values(source, len(shape_of(source)) - 1)
    frozen = op.frozen(weight) if bool(values.any()) else None
    if frozen is None:
        return
    rows = edit.kept(weight, 0)
    shift = frozen[rows].to(torch.float64) @ values
    edit.set_bias(op.node, "bias", weight, bias, shift)


# ---------------------------------------------------------------------- matmul, bmm, addmm, einsum


def _matmul_operands(op: Op) -> tuple[fx.Node, fx.Node]:
    names = ("mat1", "mat2") if "mat1" in op.arguments else ("self", "other" if "other" in op.arguments else "mat2")
    return op[names[0]], op[names[1]]


def _matmul_letters(first: int, second: int) -> tuple[Letters, int]:
    """Return letters for operands whose batch dims are broadcast to each other, and the number of those dims."""
    lead = _BATCH[: max(first - 2, second - 2, 0)]
    row, column = "m" if first > 1 else "", "n" if second > 1 else ""
    return Letters(lead + row + "k", lead + "k" + column, lead + row + column), len(lead)


def _matmul_known(op: Op) -> tuple[list[fx.Node], list[Known], Letters]:
    nodes = list(_matmul_operands(op))
    letters, lead = _matmul_letters(*(len(shape_of(n)) for n in nodes))
    batch = op.shape[:lead]
    knowns = []
    for node, own in zip(nodes, (len(letters.first) - lead, len(letters.second) - lead), strict=True):
        shape = shape_of(node)
        knowns.append(op.known(node).map(lambda g, s=shape, o=own: g.broadcast_to((*batch, *s[len(s) - o :]))))  # type: ignore[misc]
    return nodes, knowns, letters


_MATMULS = (_aten.matmul.default, _aten.bmm.default, _aten.mm.default)


@rule("constants", *_MATMULS)
def matmul(op: Op) -> Known | None:
    """Know an output whose every term is closed."""
    nodes, (first, second), letters = _matmul_known(op)
    values = op.values(nodes[1])
    weight = values if len(letters.second) == 2 and letters.out else None
    return contraction(op, first, second, letters, weight, summed_dynamic=_sums_dynamic(nodes, letters))


@rule("observed", *_MATMULS)
def matmul_observed(op: Op, seen: Grid) -> _Seen:
    """Observe each side where the other is not 0."""
    nodes, (first, second), letters = _matmul_known(op)
    found = contraction_observed(op, first, second, letters, seen)
    return [(n, unbroadcast(grid, shape_of(n))) for n, grid in zip(nodes, found, strict=True)]


@rule("axes", *_MATMULS)
def matmul_axes(op: Op, axes: Axes) -> None:
    """Cut rows and columns with the output, and the summed dim of both sides together."""
    nodes = list(_matmul_operands(op))
    letters, _ = _matmul_letters(*(len(shape_of(n)) for n in nodes))
    _tie_letters(op, axes, nodes, letters)


def _tie_letters(op: Op, axes: Axes, nodes: list[fx.Node], letters: Letters) -> None:
    """Cut dims of one letter together; an index of a summed one goes only where it adds nothing."""
    summed: dict[str, list[tuple[fx.Node, int]]] = {}
    for node, whole_word in zip(nodes, letters[:2], strict=True):
        word = whole_word[len(whole_word) - len(shape_of(node)) :]  # a batch dim may be missing: it is broadcast
        for dim, name in enumerate(word):
            if name in letters.out:
                axes.broadcast_dim((node, dim), (op.node, letters.out.index(name)))
            else:
                summed.setdefault(name, []).append((node, dim))
    for first, second in summed.values():
        axes.equal(axes.of(*first), axes.of(*second))
        axes.absorb_pair(first, second, op.node)


@rule("constants", _aten.addmm.default)
def addmm(op: Op) -> Known | None:
    """Know a product of matrices plus a bias."""
    if op["alpha"] != 1 or op["beta"] != 1:
        return None
    known = contraction(
        op, op.known(op["mat1"]), op.known(op["mat2"]), Letters("mk", "kn", "mn"), op.values(op["mat2"])
    )
    return with_bias(known, op.known(op["self"]))


@rule("observed", _aten.addmm.default)
def addmm_observed(op: Op, seen: Grid) -> _Seen:
    """Observe each side of the product where the other is not 0."""
    found = contraction_observed(op, op.known(op["mat1"]), op.known(op["mat2"]), Letters("mk", "kn", "mn"), seen)
    return [(op["mat1"], found[0]), (op["mat2"], found[1]), (op["self"], unbroadcast(seen, shape_of(op["self"])))]


@rule("axes", _aten.addmm.default)
def addmm_axes(op: Op, axes: Axes) -> None:
    """Cut rows, columns and the summed dim; constants that are cut go into the bias."""
    first, second, bias = op["mat1"], op["mat2"], op["self"]
    axes.equal(axes.of(first, 0), axes.of(op.node, 0))
    axes.equal(axes.of(second, 1), axes.of(op.node, 1))
    axes.equal(axes.of(first, 1), axes.of(second, 0))
    axes.broadcast(bias, op.node)
    plain = op["alpha"] == 1 and op["beta"] == 1 and len(shape_of(bias)) == 1
    foldable = plain and op.values(second) is not None and op.values(bias) is not None
    axes.absorb(first, 1, op.node, fold=foldable)


@rule("rewrite", _aten.addmm.default)
def fold_into_addmm(op: Op, edit: Edit) -> None:
    """Add what the cut constants contributed to the bias."""
    values = edit.cut_values(op["mat1"], 1)
    frozen = op.frozen(op["mat2"]) if bool(values.any()) else None
    if frozen is None:
        return
    shift = values @ frozen[:, edit.kept(op["mat2"], 1)].to(torch.float64)
    edit.set_bias(op.node, "self", op["mat2"], op["self"], shift)


@rule("constants", _aten.einsum.default)
def einsum(op: Op) -> Known | None:
    """Know an einsum of two tensors whose every term is closed."""
    parsed = _einsum_operands(op)
    if parsed is None:
        return None
    nodes, letters = parsed
    first, second = (op.known(n) for n in nodes)
    return contraction(op, first, second, letters, summed_dynamic=_sums_dynamic(nodes, letters))


@rule("observed", _aten.einsum.default)
def einsum_observed(op: Op, seen: Grid) -> _Seen:
    """Observe each side where the other is not 0."""
    parsed = _einsum_operands(op)
    if parsed is None:
        return []
    (first, second), letters = parsed
    found = contraction_observed(op, op.known(first), op.known(second), letters, seen)
    return [(first, found[0]), (second, found[1])]


@rule("axes", _aten.einsum.default)
def einsum_axes(op: Op, axes: Axes) -> None:
    """Cut dims of one letter together."""
    parsed = _einsum_operands(op)
    if parsed is not None:
        _tie_letters(op, axes, *parsed)
        return
    for node in (op.node, *op.inputs):
        axes.keep_all(node, "an einsum of another kind than a product of two tensors")


def _einsum_operands(op: Op) -> tuple[list[fx.Node], Letters] | None:
    """Return operands and letters of an einsum of two tensors, or None where a dim is repeated, traced or lonely."""
    equation = str(op["equation"]).replace(" ", "")
    nodes = list(op["tensors"])
    if "->" not in equation or len(nodes) != 2:
        return None
    left, out = equation.split("->")
    words = left.split(",")
    free = [name for name in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if name not in equation]
    missing = [len(shape_of(n)) - len(w.replace("...", "")) for n, w in zip(nodes, words, strict=True) if "..." in w]
    if len(set(missing)) > 1:
        return None  # one of them is repeated along dims that it does not have
    dots = "".join(free[: missing[0]]) if missing else ""
    first, second, out = (word.replace("...", dots) for word in (*words, out))
    lonely = set(first) ^ set(second)
    repeated = any(len(set(word)) != len(word) for word in (first, second, out))
    sizes: dict[str, int] = {}
    pairs = [
        pair for n, word in zip(nodes, (first, second), strict=True) for pair in zip(word, shape_of(n), strict=True)
    ]
    if repeated or not lonely <= set(out) or any(sizes.setdefault(name, size) != size for name, size in pairs):
        return None
    return nodes, Letters(first, second, out)
