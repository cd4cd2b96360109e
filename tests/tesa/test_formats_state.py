"""Files of packed matrices: each way to damage one is an error that says what is wrong."""

import copy

import pytest
import torch

from sparta.errors import FileFormatError
from sparta.tesa.formats import BCSR, Bitmap, Packed, pack


def stored(format, **options):
    """State of a small matrix whose blocks, bits and groups are all of several kinds."""
    mask = torch.zeros(4, 10, dtype=torch.bool)
    mask[0, [0, 9]] = mask[1, [2, 3]] = mask[3, [4, 8]] = True
    dense = torch.arange(1.0, 41.0).view(4, 10)
    return pack(dense, mask, format=format, **options).state()


def bcsr():
    return stored("bcsr", block=(2, 3))


def bcsc():
    return stored("bcsc", block=(2, 3))


def bcsrc():
    return stored("bcsrc", block=(2, 3))


def bitmap():
    return stored("bitmap")


def nm():
    return stored("nm", n=2, m=4)


def packed24():
    return stored("packed24")


ALL = [bcsr, bcsc, bcsrc, bitmap, nm, packed24]


def put(name, place, value):
    """A damage: write `value` at `place` of tensor `name`."""

    def damage(tensors, _meta):
        tensors[name][place] = value

    return damage


def cut(name):
    """A damage: lose the last entry of the last dimension."""

    def damage(tensors, _meta):
        tensors[name] = tensors[name][..., :-1]

    return damage


def recast(name, dtype):
    """A damage: store a tensor in another dtype."""

    def damage(tensors, _meta):
        tensors[name] = tensors[name].to(dtype)

    return damage


def swap(name, first, second):
    """A damage: exchange two entries."""

    def damage(tensors, _meta):
        tensors[name][[first, second]] = tensors[name][[second, first]]

    return damage


def note(key, value):
    """A damage: write metadata."""

    def damage(_tensors, meta):
        meta[key] = value

    return damage


def drop(key):
    """A damage: lose a tensor or a metadata entry."""

    def damage(tensors, meta):
        (tensors if key in tensors else meta).pop(key)

    return damage


def extra_tensor(tensors, _meta):
    tensors["more"] = torch.zeros(1)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (drop("values"), "tensor 'values' is missing"),
        (drop("format"), "names no format"),
        (note("format", 3), "names no format"),
        (note("format", "bcrs"), "did you mean"),
        (drop("version"), "version is None"),
        (note("version", 2), "version 2 is newer"),
        (note("version", True), "version is True"),
        (drop("shape"), "shape is None"),
        (note("shape", [4]), r"shape is \[4\]"),
        (note("shape", [4, -1]), r"shape is \[4, -1\]"),
        (note("shape", [4, "10"]), r"shape is \[4, '10'\]"),
        (note("shape", [4, True]), r"shape is \[4, True\]"),
        (note("shape", "4x10"), "shape is '4x10'"),
        (note("color", "red"), "unexpected entries color"),
        (extra_tensor, "unexpected entries more"),
        (cut("values"), "values have shape .* which does not end in"),
        (lambda tensors, _: tensors.update(values=torch.zeros(())), r"values have shape \(\)"),
        (lambda tensors, _: tensors.update(values=tensors["values"].to("meta")), "several devices"),
    ],
)
def test_damage_that_any_format_can_have(make, damage, says):
    check(make, damage, says)


