"""Handles mean living kernels of their kind; a weight is packed once per change, and every change is seen."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import sparta.specialize.matmul.cpu  # noqa: F401 - its op
from sparta.errors import SpartaError
from sparta.nn import SparseConv2d, SparseLinear
from sparta.specialize.cuda import graphs
from sparta.specialize.linear.dense import DenseLinear
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.runtime.handles import KernelState, find, register
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, linear_reference

K, N = 48, 40


class Counter:
    """A kernel that counts how often it packs."""

    def __init__(self, kernel):
        self.kernel, self.packs = kernel, 0

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def pack(self, operand):
        self.packs += 1
        return self.kernel.pack(operand)


@pytest.fixture(params=["dense", "torch-csr"])
def layer(request):
    mask = block_mask((N, K), (1, 1), 0.8, seed=1)
    made = SparseLinear(nn.Linear(K, N), weight_mask=mask)
    config, x = {"_name": request.param}, torch.randn(7, K)
    if not made.get_search_space(x).includes(config):
        pytest.skip(f"{request.param} is not available here")
    made.build((x,), config)
    made._state.forward = Counter(made._state.forward)
    return made


def packs_of(layer, *, again=1):
    """Return how often calls pack, each of which must give what the weight is now."""
    counter = layer._state.forward
    before, x = counter.packs, torch.randn(7, K)
    for _ in range(again):
        expected = linear_reference(x, layer.weight.detach(), layer.bias.detach(), weight_mask=layer.weight_mask)
        check(layer(x).detach(), expected, reduction=K)
    return counter.packs - before


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_weight_that_does_not_change_is_packed_once(layer, training, gradients):
    layer.train(training)
    with torch.set_grad_enabled(gradients):
        assert packs_of(layer, again=5) == 1
    layer.train(not training)
    with torch.set_grad_enabled(not gradients):
        assert packs_of(layer, again=2) == 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_an_optimizer_that_steps_in_place_is_seen(layer, training, optimizer):
    layer.train(training)
    steps = getattr(torch.optim, optimizer)(layer.parameters(), lr=0.1)
    for _ in range(3):
        steps.zero_grad()
        layer(torch.randn(7, K)).square().sum().backward()
        steps.step()
        assert packs_of(layer, again=3) == 1


def test_a_step_that_leaves_the_version_counter_alone_is_seen(layer):
    packs_of(layer)
    for _ in range(3):
        layer(torch.randn(7, K)).square().sum().backward()
        before = layer.weight._version
        layer.weight.data -= 0.1 * layer.weight.grad
        assert layer.weight._version == before
        assert packs_of(layer, again=3) == 1
        with torch.no_grad():
            assert packs_of(layer, again=3) == 0


def test_a_frozen_weight_is_not_packed_again_by_what_trains_below_it(layer):
    layer.requires_grad_(requires_grad=False)
    packs_of(layer)
    for _ in range(3):
        x = torch.randn(7, K, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
        assert packs_of(layer) == 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_values_are_right_after_every_other_change(layer, training, gradients):
    layer.train(training)
    kept = layer.weight_mask

    def fresh():
        return torch.randn(N, K) * kept

    changes = [
        lambda: layer.weight.mul_(2.0),
        lambda: layer.weight.copy_(fresh()),
        lambda: setattr(layer.weight, "data", fresh()),
        lambda: setattr(layer, "weight", nn.Parameter(fresh())),
        lambda: layer.weight.set_(fresh()),
        lambda: layer.load_state_dict({name: 3 * value for name, value in layer.state_dict().items()}, strict=False),
    ]
    packs_of(layer)
    for change in changes:
        with torch.no_grad():
            change()
        with torch.set_grad_enabled(gradients):
            assert packs_of(layer, again=2) == 1


def test_weights_of_inference_mode_count_nothing_and_are_packed_in_each_call(layer):
    with torch.inference_mode():
        layer.weight = nn.Parameter(torch.randn(N, K) * layer.weight_mask, requires_grad=False)
        assert layer.weight.is_inference()
        for training in (True, False):
            layer.train(training)
            assert packs_of(layer, again=2) == 2
            layer.weight.mul_(-1.5)
            assert packs_of(layer) == 1


def test_convolutions_pack_once_per_change_too():
    conv = SparseConv2d(nn.Conv2d(8, 8, 3), weight_mask=torch.rand(8, 8, 3, 3) < 0.4)
    x = torch.randn(2, 8, 9, 9)
    conv.build((x,), {"_name": "dense"})
    counter = conv._state.forward = Counter(conv._state.forward)
    for training in (True, False):
        conv.train(training)
        with torch.no_grad():
            for _ in range(3):
                conv(x)
    assert counter.packs == 1
    conv.train()
    conv(x).sum().backward()
    torch.optim.SGD(conv.parameters(), lr=0.1).step()
    torch.testing.assert_close(conv(x), nn.functional.conv2d(x, conv.weight * conv.weight_mask, conv.bias))
    assert counter.packs == 2


def test_memory_of_a_weight_is_not_given_to_another_while_its_packed_form_is_known():
    spec = linear_spec(TeSA.dense((64, 64)), 16, torch.float32)
    state, counter = None, Counter(DenseLinear().build(spec, {}))
    state = KernelState(spec["weight"], counter)
    for number in range(50):  # a freed weight's memory is what the next one would get
        weight = torch.full((64, 64), float(number))
        packed = state.packed(weight, keep=number % 2 == 0)
        assert all((each == number).all() for each in packed if each.is_floating_point() and each.numel() == 64 * 64)
        del weight, packed
    assert counter.packs == 50


class Held:
    """Something that ops may ask for."""


class Other:
    """Something else."""


def test_a_handle_means_one_living_object_of_the_kind_that_is_asked_for():
    held, other = Held(), Other()
    handle = register(held)
    assert find(handle, Held) is held
    assert register(other) != handle
    with pytest.raises(SpartaError, match="are gone"):
        find(handle, Other)
    del held
    with pytest.raises(SpartaError, match="keep it"):
        find(handle, Held, fix="keep it")


def test_handles_of_two_processes_have_nothing_in_common():
    code = (
        "from sparta.specialize.runtime.handles import register\n"
        "held = {1}\n"
        "print(*(register(held) for _ in range(20)))"
    )
    found = [
        set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
        for _ in range(2)
    ]
    assert len(found[0]) == len(found[1]) == 20
    assert not found[0] & found[1]
    assert all(2**16 < int(handle) < 2**63 for handle in found[0] | found[1])
    for handle in found[0]:  # a number that was written down means nothing here
        with pytest.raises(SpartaError):
            find(int(handle), KernelState)


def test_ops_find_no_kernel_of_another_kind():
    spec = linear_spec(TeSA.dense((8, 4)), 16, torch.float32)
    state = KernelState(spec["weight"], DenseLinear().build(spec, {}))
    x, weight, mask = torch.zeros(2, 4), torch.zeros(8, 4), torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(SpartaError, match="are gone"):
        torch.ops.sparta.masked_input(x, weight, mask, state.handle)
    with pytest.raises(SpartaError, match="are gone"):
        torch.ops.sparta.linear(x, weight, None, state.handle, keep=False)


@pytest.mark.parametrize("keep", [True, False])
def test_a_recording_knows_that_a_weight_is_packed_in_it(monkeypatch, keep):
    """Kernels that are recorded after that wait for their weight, as for all that a graph writes itself."""
    spec = linear_spec(TeSA.dense((N, K)), 7, torch.float32)
    state, weight = KernelState(spec["weight"], DenseLinear().build(spec, {})), torch.randn(N, K)
    monkeypatch.setattr(graphs._recording, "settled", True)
    state.packed(weight, keep=keep)
    assert not graphs.weights_settled()
    monkeypatch.setattr(graphs._recording, "settled", True)
    state.packed(weight, keep=keep)
    assert graphs.weights_settled()
