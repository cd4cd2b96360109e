"""Sharded and replicated training: the masks of two processes are those of one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pairs
from sparsify.two_processes import PLACED, SCARCE
from sparta.sparsify.ranking import lowest_of
from sparta.sparsify.shards import Shards
from sparta.tesa.patterns import NM, VNM, Block, Channel, Unstructured
from sparta.tesa.select import lowest


@pytest.mark.slow
def test_two_processes_make_the_masks_of_one(tmp_path):
    report = tmp_path / "report"
    pairs.run("sparsify.two_processes", report)
    lines = report.read_text().splitlines()
    assert len(lines) == 16 + 2 * len(PLACED) + len(SCARCE)
    trained, placed = lines[:16], lines[16:]
    assert [line for line in trained if "same=True zero=True density=0.5000" not in line] == []
    assert [line for line in placed if "same=True" not in line] == []


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 99), st.floats(0, 1))
def test_the_lowest_of_several_tensors_are_those_of_their_concatenation(sizes, seed, fraction):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(0, 4, (size,), generator=generator).float() for size in sizes]
    count = round(fraction * sum(sizes))
    assert torch.equal(torch.cat(lowest_of(parts, count)), lowest(torch.cat(parts), count))


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([Unstructured(), Channel(0), Channel(1), Block(2, 3)]))
def test_a_pattern_keeps_the_highest_of_the_unit_scores(rows, columns, pattern):
    if isinstance(pattern, Block) and (rows < 2 or columns < 3):
        return
    score = torch.rand(rows, columns)
    units = pattern.unit_scores(score)
    assert len(units) == pattern.unit_count(score.shape)
    kept = pattern.project(score, 0.5)
    assert torch.equal(pattern.unit_scores(kept.float()) > 0, ~lowest(units, round(0.5 * len(units))))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3), st.data())
def test_places_of_a_part_are_those_of_the_whole(sides, data):
    offset = tuple(data.draw(st.integers(0, extra)) for _, extra in sides)
    part = tuple(size for size, _ in sides)
    shape = tuple(size + extra for size, extra in sides)
    shards = Shards(("group",), shape, offset, part)
    places = torch.arange(torch.Size(shape).numel()).reshape(shape)[shards.slices()]
    assert torch.equal(shards.positions(torch.arange(places.numel())), places.flatten())


@pytest.mark.parametrize(
    ("pattern", "part", "offset"),
    [
        (Channel(1), (5, 8), (5, 0)),
        (NM(2, 4, axis=0), (5, 8), (5, 0)),
        (NM(2, 4), (10, 6), (0, 2)),
        (Block(4, 4), (5, 8), (5, 0)),
        (Block(5, 4), (10, 4), (0, 4)),
        (VNM(4, 2, 8), (5, 8), (5, 0)),
        (Channel(0), (10, 4), (0, 4)),
    ],
)
def test_units_across_processes_are_told(pattern, part, offset, monkeypatch):
    monkeypatch.setattr("sparta.sparsify.shards.summed", lambda value, _: value)
    assert Shards(("group",), (10, 8), offset, part).of_units(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "part", "offset", "units"),
    [
        (Channel(0), (5, 8), (5, 0), ((10,), (5,), (5,))),
        (Block(5, 4), (5, 8), (5, 0), ((4,), (2,), (2,))),
        (NM(2, 4), (10, 4), (0, 4), ((10, 8), (0, 4), (10, 4))),
        (NM(2, 4), (5, 8), (5, 0), ((10, 8), (5, 0), (5, 8))),
        (Unstructured(), (3, 2), (7, 6), ((10, 8), (7, 6), (3, 2))),
        (Block(5, 4), (0, 8), (10, 0), ((4,), (4,), (0,))),
    ],
)
def test_units_within_a_process_stay_there(pattern, part, offset, units, monkeypatch):
    monkeypatch.setattr("sparta.sparsify.shards.summed", lambda value, _: value)
    found = Shards(("group",), (10, 8), offset, part).of_units(pattern)
    assert (found.shape, found.offset, found.part) == units
