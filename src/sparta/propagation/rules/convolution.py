"""Convolutions, of 1 to 3 dims, grouped, depthwise and transposed: a contraction over channels at every position.

Taps do not matter beyond "all taps of this pair of channels are 0". A border of zeros around a channel that is the
constant c ≠ 0 makes the output differ at the border, so such a channel is folded into the bias only where there is no
padding; elsewhere it stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, any_over
from sparta.propagation.edit import Edit
from sparta.propagation.op import Op, shape_of
from sparta.propagation.registry import rule
from sparta.propagation.rules.linear import Letters, contraction, contraction_observed, with_bias
from sparta.tesa.grid import Grid

__all__: list[str] = []

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]
_LETTERS = Letters("bgi", "goi", "bgo")

_PLAIN = tuple(
    getattr(packet, name) for packet in (_aten.conv1d, _aten.conv2d, _aten.conv3d) for name in ("default", "padding")
)
_TRANSPOSED = (_aten.conv_transpose1d.default, _aten.conv_transpose2d.input, _aten.conv_transpose3d.input)


@dataclass(frozen=True)
class _Conv:
    """One convolution, its channels in groups."""

    op: Op

    @property
    def transposed(self) -> bool:
        return self.op.node.target in _TRANSPOSED

    @property
    def source(self) -> fx.Node:
        node: fx.Node = self.op["input"]
        return node

    @property
    def weight(self) -> fx.Node:
        node: fx.Node = self.op["weight"]
        return node

    @property
    def bias(self) -> fx.Node | None:
        node: fx.Node | None = self.op["bias"]
        return node

    @property
    def groups(self) -> int:
        return int(self.op["groups"])

    @property
    def batched(self) -> bool:
        return len(shape_of(self.source)) == len(shape_of(self.weight))

    @property
    def channel(self) -> int:
        """The dim of the channels in input and output."""
        return 1 if self.batched else 0

    @property
    def spatial(self) -> list[int]:
        return list(range(self.channel + 1, len(self.op.shape)))

    @property
    def taps(self) -> list[int]:
        return list(range(2, len(shape_of(self.weight))))

    def padded(self) -> bool:
        """Whether a constant channel other than 0 would not stay constant."""
        padding = self.op["padding"]
        return self.transposed or padding == "same" or (not isinstance(padding, str) and any(padding))

    def channels(self, grid: Grid) -> Grid:
        """Return a grid of (batch, channels, 1 ...) as (batch, groups, channels of a group)."""
        batch = grid.shape[0] if self.batched else 1
        return grid.reshape((batch, self.groups, grid.shape[self.channel] // self.groups))

    def pairs(self, grid: Grid) -> Grid:
        """Return a grid of the weight without taps as (groups, outputs, inputs)."""
        rows, columns = grid.shape[:2]
        flat = grid.reshape((self.groups, rows // self.groups, columns))
        return flat.permute((0, 2, 1)) if self.transposed else flat

    def unpairs(self, grid: Grid) -> Grid:
        """Return (groups, outputs, inputs) as a grid of the weight."""
        flat = grid.permute((0, 2, 1)) if self.transposed else grid
        shape = shape_of(self.weight)
        return flat.reshape((*shape[:2], *(1 for _ in self.taps))).broadcast_to(shape)

    def known_source(self) -> Known:
        """Return what is known of each input channel as a whole; constants other than 0 only without padding."""
        known = self.op.known(self.source).uniform_over(self.spatial)
        return (known.only(known.zero()) if self.padded() else known).map(self.channels)

    def known_weight(self) -> Known:
        """Return which pairs of channels have only zero taps."""
        zero = self.op.known(self.weight).zero()
        alive = any_over(Grid(zero.shape, zero.block, ~zero.cells), self.taps)
        none = Grid(alive.shape, alive.block, ~alive.cells)
        return Known(none, Grid.uniform(none.shape, 0.0, torch.float64)).map(self.pairs)

    def summed_weight(self) -> Tensor | None:
        """Return the sum of all taps as (groups, outputs, inputs), if the weight is a parameter."""
        frozen = self.op.frozen(self.weight)
        if frozen is None:
            return None
        summed = frozen.to(torch.float64).sum(dim=self.taps) if self.taps else frozen.to(torch.float64)
        flat = summed.reshape(self.groups, -1, summed.shape[1])
        return flat.transpose(1, 2) if self.transposed else flat

    def out(self, grid: Grid) -> Grid:
        """Return (batch, groups, outputs) as a grid of the output."""
        shape = [1 if d in self.spatial else s for d, s in enumerate(self.op.shape)]
        return grid.reshape(shape).broadcast_to(self.op.shape)


@rule("constants", *_PLAIN, *_TRANSPOSED)
def convolution(op: Op) -> Known | None:
    """Know an output channel that meets no live input channel: it is its bias plus what the constants give."""
    conv = _Conv(op)
    summed = conv.summed_weight if not conv.padded() and op.values(conv.weight) is not None else None
    known = contraction(op, conv.known_source(), conv.known_weight(), _LETTERS, summed)
    if known is None:
        return None
    if conv.bias is None:
        return known.map(conv.out)
    bias = op.known(conv.bias).map(lambda g: g.reshape((1, conv.groups, g.shape[0] // conv.groups)))
    biased = with_bias(known, bias)
    return None if biased is None else biased.map(conv.out)


@rule("observed", *_PLAIN, *_TRANSPOSED)
def convolution_observed(op: Op, seen: Grid) -> _Seen:
    """Observe an input channel through the pairs that are not 0, and a pair where its input channel is not 0."""
    conv = _Conv(op)
    line = any_over(seen, conv.spatial)
    found = contraction_observed(op, conv.known_source(), conv.known_weight(), _LETTERS, conv.channels(line))
    shape = shape_of(conv.source)
    narrow = [1 if d in conv.spatial else s for d, s in enumerate(shape)]
    result = [(conv.source, found[0].reshape(narrow).broadcast_to(shape)), (conv.weight, conv.unpairs(found[1]))]
    if conv.bias is not None:
        batch = [0] if conv.batched else []
        result.append((conv.bias, any_over(line, batch).reshape(shape_of(conv.bias))))
    return result


@rule("axes", *_PLAIN, *_TRANSPOSED)
def convolution_axes(op: Op, axes: Axes) -> None:
    """Cut inputs and outputs with the weight's dims; groups go whole or lose the same channels each."""
    conv = _Conv(op)
    source, weight = axes.of(conv.source, conv.channel), conv.weight
    out = axes.of(op.node, conv.channel)
    for dim in conv.spatial:
        axes.keep(axes.of(conv.source, dim), "convolved")
        axes.keep(axes.of(op.node, dim), "convolved")
    for dim in conv.taps:
        axes.keep(axes.of(weight, dim), "convolved")
    if conv.batched:
        axes.equal(axes.of(conv.source, 0), axes.of(op.node, 0))
    first, second = (source, out) if conv.transposed else (out, source)
    axes.equal(axes.of(weight, 0), first)
    if conv.groups == 1:
        axes.equal(axes.of(weight, 1), second)
    else:
        group = axes.free(conv.groups)
        inner = axes.free(shape_of(weight)[0] // conv.groups)
        axes.product(first, [group, inner], op.node)
        axes.product(second, [group, axes.of(weight, 1)], op.node)
    if conv.bias is not None:
        axes.equal(axes.of(conv.bias, 0), out)
    known_bias = conv.bias is None or op.values(conv.bias) is not None
    fold = not conv.padded() and op.values(weight) is not None and known_bias
    axes.absorb(conv.source, conv.channel, op.node, fold=fold)


@rule("rewrite", *_PLAIN, *_TRANSPOSED)
def fold_into_convolution(op: Op, edit: Edit) -> None:
    """Count the groups that are left, and add what the cut constants contributed to the bias."""
    conv = _Conv(op)
    if conv.groups > 1:
        per_group = shape_of(conv.source)[conv.channel] // conv.groups
        groups = edit.axes.kept(conv.source, conv.channel).reshape(conv.groups, per_group).any(dim=1)
        edit.set(op.node, "groups", int(groups.sum()))
    values = edit.cut_values(conv.source, conv.channel)
    summed = conv.summed_weight() if bool(values.any()) else None
    if summed is None:
        return
    shift = torch.einsum("goi,gi->go", summed, values.reshape(conv.groups, -1)).reshape(-1)
    edit.set_bias(op.node, "bias", conv.weight, conv.bias, shift[edit.kept(op.node, conv.channel)])


# ---------------------------------------------------------------------- windows as columns

_WINDOWS = _aten.im2col.default


def _taps(op: Op) -> int:
    return int(torch.Size(op["kernel_size"]).numel())


@rule("constants", _WINDOWS)
def windows(op: Op) -> Known | None:
    """Know the windows of a channel of zeros."""
    source = op["self"]
    spatial = [len(shape_of(source)) - 2, len(shape_of(source)) - 1]
    zero = op.known(source).uniform_over(spatial).zero()
    lead = shape_of(source)[:-2]
    wide = zero.reshape((*lead, 1)).broadcast_to((*lead, _taps(op))).reshape((*op.shape[:-1], 1))
    return Known(wide.broadcast_to(op.shape), Grid.uniform(op.shape, 0.0, torch.float64))


@rule("observed", _WINDOWS)
def windows_observed(op: Op, seen: Grid) -> _Seen:
    """Observe a channel of which any window is observed."""
    source = op["self"]
    lead = shape_of(source)[:-2]
    line = any_over(seen, [len(op.shape) - 1]).reshape((*lead, _taps(op)))
    channels = any_over(line, [len(lead)]).reshape((*lead, 1, 1))
    return [(source, channels.broadcast_to(shape_of(source)))]


@rule("axes", _WINDOWS)
def windows_axes(op: Op, axes: Axes) -> None:
    """Cut a channel with all its taps."""
    source, rank = op["self"], len(op.shape)
    taps = axes.free(_taps(op))
    axes.keep(taps, "convolved")
    axes.product(axes.of(op.node, rank - 2), [axes.of(source, rank - 2), taps], op.node)
    for dim in (rank - 1, rank):
        axes.keep(axes.of(source, dim), "convolved")
    axes.keep(axes.of(op.node, rank - 1), "convolved")
    if rank == 3:
        axes.equal(axes.of(source, 0), axes.of(op.node, 0))
