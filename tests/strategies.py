"""Hypothesis strategies for shapes, grids and TeSAs: small, ragged, empty, blocky, with every kind of attribute."""

import math

import torch
from hypothesis import strategies as st

from sparta.tesa.attribute import TeSA
from sparta.tesa.bits import FORMATS
from sparta.tesa.grid import Grid, cells_shape

ANY_NUMBER = st.sampled_from([0.0, 1.0, -2.5, math.nan, math.inf])
ANY_DENSITY = st.sampled_from([0.0, 0.2, 0.5, 1.0])

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)
shapes_with_empty = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def grids(draw, shape=None, values=ANY_NUMBER, dtype=torch.float64):
    """A grid of some block shape whose cells are drawn from `values`; the blocks need not be canonical."""
    shape = draw(shapes_with_empty) if shape is None else shape
    block = tuple(draw(st.integers(1, max(1, s))) for s in shape)
    counts = cells_shape(shape, block)
    cells = draw(st.lists(values, min_size=math.prod(counts), max_size=math.prod(counts)))
    return Grid(shape, block, torch.tensor(cells, dtype=dtype).reshape(counts))


@st.composite
def tesas(draw, shape=None):
    """A TeSA with states, constants, formats and quantisation parameters, each in blocks of its own."""
    shape = draw(shapes_with_empty) if shape is None else shape
    state = draw(grids(shape, st.sampled_from([0, 1, 2]), torch.uint8))
    value = draw(grids(shape, st.sampled_from([0.0, 0.0, 1.0, -math.inf])))
    code = draw(grids(shape, st.integers(0, len(FORMATS) - 1), torch.uint8))
    scale = draw(grids(shape, st.sampled_from([math.inf, 0.5, 2.0])))
    zero_point = draw(grids(shape, st.sampled_from([0.0, 3.0])))
    value = Grid.combine(lambda s, v: torch.where(s == 1, v, 0.0), state, value)
    return TeSA(*(g.canonical() for g in (state, value, code, scale, zero_point)))


@st.composite
def masks(draw, shape=None, density=ANY_DENSITY):
    """A bool tensor: empty, full, or random, sometimes not contiguous."""
    shape = draw(shapes) if shape is None else shape
    seed, kept = draw(st.integers(0, 2**31)), draw(density)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < kept
    if mask.dim() > 1 and draw(st.booleans()):
        mask = mask.transpose(0, -1).contiguous().transpose(0, -1)
    return mask
