"""What holds for every format: round trip, sums, files, moving; whatever the shape, dtype, strides and batch."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats import (
    BCSR,
    Bitmap,
    NMPacked,
    Packed,
    format_named,
    known_formats,
    pack,
    pack_bits,
    register_format,
    unpack,
    unpack_bits,
)
from sparta.tesa.formats.sums import segment_sum

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool]
DTYPES = [*FLOATS, *INTEGERS, torch.complex64]


@dataclass
class Case:
    """A matrix to pack: what is dead holds poison."""

    dense: torch.Tensor
    mask: torch.Tensor
    format: str
    options: dict

    @property
    def expected(self):
        """The dense tensor with its dead elements at zero, as NumPy sees it."""
        return torch.where(self.mask, widened(self.dense), 0)

    def pack(self, tesa=None):
        return pack(self.dense, self.mask if tesa is None else tesa, format=self.format, **self.options)

    def __repr__(self):
        return (
            f"Case({self.format}, {self.options}, {tuple(self.dense.shape)}, {self.dense.dtype}, {self.dense.stride()})"
        )


def widened(tensor):
    """The same values in a dtype that every PyTorch operator knows."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64)


def same(left, right):
    """Equal dtype, shape and bits (NaN included)."""
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(*bits)


def keep_n_of_m(mask, n, m):
    """The first n live elements of each group, written the slow way."""
    mask = mask.copy()
    for row in mask:
        for start in range(0, len(row), m):
            for extra in np.flatnonzero(row[start : start + m])[n:]:
                row[start + extra] = False
    return mask


def laid_out(tensor, layout):
    """The same values in other strides."""
    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        wide = torch.stack([tensor, tensor], -1).flatten(-2)
        return wide[..., ::2]
    return tensor


@st.composite
def cases(draw, dtypes=DTYPES, formats=("bcsr", "bcsc", "bcsrc", "bitmap", "nm", "packed24")):
    rows, cols = draw(st.integers(0, 12)), draw(st.integers(0, 19))
    batch = draw(st.sampled_from([(), (2,), (3, 2), (0,)]))
    name = draw(st.sampled_from(formats))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    mask = rng.random((rows, cols)) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    options = {}
    if name.startswith("bc"):
        options["block"] = (draw(st.integers(1, max(rows, 1))), draw(st.integers(1, max(cols, 1))))
    if name == "nm":
        options["m"] = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 256]))
        options["n"] = draw(st.integers(1, options["m"]))
        mask = keep_n_of_m(mask, options["n"], options["m"])
    if name == "packed24":
        mask = keep_n_of_m(mask, 2, 4)
    device = draw(st.sampled_from(DEVICES))
    dtype = draw(st.sampled_from(dtypes))
    low = -50 if dtype.is_floating_point or dtype.is_signed else 0
    dense = torch.from_numpy(rng.integers(low, 50, (*batch, rows, cols))).to(device)
    if dtype.is_floating_point or dtype.is_complex:
        dense = dense / 7
    dense, mask = dense.to(dtype), torch.from_numpy(mask).to(device)
    if dtype in FLOATS and dtype != torch.float8_e4m3fn:
        poison = draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
        dense = torch.where(mask, dense, torch.tensor(poison, dtype=dtype, device=device))
    return Case(laid_out(dense, draw(st.sampled_from(["contiguous", "transposed", "strided"]))), mask, name, options)


@given(cases())
@settings(max_examples=250)
def test_unpack_gives_live_elements_back_and_zero_elsewhere(case):
    packed = case.pack()
    dense = packed.unpack()
    assert packed.shape == tuple(case.dense.shape) == tuple(dense.shape)
    assert packed.dtype == case.dense.dtype == dense.dtype
    assert packed.device == case.dense.device == dense.device
    assert torch.equal(widened(dense), case.expected)
    assert same(unpack(packed), dense)


@given(cases())
@settings(max_examples=120)
def test_nothing_but_live_values_is_stored(case):
    """Poison at dead places never reaches the values, not even inside a kept block."""
    packed = case.pack()
    values, expected = widened(packed.values), case.expected
    assert torch.isfinite(values).all()
    assert int((values != 0).sum()) == int((expected != 0).sum())


@given(cases())
@settings(max_examples=250)
def test_sums_equal_the_sums_of_the_dense_matrix(case):
    packed = case.pack()
    for axis in (-1, -2):
        sums, expected = packed.sum(axis), case.expected.sum(axis)
        assert sums.shape == expected.shape
        if case.dense.dtype in INTEGERS:
            assert sums.dtype == torch.int64
            assert torch.equal(sums, expected)
        else:
            assert sums.dtype in {torch.float32, torch.float64, torch.complex64}
            scale = case.expected.abs().sum(axis)
            assert ((sums - expected).abs() <= 1e-6 * scale).all()
            if sums.dtype == torch.float64:
                assert ((sums - expected).abs() <= 1e-14 * scale).all()


