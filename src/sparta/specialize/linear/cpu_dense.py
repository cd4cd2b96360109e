"""Dense linear layers as steps of a chain: the weight packed once for the kernels of blocks, which skip nothing here.

Between sparse layers a dense one would end the chain and start another; packed, it is as fast as a library's product
and hands over its activations as its neighbours do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.specialize.cpu.chain import Product, StepKind, pack_call
from sparta.specialize.cpu.library import (
    PANEL_CALL,
    STREAM_CALL,
    STREAM_FORMS,
    PanelMatrix,
    StreamMatrix,
    activation_code,
    load,
)
from sparta.specialize.cpu.packing import BLOCK_ROWS, is_float
from sparta.specialize.cpu.tile import MOST_AHEAD, Tile

__all__ = ["dense_product", "dense_tile", "dense_values", "few_tokens_product"]

_MANY_INPUTS = 1536  # from here on a tile of activations outgrows the second level of caches
_CHUNK = 768
_HEIGHT = 4  # of all tiles, so that a weight is packed once for all sizes
_WIDEST = {"avx512": 4, "avx2": 2}
_COLUMNS = Tile("columns", 16, prefetch=4096)  # of few tokens
_PADDING = 16  # values that a kernel may load beyond the last one


def dense_tile(tokens: int, inputs: int) -> Tile:
    """Return the tile for a dense weight.

    >>> dense_tile(128, 768).form
    'panel'
    """
    library = load()
    vectors = min(_WIDEST.get(library.isa, 2), -(-tokens // library.lanes))
    return Tile("panel", _HEIGHT, vectors, k_chunk=_CHUNK if inputs > _MANY_INPUTS else 0)


def dense_values(weight: Tensor, tile: Tile) -> Tensor:
    """Return the values of a weight (N, K) as the kernels read them; tiles of one block and chunk share them.

    >>> dense_values(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), Tile("panel", 4))[:8].tolist()
    [1.0, 3.0, 0.0, 0.0, 2.0, 4.0, 0.0, 0.0]
    """
    outputs, inputs = weight.shape
    groups = -(-outputs // tile.block)
    missing = groups * tile.block - outputs
    whole = functional.pad(weight.detach(), (0, 0, 0, missing)) if missing else weight.detach()
    blocks = whole.reshape(groups, tile.block, inputs).transpose(1, 2)
    parts = [blocks[:, begin:end].reshape(-1) for begin, end in pairwise(_bounds(inputs, tile))]
    return torch.cat([*parts, torch.zeros(_PADDING)])


def _bounds(inputs: int, tile: Tile) -> list[int]:
    return [*range(0, inputs, tile.k_chunk or inputs), inputs]


def dense_product(weight: Tensor, bias: Tensor | None, tile: Tile, values: Tensor | None = None) -> Product | None:
    """Return a dense layer (N, K) as a step; None where the kernels do not take it as it is.

    Parameters
    ----------
    values
        What :func:`dense_values` returned for this weight and a tile of the same block and chunk.

    Examples
    --------
    >>> product = dense_product(torch.ones(4, 3), None, dense_tile(8, 3))
    >>> product.inputs, product.outputs
    (3, 4)
    """
    outputs, inputs = weight.shape
    row_bytes = 4 * tile.mv * load().lanes
    plain = weight.dtype == torch.float32 and weight.is_cpu and not weight.is_neg()
    if not plain or not weight.numel() or inputs * row_bytes >= 2**31 or (bias is not None and not is_float(bias)):
        return None
    bounds, groups = _bounds(inputs, tile), -(-outputs // tile.block)
    widths = torch.tensor([end - begin for begin, end in pairwise(bounds)])
    columns = [torch.arange(begin, end, dtype=torch.int32) * row_bytes for begin, end in pairwise(bounds)]
    padding = torch.zeros(MOST_AHEAD, dtype=torch.int32)
    arrays = {
        "values": dense_values(weight, tile) if values is None else values,
        "offsets": torch.cat([*(each.repeat(groups) for each in columns), padding]),
        "starts": functional.pad(widths.repeat_interleave(groups).cumsum(0), (1, 0)),
        "rows": torch.arange(groups, dtype=torch.int32) * tile.block,
        "costs": _costs(outputs),
        "chunk_columns": torch.tensor(bounds),
    }
    fields = {name: array.data_ptr() for name, array in arrays.items()}
    sizes = {"channels": outputs, "inputs": inputs, "groups": groups, "chunks": len(bounds) - 1}
    matrix = PanelMatrix(**fields, **sizes, bn=tile.block, mv=tile.mv, interleave=1, prefetch=0)
    return _product(matrix, tile, (arrays, bias), 0 if bias is None else bias.data_ptr())


def _product(matrix: PanelMatrix, tile: Tile, alive: tuple[Any, ...], bias: int, activation: str = "none") -> Product:
    outputs, inputs = matrix.channels, matrix.inputs
    ends = (bias, 0, outputs, activation_code(activation), 0)

    def call(tokens: int, stride: int, x: str, *, to_panel: bool, residual: bool) -> bytes:
        del residual
        return PANEL_CALL.pack(0, 0, tokens, stride, outputs, *ends, x == "panel", to_panel)

    return Product(
        kind=StepKind.PANELS,
        matrix=matrix,
        inputs=inputs,
        outputs=outputs,
        output=torch.float32,
        takes=None,
        tile=tile.mv * load().lanes,
        rounding=(),
        call=call,
        pack=lambda tokens, stride: pack_call(tokens, inputs, stride, tile.mv),
        activated=(lambda name: _product(matrix, tile, alive, bias, name)) if activation == "none" else None,
        alive=alive,
    )


def few_tokens_product(weight: Tensor, bias: Tensor | None) -> Product | None:
    """Return a dense layer (N, K) as a step for one token or two; None where the kernels do not take it as it is.

    The weight is one stream of columns, of which nothing is skipped: with so few tokens, reading it is all the work.

    Examples
    --------
    >>> product = few_tokens_product(torch.ones(4, 3), None)
    >>> product.inputs, product.outputs, product.kind.name
    (3, 4, 'STREAM')
    """
    plain = weight.dtype == torch.float32 and weight.is_cpu and not weight.is_neg()
    if not plain or not weight.numel() or (bias is not None and not is_float(bias)):
        return None
    outputs, inputs = weight.shape
    groups, short = -(-outputs // _COLUMNS.block), inputs < 2**15
    arrays = {
        "values": dense_values(weight, _COLUMNS),
        "indices": torch.arange(inputs, dtype=torch.int16 if short else torch.int32).repeat(groups),
        "starts": torch.arange(groups + 1) * inputs,
        "costs": torch.arange(groups + 1),
    }
    fields = {name: array.data_ptr() for name, array in arrays.items()}
    sizes = {"channels": outputs, "inputs": inputs, "groups": groups, "height": _COLUMNS.block}
    form = {"form": STREAM_FORMS[_COLUMNS.form], "index_bytes": 2 if short else 4, "prefetch": _COLUMNS.prefetch}
    matrix = StreamMatrix(**fields, **sizes, **form)
    return _few_tokens(matrix, (arrays, bias), 0 if bias is None else bias.data_ptr())


def _few_tokens(matrix: StreamMatrix, alive: tuple[Any, ...], bias: int, activation: str = "none") -> Product:
    outputs, inputs = matrix.channels, matrix.inputs
    ends = (bias, 0, outputs, activation_code(activation), 0)

    def call(tokens: int, stride: int, x: str, *, to_panel: bool, residual: bool) -> bytes:
        del x, to_panel, residual
        return STREAM_CALL.pack(0, 0, tokens, stride, outputs, *ends)

    return Product(
        kind=StepKind.STREAM,
        matrix=matrix,
        inputs=inputs,
        outputs=outputs,
        output=torch.float32,
        takes=None,
        tile=0,
        rounding=None,
        call=call,
        pack=lambda tokens, stride: pack_call(tokens, inputs, stride, 1),
        activated=(lambda name: _few_tokens(matrix, alive, bias, name)) if activation == "none" else None,
        alive=alive,
    )


def _costs(outputs: int) -> Tensor:
    """Return running costs of blocks of output rows: all rows are alike."""
    return (torch.arange(-(-outputs // BLOCK_ROWS) + 1) * BLOCK_ROWS).clamp_max(outputs)