@pytest.mark.parametrize(
    ("make", "damage", "says"),
    [
        (bcsr, note("block", [2, 0]), r"block is \[2, 0\]"),
        (bcsr, note("block", [8, 3]), "larger than the matrix"),
        (bcsr, note("shape", [9, 10]), "row_ptr has shape"),
        (bcsr, note("shape", [4, 8]), "col_idx has entries outside 0 to 2"),
        (bcsr, put("values", (2, 0, 1), 5.0), "values other than 0 stand outside the matrix"),
        (bcsr, note("shape", [3, 10]), "values other than 0 stand outside the matrix"),
        (bcsc, put("values", (-1, 0, 1), 5.0), "values other than 0 stand outside the matrix"),
        (bcsrc, put("values", (2, 0, 2), float("nan")), "values other than 0 stand outside the matrix"),
        (bcsc, note("shape", [4, 30]), "col_ptr has shape"),
        (bitmap, note("shape", [4, 30]), "bits has shape"),
        (bitmap, note("shape", [4, 9]), "bits are set beyond the last column"),
        (nm, note("shape", [4, 30]), "positions has shape"),
        (nm, note("shape", [4, 9]), "beyond the last column"),
        (packed24, note("shape", [5, 10]), "metadata has shape"),
        (bcsr, drop("col_idx"), "'col_idx' is missing"),
        (bcsr, recast("col_idx", torch.int64), "col_idx has dtype torch.int64, not torch.int32"),
        (bcsr, lambda t, _: t.update(col_idx=t["col_idx"][None]), r"col_idx has shape \(1, "),
        (bcsr, cut("row_ptr"), "row_ptr has shape"),
        (bcsr, put("row_ptr", 0, 1), "row_ptr starts at 1"),
        (bcsr, put("row_ptr", -1, 4), "row_ptr ends at 4, not at 5"),
        (bcsr, put("row_ptr", 1, 6), "row_ptr is not in ascending order"),
        (bcsr, put("col_idx", 0, -1), "col_idx has entries outside 0 to 3"),
        (bcsr, put("col_idx", 2, 4), "col_idx has entries outside 0 to 3"),
        (bcsr, swap("col_idx", 0, 1), "not sorted within row_ptr, or repeats"),
        (bcsr, put("col_idx", 1, 0), "not sorted within row_ptr, or repeats"),
        (bcsr, put("row_ptr", 1, 2), "not sorted within row_ptr, or repeats"),
        (bcsc, put("row_idx", 0, 2), "row_idx has entries outside 0 to 1"),
        (bcsc, put("col_ptr", 1, 9), "col_ptr is not in ascending order"),
        (bcsc, put("col_ptr", 1, 2), "not sorted within col_ptr, or repeats"),
        (bcsrc, put("csc_to_csr", 0, 1), "csc_to_csr does not agree"),
        (bcsrc, put("row_idx", 0, 1), "row_idx does not agree"),
        (bcsrc, put("col_ptr", 1, 0), "col_ptr does not agree"),
        (bcsrc, cut("csc_to_csr"), "csc_to_csr has shape"),
        (bitmap, cut("bits"), "bits has shape"),
        (bitmap, recast("bits", torch.int8), "bits has dtype torch.int8"),
        (bitmap, put("bits", (2, 1), 4), "bits are set beyond the last column"),
        (bitmap, put("bits", (2, 0), 1), "row_ptr ends at 6, not at 7"),
        (bitmap, put("row_ptr", 1, 1), "row_ptr does not agree"),
        (bitmap, recast("row_ptr", torch.int32), "row_ptr has dtype torch.int32"),
        (nm, note("n", 5), "5:4 is not an N:M pattern"),
        (nm, note("n", 0), "n is 0"),
        (nm, note("m", 300), "2:300 is not an N:M pattern"),
        (nm, note("n", 1), "positions has shape"),
        (nm, put("positions", (0, 0, 1), 4), "positions are outside 0 to 3"),
        (nm, put("positions", (0, 0, 1), 0), "not ascending, or repeat"),
        (nm, put("positions", (0, 2, 1), 3), "beyond the last column"),
        (packed24, cut("metadata"), "metadata has shape"),
        (packed24, put("metadata", (0, 0), 0), "not ascending"),
        (packed24, put("metadata", (0, 1), 0x44), "bits are set beyond the last group"),
        (packed24, put("metadata", (0, 1), 0x0E), "beyond the last column"),
    ],
)
def test_damage_to_the_index(make, damage, says):
    check(make, damage, says)


def check(make, damage, says):
    """The matrix can be read, and after the damage it cannot."""
    tensors, meta = make()
    assert Packed.from_state(tensors, meta).shape == (4, 10)
    tensors, meta = {name: tensor.clone() for name, tensor in tensors.items()}, copy.deepcopy(meta)
    damage(tensors, meta)
    with pytest.raises(FileFormatError, match=says):
        Packed.from_state(tensors, meta)


def test_a_class_reads_its_own_format_only():
    with pytest.raises(FileFormatError, match="a Bitmap matrix was asked for"):
        Bitmap.from_state(*bcsr())
    assert isinstance(BCSR.from_state(*bcsr()), BCSR)


@pytest.mark.parametrize("make", ALL)
def test_state_can_be_changed_without_reading_it_back_changed(make):
    """Reading leaves the given mappings alone."""
    tensors, meta = make()
    names, before = set(tensors), copy.deepcopy(meta)
    Packed.from_state(tensors, meta)
    assert (set(tensors), meta) == (names, before)
