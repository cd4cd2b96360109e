"""Hypothesis strategies for CPU kernels: every tile, and masks as training leaves them."""

from hypothesis import strategies as st

from sparta.specialize.cpu.tile import Tile
from strategies import masks


@st.composite
def tiles(draw, form=None):
    """Any tile that a library holds."""
    form = form or draw(st.sampled_from(["panel", "panel", "panel", "columns", "permuted", "bitmap", "rows"]))
    if form != "panel":
        blocks = {"columns": [4, 8, 16], "permuted": [16], "bitmap": [1], "rows": [1]}[form]
        return Tile(form, draw(st.sampled_from(blocks)), prefetch=draw(st.sampled_from([0, 4096])))
    block = draw(st.sampled_from([1, 4, 8]))
    interleave = draw(st.sampled_from([1, 2, 4])) if block == 1 else 1
    return Tile(
        form,
        block,
        mv=draw(st.integers(1, 3 if block == 8 else 7 if interleave == 4 else 4)),
        interleave=interleave,
        k_chunk=draw(st.sampled_from([0, 7, 16])),
        prefetch=0 if block == 1 else draw(st.sampled_from([0, 4, 16])),
    )


@st.composite
def weight_masks(draw):
    """(N, K) masks as training leaves them: rows of very different density, some dead, some full."""
    shape = (draw(st.integers(0, 70)), draw(st.integers(0, 70)))
    mask = draw(masks(shape=shape))
    if shape[0] and draw(st.booleans()):
        mask[draw(st.integers(0, shape[0] - 1))] = True
        mask[draw(st.integers(0, shape[0] - 1)) :: 7] = False
    return mask