@given(cases())
def test_a_file_brings_the_same_matrix_back(case):
    packed = case.pack()
    tensors, meta = packed.state()
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert packed.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
    for reader in (Packed, type(packed)):
        back = reader.from_state(tensors, meta)
        assert type(back) is type(packed)
        assert back.shape == packed.shape
        assert same(back.unpack(), packed.unpack())
        assert all(same(t, tensors[name]) for name, t in back.state()[0].items())
        assert back.state()[1] == meta


@given(cases(dtypes=[torch.float32]))
def test_a_tesa_packs_as_its_mask_does(case):
    packed, expected = case.pack(TeSA.from_mask(case.mask)), case.pack()
    for name, tensor in expected.state()[0].items():
        assert same(packed.state()[0][name], tensor)


@given(cases(dtypes=[torch.float32]), st.sampled_from([torch.uint8, torch.int64, torch.float32]))
def test_a_mask_may_be_numbers(case, dtype):
    packed = case.pack(case.mask.to(dtype))
    assert same(packed.unpack(), case.pack().unpack())


@given(cases(dtypes=[torch.float32, torch.int8]))
def test_packing_is_deterministic(case):
    first, second = case.pack().state()[0], case.pack().state()[0]
    assert first.keys() == second.keys()
    assert all(same(first[name], second[name]) for name in first)


@given(cases(dtypes=[torch.float32]))
def test_new_values_take_the_old_index(case):
    packed = case.pack()
    other = packed.with_values(torch.stack([packed.values * 2, packed.values * 3]))
    assert other.shape == (2, *packed.shape)
    assert same(other.unpack(), torch.stack([packed.unpack() * 2, packed.unpack() * 3]))


@given(cases(dtypes=[torch.float32]), st.sampled_from(DEVICES))
def test_moving_changes_device_and_dtype_only(case, device):
    packed = case.pack()
    moved = packed.to(device, torch.float64)
    assert moved.device.type == device
    assert same(moved.unpack(), packed.unpack().to(device, torch.float64))
    assert all(t.device.type == device for t in moved.state()[0].values())
    assert packed.to().dtype == torch.float32
    assert [t.dtype for n, t in moved.state()[0].items() if n != "values"] == [
        t.dtype for n, t in packed.state()[0].items() if n != "values"
    ]


@given(cases(dtypes=[torch.float32]))
def test_stored_places_hold_all_live_elements(case):
    stored = case.pack().stored_mask()
    assert stored.shape == case.mask.shape
    assert not (case.mask & ~stored).any()


@given(cases(dtypes=[torch.float64]))
def test_unpacking_is_differentiable_in_the_values(case):
    packed = case.pack()
    values = packed.values.clone().requires_grad_()
    dense = packed.with_values(values).unpack()
    weight = torch.arange(1.0, dense.numel() + 1, dtype=torch.float64, device=dense.device).view(dense.shape)
    (gradient,) = torch.autograd.grad((dense * weight).sum(), values)
    assert same(packed.with_values(gradient).unpack(), torch.where(packed.stored_mask(), weight, 0))


@given(st.integers(0, 5), st.integers(0, 30), st.integers(0, 99))
def test_bits_hold_a_mask_eight_columns_to_a_byte(rows, cols, seed):
    mask = np.random.default_rng(seed).random((rows, cols)) < 0.5
    packed = pack_bits(torch.from_numpy(mask))
    assert np.array_equal(packed.numpy(), np.packbits(mask, axis=-1, bitorder="little"))
    assert np.array_equal(unpack_bits(packed, cols).numpy(), mask)


@pytest.mark.parametrize(
    "options", [{"format": "bcsr", "block": (2, 2)}, {"format": "bitmap"}, {"format": "nm", "n": 2, "m": 2}]
)
def test_nan_stays_in_its_own_row_and_column(options):
    dense = torch.ones(4, 4)
    dense[0, 1] = float("nan")
    packed = pack(dense, torch.ones(4, 4, dtype=torch.bool), **options)
    assert packed.sum(-1).isnan().tolist() == [True, False, False, False]
    assert packed.sum(-2).isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    "options", [{"format": "bcsr", "block": (1, 1)}, {"format": "bitmap"}, {"format": "nm", "n": 4, "m": 4}]
)
def test_half_precision_sums_do_not_stall_or_overflow(options):
    """40 000 ones: fp16 stops counting at 2048, and 60 000 + 60 000 is beyond its range."""
    ones = torch.ones(1, 40_000, dtype=torch.float16)
    packed = pack(ones, ones.bool(), **options)
    assert packed.sum(-1).tolist() == [40_000.0]
    tall = torch.full((2, 4), 60_000.0, dtype=torch.float16)
    assert pack(tall, tall.bool(), **options).sum(-2).tolist() == [120_000.0] * 4


