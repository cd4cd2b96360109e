"""Complex numbers and Fourier transforms.

What is known of a complex element is at most that it is 0, which is enough for channels to go; a transform mixes the
dims that it goes over and treats every other index for itself.
"""

from __future__ import annotations

import torch
from torch import fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, any_over
from sparta.propagation.op import Op, shape_of
from sparta.propagation.registry import rule
from sparta.tesa.grid import Grid

__all__: list[str] = []

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]

_TRANSFORMS = tuple(
    getattr(_aten, f"fft_{inverse}{kind}fft{dims}").default
    for inverse in ("", "i")
    for kind in ("", "r", "h")
    for dims in ("", "2", "n")
)
_CENTRED = (_aten.fft_fftshift.default, _aten.fft_ifftshift.default)


def _zeros(where: Grid) -> Known:
    return Known(where, Grid.uniform(where.shape, 0.0, torch.float64))


def _none(grid: Grid) -> Grid:
    return Grid(grid.shape, grid.block, ~grid.cells)


# ---------------------------------------------------------------------- transforms


def _mixed(op: Op) -> tuple[fx.Node, list[int]]:
    """Return what is transformed, and the dims that it goes over."""
    source: fx.Node = op["self"]
    rank = len(shape_of(source))
    dims = op.arguments.get("dim")
    if dims is None and op.arguments.get("s") is not None:
        dims = list(range(rank - len(op["s"]), rank))
    return source, op.dims(dims, rank)


@rule("constants", *_TRANSFORMS, *_CENTRED)
def transform(op: Op) -> Known | None:
    """Know the transform of zeros."""
    source, dims = _mixed(op)
    if not op.facts.assume_finite:
        return None
    zero = op.known(source).zero()
    line = _none(any_over(_none(zero), dims))
    return _zeros(line.broadcast_to(op.shape))


@rule("observed", *_TRANSFORMS, *_CENTRED)
def transform_observed(op: Op, seen: Grid) -> _Seen:
    """Observe all that goes into an observed output."""
    source, dims = _mixed(op)
    return [(source, any_over(seen, dims).broadcast_to(shape_of(source)))]


@rule("axes", *_TRANSFORMS, *_CENTRED)
def transform_axes(op: Op, axes: Axes) -> None:
    """Keep the dims that are transformed, cut the others alike."""
    source, dims = _mixed(op)
    for dim in range(len(op.shape)):
        if dim in dims:
            axes.keep(axes.of(source, dim), "transformed")
            axes.keep(axes.of(op.node, dim), "transformed")
        else:
            axes.equal(axes.of(source, dim), axes.of(op.node, dim))


# ---------------------------------------------------------------------- real and imaginary parts

_JOIN, _PART = _aten.view_as_complex.default, _aten.view_as_real.default


@rule("constants", _JOIN)
def joined(op: Op) -> Known | None:
    """Know a 0 whose both parts are 0."""
    zero = op.known(op["self"]).zero()
    both = _none(any_over(_none(zero), [len(zero.shape) - 1]))
    return _zeros(both.reshape(op.shape))


@rule("observed", _JOIN)
def joined_observed(op: Op, seen: Grid) -> _Seen:
    """Observe both parts."""
    return [(op["self"], seen.reshape((*op.shape, 1)).broadcast_to(shape_of(op["self"])))]


@rule("axes", _JOIN)
def joined_axes(op: Op, axes: Axes) -> None:
    """Keep both parts, cut the other dims alike."""
    _tie_parts(op["self"], op.node, axes)


@rule("constants", _PART)
def parted(op: Op) -> Known | None:
    """Know both parts of a 0."""
    zero = op.known(op["self"]).zero()
    return _zeros(zero.reshape((*zero.shape, 1)).broadcast_to(op.shape))


@rule("observed", _PART)
def parted_observed(op: Op, seen: Grid) -> _Seen:
    """Observe an element of which either part is observed."""
    return [(op["self"], any_over(seen, [len(op.shape) - 1]).reshape(shape_of(op["self"])))]


@rule("axes", _PART)
def parted_axes(op: Op, axes: Axes) -> None:
    """Keep both parts, cut the other dims alike."""
    _tie_parts(op.node, op["self"], axes)


def _tie_parts(parts: fx.Node, whole: fx.Node, axes: Axes) -> None:
    for dim in range(len(shape_of(whole))):
        axes.equal(axes.of(parts, dim), axes.of(whole, dim))
    axes.keep(axes.of(parts, len(shape_of(parts)) - 1), "real and imaginary part")


_SAME_PLACE = (
    _aten.real.default,
    _aten.imag.default,
    _aten._conj.default,
    _aten.conj.default,
    _aten.resolve_conj.default,
)


@rule("constants", *_SAME_PLACE)
def same_place(op: Op) -> Known | None:
    """Know what becomes of a 0."""
    return _zeros(op.known(op.inputs[0]).zero())


@rule("observed", *_SAME_PLACE)
def same_place_observed(op: Op, seen: Grid) -> _Seen:
    """Observe of the input what is observed of the output."""
    return [(op.inputs[0], seen)]


@rule("axes", *_SAME_PLACE)
def same_place_axes(op: Op, axes: Axes) -> None:
    """Cut input and output alike."""
    axes.broadcast(op.inputs[0], op.node)
