"""The convolution's spec and its implements: every implement gives what dense gives, and specs say what is wrong."""

import pytest
import torch
from torch import nn

from sparta.errors import ShapeError, ValueRangeError
from sparta.specialize.conv.spec import ConvGeometry, conv_spec, dense_conv
from sparta.specialize.implement import supported
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import apply_epilogue
from sparta.specialize.tuning.select import build
from sparta.tesa.attribute import TeSA
from sparta.testing import check


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("padding", ["same", "valid", 1, (2, 0)])
@pytest.mark.parametrize(("kernel", "dilation"), [(3, 1), (2, 1), ((1, 4), 2)])
def test_the_geometry_of_a_layer_gives_its_result(padding, kernel, dilation):
    layer = nn.Conv2d(4, 6, kernel, padding=padding, dilation=dilation, groups=2)
    x = torch.randn(2, 4, 9, 11)
    y = dense_conv(x, layer.weight, layer.bias, ConvGeometry.of(layer))
    torch.testing.assert_close(y, layer(x))
    geometry = ConvGeometry.of(layer)
    assert geometry.output_size((9, 11), layer.kernel_size) == tuple(y.shape[2:])
    assert ConvGeometry.from_dict(geometry.to_dict()) == geometry


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("dims", [1, 2])
def test_every_implement_computes_the_whole_epilogue(activation, dims):
    geometry = ConvGeometry.make(dims, stride=2, padding=1)
    mask = torch.rand(16, 6, *[3] * dims) < 0.3
    x, bias, weight = torch.randn(2, 6, *[13] * dims), torch.randn(16), torch.randn(mask.shape)
    epilogue = Epilogue(bias=True, activation=activation, residual=True)
    spec = conv_spec(TeSA.from_mask(mask), x.shape, x.dtype, geometry, epilogue=epilogue)
    assert KernelSpec.from_dict(spec.to_dict()) == spec
    residual = torch.randn(2, 16, *geometry.output_size(x.shape[2:], mask.shape[2:]))
    exact = dense_conv(x.double(), torch.where(mask, weight, 0.0).double(), bias.double(), geometry)
    truth = apply_epilogue(exact, epilogue, residual.double())
    able, _ = supported(spec)
    assert {implement.name for implement in able} >= {"dense"}
    for implement in able:
        kernel = build(spec, {"_name": implement.name, **implement.default(spec)})
        y = kernel.run(kernel.pack(weight), x, bias, residual)
        assert y.is_contiguous()
        check(y, truth, reduction=64, what=implement.name)


def test_the_default_is_a_point_of_the_space():
    weight = TeSA.from_mask((torch.rand(4, 8, 3, 3) < 0.2).repeat_interleave(8, 0))
    spec = conv_spec(weight, (1, 8, 14, 14), torch.float32, ConvGeometry.make(2, padding=1))
    for implement in supported(spec)[0]:
        space, default = implement.space(spec), implement.default(spec)
        assert all(value in space[name]._value for name, value in default.items())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: conv_spec(TeSA.dense((4, 4)), (1, 4), torch.float32), ShapeError, "3 or 4 dims"),
        (lambda: conv_spec(TeSA.dense((4, 4, 1)), (1, 3, 9), torch.float32), ShapeError, "an input of shape"),
        (lambda: conv_spec(TeSA.dense((4, 4, 3)), (1, 4, 2), torch.float32), ShapeError, "holds the kernel"),
        (lambda: ConvGeometry.make(2, stride=0), ValueRangeError, "1 or more"),
        (lambda: ConvGeometry.make(2, padding=-1), ValueRangeError, "0 or more"),
        (lambda: ConvGeometry((1,), ((0, 0), (0, 0)), (1,)), ValueRangeError, "as many paddings"),
    ],
)
def test_wrong_specs_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text):
        call()
