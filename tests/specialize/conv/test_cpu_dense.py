"""Dense and depthwise convolutions of the library against float64: any geometry, size, chunk, instruction set."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError
from sparta.measure.machine import probe_compiler
from sparta.specialize.conv.cpu_dense import DenseConv, DepthwiseConv, dense_images
from sparta.specialize.conv.spec import ConvGeometry, conv_spec, dense_conv
from sparta.specialize.cpu import runnable_isas
from sparta.specialize.implement import implement_named, supported
from sparta.specialize.kernel_spec import Epilogue
from sparta.tesa.attribute import TeSA
from sparta.testing import check

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")
ACTIVATIONS = {
    None: lambda y: y,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu6": functional.relu6,
}


@st.composite
def problems(draw):
    """A geometry, the shape of a weight that fits it, and the size of an image that holds its kernel."""
    dims, depthwise = draw(st.sampled_from([1, 2, 2, 2])), draw(st.booleans())
    groups = draw(st.sampled_from([2, 5, 9] if depthwise else [1, 1, 2, 3]))
    geometry = ConvGeometry(
        stride=tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in range(dims)),
        padding=tuple((draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(dims)),
        dilation=tuple(draw(st.sampled_from([1, 1, 2])) for _ in range(dims)),
        groups=groups,
    )
    each = 1 if depthwise else draw(st.sampled_from([1, 2, 19, 40]))
    outputs = groups * draw(st.sampled_from([1, 2, 4, 7, 40]))
    kernel = (draw(st.sampled_from([1, 3, 5])),) * dims
    if draw(st.booleans()):
        kernel = tuple(draw(st.sampled_from([1, 2, 3, 7])) for _ in range(dims))
    size = []
    for dim in range(dims):
        least = geometry.dilation[dim] * (kernel[dim] - 1) + 1 - sum(geometry.padding[dim])
        size.append(max(draw(st.integers(1, 40)), least, 1))
    return geometry, (outputs, each, *kernel), tuple(size)


@settings(max_examples=80)
@given(problems(), st.sampled_from(runnable_isas()), st.sampled_from([0, 1, 3]), st.data())
def test_the_result_is_that_of_the_convolution(problem, isa, batch, data):
    geometry, shape, size = problem
    weight, x = torch.randn(shape), torch.randn(batch, shape[1] * geometry.groups, *size)
    if data.draw(st.booleans()):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    bias = data.draw(st.sampled_from([None, torch.randn(shape[0])]))
    activation = data.draw(st.sampled_from(list(ACTIVATIONS)))
    truth = dense_conv(x.double(), weight.double(), None if bias is None else bias.double(), geometry)
    truth = ACTIVATIONS[activation](truth)
    residual = data.draw(st.sampled_from([None, torch.randn(truth.shape)]))
    truth = truth if residual is None else truth + residual.double()
    conv = dense_images(shape, geometry, isa)
    if isinstance(conv, DenseConv):
        conv._chunk = data.draw(st.sampled_from([conv._chunk, 1, 7, 30]))
    y = conv(x, conv.pack(weight), bias, activation, residual, threads=data.draw(st.sampled_from([1, 2, 3])))
    assert y.is_contiguous()
    check(y, truth, reduction=max(128, weight[0].numel()))


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize(
    ("shape", "geometry", "size"),
    [
        ((40, 70, 1, 1), ConvGeometry.make(2), 31),
        ((16, 300, 3, 3), ConvGeometry.make(2, padding=1), 30),
        ((32, 3, 7, 7), ConvGeometry.make(2, stride=2, padding=3), 61),
        ((20, 600, 1, 1), ConvGeometry.make(2), 7),
        # Tokens behind the last whole vector: one, two or many; read in place and as panels.
        ((72, 200, 3, 3), ConvGeometry.make(2, padding=1), 7),
        ((70, 40, 1, 1), ConvGeometry.make(2), 14),
        ((70, 40, 1, 1), ConvGeometry.make(2), 10),
        ((12, 33, 1, 1), ConvGeometry.make(2), 5),
        ((12, 33, 1, 1), ConvGeometry.make(2, stride=2), 33),
    ],
)
def test_large_images_are_cut_into_bands_and_long_sums_into_chunks(isa, shape, geometry, size):
    weight, x, residual = torch.randn(shape), torch.randn(2, shape[1], size, size), None
    conv = DenseConv(shape, geometry, isa)
    truth = dense_conv(x.double(), weight.double(), None, geometry)
    residual = torch.randn(truth.shape)
    y = conv(x, conv.pack(weight), None, "relu_last", residual, threads=3)
    check(y, functional.relu(truth + residual.double()), reduction=weight[0].numel())


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize(("inputs", "size", "direct"), [(40, 31, True), (600, 16, True), (40, 1, False)])
def test_layers_of_single_pixels_read_images_where_they_are(isa, inputs, size, direct):
    weight, x = torch.randn(20, inputs, 1, 1), torch.randn(2, inputs, size, size)
    conv = DenseConv(tuple(weight.shape), ConvGeometry.make(2), isa)
    assert bool(conv._planned(tuple(x.shape), 1).rest[1][-1]) is direct
    truth = dense_conv(x.double(), weight.double(), None, ConvGeometry.make(2))
    for threads in (1, 3):
        check(conv(x, conv.pack(weight), threads=threads), truth, reduction=inputs)


@settings(max_examples=60)
@given(
    st.sampled_from([3, 5]),
    st.sampled_from([1, 2]),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.sampled_from([(1, 1), (7, 7), (5, 17), (14, 33), (9, 300)]),
    st.data(),
)
def test_planes_are_read_where_they_are_and_nothing_beside_them(side, stride, padding, size, data):
    taken = tuple(max(each, side - sum(padding)) for each in size)
    geometry = ConvGeometry((stride, stride), (padding, padding), (1, 1), groups=3)
    conv = DepthwiseConv((6, 1, side, side), geometry, data.draw(st.sampled_from(runnable_isas())))
    weight, x = torch.randn(6, 1, side, side), torch.randn(2, 3, *taken)
    room = torch.full((x.numel() + 128,), torch.nan)  # what lies around the planes spoils whatever reads it
    room[64:-64] = x.flatten()
    y = conv(room[64:-64].view(x.shape), conv.pack(weight), threads=data.draw(st.sampled_from([1, 2])))
    check(y, dense_conv(x.double(), weight.double(), None, geometry), reduction=128)


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    "size", [(7, 7), (1, 1), (2, 8), (9, 15), (5, 16), (14, 14), (3, 17), (6, 33), (28, 28), (3, 64), (2, 65), (4, 131)]
)
def test_rows_of_planes_are_shifted_in_registers(isa, stride, size):
    channels, planes = 5, 2 * 5  # an odd number, so that the last of pairs is alone
    weight, bias = torch.randn(channels, 1, 3, 3), torch.randn(channels)
    room = torch.full((planes * size[0] * size[1] + 128,), torch.nan)  # spoils whatever reads it
    x = room[64:-64].view(2, channels, *size)
    x.normal_()
    for bottom in (0, 1, 3):
        rows = (1, max(bottom, 2 - size[0]))
        geometry = ConvGeometry((stride, stride), (rows, (1, 1)), (1, 1), groups=channels)
        conv = DepthwiseConv((channels, 1, 3, 3), geometry, isa)
        truth = dense_conv(x.double(), weight.double(), bias.double(), geometry)
        residual = torch.randn(truth.shape)
        for activation, added in (("relu6", None), (None, residual), ("silu", residual)):
            expected = ACTIVATIONS[activation](truth) + (0 if added is None else added.double())
            for threads in (1, 3):
                y = conv(x, conv.pack(weight), bias, activation, added, threads=threads)
                check(y, expected, reduction=128)


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize(
    ("shape", "stride", "padding", "groups", "size"),
    [
        ((12, 3, 3, 3), 2, 1, 1, (35, 56)),
        ((64, 3, 7, 7), 2, 3, 1, (50, 75)),
        ((5, 1, 3, 3), 1, 1, 1, (40, 33)),
        ((20, 4, 5, 5), 3, 2, 1, (61, 59)),
        ((6, 2, 3, 3), 2, 0, 3, (41, 47)),
        ((9, 2, 2, 4), 1, 2, 1, (3, 130)),
    ],
)
def test_layers_of_few_channels_read_taps_where_they_are(isa, shape, stride, padding, groups, size):
    geometry = ConvGeometry.make(2, stride=stride, padding=padding, groups=groups)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    room = torch.full((3 * shape[1] * groups * size[0] * size[1] + 128,), torch.nan)  # spoils whatever reads it
    x = room[64:-64].view(3, shape[1] * groups, *size)
    x.normal_()
    conv = DenseConv(shape, geometry, isa, fewer=False)
    plan = conv._image(ConvGeometry(conv._stride, conv._padding, conv._dilation), size, shape[1])[0]
    assert plan.row_width > plan.out_size[1]
    truth = dense_conv(x.double(), weight.double(), bias.double(), geometry)
    residual = torch.randn(truth.shape)
    for activation, added in (("relu6", residual), ("silu", residual), (None, None)):
        expected = ACTIVATIONS[activation](truth) + (0 if added is None else added.double())
        for threads in (1, 2, 7):
            check(conv(x, conv.pack(weight), bias, activation, added, threads=threads), expected, reduction=256)


@pytest.mark.parametrize("groups", [1, 6])
def test_what_is_no_number_stays_where_it_belongs(groups):
    geometry = ConvGeometry.make(2, padding=1, groups=groups)
    weight, x = torch.randn(12, 6 // groups, 3, 3), torch.randn(1, 6, 9, 9)
    x[0, 2, 4, 4], x[0, 5, 0, 8] = torch.nan, torch.inf
    conv = dense_images(tuple(weight.shape), geometry)
    truth = functional.relu(dense_conv(x, weight, None, geometry))
    torch.testing.assert_close(conv(x, conv.pack(weight), None, "relu"), truth, equal_nan=True, rtol=1e-4, atol=1e-4)


@settings(max_examples=30)
@given(
    st.tuples(st.sampled_from([32, 36, 70]), st.sampled_from([32, 45, 130])),
    st.tuples(st.sampled_from([14, 15, 30]), st.sampled_from([13, 14, 57])),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from(runnable_isas()),
    st.data(),
)
def test_fewer_products_give_the_same_result(channels, size, padding, isa, data):
    geometry = ConvGeometry((1, 1), (padding, padding[::-1]), (1, 1))
    conv = DenseConv((*channels, 3, 3), geometry, isa)
    weight, x, bias = torch.randn(*channels, 3, 3), torch.randn(2, channels[1], *size), torch.randn(channels[0])
    assume(conv._planned(tuple(x.shape), 1).rest[-1])  # the address of a plan
    activation = data.draw(st.sampled_from([*ACTIVATIONS, "relu_last"]))
    truth = dense_conv(x.double(), weight.double(), bias.double(), geometry)
    residual = torch.randn(truth.shape)
    if activation == "relu_last":
        truth = functional.relu(truth + residual.double())
    else:
        truth = ACTIVATIONS[activation](truth) + residual.double()
    results = [conv(x, conv.pack(weight), bias, activation, residual, threads=threads) for threads in (1, 2)]
    check(results[0], truth, reduction=weight[0].numel())
    assert torch.equal(*results)


@pytest.mark.parametrize("where", ["image", "weight", "sums"])
def test_fewer_products_do_not_spread_what_is_no_number(where):
    geometry = ConvGeometry.make(2, padding=1)
    weight, x = torch.randn(32, 40, 3, 3), torch.randn(2, 40, 20, 20)
    if where == "image":
        x[0, 2, 4, 4], x[1, 5, 0, 8], x[1, 5, 9, 9] = torch.nan, torch.inf, -torch.inf
    elif where == "weight":
        weight[3, 2, 1, 0] = torch.inf
    else:  # finite, but not when transformed: such differences are beyond what a float holds
        x[0, 2, 4, 4], x[0, 2, 6, 4] = 3e38, -3e38
    conv, plain = (DenseConv(tuple(weight.shape), geometry, fewer=fewer) for fewer in (True, False))
    y, truth = conv(x, conv.pack(weight)), plain(x, plain.pack(weight))
    torch.testing.assert_close(y, truth, equal_nan=True, rtol=0, atol=0)
    assert not y.isfinite().all()
    assert not y.isnan().all()


@pytest.mark.parametrize("isa", runnable_isas())
def test_fewer_products_do_not_look_at_what_other_images_left_behind(isa):
    geometry, weight, small = ConvGeometry.make(2, padding=1), torch.randn(32, 32, 3, 3), torch.randn(1, 32, 14, 14)
    conv, plain = (DenseConv(tuple(weight.shape), geometry, isa, fewer=fewer) for fewer in (True, False))
    values = conv.pack(weight)
    assert conv(torch.full((1, 32, 16, 16), torch.nan), values, threads=1).isnan().all()
    after = conv(small, values, threads=1)
    assert not torch.equal(after, plain(small, plain.pack(weight), threads=1))  # fewer products round otherwise
    conv(torch.randn(1, 32, 16, 16), values, threads=1)
    assert torch.equal(conv(small, values, threads=1), after)


def test_weights_that_were_packed_for_all_products_still_run():
    geometry, x = ConvGeometry.make(2, padding=1), torch.randn(1, 32, 20, 20)
    conv, plain = DenseConv((32, 32, 3, 3), geometry), DenseConv((32, 32, 3, 3), geometry, fewer=False)
    weight = torch.randn(32, 32, 3, 3)
    assert torch.equal(conv(x, plain.pack(weight)), plain(x, plain.pack(weight)))
    assert plain.pack(weight).numel() < conv.pack(weight).numel()


def test_short_dtypes_are_computed_in_float32():
    conv = DepthwiseConv((4, 1, 3), ConvGeometry.make(1, groups=4))
    weight, x = torch.randn(4, 1, 3), torch.randn(2, 4, 9).bfloat16()
    y = conv(x, conv.pack(weight))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, functional.conv1d(x.float(), weight, groups=4).bfloat16())


def test_the_short_way_and_copies_give_the_same():
    geometry = ConvGeometry.make(2, padding=1)
    conv, x = DenseConv((8, 3, 3, 3), geometry), torch.randn(2, 3, 11, 12)
    values, bias, residual = conv.pack(torch.randn(8, 3, 3, 3)), torch.randn(8), torch.randn(2, 8, 11, 12)
    y = conv(x, values, bias, "silu", residual)
    call = conv.fast_path(values, bias, "silu")
    assert torch.equal(call(x, residual), y)
    assert torch.equal(copy.deepcopy(conv)(x, values, bias, "silu", residual), y)
    assert call(x.double()) is None
    assert call(x, residual[:1]) is None
    assert conv.fast_path(values, bias.double()) is None
    assert conv.product(values, bias.double()) is None
    assert conv.product(values, bias)((2, 4, 11, 12), 1) is None
    assert conv.product(values, bias)((0, 3, 11, 12), 1) is None


@pytest.mark.parametrize("dims", [1, 2])
def test_the_kernel_is_an_implement_that_competes(dims):
    weight, x = torch.randn(6, 1, *[3] * dims), torch.randn(2, 3, *[9] * dims)
    mask = torch.rand(weight.shape) < 0.5
    geometry = ConvGeometry.make(dims, padding=1, groups=3)
    epilogue = Epilogue(bias=True, activation="relu", residual=True, residual_first=True)
    spec = conv_spec(TeSA.from_mask(mask), x.shape, torch.float32, geometry, epilogue=epilogue)
    implement = implement_named("cpu-dense", spec.op)
    assert implement in supported(spec)[0]
    kernel, bias, residual = implement.build(spec, {}), torch.randn(6), torch.randn(2, 6, *[9] * dims)
    packed = kernel.pack(torch.where(mask, weight, torch.nan))
    truth = functional.relu(dense_conv(x, weight * mask, bias, geometry) + residual)
    torch.testing.assert_close(kernel.run(packed, x, bias, residual), truth)
    torch.testing.assert_close(kernel.fast_path(packed, bias)(x, residual), truth)
    assert kernel.product(packed, bias)(tuple(x.shape), 1).shape == truth.shape


def test_sparse_weights_are_left_to_kernels_that_skip_zeros():
    mask = torch.zeros(8, 4, 3, 3, dtype=torch.bool)
    mask[:, 0] = True
    spec = conv_spec(TeSA.from_mask(mask), (1, 4, 9, 9), torch.float32, ConvGeometry.make(2))
    assert "25%" in implement_named("cpu-dense", "conv2d").supports(spec).reason


def test_wrong_arguments_are_refused():
    conv, x = DenseConv((8, 3, 3, 3), ConvGeometry.make(2)), torch.randn(1, 3, 5, 5)
    values = conv.pack(torch.randn(8, 3, 3, 3))
    for wrong in (torch.randn(1, 4, 5, 5), torch.randn(3, 5, 5), torch.randn(1, 3, 2, 5)):
        with pytest.raises(ShapeError):
            conv(wrong, values)
    with pytest.raises(ShapeError):
        conv(x, values, torch.randn(7))
    with pytest.raises(ShapeError):
        conv(x, values, residual=torch.randn(1, 8, 5, 5))
    with pytest.raises(ValueRangeError):
        conv(x.double(), values)
    with pytest.raises(ValueRangeError):
        conv(x, values, threads=0)
    for make in (conv, DepthwiseConv((4, 1, 3), ConvGeometry.make(1, groups=4))):
        with pytest.raises(ShapeError):
            make.pack(torch.randn(8, 3, 3, 4))
    with pytest.raises(ShapeError):
        DenseConv((8, 3, 3), ConvGeometry.make(2))
    with pytest.raises(ShapeError):
        DepthwiseConv((8, 3, 3), ConvGeometry.make(1))
