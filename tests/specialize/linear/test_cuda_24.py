"""2:4 weights for few tokens: packing loses nothing, and who reads them as the hardware does multiplies rightly."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import MissingPackageError, PatternError, ShapeError, ValueRangeError
from sparta.nn import SparseLinear
from sparta.specialize.cuda import nvrtc
from sparta.specialize.linear.cuda_24 import StreamTile, TwoFour, is_two_four
from sparta.specialize.linear.cuda_24_layout import CHUNK, SLAB, StreamLayout
from sparta.specialize.linear.cusparselt import CuSparseLt
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA


def two_four_mask(rows, columns, keep=2, seed=0):
    draws = torch.rand(rows, -(-columns // 4), 4, generator=torch.Generator().manual_seed(seed))
    chosen = draws.topk(keep, -1).indices
    return torch.zeros_like(draws, dtype=torch.bool).scatter_(2, chosen, True).flatten(1)[:, :columns]


def multiply_as_hardware(values, selectors, x):
    """Walk over slabs, chunks and multiplications; each lane owns its values, each selector word its 16 columns.

    Rows g and g + 8 of a multiplication's 16×32 tile come from the lanes 4g..4g+3: lane t holds the kept values of the
    groups of columns t and t + 4. Their places come from lanes 2f and 2f + 1, f being the parity of the multiplication:
    the first tells of columns 0-15, the second of 16-31; the low half word of row g, the high one of row g + 8.
    """
    slabs, chunks = values.shape[:2]
    y = torch.zeros(x.shape[0], slabs * SLAB)
    words = selectors.long() & 0xFFFFFFFF
    padded = torch.nn.functional.pad(x, (0, chunks * CHUNK - x.shape[1]))
    for slab in range(slabs):
        for chunk in range(chunks):
            for j in range(4):
                tile = torch.zeros(16, 32)
                for g in range(8):
                    for t in range(4):
                        for register in range(4):
                            row, group = g + 8 * (register % 2), t + 4 * (register // 2)
                            word = int(words[slab, chunk, 4 * g + 2 * (j % 2) + register // 2, j // 2])
                            nibble = word >> (16 * (register % 2) + 4 * t) & 15
                            first, second = nibble & 3, nibble >> 2
                            assert first < second
                            pair = values[slab, chunk, j, 4 * g + t, 2 * register : 2 * register + 2]
                            tile[row, 4 * group + first], tile[row, 4 * group + second] = pair
                k = chunk * CHUNK + 32 * j
                y[:, slab * SLAB : (slab + 1) * SLAB] += padded[:, k : k + 32] @ tile.t()
    return y


@given(rows=st.integers(1, 40), columns=st.integers(1, 300), keep=st.integers(0, 2), seed=st.integers(0, 9))
def test_what_is_packed_is_unpacked(rows, columns, keep, seed):
    mask = two_four_mask(rows, columns, keep, seed)
    weight = torch.randn(columns, rows, generator=torch.Generator().manual_seed(seed)).t()  # strided on purpose
    layout = StreamLayout(TeSA.from_mask(mask))
    values, selectors = layout.pack(weight)
    assert torch.equal(layout.unpack(values), torch.where(mask, weight, 0))
    assert selectors.dtype == torch.int32
    assert values.is_contiguous()
    assert selectors.is_contiguous()


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_the_hardware_finds_every_value_in_its_place(keep):
    mask = two_four_mask(20, 150, keep, seed=keep)
    weight, x = torch.randn(20, 150), torch.randn(3, 150)
    values, selectors = StreamLayout(TeSA.from_mask(mask)).pack(weight)
    expected = x @ torch.where(mask, weight, 0).t()
    torch.testing.assert_close(multiply_as_hardware(values, selectors, x)[:, :20], expected, atol=1e-4, rtol=1e-4)


def test_three_of_four_is_refused_by_name():
    with pytest.raises(PatternError, match="3 or 4 live"):
        StreamLayout(TeSA.from_mask(torch.tensor([[True, True, True, False]]))).pack(torch.ones(1, 4))


def test_another_weight_is_refused():
    with pytest.raises(ShapeError, match="as when built"):
        StreamLayout(TeSA.from_mask(two_four_mask(8, 8))).pack(torch.ones(8, 12))


def test_two_four_is_recognized():
    assert is_two_four(TeSA.from_mask(two_four_mask(8, 30)))
    assert is_two_four(TeSA.from_mask(torch.zeros(8, 30, dtype=torch.bool)))
    assert not is_two_four(TeSA.dense((8, 32)))
    shifted = torch.tensor([[False, True, True, True, False, False, False, False]])
    assert not is_two_four(TeSA.from_mask(shifted))


@pytest.mark.parametrize("implement", [TwoFour(), CuSparseLt()], ids=lambda each: each.name)
def test_refusals_have_reasons(implement):
    mask = TeSA.from_mask(two_four_mask(64, 64))
    assert "not on cpu" in implement.supports(linear_spec(mask, 128, torch.bfloat16)).reason
    assert CuSparseLt().supports(linear_spec(mask, 128, torch.float16, device="cuda")).reason.endswith("not fp16")
    assert "not fp32" in implement.supports(linear_spec(mask, 128, torch.float32, device="cuda")).reason
    dense = linear_spec(TeSA.dense((64, 64)), 64 if implement.name == "cuda-24" else 128, torch.bfloat16, device="cuda")
    assert "of some 4" in implement.supports(dense).reason


def test_numbers_of_tokens_that_do_not_pay_are_refused():
    mask = TeSA.from_mask(two_four_mask(64, 64))
    assert "4096 tokens" in TwoFour().supports(linear_spec(mask, 4096, torch.bfloat16, device="cuda")).reason
    assert "1 tokens" in CuSparseLt().supports(linear_spec(mask, 1, torch.bfloat16, device="cuda")).reason
    ragged = TeSA.from_mask(two_four_mask(60, 64))
    assert "multiples" in CuSparseLt().supports(linear_spec(ragged, 128, torch.bfloat16, device="cuda")).reason


def test_bad_parameters_are_refused():
    spec = linear_spec(TeSA.from_mask(two_four_mask(64, 64)), 16, torch.bfloat16, device="cuda")
    with pytest.raises(ValueRangeError, match="clusters"):
        StreamTile(tokens=7)
    with pytest.raises(ValueRangeError, match="name=number"):
        TwoFour().build(spec, {"tile": "nonsense=1"})
    with pytest.raises(ValueRangeError, match="0 or more"):
        CuSparseLt().build(spec, {"algorithm": -1})


def test_every_tile_fits_into_shared_memory():
    mask = TeSA.from_mask(two_four_mask(64, 64))
    for rows in (1, 9, 17, 33, 64):
        tiles = [
            StreamTile.parse(text)
            for text in TwoFour().space(linear_spec(mask, rows, torch.float16)).get("tile").domain.values
        ]
        assert tiles
        assert all(tile.tokens >= rows and tile.shared_bytes <= 227 * 1024 for tile in tiles)


def test_a_cached_kernel_that_was_changed_is_not_used(tmp_path):
    path = tmp_path / "kernel.cubin"
    assert nvrtc._cached(path) is None
    path.write_bytes(b"x" * 100)
    assert nvrtc._cached(path) is None


def test_without_nvrtc_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: None)
    assert "NVRTC" in nvrtc.nvrtc_obstacle()
    with pytest.raises(MissingPackageError, match="CUDA build of PyTorch"):
        nvrtc.compile_cuda("", {}, {}, (9, 0))


def test_a_header_is_part_of_what_a_kernel_is_known_by(monkeypatch, tmp_path):
    compiled = []
    library = SimpleNamespace(nvrtcVersion=lambda *_: 0)
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: library)
    monkeypatch.setattr(nvrtc, "private_folder", lambda name: tmp_path)
    monkeypatch.setattr(nvrtc, "_compile", lambda *given: compiled.append(given) or b"code")
    source = '#include "shared.cuh"\n'
    for text in ("int one;", "int two;", "int one;"):
        assert nvrtc.compile_cuda(source, {"shared.cuh": text}, {}, (9, 0)) == b"code"
    assert [given[2] for given in compiled] == [{"shared.cuh": "int one;"}, {"shared.cuh": "int two;"}]


@pytest.mark.parametrize("name", ["banks", "bitmap", "gather", "lanes", "stream24", "threshold"])
def test_every_header_of_a_kernel_is_found(name):
    source, headers = nvrtc._with_headers(nvrtc._NATIVE / f"{name}.cu")
    assert source.count("#include") == len(headers) >= 1
    assert "#include" not in "".join(headers.values())  # only what a source itself includes is looked for


def test_the_library_is_left_out_of_training_which_packs_in_every_step():
    mask = torch.tensor([True, False, False, True]).repeat(64, 16)
    layer = SparseLinear(torch.nn.Linear(64, 64).bfloat16(), weight_mask=mask)
    x = torch.randn(256, 64).bfloat16()
    trained, used = (replace(layer._spec(x, backward=backward), device="cuda") for backward in (True, False))
    assert "in every step" in CuSparseLt().supports(trained).reason
    assert "in every step" not in CuSparseLt().supports(used).reason
    assert layer._backward_spec(x).attributes == {"trained": True}
