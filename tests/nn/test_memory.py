"""What a built module keeps in memory in evaluation mode: one dense weight, and little beside it."""

import gc
import types

import pytest
import torch
from torch import nn

import sparta
from sparta.nn import SparseConv2d, SparseLinear
from sparta.testing import block_mask

SIZE = 256
X = torch.randn(32, SIZE)


def bytes_of(root):
    """Bytes of all tensors that can be reached from an object, each piece of memory once."""
    seen, found, left = set(), {}, [root]
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType)):
            continue
        seen.add(id(thing))
        if isinstance(thing, types.FunctionType):  # what it closes over, not the module it stands in
            left += [cell.cell_contents for cell in thing.__closure__ or ()] + list(thing.__defaults__ or ())
            continue
        if isinstance(thing, torch.Tensor):
            thing = thing.untyped_storage()
        if isinstance(thing, torch.UntypedStorage):
            found[thing.data_ptr()] = thing.nbytes()
            continue
        left += gc.get_referents(thing)
    return sum(found.values())


def test_memory_is_counted_once():
    x = torch.zeros(100)
    assert bytes_of([x, x[3:], {"view": x.view(10, 10)}, lambda: x]) == 400


def run(layer, name, x):
    config = next(sample for sample in layer.get_search_space(x).samples() if sample["_name"] == name)
    layer.eval().build(x, config)
    with torch.no_grad():
        return layer(x), layer(x)


@pytest.mark.parametrize("block", [(1, 1), (4, 1)])
@pytest.mark.parametrize(("name", "most"), [("dense", 0.51), ("cpu", 0.82)])
def test_a_linear_layer_keeps_its_dense_weight_once(block, name, most):
    mask = block_mask((SIZE, SIZE), block, 0.9, seed=0)
    layer = SparseLinear(nn.Linear(SIZE, SIZE), weight_mask=mask)
    run(layer, name, X)
    # A byte for the mask, up to one for the attribute, and for each live weight its value and two numbers.
    assert bytes_of(layer) <= (1 + most) * layer.weight.nbytes + 20_000


def test_a_convolution_keeps_its_dense_weight_once():
    mask = block_mask((64, 32 * 9), (1, 1), 0.9, seed=0).reshape(64, 32, 3, 3)
    layer = SparseConv2d(nn.Conv2d(32, 64, 3), mask)
    run(layer, "dense", torch.randn(1, 32, 8, 8))
    assert bytes_of(layer) <= 1.51 * layer.weight.nbytes + 20_000


def test_a_whole_model_does_not_double():
    model = nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(3)]).eval()
    before = sum(parameter.nbytes for parameter in model.parameters())
    sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.9).apply(model)
    sparta.nn.swap(model)
    sparta.nn.build(model, X)
    with torch.no_grad():
        model(X)
    assert bytes_of(model) <= 1.6 * before


def test_a_weight_that_is_not_zero_where_it_is_pruned_is_masked_all_the_same():
    mask = block_mask((SIZE, SIZE), (4, 1), 0.9, seed=0)
    layer = SparseLinear(nn.Linear(SIZE, SIZE, bias=False), weight_mask=mask)
    before, again = run(layer, "dense", X)
    assert torch.equal(before, again)
    with torch.no_grad():
        layer.weight.masked_fill_(~mask, 7.0)
        assert torch.equal(layer(X), before)
        layer.weight.masked_fill_(~mask, 0.0)
        layer.weight.mul_(2.0)
        torch.testing.assert_close(layer(X), 2 * before)


def test_gradients_after_evaluation_are_those_of_training():
    mask = block_mask((SIZE, SIZE), (4, 1), 0.9, seed=0)
    layer = SparseLinear(nn.Linear(SIZE, SIZE), weight_mask=mask)
    run(layer, "dense", X)
    gradients = []
    for training in (True, False):
        layer.train(training).zero_grad()
        layer(X).square().sum().backward()
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(*gradients)
    assert not bool(gradients[0][~mask].any())
