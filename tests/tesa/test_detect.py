"""Detection: what a pattern projected is found again, and what is random is not given a name it does not deserve."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import ValueRangeError
from sparta.tesa.patterns import NM, VNM, Block, Channel, Detection, Pattern, Unstructured, detect

PROJECTED = [
    (Channel(0), (64, 48), 0.5),
    (Channel(1), (64, 48), 0.9),
    (Channel(0), (32, 16, 3, 3), 0.5),
    (Channel(1), (32, 16, 3, 3), 0.25),
    (Channel(3), (8, 8, 4, 4), 0.5),
    (Block(32, 32), (512, 768), 0.5),
    (Block(32, 32), (500, 770), 0.9),
    (Block(1, 4), (64, 64), 0.5),
    (Block(64, 1), (512, 64), 0.7),
    (Block(16, 8), (128, 64, 3, 3), 0.5),
    (Block(8, 8, axes=(-2, -1)), (2, 4, 64, 64), 0.5),
    (NM(2, 4), (64, 64), None),
    (NM(2, 4), (64, 67), None),
    (NM(4, 8), (64, 64), None),
    (NM(8, 16), (64, 64), None),
    (NM(1, 2), (64, 64), None),
    (NM(1, 4), (64, 64), None),
    (NM(2, 8), (64, 64), None),
    (NM(2, 10), (64, 60), None),
    (NM(1, 16), (128, 128), None),
    (NM(2, 4), (64, 64), 0.7),
    (NM(2, 4, axis=0), (64, 64), None),
    (NM(2, 4), (32, 32, 3, 3), None),
    (NM(2, 4, axis=0), (4096,), None),
    (VNM(64, 2, 8), (256, 128), None),
    (VNM(32, 2, 16), (256, 128), None),
    (VNM(128, 2, 10), (256, 120), None),
    (VNM(16, 2, 8), (250, 123), None),
    (VNM(64, 2, 8, axis=0), (128, 256), None),
    (VNM(64, 2, 8), (256, 128), 0.8),
]


@pytest.mark.parametrize(("pattern", "shape", "sparsity"), PROJECTED, ids=str)
def test_a_projected_pattern_is_found_again(pattern, shape, sparsity):
    mask = pattern.project(torch.rand(shape), sparsity)
    found = detect(mask)
    assert found.pattern == pattern
    assert found.density == pytest.approx(mask.double().mean().item())
    capacity = found.density if isinstance(pattern, Channel | Block) else pattern.capacity(shape)
    assert found.inside == pytest.approx(found.density / capacity)


@pytest.mark.parametrize("density", [0.5, 0.1, 0.05, 0.01, 0.95])
@pytest.mark.parametrize("shape", [(256, 512), (64, 64, 3, 3), (100_000,), (1, 4096), (4096, 1)])
def test_a_random_mask_is_unstructured(shape, density):
    found = detect(torch.rand(shape) < density)
    assert found.pattern == Unstructured()
    assert found.inside == found.density == pytest.approx(density, rel=0.3)


@given(st.integers(0, 3), st.data())
def test_what_is_found_holds(kind, data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) < 0.2 + 0.2 * kind
    found = detect(mask)
    assert found.density == int(mask.sum()) / mask.numel()
    assert 0 <= found.density <= found.inside <= 1
    if found.pattern is None:
        assert bool(mask.all())
    else:
        found.pattern.validate(mask)


@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (2, 3, 4)])
def test_a_full_mask_is_dense(shape):
    assert detect(torch.ones(shape, dtype=torch.bool)) == Detection(None, 1.0, 1.0)


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3, 3)])
def test_an_empty_tensor_is_dense(shape):
    assert detect(torch.ones(shape, dtype=torch.bool)) == Detection(None, 1.0, 1.0)


@pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 3, 4)])
def test_a_mask_without_live_elements_is_dead_channels(shape):
    assert detect(torch.zeros(shape, dtype=torch.bool)) == Detection(Channel(0), 0.0, 1.0)


def test_a_dead_scalar_is_unstructured():
    assert detect(torch.tensor(False)) == Detection(Unstructured(), 0.0, 0.0)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1)])
def test_single_elements_of_a_line_are_not_channels(shape):
    mask = torch.tensor([True, True, False, True, False, False]).view(shape)
    assert not isinstance(detect(mask).pattern, Channel)


def test_a_channel_mask_is_not_called_blocks():
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[16:32] = True
    assert detect(mask).pattern == Channel(0)
    assert detect(mask.t()).pattern == Channel(1)


def test_blocks_of_an_exact_pattern_are_not_split():
    mask = torch.eye(4, dtype=torch.bool).repeat_interleave(32, 0).repeat_interleave(16, 1)
    assert detect(mask) == Detection(Block(32, 16), 0.25, 1.0)
    assert detect(mask[:-5, :-3]).pattern == Block(32, 16)  # ragged edges


def test_blocks_of_whole_kernel_planes_are_found():
    mask = torch.rand(8, 8, 1, 1).lt(0.5).expand(8, 8, 3, 3)
    assert detect(mask) == Detection(Block(3, 3, axes=(-2, -1)), mask.double().mean().item(), 1.0)


@pytest.mark.parametrize("pattern", [Block(8, 8), NM(2, 4), VNM(16, 2, 8)], ids=str)
def test_a_single_exception_far_from_the_start_is_seen(pattern):
    mask = pattern.project(torch.rand(512, 64), 0.75)
    before = detect(mask)
    assert before.pattern == pattern
    mask[-1, -8:] = torch.tensor([True] * 7 + [False])
    assert detect(mask) != before
    assert isinstance(pattern, Block) or detect(mask).pattern != pattern


@pytest.mark.parametrize(
    ("pattern", "shape"),
    [
        (Block(8, 1), (256, 128)),
        (Block(4, 4), (128, 64)),
        (Block(16, 16), (256, 256)),
        (Channel(0), (64, 48)),
        (Channel(1), (64, 48)),
        (Block(4, 1), (64, 32, 3, 3)),
        (Block(3, 3, axes=(-2, -1)), (32, 32, 3, 3)),
    ],
    ids=str,
)
def test_single_zeros_inside_channels_and_blocks_are_forgiven(pattern, shape):
    torch.manual_seed(0)
    mask = pattern.project(torch.rand(shape), 0.75)
    live = int(mask.sum())
    mask[tuple(mask.nonzero()[live // 2])] = False
    found = detect(mask)
    assert found.pattern == pattern
    assert found.inside == pytest.approx((live - 1) / live)


def test_more_than_one_zero_in_a_hundred_is_a_pattern_of_its_own():
    torch.manual_seed(0)
    mask = Block(8, 8).project(torch.rand(256, 256), 0.75)
    mask &= torch.rand(256, 256) > 0.05
    assert detect(mask).pattern == Unstructured()


def test_a_few_zeros_in_a_dense_weight_are_no_blocks():
    mask = torch.ones(256, 256, dtype=torch.bool)
    mask[3, 7] = mask[100, 200] = False
    assert detect(mask).pattern == Unstructured()


def test_numeric_masks_and_strides_are_accepted():
    mask = NM(2, 4).project(torch.rand(64, 64))
    assert detect(mask.float()) == detect(mask)
    assert detect(mask.t().contiguous().t()) == detect(mask)
    assert detect(mask.t()).pattern == NM(2, 4, axis=0)


def test_values_other_than_zero_and_one_are_refused():
    with pytest.raises(ValueRangeError, match="0 and 1"):
        detect(torch.tensor([0.0, 0.5]))


def test_a_detection_prints_and_serializes():
    found = detect(torch.eye(4, dtype=torch.bool).repeat_interleave(32, 0).repeat_interleave(32, 1))
    assert str(found) == "block 32×32, density 0.25"
    assert str(Detection(NM(2, 4), 0.3, 0.6)) == "2:4, density 0.30 (0.60 inside)"
    assert str(Detection(Unstructured(), 0.3, 0.3)) == "unstructured, density 0.30"
    assert str(Detection(None, 1.0, 1.0)) == "dense"
    fields = json.loads(json.dumps(found.to_dict()))
    assert Pattern.from_dict(fields["pattern"]) == found.pattern
    assert (fields["density"], fields["inside"]) == (0.25, 1.0)
    assert Detection(None, 1.0, 1.0).to_dict()["pattern"] is None
