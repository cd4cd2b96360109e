"""A TeSA is made, asked, sliced and reshaped exactly as the tensor it describes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.specialize.linear.cuda_24 import is_two_four
from sparta.tesa.attribute import TeSA
from sparta.tesa.bits import FORMATS, bit_format
from sparta.tesa.grid import Grid
from sparta.tesa.patterns import NM, Block, Channel, Unstructured
from strategies import masks, shapes, tesas


def agrees(tesa, states, values, codes):
    """Whether a TeSA says the same as dense tensors of states, values and codes."""
    return (
        tesa.shape == tuple(states.shape)
        and torch.equal(tesa.states(), states)
        and torch.equal(tesa.values().nan_to_num(7.25), values.nan_to_num(7.25))
        and torch.equal(tesa.code.dense(), codes)
    )


def facts(tesa):
    return tesa.states(), tesa.values(), tesa.code.dense()


# ---------------------------------------------------------------------- making


@given(masks())
def test_a_mask_comes_back_as_it_was(mask):
    tesa = TeSA.from_mask(mask)
    assert torch.equal(tesa.mask(), mask)
    assert tesa.count("live") == int(mask.sum())
    assert tesa.count("live") + tesa.count("constant") + tesa.count("dead") == tesa.numel


def test_cost_follows_the_knowledge_not_the_tensor():
    channels = torch.zeros(8, 96, 14, 14, dtype=torch.bool)
    channels[:, torch.randperm(96)[:48]] = True
    assert TeSA.from_mask(channels).entries <= 96
    blocks = torch.rand(64, 224) < 0.5
    weight = TeSA.from_block_mask(blocks, (8192, 28672), (128, 128))
    assert weight.entries == 14336
    assert weight.density == pytest.approx(blocks.float().mean().item())
    assert TeSA.dense((8192, 28672)).entries == 1


def test_zeros_are_read_from_a_tensor_of_any_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8):
        weight = torch.tensor([[0, 1], [2, 0]], dtype=dtype)
        tesa = TeSA.from_zeros(weight)
        assert tesa.mask().tolist() == [[False, True], [True, False]]
        assert tesa.format.dtype is dtype
    assert TeSA.from_zeros(torch.tensor([0.0, -0.0, math.nan])).mask().tolist() == [False, False, True]


def test_bits_come_back_as_they_were():
    bits = torch.tensor([[0, 4, 8], [16, 32, 64]], dtype=torch.int16)
    assert torch.equal(TeSA.from_bits(bits).bits(), bits)
    assert TeSA.from_bits(torch.tensor([7, 31, 33])).bits(default="fp16").tolist() == [8, 32, 16]


def test_pruned_elements_can_be_dead_or_another_constant():
    mask = torch.tensor([True, False])
    assert TeSA.from_mask(mask, pruned="dead").states().tolist() == [0, 2]
    hidden = TeSA.from_mask(mask, value=-math.inf)
    assert hidden.values().tolist()[1] == -math.inf
    assert math.isnan(hidden.values().tolist()[0])


def test_a_tesa_does_not_change_when_its_sources_do():
    mask = torch.tensor([[True, False]])
    tesa = TeSA.from_mask(mask)
    mask.fill_(value=True)
    tesa.mask().zero_()
    assert tesa.mask().tolist() == [[True, False]]


# ---------------------------------------------------------------------- shape operations


@given(tesas(), st.data())
def test_index_as_the_tensor(tesa, data):
    index = []
    for size in tesa.shape:
        kind = data.draw(st.sampled_from(["slice", "none", "int", "tensor"]))
        if kind == "none":
            index.append(None)
        if kind == "int" and size:
            index.append(data.draw(st.integers(-size, size - 1)))
        elif kind == "tensor":
            kept = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
            index.append(torch.tensor(kept, dtype=torch.bool))
            break  # a second index tensor would mean something else to torch
        else:
            bound = st.none() | st.integers(-size - 1, size + 1)
            index.append(slice(data.draw(bound), data.draw(bound), data.draw(st.none() | st.integers(1, 3))))
    assert agrees(tesa[tuple(index)], *(t[tuple(index)] for t in facts(tesa)))


@given(tesas())
def test_ellipsis_and_reversed_slices(tesa):
    if tesa.ndim:
        assert agrees(tesa[..., :1], *(t[..., :1] for t in facts(tesa)))
        assert agrees(tesa[..., None], *(t[..., None] for t in facts(tesa)))
        assert agrees(tesa[::-1], *(t.flip(0) for t in facts(tesa)))


@given(tesas(), st.randoms(use_true_random=False))
def test_permute_transpose_unsqueeze_squeeze(tesa, random):
    order = list(range(tesa.ndim))
    random.shuffle(order)
    assert agrees(tesa.permute(*order), *(t.permute(order) for t in facts(tesa)))
    assert tesa.unsqueeze(-1).squeeze(-1) == tesa
    if tesa.ndim > 1:
        assert agrees(tesa.transpose(0, -1), *(t.transpose(0, -1) for t in facts(tesa)))


@given(shapes.flatmap(tesas))
def test_reshape_and_back(tesa):
    flat = tesa.reshape(-1)
    assert agrees(flat, *(t.reshape(-1) for t in facts(tesa)))
    assert flat.reshape(*tesa.shape) == tesa


@given(tesas(), st.integers(1, 3))
def test_broadcast(tesa, lead):
    shape = (lead, *tesa.shape)
    assert agrees(tesa.broadcast_to(*shape), *(t.broadcast_to(shape) for t in facts(tesa)))


@given(st.data())
def test_cat_and_slice_apart(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    dim = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    parts = [data.draw(tesas((*shape[:dim], n, *shape[dim + 1 :]))) for n in sizes]
    whole = TeSA.cat(parts, dim)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        assert whole[(slice(None),) * dim + (slice(start, start + size),)] == part
        start += size


@given(tesas(), tesas())
def test_equal_tesas_have_equal_digests_and_others_do_not(a, b):
    assert (a == b) == (a.digest == b.digest)
    assert (a != b) or hash(a) == hash(b)


# ---------------------------------------------------------------------- dynamic dims


def test_dynamic_dims_travel_with_the_shape():
    tesa = TeSA.from_mask(torch.tensor([True, False, True]).expand(4, 5, 3), dynamic=[0])
    assert tesa.permute(2, 0, 1).dynamic == {1}
    assert tesa.transpose(0, 1).dynamic == {1}
    assert tesa.unsqueeze(0).dynamic == {1}
    assert tesa.unsqueeze(0).squeeze(0) == tesa
    assert tesa.broadcast_to(2, 4, 5, 3).dynamic == {1}
    assert tesa.reshape(20, 3).dynamic == {0}
    assert tesa.reshape(4, 5, 3).dynamic == {0}
    assert tesa[:, 0].dynamic == {0}
    assert "4*" in str(tesa)


def test_knowledge_along_a_dynamic_dim_is_refused():
    mask = torch.tensor([[True, False], [False, True]])
    with pytest.raises(ShapeError, match="dynamic"):
        TeSA.from_mask(mask, dynamic=[0])
    channels = TeSA.from_mask(torch.tensor([True, False]).expand(4, 2), dynamic=[0])
    with pytest.raises(ShapeError, match="dynamic"):
        channels.reshape(8)


# ---------------------------------------------------------------------- using


@given(tesas(), st.integers(0, 2**31))
def test_apply_puts_constants_in_place_and_touches_nothing_live(tesa, seed):
    tensor = torch.randn(tesa.shape, generator=torch.Generator().manual_seed(seed))
    applied = tesa.apply(tensor)
    assert torch.equal(applied[tesa.mask()], tensor[tesa.mask()])
    assert tesa.violations(applied) == 0
    constants = tesa.states() == 1
    wrong = int((tensor.double() != tesa.values())[constants].sum())
    assert tesa.violations(tensor) == wrong


def test_apply_silences_non_finite_garbage():
    mask = torch.tensor([True, False, False])
    applied = TeSA.from_mask(mask).apply(torch.tensor([1.0, math.nan, math.inf]))
    assert applied.tolist() == [1.0, 0.0, 0.0]


@given(tesas(), st.data())
def test_kept_blocks(tesa, data):
    block = tuple(data.draw(st.integers(1, 4)) for _ in tesa.shape)
    kept = tesa.kept_blocks(block)
    assert kept.sum() <= tesa.count("live")
    assert bool(kept.any()) == bool(tesa.mask().any())


# ---------------------------------------------------------------------- bits


def test_quantization_parameters_by_tensor_channel_and_group():
    weight = TeSA.dense((4, 8))
    assert weight.with_format("int8", scale=0.1, zero_point=3).zero_point.value() == 3
    by_channel = weight.with_format("int8", scale=torch.arange(1.0, 5.0))
    assert by_channel.scale.block == (1, 8)
    by_group = weight.with_format("int4", scale=torch.rand(4, 2) + 1, zero_point=torch.zeros(4, 2), group=4)
    assert by_group.scale.block == (1, 4)
    assert "scale per 1×4" in str(by_group)
    assert by_group[:, :4].scale.cells.shape == (4, 1)


def test_wrong_quantization_parameters_are_refused():
    weight = TeSA.dense((4, 8))
    with pytest.raises(ValueRangeError, match="scale"):
        weight.with_format("int8", scale=0.0)
    with pytest.raises(ShapeError, match="group"):
        weight.with_format("int8", scale=torch.rand(2, 2))
    with pytest.raises(ShapeError, match="cells"):
        weight.with_format("int8", scale=torch.rand(4, 3), group=4)
    with pytest.raises(NameNotFoundError, match="did you mean 'int8'"):
        weight.with_format("int_8")


def test_formats_are_ordered_by_bits_and_hold_what_they_can():
    known = [f for f in FORMATS if f.kind != "any"]
    assert [f.bits for f in known] == sorted(f.bits for f in known)
    for small in known:
        for large in known:
            if small.kind != "float" and 8 <= small.bits <= 16 and large.bits >= 8:
                info = torch.iinfo(small.dtype)
                every = torch.arange(info.min, info.max + 1)
                exact = torch.equal(every.double().to(large.dtype).double(), every.double())
                assert large.holds(small) == exact, (small.name, large.name)
    assert bit_format("fp32").holds(bit_format("bf16"))
    assert not bit_format("fp16").holds(bit_format("bf16"))
    assert not bit_format("int32").holds(bit_format("fp16"))


# ---------------------------------------------------------------------- telling a person


def test_print_tells_shape_pattern_density_and_bits():
    torch.manual_seed(3)
    assert str(TeSA.dense((2, 3), format="fp16")) == "TeSA 2×3, dense, density 1, fp16"
    assert "2:4" in str(TeSA.from_pattern(NM(2, 4), torch.rand(64, 64)))
    assert "block 8×8" in str(TeSA.from_pattern(Block(8, 8), torch.rand(64, 64), 0.5))
    assert "channel" in str(TeSA.from_pattern(Channel(0), torch.rand(64, 64), 0.5))
    assert "unstructured" in str(TeSA.from_pattern(Unstructured(), torch.rand(64, 64), 0.5))
    assert "dead" in str(TeSA.dead((2, 2)))
    assert "constants other than 0" in str(TeSA.constant((2, 2), 3))
    assert "scalar" in str(TeSA.dense(()))


# ---------------------------------------------------------------------- wrong inputs


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: TeSA.from_mask(torch.tensor([0.0, 0.5])), ValueRangeError, "from_zeros"),
        (lambda: TeSA.from_mask(torch.ones(2), pruned="gone"), ValueRangeError, "'dead'"),
        (lambda: TeSA.from_bits(torch.tensor([0.5])), ValueRangeError, "integer"),
        (lambda: TeSA.from_bits(torch.tensor([5])), NameNotFoundError, "int4"),
        (lambda: TeSA.from_zeros(torch.empty(2, device="meta")), ValueRangeError, "meta"),
        (lambda: TeSA.dense((2, 3)).apply(torch.ones(3, 2)), ShapeError, r"\(2, 3\)"),
        (lambda: TeSA.dense((2, 3)).violations(torch.ones(3)), ShapeError, r"\(2, 3\)"),
        (lambda: TeSA.dense((2, 3)).reshape(4), ShapeError, "same number"),
        (lambda: TeSA.dense((2, 3)).reshape(-1, -1), ShapeError, "same number"),
        (lambda: TeSA.dense((2, 3)).permute(0, 0), ShapeError, "exactly once"),
        (lambda: TeSA.dense((2, 3)).take(2, [0]), ShapeError, "dim 2"),
        (lambda: TeSA.dense((2, 3)).take(0, [2]), ShapeError, "-2 to 1"),
        (lambda: TeSA.dense((2, 3)).squeeze(0), ShapeError, "size 2"),
        (lambda: TeSA.dense((2, 3)).unsqueeze(5), ShapeError, "dim 5"),
        (lambda: TeSA.dense((2, 3)).broadcast_to(3, 3), ShapeError, "equal or 1"),
        (lambda: TeSA.dense((2, 3))[0, 0, 0], ShapeError, "at most 2"),
        (lambda: TeSA.dense((2, 3))["a"], ShapeError, "ints"),
        (lambda: TeSA.dense((2, 3)).count("alive"), ValueRangeError, "'live'"),
        (lambda: TeSA.dense((2, 3), dynamic=[2]), ShapeError, "dynamic dims"),
        (lambda: TeSA.cat([]), ShapeError, "at least one"),
        (lambda: TeSA.cat([TeSA.dense((2, 3)), TeSA.dense((2, 4))]), ShapeError, "all other dims"),
    ],
)
def test_wrong_inputs_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_what_was_found_out_about_live_elements_stays_in_another_format():
    mask = torch.rand(40, 24) < 0.3
    tesa = TeSA.from_mask(mask)
    pattern, density = tesa.pattern, tesa.density
    tesa.found["asked"] = 1
    for other in (tesa.with_format("bf16"), tesa.with_format("int8", scale=torch.rand(40) + 0.1)):
        assert other.pattern is pattern
        assert other.density == density
        other.found["also"] = 2
        assert tesa.found == {"asked": 1, "also": 2}
        del tesa.found["also"]
    fresh = TeSA.from_mask(mask).with_format("bf16")
    assert str(fresh.pattern) == str(pattern)
    assert fresh.found == {}
    assert TeSA.from_mask(~mask).found == {}


def test_a_gpu_without_room_leaves_questions_to_the_cpu(monkeypatch):
    mask = NM(2, 4).project(torch.rand(32, 48))
    asked = []

    def full(*_):
        asked.append(True)
        raise torch.OutOfMemoryError("CUDA out of memory")

    class Cells(torch.Tensor):
        """Cells on a GPU that holds them, and nothing else."""

        __eq__ = full
        __hash__ = torch.Tensor.__hash__

    for soon in (full, lambda tesa: Grid(tesa.shape, tesa.state.block, tesa.state.cells.as_subclass(Cells))):
        monkeypatch.setattr(TeSA, "soon", soon)
        tesa = TeSA.from_mask(mask)
        assert tesa.count("live") == int(mask.sum())
        assert tesa.density == 0.5
        assert tesa.pattern.pattern == NM(2, 4)
        assert torch.equal(tesa.kept_blocks((8, 8)), mask.view(4, 8, 6, 8).any(3).any(1))
        assert is_two_four(tesa)
        assert not is_two_four(TeSA.from_mask(NM(2, 4).project(torch.rand(32, 48)).roll(1, 1)))
    assert len(asked) >= 8