def test_integer_sums_do_not_wrap():
    dense = torch.full((3, 1000), 127, dtype=torch.int8)
    for options in ({"format": "bcsc", "block": (2, 7)}, {"format": "bitmap"}, {"format": "nm", "n": 4, "m": 4}):
        assert pack(dense, dense.bool(), **options).sum(-1).tolist() == [127_000] * 3


def test_column_sums_over_many_slabs(monkeypatch):
    monkeypatch.setattr("sparta.tesa.formats.sums._SLAB_ELEMENTS", 10)
    dense = torch.arange(70.0).reshape(10, 7)
    for packed in (Bitmap.pack(dense, dense > 3), NMPacked.pack(dense, dense > 3, n=3, m=3)):
        assert torch.equal(packed.sum(-2), torch.where(dense > 3, dense, 0).sum(0))


def test_segment_sum_of_nothing_is_zero():
    assert segment_sum(torch.zeros(0, 3), torch.tensor([0, 0, 0])).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert segment_sum(torch.zeros(0, 3, dtype=torch.int8), torch.tensor([0])).shape == (0, 3)


def test_repr_tells_shape_and_cost():
    packed = pack(torch.eye(4), torch.eye(4, dtype=torch.bool), format="nm", n=1, m=4)
    assert repr(packed) == "NMPacked(shape=(4, 4), n=1, m=4, dtype=torch.float32, device=cpu, nbytes=20)"


def test_formats_are_found_by_name():
    assert known_formats() == ("bcsc", "bcsr", "bcsrc", "bitmap", "nm", "packed24")
    assert format_named("bcsr") is BCSR
    with pytest.raises(NameNotFoundError, match="did you mean 'bitmap'"):
        format_named("bitmpa")
    with pytest.raises(NameNotFoundError, match="unknown format 'csr5'"):
        pack(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool), format="csr5")


def test_a_format_is_registered_once():
    with pytest.raises(ValueRangeError, match="'bcsr' is registered already"):
        register_format(BCSR)


def test_options_are_checked():
    dense, mask = torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.bool)
    with pytest.raises(NameNotFoundError, match="unknown bcsr option 'blok'; did you mean 'block'"):
        pack(dense, mask, format="bcsr", blok=(2, 2))
    with pytest.raises(NameNotFoundError, match="unknown bitmap option 'block'"):
        pack(dense, mask, format="bitmap", block=(2, 2))
    with pytest.raises(ValueRangeError, match="given no n and no m"):
        pack(dense, mask, format="nm")


@pytest.mark.parametrize("format", ["bcsr", "bcsc", "bcsrc", "bitmap", "nm", "packed24"])
@pytest.mark.parametrize("shape", [(4,), (4, 5), (5, 4, 3)])
def test_a_mask_of_another_shape_is_refused(format, shape):
    options = {"nm": {"n": 2, "m": 4}, "bitmap": {}, "packed24": {}}.get(format, {"block": (2, 2)})
    with pytest.raises(ShapeError, match=r"\(4, 4\)"):
        pack(torch.zeros(shape), torch.zeros(4, 4, dtype=torch.bool), format=format, **options)


@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        (torch.full((4, 4), 0.5), ValueRangeError, "values other than 0 and 1"),
        (torch.zeros(4, dtype=torch.bool), ShapeError, "two dimensions"),
        (torch.zeros(1, 4, 4, dtype=torch.bool), ShapeError, "two dimensions"),
        ([[True]], ValueRangeError, "type list"),
        (np.ones((4, 4), bool), ValueRangeError, "type ndarray"),
    ],
)
def test_what_is_no_mask_is_refused(mask, error, says):
    for options in ({"format": "bitmap"}, {"format": "bcsr", "block": (2, 2)}):
        with pytest.raises(error, match=says):
            pack(torch.zeros(4, 4), mask, **options)


@pytest.mark.parametrize("options", [{"format": "bcsr", "block": (2, 2)}, {"format": "bitmap"}, {"format": "packed24"}])
def test_wrong_axes_and_values_are_refused(options):
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[:, 0] = True
    packed = pack(torch.zeros(4, 4), mask, **options)
    for axis in (0, 1, -3):
        with pytest.raises(ShapeError, match=f"axis is {axis}"):
            packed.sum(axis)
    with pytest.raises(ShapeError, match=r"as the .* index says"):
        packed.with_values(torch.zeros(3))
    with pytest.raises(ShapeError, match=r"as the .* index says"):
        packed.with_values(torch.zeros(()))
    with pytest.raises(ValueRangeError, match="values are on meta"):
        packed.with_values(packed.values.to("meta"))


def test_a_dtype_without_zero_is_refused():
    scales = torch.ones(2, 2).to(torch.float8_e8m0fnu)
    with pytest.raises(ValueRangeError, match="can represent zero"):
        pack(scales, torch.ones(2, 2, dtype=torch.bool), format="bitmap")
