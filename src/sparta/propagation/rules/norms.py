"""Normalisations. Batch norm in eval mode is one scale and one shift per channel; the others mix what they normalise.

A norm that computes statistics of its input observes every element of it, and its output is known only where the
learned scale is 0 (it is the learned shift there), or where no statistic can matter.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, any_over, unbroadcast
from sparta.propagation.edit import Edit
from sparta.propagation.op import Op, dtype_of, shape_of
from sparta.propagation.registry import rule
from sparta.propagation.slices import slice_values
from sparta.tesa.grid import Grid

__all__: list[str] = []

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]


def _channelwise(grid: Grid, rank: int) -> Grid:
    """Return a grid of one value per channel as it is broadcast along dim 1."""
    return grid.reshape((1, grid.shape[0], *(1 for _ in range(rank - 2))))


def _of_channels(seen: Grid, size: int) -> Grid:
    """Return which channels (dim 1) are observed."""
    rank = len(seen.shape)
    return unbroadcast(seen, (1, size, *(1 for _ in range(rank - 2)))).reshape((size,))


# ---------------------------------------------------------------------- batch norm


def _batch_scale_shift(op: Op) -> tuple[Tensor, Tensor] | None:
    """Return scale and shift of a batch norm in eval mode, or None where they are not known."""
    if op.arguments.get("training", False):
        return None
    mean, variance = op.frozen(op["running_mean"]), op.frozen(op["running_var"])
    weight, bias = op["weight"], op["bias"]
    if mean is None or variance is None:
        return None
    frozen = [
        op.frozen(n) if n is not None else default for n, default in ((weight, torch.ones(())), (bias, torch.zeros(())))
    ]
    if frozen[0] is None or frozen[1] is None:
        return None
    scale = frozen[0].to(torch.float64) / (variance.to(torch.float64) + op["eps"]).sqrt()
    return scale.expand(mean.shape), frozen[1].to(torch.float64) - mean.to(torch.float64) * scale


_BATCH_NORM = _aten.batch_norm.default


@rule("constants", _BATCH_NORM)
def batch_norm(op: Op) -> Known | None:
    """Scale and shift a constant channel: it stays a constant, but rarely the same one."""
    if op["training"]:
        return _batch_norm_in_training(op)
    found = _batch_scale_shift(op)
    if found is None:
        return None
    known = op.known(op["input"])
    rank = len(op.shape)
    scale, shift = (_channelwise(Grid.from_dense(t.contiguous()), rank).broadcast_to(op.shape) for t in found)
    const = known.const
    if op.facts.assume_finite:
        const = Grid.combine(lambda c, s: c | (s == 0), const, scale)
    dtype = dtype_of(op.node)
    value = Grid.combine(
        lambda k, v, s, t: torch.where(k, v * s + t, 0.0).to(dtype).to(torch.float64), const, known.value, scale, shift
    )
    return Known(const, value)


def _batch_norm_in_training(op: Op) -> Known | None:
    """Know the shift of a channel of zeros, or of a scale of 0.

    A channel of another constant has no variance either, but what rounding leaves of its mean is divided by the square
    root of eps; it is taken for live.
    """
    if not op.facts.assume_finite:
        return None
    rank = len(op.shape)
    others = [d for d in range(rank) if d != 1]
    zero = op.known(op["input"]).uniform_over(others).zero().broadcast_to(op.shape)
    if op["weight"] is not None:
        scale = _channelwise(op.known(op["weight"]).zero(), rank).broadcast_to(op.shape)
        zero = Grid.combine(torch.logical_or, zero, scale)
    if op["bias"] is None:
        return Known(zero, Grid.uniform(op.shape, 0.0, torch.float64))
    shift = op.known(op["bias"]).map(lambda g: _channelwise(g, rank).broadcast_to(op.shape))
    const = Grid.combine(torch.logical_and, zero, shift.const)
    return Known(const, shift.value).only(const)


@rule("observed", _BATCH_NORM)
def batch_norm_observed(op: Op, seen: Grid) -> _Seen:
    """Observe each channel for itself, and not where its scale is 0."""
    source = op["input"]
    size = op.shape[1]
    channels = _of_channels(seen, size)
    tensors = [op[n] for n in ("weight", "bias", "running_mean", "running_var") if op[n] is not None]
    if op["training"]:
        whole = _channelwise(channels, len(op.shape)).broadcast_to(op.shape)
        return [(source, whole), *((n, channels) for n in tensors)]
    of_source = seen
    if op["weight"] is not None and op.facts.assume_finite:
        zero = _channelwise(op.known(op["weight"]).zero(), len(op.shape)).broadcast_to(op.shape)
        # A constant input is kept: the constants derived above may rest on it.
        kept = op.known(source).const
        of_source = Grid.combine(lambda s, z, k: s & (~z | k), seen, zero, kept)
    return [(source, of_source), *((n, channels) for n in tensors)]


@rule("axes", _BATCH_NORM)
def batch_norm_axes(op: Op, axes: Axes) -> None:
    """Cut channels with their statistics, scale and shift; in train mode all that goes into the statistics stays."""
    if op["training"]:
        for dim in range(len(op.shape)):
            if dim != 1:
                axes.keep(axes.of(op.node, dim), "batch norm computes statistics over it")
    axes.broadcast(op["input"], op.node)
    for name in ("weight", "bias", "running_mean", "running_var"):
        if op[name] is not None:
            axes.equal(axes.of(op[name], 0), axes.of(op.node, 1))


# ---------------------------------------------------------------------- norms with statistics of their input


def _affine(op: Op) -> tuple[fx.Node | None, fx.Node | None, bool]:
    """Return scale and shift of a norm, and whether they belong to dim 1 (else to the last dims)."""
    per_channel = op.node.target in {_aten.group_norm.default, _aten.instance_norm.default}
    return op["weight"], op.arguments.get("bias"), per_channel


def _in_groups(op: Op) -> tuple[int, ...]:
    """Return the shape of a group norm's output with its channels as (groups, channels of a group)."""
    batch, channels, *rest = op.shape
    groups = int(op["num_groups"])
    return (batch, groups, channels // groups, *rest)


def _wide(op: Op, known: Known, *, per_channel: bool) -> Known:
    rank = len(op.shape)
    return known.map(lambda g: (_channelwise(g, rank) if per_channel else g).broadcast_to(op.shape))


_STATISTICS = (_aten.layer_norm.default, _aten.group_norm.default, _aten.instance_norm.default, _aten.rms_norm.default)


@rule("constants", *_STATISTICS)
def normalized(op: Op) -> Known | None:
    """Know the shift where the scale is 0, or where the normalised value is 0 for certain."""
    weight, bias, per_channel = _affine(op)
    if not op.facts.assume_finite:
        return None
    source = op.known(op["input"])
    nothing = Grid.uniform(op.shape, 0, torch.bool)
    # RMS norm only scales; an instance norm of a channel of zeros is zero before the shift, and so is a group of them.
    zero = nothing
    if op.node.target is _aten.rms_norm.default:
        zero = source.zero()
    elif op.node.target is _aten.instance_norm.default and op["use_input_stats"]:
        zero = source.uniform_over(range(2, len(op.shape))).zero().broadcast_to(op.shape)
    elif op.node.target is _aten.group_norm.default:
        apart = source.map(lambda g: g.reshape(_in_groups(op)))
        zero = apart.uniform_over(range(2, len(op.shape) + 1)).zero().broadcast_to(_in_groups(op)).reshape(op.shape)
    if weight is not None:
        scale = _wide(op, op.known(weight), per_channel=per_channel).zero()
        zero = Grid.combine(torch.logical_or, zero, scale)
    if bias is None:
        return Known(zero, Grid.uniform(op.shape, 0.0, torch.float64))
    shift = _wide(op, op.known(bias), per_channel=per_channel)
    const = Grid.combine(torch.logical_and, zero, shift.const)
    return Known(const, shift.value).only(const)


@rule("observed", *_STATISTICS)
def normalized_observed(op: Op, seen: Grid) -> _Seen:
    """Observe all that goes into a statistic with an observed output."""
    weight, bias, per_channel = _affine(op)
    source = op["input"]
    rank = len(op.shape)
    if op.node.target is _aten.group_norm.default:
        apart = any_over(seen.reshape(_in_groups(op)), range(2, rank + 1))
        found = [(source, apart.broadcast_to(_in_groups(op)).reshape(op.shape))]
    else:
        first = 2 if per_channel else rank - len(op["normalized_shape"] or op.shape)
        found = [(source, any_over(seen, range(first, rank)).broadcast_to(op.shape))]
    for node in (weight, bias):
        if node is not None:
            of_node = _of_channels(seen, op.shape[1]) if per_channel else unbroadcast(seen, shape_of(node))
            found.append((node, of_node))
    return found


@rule("axes", *_STATISTICS)
def normalized_axes(op: Op, axes: Axes) -> None:
    """Keep what goes into a statistic; cut the other dims alike, and groups of channels as a whole."""
    rank = len(op.shape)
    name = str(op.node.target).split(".")[1]
    per_channel = "normalized_shape" not in op.arguments
    mixed = range(2, rank) if per_channel else range(rank - len(op["normalized_shape"]), rank)
    if op.node.target is _aten.group_norm.default:
        group, inner = (axes.free(size) for size in _in_groups(op)[1:3])
        axes.keep(inner, f"{name} computes statistics over it")
        axes.product(axes.of(op.node, 1), [group, inner], op.node)
    for node in op.inputs:
        if node is op["input"]:
            continue
        if per_channel:
            axes.equal(axes.of(node, 0), axes.of(op.node, 1))
        else:
            axes.keep_all(node, f"{name} computes statistics")
    for dim in range(rank):
        axes.equal(axes.of(op["input"], dim), axes.of(op.node, dim))
        if dim in mixed:
            axes.keep(axes.of(op.node, dim), f"{name} computes statistics over it")


@rule("rewrite", _aten.group_norm.default)
def count_groups(op: Op, edit: Edit) -> None:
    """Count the groups of channels that are left."""
    _, groups, each, *_ = _in_groups(op)
    left = edit.axes.kept(op["input"], 1).reshape(groups, each).any(dim=1)
    edit.set(op.node, "num_groups", int(left.sum()))


# ---------------------------------------------------------------------- weights that are a direction and a length

_WEIGHT_NORM = _aten._weight_norm.default


@rule("constants", _WEIGHT_NORM)
def weight_norm(op: Op) -> Known | None:
    """Know a zero of the direction or of the length as a zero of the weight; a direction of zeros alone has none."""
    if not op.facts.assume_finite:
        return None
    mixed = [d for d in range(len(op.shape)) if d != op.dim(op["dim"])]
    direction = op.known(op["v"])
    undefined = direction.uniform_over(mixed).zero().broadcast_to(op.shape)
    zeros = direction.zero(), op.known(op["g"]).zero().broadcast_to(op.shape), undefined
    const = Grid.combine(lambda v, g, u: (v | g) & ~u, *zeros)
    return Known(const, Grid.uniform(op.shape, 0.0, torch.float64))


@rule("observed", _WEIGHT_NORM)
def weight_norm_observed(op: Op, seen: Grid) -> _Seen:
    """Observe all that goes into the length of an observed direction."""
    mixed = [d for d in range(len(op.shape)) if d != op.dim(op["dim"])]
    line = any_over(seen, mixed)
    return [(op["v"], line.broadcast_to(op.shape)), (op["g"], line.reshape(shape_of(op["g"])))]


@rule("axes", _WEIGHT_NORM)
def weight_norm_axes(op: Op, axes: Axes) -> None:
    """Cut what adds nothing to a length, and whole directions with their lengths."""
    own = op.dim(op["dim"])
    axes.broadcast(op["v"], op.node)
    axes.equal(axes.of(op["g"], own), axes.of(op.node, own))
    for dim in range(len(op.shape)):
        if dim != own:
            nonzero, _, live = slice_values(axes.facts, op["v"], dim)
            axes.keep(axes.of(op.node, dim), "goes into the length of a weight", nonzero | live)
            axes.keep(axes.of(op["g"], dim), "goes into the length of a weight")
