"""The order of an epilogue is stated, and every implement that takes it computes it."""

import pytest
import torch
from torch.nn import functional

from sparta.errors import ValueRangeError
from sparta.specialize.conv.op import ConvState
from sparta.specialize.conv.spec import ConvGeometry, conv_spec, dense_conv
from sparta.specialize.implement import Implement, Support, implement_named, supported
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import apply_epilogue, linear_spec
from sparta.specialize.tuning.select import build
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check

LAST = Epilogue(bias=True, activation="relu", residual=True, residual_first=True)
SIX = Epilogue(bias=True, activation="relu6", residual=True)


def samples(implement, spec):
    """Every tile and image layout that an implement has for a spec, one for each value."""
    default = implement.default(spec)
    found = [default]
    for name, space in implement.space(spec).items():
        found += [{**default, name: value} for value in space._value if value != default[name]]
    return found


def test_the_order_is_part_of_the_spec():
    first = Epilogue(bias=True, activation="relu", residual=True)
    y, residual = torch.tensor([-1.0, 2.0]), torch.tensor([3.0, -4.0])
    assert apply_epilogue(y, first, residual).tolist() == [3.0, -2.0]
    assert apply_epilogue(y, LAST, residual).tolist() == [2.0, 0.0]
    one, two = (linear_spec(TeSA.dense((4, 4)), 2, torch.float32, epilogue=e) for e in (first, LAST))
    assert one != two
    assert one.bucket != two.bucket
    assert KernelSpec.from_dict(two.to_dict()) == two


@pytest.mark.parametrize(
    "wrong", [{"residual": True}, {"activation": "relu"}, {"activation": "gelu", "residual": True}]
)
def test_only_a_relu_may_follow_a_residual(wrong):
    with pytest.raises(ValueRangeError, match="a residual and the activation 'relu'"):
        Epilogue(residual_first=True, **wrong)


@pytest.mark.parametrize("epilogue", [LAST, SIX], ids=str)
@pytest.mark.parametrize("rows", [1, 21])
def test_linear_implements_compute_it(epilogue, rows):
    torch.manual_seed(rows)
    mask = block_mask((40, 48), (4, 1), 0.7, seed=0)
    weight, bias = torch.where(mask, torch.randn(40, 48), 0.0), torch.randn(40)
    x, residual = 3 * torch.randn(rows, 48), torch.randn(rows, 40)
    spec = linear_spec(TeSA.from_mask(mask), rows, torch.float32, epilogue=epilogue)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    truth = apply_epilogue(exact, epilogue, residual.double())
    for implement in supported(spec)[0]:
        for params in samples(implement, spec) if implement.name == "cpu" else [implement.default(spec)]:
            kernel = build(spec, {"_name": implement.name, **params})
            y = kernel.run(kernel.pack(weight), x, bias, residual)
            check(y, truth, reduction=48, what=f"{implement.name} {params}")


@pytest.mark.parametrize("epilogue", [LAST, SIX], ids=str)
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_convolutions_compute_it(epilogue, kernel, stride):
    torch.manual_seed(kernel)
    geometry = ConvGeometry.make(2, stride=stride, padding=kernel // 2)
    mask = block_mask((16, 6 * kernel * kernel), (4, 1), 0.6, seed=1).reshape(16, 6, kernel, kernel)
    weight, bias, x = torch.where(mask, torch.randn(mask.shape), 0.0), torch.randn(16), 3 * torch.randn(2, 6, 9, 11)
    spec = conv_spec(TeSA.from_mask(mask), x.shape, x.dtype, geometry, epilogue=epilogue)
    residual = torch.randn(2, 16, *geometry.output_size((9, 11), (kernel, kernel)))
    exact = dense_conv(x.double(), weight.double(), bias.double(), geometry)
    truth = apply_epilogue(exact, epilogue, residual.double())
    for implement in supported(spec)[0]:
        for params in samples(implement, spec):
            built = build(spec, {"_name": implement.name, **params})
            check(built.run(built.pack(weight), x, bias, residual), truth, reduction=64, what=str(params))


def test_an_implement_that_does_not_know_the_order_is_not_asked():
    class Plain(Implement):
        name, op = "plain", "linear"

        def supports(self, spec):
            del spec
            return Support.yes()

        def build(self, spec, params):
            raise NotImplementedError

    specs = [linear_spec(TeSA.dense((4, 4)), 2, torch.float32, epilogue=e) for e in (Epilogue(), LAST, SIX)]
    assert [bool(Plain().answer(spec)) for spec in specs] == [True, False, False]
    assert "bias+residual+relu" in Plain().answer(specs[1]).reason


def test_training_through_it_is_refused_for_convolutions_and_relu6_has_a_gradient():
    geometry, weight = ConvGeometry.make(1), torch.randn(4, 3, 1, requires_grad=True)
    spec = conv_spec(TeSA.dense((4, 3, 1)), (2, 3, 5), torch.float32, geometry, epilogue=LAST)
    dense = implement_named("dense", "conv1d")
    with pytest.raises(ValueRangeError, match="after the activation"):
        ConvState(spec, dense.build(spec, {}))
    spec = conv_spec(TeSA.dense((4, 3, 1)), (2, 3, 5), torch.float32, geometry, epilogue=Epilogue(activation="relu6"))
    state, x = ConvState(spec, dense.build(spec, {})), 4 * torch.randn(2, 3, 5)
    (mine,) = torch.autograd.grad(torch.ops.sparta.conv(x, weight, None, None, state.handle, False).sum(), weight)
    (theirs,) = torch.autograd.grad(functional.relu6(functional.conv1d(x, weight)).sum(), weight)
    torch.testing.assert_close(mine, theirs)
