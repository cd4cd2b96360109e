"""Sharded and replicated training: the masks of two processes are those of one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pairs
from sparta.errors import ShapeError
from sparta.sparsify.shards import Shards, check_sharding, lowest_of
from sparta.tesa.patterns import NM, VNM, Block, Channel, Unstructured
from sparta.tesa.select import lowest


@pytest.mark.slow
def test_two_processes_make_the_masks_of_one(tmp_path):
    report = tmp_path / "report"
    pairs.run("sparsify.two_processes", report)
    lines = report.read_text().splitlines()
    assert len(lines) == 16
    assert [line for line in lines if "same=True zero=True density=0.5000" not in line] == []


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


@pytest.mark.parametrize("pattern", [Channel(1), NM(2, 4, axis=0), Block(4, 4), VNM(4, 2, 8)])
def test_units_across_processes_are_refused(pattern):
    with pytest.raises(ShapeError, match="cut over 2 processes"):
        check_sharding(pattern, (10, 8), 5, Shards(object(), 0, 2))


def test_units_within_a_process_are_not():
    for pattern in (Channel(0), NM(2, 4), Block(5, 4), Unstructured()):
        check_sharding(pattern, (10, 8), 5, Shards(object(), 0, 2))
