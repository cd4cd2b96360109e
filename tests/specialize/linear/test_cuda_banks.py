"""Strips of live values: lanes find every one of them, each in its own bank, and little is added to make them equal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.specialize.linear.cuda_banks import BanksTile, CudaBanks
from sparta.specialize.linear.cuda_banks_layout import BANKS, BanksLayout, run_of, segments_of
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.scaled_linear.cuda_banks import ScaledBanks
from sparta.specialize.scaled_linear.spec import scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA


def apart(layout, pieces, *, wide):
    """Return positions (pieces, 32, 4) and values (pieces, 32, step) of what was packed."""
    size = 4 + layout.step * (2 if wide else 1)
    records = pieces.view(-1, BANKS * size)
    if not layout.nibbles and not wide:
        both = records.view(-1, BANKS, size)
        return both[..., :4], both[..., 4:]
    values = records[:, 4 * BANKS :].contiguous().view(torch.int16 if wide else torch.uint8)
    return records[:, : 4 * BANKS].reshape(-1, BANKS, 4), values.view(-1, BANKS, layout.step)


def positions_in_run(words, last, *, nibbles):
    """Return the positions of a piece's values in their runs, by the kernel's arithmetic on bytes of a word."""
    if not nibbles:
        return words.long(), last
    even, odd = words.long() & 15, words.long() >> 4
    pairs = even + odd
    first = pairs.cumsum(1) - pairs + even + last[:, None]
    second = first + odd
    return torch.stack([first, second], 2).flatten(1), second[:, 3]


def walked(layout, weight):
    """Return the dense weight that lanes find when they walk as the kernel does."""
    (n, k), wide = weight.shape, weight.element_size() == 2
    pieces, places, owners = layout.pack(weight)
    positions, values = apart(layout, pieces, wide=wide)
    segments, run, tasks = segments_of(k), run_of(k), layout.grid[0] * layout.warps * layout.turns
    warps = layout.grid[0] * layout.warps
    starts, ends, outputs = torch.split(places, [warps, tasks, len(places) - warps - tasks])
    starts, ends, outputs = starts[:, None], ends.view(-1, layout.turns), outputs.view(-1, layout.rows)
    assert starts[:, 0].tolist() == [0, *ends[:, -1].cumsum(0).tolist()[:-1]]
    assert len(positions) == int(ends[:, -1].sum())
    begins = (starts + torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)).flatten().tolist()
    ends = (starts + ends).flatten().tolist()
    dense, lanes = torch.zeros(n, segments * BANKS * run, dtype=torch.float64), torch.arange(BANKS)
    for task, owner in enumerate(owners.view(-1, BANKS).long()):
        last = torch.zeros(BANKS, dtype=torch.int64)
        row = outputs[task // (layout.warps * layout.turns)][owner // segments].long()
        assert ends[task] > begins[task]
        for piece in range(begins[task], ends[task]):
            at, last = positions_in_run(positions[piece], last, nibbles=layout.nibbles)
            assert bool((at < run).all())  # so they fit into a byte, and stay in the lane's bank
            column = (owner % segments * BANKS + lanes)[:, None] * run + at
            found = values[piece].double()
            assert bool(((row >= 0)[:, None] | (found == 0)).all())
            dense.index_put_((row.clamp(min=0)[:, None].expand_as(column), column), found, accumulate=True)
    assert not dense[:, k:].any()
    return dense[:, :k]


@settings(max_examples=15, deadline=None)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 700)),
    st.sampled_from([0.0, 0.003, 0.1, 0.5, 1.0]),
    st.sampled_from([(8, 4), (3, 1), (5, 2)]),
    st.booleans(),
    st.sampled_from([torch.uint8, torch.int16]),
)
def test_lanes_find_every_live_value(shape, density, cut, nibbles, dtype):
    mask = torch.rand(shape) < density
    weight = torch.randint(1, 100, shape, dtype=dtype)
    layout = BanksLayout(TeSA.from_mask(mask), *cut, nibbles)
    assert torch.equal(walked(layout, weight), torch.where(mask, weight, 0).double())
    assert torch.equal(layout.unpack(layout.pack(weight)[0], dtype), torch.where(mask, weight, 0))


@pytest.mark.parametrize("nibbles", [False, True])
def test_more_inputs_than_bytes_count_are_cut_into_segments(nibbles):
    mask = torch.rand(20, 9000) < 0.2
    mask[3] = False
    weight = torch.randint(1, 100, (20, 9000), dtype=torch.uint8)
    layout = BanksLayout(TeSA.from_mask(mask), 4, 2, nibbles)
    assert segments_of(9000) == 2
    assert torch.equal(walked(layout, weight), torch.where(mask, weight, 0).double())


@pytest.mark.parametrize(("density", "nibbles", "most"), [(0.3, True, 1.12), (0.1, False, 1.25)])
def test_little_is_added_to_make_strips_equal(density, nibbles, most):
    torch.manual_seed(0)
    mask = torch.rand(64, 8192) < density
    mask[: 64 // 4] &= torch.rand(16, 8192) < 0.5  # outputs of different lengths
    layout = BanksLayout(TeSA.from_mask(mask), 16, 4, nibbles)
    pieces, _, _ = layout.pack(torch.ones(64, 8192, dtype=torch.uint8))
    assert pieces.numel() < most * int(mask.sum()) * (1.5 if nibbles else 2.0) + 64 * BANKS


def test_what_does_not_fit_is_refused_with_a_reason():
    tesa, weight = TeSA.from_mask(torch.rand(32, 256) < 0.1), torch.randn(32, 256)
    with pytest.raises(ShapeError):
        BanksLayout(tesa).pack(torch.zeros(32, 256))
    with pytest.raises(ValueRangeError, match="strips"):
        BanksLayout(tesa, 32, 9)

    def reason(implement, spec):
        answer = implement.supports(spec)
        assert not answer
        return answer.reason

    assert "5 tokens" in reason(CudaBanks(), linear_spec(tesa, 5, torch.bfloat16, device="cuda"))
    assert "fp32" in reason(CudaBanks(), linear_spec(tesa, 1, torch.float32, device="cuda"))
    dense = TeSA.dense((32, 256))
    assert "1.00 of the weight" in reason(CudaBanks(), linear_spec(dense, 1, torch.bfloat16, device="cuda"))
    assert "more than shared memory" in reason(
        CudaBanks(),
        linear_spec(TeSA.from_mask(torch.zeros(2, 70000, dtype=torch.bool)), 4, torch.bfloat16, device="cuda"),
    )
    assert "whole rows" in reason(ScaledBanks(), scaled_linear_spec(scaled_weight(weight, tesa, group=128), 1))
    assert "int4" in reason(ScaledBanks(), scaled_linear_spec(scaled_weight(weight, tesa, "int4"), 1))


def test_tiles_keep_multiprocessors_busy_and_fit():
    spec = linear_spec(TeSA.from_mask(torch.rand(4096, 4096) < 0.1), 4, torch.bfloat16, device="cuda")
    tiles = [BanksTile.parse(str(tile)) for tile in CudaBanks().tiles(spec)]
    assert tiles
    for tile in tiles:
        assert tile.shared_bytes(4096) <= 227 * 1024
        assert BanksLayout(spec["weight"], tile.warps, tile.tasks).rows == tile.rows
