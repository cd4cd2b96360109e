"""Run-time ops of mixtures of experts: how PyTorch reaches the ragged kernels, eager, under autograd and compiled.

``sparta::ragged_linear`` takes the weights as they are, one tensor per expert. Kernels get the addresses of the weights
in one small table, which is sent to the device once and not at every call, so weights are never copied together and
nothing waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.specialize.cuda.graphs import keep
from sparta.specialize.moe.tile import RaggedTile

__all__ = ["Routes", "ragged_forward", "ragged_linear", "ragged_product_of", "routes"]

_ONE_HOT = 16384  # elements of the table in which a program sorts its rows
_JOINED = 1024
_MOVED_ROWS = 4
_MOVED = 512
_INTERPRETED_PROCESSORS = 3


class Routes(NamedTuple):
    """Which rows go to which expert.

    Attributes
    ----------
    order
        int32 (rows,): rows sorted by expert, in their own order within each.
    ends
        int32 (experts * blocks,): where in `order` the rows of an expert end, by blocks of rows.
    blocks
        How many ends each expert has; its last one is the end of all its rows.
    """

    order: Tensor
    ends: Tensor
    blocks: int


def routes(ids: Tensor, experts: int) -> Routes:
    """Return the routes of ids (T, k), without waiting for the device.

    >>> routes(torch.tensor([[1], [0], [1]], device="cuda"), 2).order.tolist()  # doctest: +SKIP
    [1, 0, 2]
    """
    from sparta.specialize.moe.triton_kernels import count_routes, place_routes

    rows, padded = ids.numel(), _power(experts)
    size = max(16, min(256, _ONE_HOT // padded))
    blocks = max(1, -(-rows // size))
    counts = torch.empty(experts * blocks, dtype=torch.int32, device=ids.device)
    order = torch.empty(max(1, rows), dtype=torch.int32, device=ids.device)
    flat = ids.reshape(-1)
    count_routes[(blocks,)](flat, counts, rows, experts, size, padded)
    ends = counts.cumsum(0, dtype=torch.int32)
    place_routes[(blocks,)](flat, counts, ends, order, rows, experts, size, padded)
    return Routes(order, ends, blocks)


def ragged_forward(
    tokens: Tensor, ids: Tensor, gates: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor], tile: str
) -> Tensor:
    """Return (T, N), the gated sum of the answers of each token's experts, without a gradient.

    Parameters
    ----------
    tokens, ids, gates
        (T, K), (T, k) int64, and (T, k) or None.
    weights, biases
        (N, K) and (N,) by expert; no biases at all is allowed.
    tile
        The text of a :class:`~sparta.specialize.moe.tile.RaggedTile`.
    """
    from sparta.specialize.moe.triton_kernels import join_answers

    (count, visits), width = ids.shape, weights[0].shape[0]
    y = tokens.new_empty(count, width)
    if not y.numel() or not visits:
        return y.zero_()
    with _on(tokens):
        found = routes(ids, len(weights))
        answers = y if visits == 1 else tokens.new_empty(count * visits, width)
        gates = None if gates is None else gates.contiguous()
        _product(found, tokens, (weights, biases, gates), visits, answers, tile, across=True)
        if visits > 1:
            lanes = min(_JOINED, _power(width))
            join_answers[(count, -(-width // lanes))](answers, y, width, visits, lanes)
    return y


def ragged_product_of(found: Routes, x: Tensor, weights: Sequence[Tensor], visits: int, out: Tensor, tile: str) -> None:
    """Write each row of x (T, K) times the transposed weight of each expert it visits into out (T * visits, N)."""
    with _on(x):
        _product(found, x, (weights, (), None), visits, out, tile, across=True)


@torch.library.custom_op("sparta::ragged_linear", mutates_args=())
def ragged_linear(
    tokens: Tensor, ids: Tensor, gates: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor], tile: str
) -> Tensor:
    """Return what :func:`ragged_forward` does, with gradients."""
    return ragged_forward(tokens, ids, gates, weights, biases, tile)


@ragged_linear.register_fake
def _(
    tokens: Tensor, ids: Tensor, gates: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor], tile: str
) -> Tensor:
    del ids, gates, biases, tile
    return tokens.new_empty(tokens.shape[0], weights[0].shape[0])


@torch.library.custom_op("sparta::ragged_linear_backward", mutates_args=())
def ragged_linear_backward(
    grad: Tensor,
    tokens: Tensor,
    ids: Tensor,
    gates: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    tile: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of tokens, gates, weights (experts, N, K) and biases (experts, N)."""
    from sparta.specialize.moe.triton_kernels import INTERPRETED, join_gradients, ragged_outer

    (count, visits), (n, k), experts = ids.shape, weights[0].shape, len(weights)
    grad_tokens, grad_gates = torch.zeros_like(tokens, memory_format=torch.contiguous_format), _like_gates(gates, ids)
    grad_weights, grad_biases = weights[0].new_zeros(experts, n, k), weights[0].new_zeros(experts, n)
    if not count or not visits or not n or not k:
        return grad_tokens, grad_gates, grad_weights, grad_biases
    grad, tokens = grad.contiguous(), _rows(tokens)
    gates = None if gates is None else gates.contiguous()
    cut = _outer_tile(tokens)
    with _on(tokens):
        found = routes(ids, experts)
        parts = tokens.new_empty(count * visits, k)
        _product(found, grad, (weights, (), None), visits, parts, tile, across=False)
        join_gradients[(count,)](
            parts, tokens, grad, gates, ids.contiguous(), _addresses(biases) if biases else None, grad_tokens,
            grad_gates, n, k, tokens.stride(0), grad.stride(0), visits, _JOINED, bool(biases), gates is not None,
        )  # fmt: skip
        grid = experts * -(-n // cut.rows) * -(-k // cut.columns)
        ragged_outer[(grid,)](
            grad, tokens, gates, found.order, found.ends, grad_weights, grad_biases, found.blocks, visits, n,
            k, grad.stride(0), tokens.stride(0), cut.rows, cut.columns, cut.depth, bool(biases), gates is not None,
            _precision(tokens), INTERPRETED, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return grad_tokens, grad_gates, grad_weights, grad_biases


@ragged_linear_backward.register_fake
def _(
    grad: Tensor,
    tokens: Tensor,
    ids: Tensor,
    gates: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    tile: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del grad, biases, tile
    first = weights[0]
    stacked = (first.new_empty(len(weights), *first.shape), first.new_empty(len(weights), first.shape[0]))
    return tokens.new_empty(tokens.shape), _like_gates(gates, ids), *stacked


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    tokens, ids, gates, weights, biases, ctx.tile = inputs
    ctx.has_gates, ctx.experts = gates is not None, len(weights)
    ctx.save_for_backward(tokens, ids, *([gates] if ctx.has_gates else []), *weights, *biases)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tokens, ids, *rest = ctx.saved_tensors
    gates = rest.pop(0) if ctx.has_gates else None
    weights, biases = rest[: ctx.experts], rest[ctx.experts :]
    grad_tokens, grad_gates, grad_weights, grad_biases = torch.ops.sparta.ragged_linear_backward(
        grad, tokens, ids, gates, weights, biases, ctx.tile
    )
    return (
        grad_tokens,
        None,
        grad_gates if ctx.has_gates else None,
        list(grad_weights.unbind()),
        list(grad_biases.unbind()) if biases else [],
        None,
    )


ragged_linear.register_autograd(_backward, setup_context=_setup_context)


# ---------------------------------------------------------------------- launching


def _product(
    found: Routes,
    x: Tensor,
    experts: tuple[Sequence[Tensor], Sequence[Tensor], Tensor | None],
    visits: int,
    out: Tensor,
    tile: str,
    *,
    across: bool,
) -> None:
    """Write rows of x times the weight of their expert, transposed with `across`, into out (rows, C)."""
    from triton.runtime.errors import OutOfResources

    from sparta.specialize.moe.triton_kernels import INTERPRETED, ragged_product

    (weights, biases, gates), cut, x = experts, _parsed(tile), _rows(x)
    weights = _alike(weights)
    depth, (rows, columns) = x.shape[1], out.shape
    last = columns % cut.columns
    narrow = 0 < last <= cut.columns // 2
    whole = depth % cut.depth == 0 and (last == 0 or (narrow and last == cut.columns // 2))
    span = _span(weights, cut) if cut.tma and across and whole else None
    table = _addresses(weights) if span is None else span.begins
    sources = _sorted(found, x, visits, rows, cut) if cut.ordered and _aligned(x) else (x, x)
    aligned = all(map(_aligned, weights))
    most = (min(rows, rows // cut.rows + len(weights))) * -(-columns // cut.columns)
    grid = min(most, _processors(x.device) * cut.ctas) if cut.ctas else most
    try:
        ragged_product[(grid,)](
            *sources, table, None if span is None else span.whole, None if span is None else span.half,
            _addresses(biases) if biases else None, gates, found.order, found.ends, out, len(weights), found.blocks,
            visits, depth, columns, x.stride(0), weights[0].stride(0), cut.rows, cut.columns, cut.depth,
            _power(len(weights)), across, whole, span is not None, sources[0] is not x, bool(cut.halves), narrow,
            bool(biases), gates is not None, aligned, _precision(x), INTERPRETED,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    except OutOfResources as error:
        raise ValueRangeError(message(f"{tile} needs more than the GPU has: {error}")) from error


def _sorted(found: Routes, x: Tensor, visits: int, rows: int, tile: RaggedTile) -> tuple[Any, Any]:
    """Return descriptors of the rows of x in the order of experts, for whole tiles and for half ones."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from sparta.specialize.moe.triton_kernels import sort_rows

    depth = x.shape[1]
    moved = x.new_empty(rows, depth)
    lanes = min(_MOVED, _power(depth))
    sort_rows[(-(-rows // _MOVED_ROWS), -(-depth // lanes))](
        x, found.order, moved, rows, visits, depth, x.stride(0), _MOVED_ROWS, lanes
    )
    boxes = ([tile.rows, tile.depth], [tile.rows // 2, tile.depth])
    whole, half = (TensorDescriptor(moved, [rows, depth], [depth, 1], box) for box in boxes)
    return whole, half


class _Span(NamedTuple):
    """Descriptors of the memory of all weights, for whole tiles and for half ones; and where in it each begins."""

    whole: Any
    half: Any
    begins: Tensor


def _span(weights: Sequence[Tensor], tile: RaggedTile) -> _Span | None:
    """Return what describes the memory of all weights at once; None where that cannot be.

    The memory is described as rows of a weight, each of them twice as long as it is, so that a weight may begin
    anywhere within a row. Only addresses within weights are ever read.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    first = min(weights, key=Tensor.data_ptr)
    (n, k), size = first.shape, first.element_size()
    step = tile.depth * size
    offsets = tuple(weight.data_ptr() - first.data_ptr() for weight in weights)
    if first.stride() != (k, 1) or first.data_ptr() % 16 or step % 16 or any(offset % step for offset in offsets):
        return None
    shape = [max(offsets) // (k * size) + n + 1, 2 * (k // tile.depth), tile.depth]
    boxes = ([tile.columns, 1, tile.depth], [tile.columns // 2, 1, tile.depth])
    whole, half = (TensorDescriptor(first, shape, [k, tile.depth, 1], box) for box in boxes)
    return _Span(whole, half, _table(tuple(offset // step for offset in offsets), first.device))


def _aligned(x: Tensor) -> bool:
    """Return whether every row of a matrix begins at a multiple of 16 bytes."""
    return (
        x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.shape[1] * x.element_size() % 16 == 0
    )


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return the addresses of tensors, int64 on their device."""
    return _table(tuple(tensor.data_ptr() for tensor in tensors), tensors[0].device)


def _table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers, int64 on a device; made once for the same ones, as long as not too many others are asked for."""
    table = _made_table(numbers, device)
    return keep(table) if table.is_cuda else table


@functools.lru_cache(maxsize=1024)
def _made_table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device)


def _alike(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return weights that all lie in memory in the same way."""
    strides = {weight.stride() for weight in weights}
    return weights if len(strides) == 1 and weights[0].stride(1) == 1 else [weight.contiguous() for weight in weights]


def _like_gates(gates: Tensor | None, ids: Tensor) -> Tensor:
    """Return a place for the gradient of gates; a number where there are none."""
    if gates is None:
        return torch.zeros(1, device=ids.device)
    return torch.zeros(ids.shape, dtype=gates.dtype, device=ids.device)


def _outer_tile(x: Tensor) -> RaggedTile:
    return RaggedTile(128, 128, 64, warps=8) if x.element_size() < 4 else RaggedTile(64, 64, 32, stages=2)


@functools.lru_cache(maxsize=256)
def _parsed(tile: str) -> RaggedTile:
    return RaggedTile.parse(tile)


@functools.lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    on_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else _INTERPRETED_PROCESSORS


def _on(x: Tensor) -> torch.cuda.device:
    """Return a context in which the device of x is current; nothing on the CPU."""
    return torch.cuda.device(x.device if x.is_cuda else -1)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _power(size: int) -> int:
    """Return the next power of two that Triton takes as a size."""
    return max(16, 1 << (size - 1).bit_length())


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
