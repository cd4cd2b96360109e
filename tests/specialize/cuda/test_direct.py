"""Direct starts are offered only for kernels whose parameters are where they are expected to be."""

from types import SimpleNamespace

import pytest
import torch

from sparta.errors import SpartaError
from sparta.specialize.cuda.direct import direct_kernel, parameter_layout

MATRIX = "tensordesc<bf16[16, 64]>"
KINDS = [MATRIX, "*i32", "constexpr", "i32", "i64", "constexpr"]
PLACES = [(0, 128), (128, 4), (132, 4), (136, 8), (144, 8), (152, 8), (160, 4), (168, 8), (176, 8), (184, 8)]


def test_arguments_are_written_where_the_driver_reads_them():
    layout, pick = parameter_layout(KINDS, PLACES)
    values = (b"m" * 128, 3, 5, 7, 1, 4096, -1, 11, 1 << 40)
    memory = bytearray(192)
    layout.pack_into(memory, 0, *pick(values))
    read = [memory[offset : offset + size] for offset, size in PLACES]
    assert read[0] == b"m" * 128
    assert [int.from_bytes(each, "little") for each in read[1:]] == [3, 5, 7, 1, 4096, 11, 1 << 40, 0, 0]


@pytest.mark.parametrize(
    ("kinds", "places"),
    [
        (KINDS, PLACES[:-1]),  # Triton's own pointers are not as many
        (KINDS, [*PLACES, (192, 8)]),
        (KINDS, [*PLACES[:6], (160, 8), *PLACES[7:]]),  # another size
        (KINDS, [PLACES[0], (64, 4), *PLACES[2:]]),  # inside the one before
        ([*KINDS, "fp32"], [*PLACES, (192, 4)]),
        (["*i32"], [(0, 8), (8, 8), (16, 8)]),
    ],
)
def test_other_layouts_are_refused(kinds, places):
    with pytest.raises(SpartaError):
        parameter_layout(kinds, places)


@pytest.mark.parametrize(
    "compiled",
    [
        SimpleNamespace(),
        SimpleNamespace(metadata=SimpleNamespace(shared=0)),
        SimpleNamespace(
            metadata=SimpleNamespace(
                global_scratch_size=64, profile_scratch_size=0, launch_cooperative_grid=False, num_ctas=1, shared=0
            )
        ),
    ],
)
def test_triton_starts_what_is_not_understood(compiled):
    assert direct_kernel(compiled, [torch.bfloat16]) is None
