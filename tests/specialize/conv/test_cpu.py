"""Every convolution kernel against float64: any geometry, size, stride, density, tile, layout, instruction set."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.specialize.conv.cpu import CpuConv2d, conv_layouts
from sparta.specialize.conv.cpu import conv_tiles as offered_tiles
from sparta.specialize.conv.cpu_grid import GRID, plan_grid
from sparta.specialize.conv.cpu_image import IMAGES as SHIFTED
from sparta.specialize.conv.cpu_image import plan_image
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.cpu_phases import PHASES
from sparta.specialize.conv.spec import ConvGeometry, conv_spec, dense_conv
from sparta.specialize.cpu import runnable_isas
from sparta.specialize.cpu.tile import Tile
from sparta.tesa.attribute import TeSA
from sparta.testing import check
from specialize.kernel_strategies import tiles

IMAGES = (*SHIFTED, GRID, PHASES)
ISAS = st.sampled_from(runnable_isas())
ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
LAYOUTS = st.sampled_from(["contiguous", "channels last", "reversed dims", "sliced"])


@st.composite
def problems(draw):
    """A geometry, the shape of a weight that fits it, and the size of an image that holds its kernel."""
    dims = draw(st.sampled_from([1, 2, 2]))
    geometry = ConvGeometry(
        stride=tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in range(dims)),
        padding=tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(dims)),
        dilation=tuple(draw(st.sampled_from([1, 1, 2])) for _ in range(dims)),
        groups=draw(st.sampled_from([1, 1, 2, 5])),
    )
    each = draw(st.sampled_from([1, 2, 19]))
    outputs = geometry.groups * draw(st.sampled_from([1, 4, 8, 40]))
    kernel = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in range(dims))
    size = []
    for dim in range(dims):
        least = geometry.dilation[dim] * (kernel[dim] - 1) + 1 - sum(geometry.padding[dim])
        size.append(max(draw(st.integers(1, 21)), least, 1))
    return geometry, (outputs, each, *kernel), tuple(size)


@st.composite
def conv_tiles(draw, outputs_each):
    tile = draw(tiles(form="panel"))
    return tile if outputs_each % tile.block == 0 else draw(st.just(type(tile)(block=1, mv=tile.mv)))


@st.composite
def conv_masks(draw, shape):
    """Masks as training leaves them: of any density, in blocks of output channels, with dead and full filters."""
    height = draw(st.sampled_from([1, 1, 4, 8]))
    blocks = torch.rand(-(-shape[0] // height), *shape[1:]) < draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    mask = blocks.repeat_interleave(height, 0)[: shape[0]]
    if draw(st.booleans()):
        mask[draw(st.integers(0, shape[0] - 1)) :: 3] = draw(st.booleans())
        mask[:, draw(st.integers(0, shape[1] - 1))] = False
    return mask


def laid_out(x, layout):
    """The same values with other strides."""
    if layout == "channels last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "reversed dims":
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    if layout == "sliced":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    return x


def expected(x, weight, mask, geometry, bias=None, activation=None, residual=None):
    exact = torch.where(mask, weight.double(), 0.0)
    y = ACTIVATIONS[activation](dense_conv(x.double(), exact, None if bias is None else bias.double(), geometry))
    return y if residual is None else y + residual.double()


@settings(max_examples=40)
@given(problems(), ISAS, LAYOUTS, st.sampled_from(IMAGES), st.data())
def test_the_result_is_that_of_the_masked_dense_convolution(problem, isa, layout, image, data):
    geometry, shape, size = problem
    tile = data.draw(conv_tiles(shape[0] // geometry.groups if geometry.groups > 1 else 8))
    mask = data.draw(conv_masks(shape))
    weight = torch.where(mask, torch.randn(shape), torch.nan)
    x = laid_out(torch.randn(data.draw(st.integers(0, 3)), shape[1] * geometry.groups, *size), layout)
    bias = data.draw(st.sampled_from([None, torch.randn(shape[0])]))
    activation = data.draw(st.sampled_from(list(ACTIVATIONS)))
    truth = expected(x, weight, mask, geometry, bias, activation)
    residual = data.draw(st.sampled_from([None, laid_out(torch.randn(truth.shape), layout)]))
    truth = truth if residual is None else truth + residual.double()
    packed = PackedConv(weight, mask, geometry, image=image, isa=isa, **tile.to_dict())
    y = packed(x, bias, activation, residual, threads=data.draw(st.sampled_from([1, 2])))
    assert y.is_contiguous()
    check(y, truth, reduction=max(128, weight[0].numel()))


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize(("channels", "outputs", "kernel", "size"), [(70, 40, 1, 29), (33, 64, 3, 30), (3, 32, 7, 61)])
def test_large_images_are_cut_into_bands(isa, image, channels, outputs, kernel, size):
    geometry = ConvGeometry.make(2, stride=1 if kernel < 7 else 2, padding=kernel // 2)
    weight = torch.randn(outputs, channels, kernel, kernel)
    mask = (torch.rand(outputs // 8, *weight.shape[1:]) < 0.3).repeat_interleave(8, 0)
    x = torch.randn(2, channels, size, size)
    packed = PackedConv(weight, mask, geometry, image=image, isa=isa, block=8, mv=2)
    results = [packed(x, threads=threads) for threads in (1, 2, 3)]
    check(results[0], expected(x, weight, mask, geometry), reduction=channels * kernel**2)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("size", [(7, 7), (14, 14), (9, 9), (4, 5), (3, 30)])
@pytest.mark.parametrize(
    ("kernel", "stride", "chunk"), [(1, 1, 0), (1, 1, 5), (1, 2, 0), (3, 1, 0), (3, 1, 40), (3, 2, 0)]
)
def test_pixels_behind_whole_vectors_and_gaps_between_rows(isa, image, size, kernel, stride, chunk):
    geometry = ConvGeometry.make(2, stride=stride, padding=kernel // 2)
    weight, x, bias = torch.randn(36, 12, kernel, kernel), torch.randn(2, 12, *size), torch.randn(36)
    mask = (torch.rand(9, *weight.shape[1:]) < 0.4).repeat_interleave(4, 0)
    truth = expected(x, weight, mask, geometry, bias)
    residual = torch.randn(truth.shape)
    truth = functional.relu(truth + residual.double())
    for block, mv in itertools.product((4, 8), (1, 2)):
        packed = PackedConv(weight, mask, geometry, image=image, isa=isa, block=block, mv=mv, k_chunk=chunk)
        results = [packed(x, bias, "relu_last", residual, threads=threads) for threads in (1, 2)]
        check(results[0], truth, reduction=128)
        assert torch.equal(*results)


def test_rows_share_the_padding_between_them():
    assert plan_image(ConvGeometry.make(2, padding=1), (3, 3), (14, 14)).row_width == 15
    assert plan_image(ConvGeometry.make(2, padding=2), (5, 5), (14, 14)).row_width == 16
    assert plan_image(ConvGeometry.make(2), (3, 3), (14, 14)).row_width == 14  # values, which no row shares
    assert plan_image(ConvGeometry.make(2, padding=((1, 1), (0, 2))), (3, 3), (14, 14)).row_width == 16


@settings(max_examples=60)
@given(problems(), ISAS, st.sampled_from(IMAGES), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.data())
def test_nan_and_inf_spread_to_the_pixels_that_read_them(problem, isa, image, bad, data):
    geometry, shape, size = problem
    mask, weight = torch.rand(shape) < 0.4, torch.randn(shape)
    x = torch.randn(1, shape[1] * geometry.groups, *size)
    place = (0, *(data.draw(st.integers(0, s - 1)) for s in x.shape[1:]))
    # Where a live weight meets the bad value, found by what ones and zeros give.
    hit = torch.zeros_like(x)
    hit[place] = 1.0
    touched = dense_conv(hit, mask.float(), None, geometry) > 0
    x[place] = bad
    y = PackedConv(weight, mask, geometry, image=image, isa=isa)(x)
    assert torch.equal(~y.isfinite(), touched)


@settings(max_examples=40)
@given(problems(), ISAS, st.sampled_from(IMAGES), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.data())
def test_nan_and_inf_in_a_live_weight_spread_to_its_channel(problem, isa, image, bad, data):
    geometry, shape, size = problem
    weight = torch.randn(shape)
    place = tuple(data.draw(st.integers(0, s - 1)) for s in shape)
    weight[place] = bad
    mask = torch.ones(shape, dtype=torch.bool)
    x = torch.rand(1, shape[1] * geometry.groups, *size) + 0.5
    y = PackedConv(weight, mask, geometry, image=image, isa=isa)(x)
    # Also where it meets the zeros around the image: 0 * inf is NaN.
    assert not bool(y[:, place[0]].isfinite().any())
    y[:, place[0]] = 0.0
    assert bool(y.isfinite().all())
    mask[place] = False
    assert bool(PackedConv(weight, mask, geometry, image=image, isa=isa)(x).isfinite().all())


def summed_from_zero(x, weight, mask, padding):
    """A convolution of stride 1 as the promise on zeros has it: +0, then each live product added to it."""
    around = functional.pad(x.double(), [padding] * 4)
    rows, columns = x.shape[2] + 2 * padding - weight.shape[2] + 1, x.shape[3] + 2 * padding - weight.shape[3] + 1
    y = torch.zeros(len(x), len(weight), rows, columns, dtype=torch.float64)
    for n, c, i, j in mask.nonzero().tolist():
        y[:, n] = y[:, n] + weight[n, c, i, j].double() * around[:, c, i : i + rows, j : j + columns]
    return y


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_sum_of_zeros_is_positive_zero(isa, image, activation):
    weight = torch.tensor([1.0, -1.0, 0.0, -0.0]).reshape(4, 1, 1, 1).expand(4, 2, 3, 3).contiguous()
    mask = torch.rand(weight.shape) < 0.6
    mask[3] = False
    packed = PackedConv(weight, mask, ConvGeometry.make(2, padding=1), image=image, isa=isa)
    for zero in (0.0, -0.0):
        x = torch.full((1, 2, 5, 5), zero)
        sums = summed_from_zero(x, weight, mask, padding=1)
        for bias, residual in itertools.product((None, 0.0, -0.0), repeat=2):
            truth = sums if bias is None else sums + bias
            truth = truth if residual is None else truth + residual
            beside = None if bias is None else torch.full((4,), bias)
            added = None if residual is None else torch.full((1, 4, 5, 5), residual)
            y = packed(x, beside, activation, added)
            assert torch.equal(y.double(), truth)
            assert torch.equal(y.signbit(), truth.signbit())
            assert not bool(y.signbit().any())


@pytest.mark.parametrize("isa", runnable_isas())
def test_the_switch_forces_a_build(isa, monkeypatch):
    monkeypatch.setenv("SPARTA_CPU_ISA", isa)
    geometry = ConvGeometry.make(2, padding=1, stride=2)
    weight, x = torch.randn(12, 3, 3, 3), torch.randn(2, 3, 11, 8)
    packed = PackedConv(weight, weight > 0.3, geometry)
    assert packed.library.isa == isa
    check(packed(x), expected(x, weight, weight > 0.3, geometry), reduction=27)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_computed_in_float32(dtype):
    geometry = ConvGeometry.make(2, padding=1)
    weight, x = torch.randn(8, 4, 3, 3), torch.randn(2, 4, 9, 9).to(dtype)
    y = PackedConv(weight, weight > 0, geometry)(x)
    assert y.dtype == dtype
    check(y, expected(x, weight, weight > 0, geometry), reduction=36)


def test_new_values_and_copies():
    geometry = ConvGeometry.make(1, padding=1)
    old, new, x = torch.randn(8, 4, 3), torch.randn(8, 4, 3), torch.randn(2, 4, 50)
    mask = torch.rand(8, 4, 3) < 0.5
    packed = PackedConv(old, mask, geometry, block=4)
    fresh = PackedConv(new, mask, geometry, block=4)(x)
    assert torch.equal(packed(x, values=packed.pack(new)), fresh)
    assert torch.equal(PackedConv(None, mask, geometry, block=4)(x, values=packed.pack(new)), fresh)
    assert torch.equal(copy.deepcopy(packed)(x), packed(x))
    assert "PackedConv" in repr(packed)


def test_as_many_sizes_as_one_likes():
    geometry = ConvGeometry.make(2, padding=1)
    weight = torch.randn(8, 4, 3, 3)
    packed = PackedConv(weight, weight > 0, geometry)
    for size in [*range(1, 14), 1, 2]:
        x = torch.randn(1, 4, size, size + 1)
        check(packed(x), expected(x, weight, weight > 0, geometry), reduction=36)
    assert len(packed._plans) <= 8


@pytest.fixture
def layer():
    return PackedConv(torch.randn(8, 4, 3, 3), torch.ones(8, 4, 3, 3) > 0, ConvGeometry.make(2))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"x": torch.zeros(1, 5, 6, 6)}, ShapeError, "x of shape"),
        ({"x": torch.zeros(4, 6, 6)}, ShapeError, "x of shape"),
        ({"x": torch.zeros(1, 4, 2, 6)}, ShapeError, "holds the kernel"),
        ({"x": torch.zeros(1, 4, 6, 6, dtype=torch.float64)}, ValueRangeError, "float64"),
        ({"x": torch.zeros(1, 4, 6, 6, device="meta")}, ValueRangeError, "meta"),
        ({"bias": torch.zeros(7)}, ShapeError, "bias of shape"),
        ({"residual": torch.zeros(1, 8, 6, 6)}, ShapeError, "residual of shape"),
        ({"activation": "rellu"}, NameNotFoundError, "did you mean 'relu'"),
        ({"threads": 0}, ValueRangeError, "threads is 0"),
        ({"values": torch.zeros(3)}, ShapeError, "take what pack"),
    ],
)
def test_bad_arguments_are_named(layer, arguments, error, says):
    with pytest.raises(error, match=says):
        layer(**{"x": torch.zeros(1, 4, 6, 6), **arguments})


def test_bad_layers_are_named(layer):
    ones, geometry = torch.ones(8, 4, 3, 3) > 0, ConvGeometry.make(2)
    with pytest.raises(ShapeError, match="bool"):
        PackedConv(None, ones.float(), geometry)
    with pytest.raises(ShapeError, match="as many dims"):
        PackedConv(None, ones[..., 0], geometry)
    with pytest.raises(ValueRangeError, match="form 'panel'"):
        PackedConv(None, ones, geometry, form="rows")
    with pytest.raises(ValueRangeError, match="blocks that divide"):
        PackedConv(None, ones, ConvGeometry.make(2, groups=4), block=4)
    with pytest.raises(NameNotFoundError, match="did you mean 'flat'"):
        PackedConv(None, ones, geometry, image="flatt")
    with pytest.raises(NameNotFoundError, match="did you mean 'grid'"):
        PackedConv(None, ones, geometry, image="gird")
    with pytest.raises(ValueRangeError, match="pass values="):
        PackedConv(None, ones, geometry)(torch.zeros(1, 4, 6, 6))
    with pytest.raises(ShapeError, match="as when packed"):
        layer.pack(torch.zeros(3))


@pytest.mark.parametrize(("gaps", "block"), [(0.0, 4), (0.005, 4), (0.2, 4), (0.6, 1)])
@pytest.mark.parametrize("shape", [(32, 60, 1, 1), (30, 20, 3, 3)])
def test_blocks_with_a_few_gaps_stay_blocks(shape, gaps, block):
    height = -(-shape[0] // 4)
    mask = (torch.rand(height, *shape[1:]) < 0.3).repeat_interleave(4, 0)[: shape[0]]
    mask &= torch.rand(shape) >= gaps
    geometry, weight = ConvGeometry.make(2, padding=shape[2] // 2), torch.randn(shape)
    x = torch.randn(1, shape[1], 9, 9)
    spec = conv_spec(TeSA.from_mask(mask), x.shape, x.dtype, geometry)
    offered = list(itertools.product(offered_tiles(spec), conv_layouts(spec)))
    assert offered[0][0].block == block
    assert len(set(offered)) == len(offered) <= 27
    for tile, image in offered:
        packed = PackedConv(weight, mask, geometry, image=image, **tile.to_dict())
        check(packed(x), expected(x, weight, mask, geometry), reduction=weight[0].numel(), what=repr(packed))


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("height", [1, 4, 8])
@pytest.mark.parametrize(
    ("shape", "size"), [((32, 48, 1, 1), 7), ((32, 600, 1, 1), 4), ((32, 70, 3, 3), 9), ((32, 20, 3, 3), 15)]
)
def test_every_offered_tile_and_layout_is_right_and_they_are_few(isa, height, shape, size, monkeypatch):
    monkeypatch.setenv("SPARTA_CPU_ISA", isa)
    geometry = ConvGeometry.make(2, padding=shape[2] // 2)
    mask = (torch.rand(shape[0] // height, *shape[1:]) < 0.2).repeat_interleave(height, 0)
    weight, x = torch.randn(shape), torch.randn(1, shape[1], size, size)
    spec = conv_spec(TeSA.from_mask(mask), x.shape, x.dtype, geometry)
    offered = list(itertools.product(offered_tiles(spec), conv_layouts(spec)))
    assert len(set(offered)) == len(offered) <= 27
    assert CpuConv2d().default(spec) == {"tile": str(offered[0][0]), "image": offered[0][1]}
    truth = expected(x, weight, mask, geometry)
    for tile, image in offered:
        packed = PackedConv(weight, mask, geometry, image=image, **tile.to_dict())
        check(packed(x), truth, reduction=weight[0].numel(), what=repr(packed))


@pytest.mark.parametrize(
    ("shape", "stride", "groups", "size", "layouts"),
    [
        ((64, 64, 3, 3), 1, 1, 56, (GRID, "rows", "flat")),
        ((64, 1024, 3, 3), 1, 1, 56, ("rows", "taps", "flat")),  # the copy of one row of all regions leaves the caches
        ((1024, 32, 3, 3), 1, 32, 56, ("rows", "taps", "flat")),  # as many channels, in groups
        ((64, 64, 3, 3), 1, 1, 9, ("rows", "taps", "flat")),  # regions overlap by more than they hold
        ((64, 64, 1, 1), 1, 1, 56, ("flat", "columns")),
        ((64, 64, 1, 1), 1, 1, 14, ("columns", PHASES)),  # channels begin in the middle of lines
        ((64, 66, 1, 1), 1, 1, 14, ("flat", "columns")),
        ((64, 64, 1, 1), 2, 1, 56, ("flat", "taps")),  # a copy in any case
    ],
)
def test_layouts_are_offered_where_they_differ_and_stay_near(shape, stride, groups, size, layouts):
    mask = torch.rand(shape) < 0.1
    geometry = ConvGeometry.make(2, stride=stride, padding=shape[2] // 2, groups=groups)
    spec = conv_spec(TeSA.from_mask(mask), (1, shape[1] * groups, size, size), torch.float32, geometry)
    assert conv_layouts(spec) == layouts


@pytest.mark.parametrize(("kernel", "stride"), [((1, 1), 1), ((3, 3), 2), ((3,), 1)])
def test_a_bound_call_is_the_same_call_and_leaves_other_tensors_alone(kernel, stride):
    weight = torch.randn(8, 6, *kernel) * (torch.rand(8, 6, *kernel) < 0.4)
    geometry = ConvGeometry.make(len(kernel), stride=stride, padding=kernel[0] // 2)
    packed, bias = PackedConv(weight, weight != 0, geometry), torch.randn(8)
    call = packed.fast_path(packed.values, bias, "relu")
    for count, side in [(1, 9), (3, 9), (2, 12), (0, 9), *[(1, side) for side in range(13, 22)]]:
        x = torch.randn(count, 6, *[side] * len(kernel))
        y = packed(x, bias, "relu")
        assert torch.equal(call(x), y)
        residual = torch.randn(y.shape)
        assert torch.equal(call(x, residual), packed(x, bias, "relu", residual))
    assert call(x.double()) is None
    assert call(laid_out(x, "sliced")) is None
    assert call(x, residual[:, :4]) is None
    assert call(x, residual.double()) is None
    assert packed.fast_path(packed.values, bias.double()) is None
    with pytest.raises(ShapeError, match="x of shape"):
        call(torch.randn(1, 5, *[9] * len(kernel)))


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_rows_share_what_they_load_only_within_their_group(groups):
    geometry = ConvGeometry.make(2, padding=1, groups=groups)
    weight, x = torch.randn(6 * groups, 5, 3, 3), torch.randn(2, 5 * groups, 9, 9)
    mask = torch.rand(weight.shape) < 0.6
    packed = PackedConv(weight, mask, geometry, mv=2, interleave=4)
    assert packed.tile.interleave == (4 if groups == 1 else 2)
    truth = torch.nn.functional.conv2d(x.double(), (weight * mask).double(), padding=1, groups=groups)
    torch.testing.assert_close(packed(x).double(), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize(
    ("size", "stride", "groups"), [((37, 41), 1, 1), ((5, 90), 1, 2), ((64, 33), 2, 1), ((1, 1), 1, 1)]
)
@pytest.mark.parametrize("tile", [Tile(mv=4, interleave=4, k_chunk=90), Tile(mv=3, interleave=4), Tile(block=4, mv=2)])
def test_a_grid_gives_one_result_whatever_the_threads(isa, size, stride, groups, tile):
    geometry = ConvGeometry.make(2, stride=stride, padding=1, groups=groups)
    weight, bias = torch.randn(72, 40 // groups, 3, 3), torch.randn(72)
    mask = (torch.rand(18, *weight.shape[1:]) < 0.3).repeat_interleave(4, 0) & (
        torch.rand(weight.shape) < (1.0 if tile.block > 1 else 0.6)
    )
    x = laid_out(torch.randn(2, 40, *size), "channels last")
    truth = expected(x, weight, mask, geometry, bias)
    residual = torch.randn(truth.shape)
    packed = PackedConv(weight, mask, geometry, image=GRID, isa=isa, **tile.to_dict())
    results = [packed(x, bias, "relu", residual, threads=threads) for threads in (1, 2, 3, 7)]
    check(results[0], functional.relu(truth) + residual.double(), reduction=weight[0].numel())
    for result in results[1:]:
        assert torch.equal(result, results[0])
    flat = PackedConv(weight, mask, geometry, image="flat", isa=isa, **tile.to_dict())
    ours, theirs = packed.fixed(size, 2), flat.fixed(size, 2)  # what packages hold
    assert ours.numbers == theirs.numbers
    assert ours.arrays.keys() == theirs.arrays.keys()
    assert all(torch.equal(array, theirs.arrays[name]) for name, array in ours.arrays.items())


def borders(length, step):
    """The places on both sides of every border of parts that are `step` long, and the ends."""
    return sorted({at for end in range(0, length + step, step) for at in (end - 1, end) if 0 <= at < length})


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_at_the_border_of_a_region_reaches_its_own_neighbours(isa, stride, dilation, bad):
    geometry = ConvGeometry.make(2, stride=stride, padding=1, dilation=dilation)
    weight, size = torch.randn(8, 2, 3, 3), (23, 26)
    packed = PackedConv(weight, weight != 0, geometry, image=GRID, isa=isa)
    lanes = packed.library.lanes
    plan = plan_grid(geometry, (3, 3), size, channels=2, lanes=lanes)
    (rows, columns), across = plan.out_size, plan.grid_columns
    assert lanes > 1
    height, width = -(-rows // (lanes // across)), -(-columns // across)
    places = list(itertools.product(borders(size[0], stride * height), borders(size[1], stride * width)))
    x, hit = torch.randn(len(places), 2, *size), torch.zeros(len(places), 2, *size)
    for number, place in enumerate(places):
        x[(number, number % 2, *place)], hit[(number, number % 2, *place)] = bad, 1.0
    touched = dense_conv(hit, torch.ones_like(weight), None, geometry) > 0
    for threads in (1, 3):
        assert torch.equal(~packed(x, threads=threads).isfinite(), touched)


@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from([4, 8, 16]), st.integers(1, 5))
def test_regions_hold_every_pixel_and_bands_every_row(rows, columns, lanes, threads):
    plan = plan_grid(ConvGeometry.make(2, padding=1), (3, 3), (rows, columns), channels=9, lanes=lanes, threads=threads)
    height, width = -(-rows // (lanes // plan.grid_columns)), plan.row_width - 2
    assert width * plan.grid_columns >= columns
    assert plan.band_tokens % plan.row_width == 0
    band = plan.band_tokens // plan.row_width
    assert plan.plane >= (band + 2) * plan.row_width * lanes
    assert 1 <= band <= height
