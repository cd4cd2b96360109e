"""Members by dotted name, and models inside wrappers."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import sparta
from sparta.errors import ValueRangeError
from sparta.modules import member, replace_module, set_member, unwrapped


def test_what_is_put_in_place_is_found_again():
    root = nn.Module()
    weight, buffer, layer = nn.Parameter(torch.ones(2)), torch.zeros(3), nn.ReLU()
    for name, value in (("a.0.weight", weight), ("a.0.seen", buffer), ("a.layer", layer), ("top", buffer)):
        set_member(root, name, value)
        assert member(root, name) is value
    assert dict(root.named_parameters()) == {"a.0.weight": weight}
    assert set(root.state_dict()) == {"a.0.weight", "a.0.seen", "top"}


def test_a_name_that_leads_through_something_else_is_refused():
    with pytest.raises(ValueRangeError, match=r"training\.weight"):
        set_member(nn.Module(), "training.weight", torch.ones(1))


def test_a_replaced_module_is_the_one_that_runs():
    model = nn.Sequential(nn.Sequential(nn.ReLU()), nn.Identity())
    replace_module(model, "0.0", nn.Tanh())
    assert torch.equal(model(torch.tensor([-1.0])), torch.tanh(torch.tensor([-1.0])))


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, AveragedModel, checkpoint_wrapper])
@pytest.mark.parametrize("around", [lambda model: model, nn.DataParallel, AveragedModel])
def test_the_model_is_found_inside_its_wrappers(wrap, around):
    inner = nn.Linear(2, 3)
    found = unwrapped(around(wrap(inner)))
    assert type(found) is nn.Linear
    assert found is inner or AveragedModel in {wrap, around}, "which averages a copy"


def test_a_model_with_a_child_named_module_is_not_a_wrapper():
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert unwrapped(model) is model


def test_a_wrapped_model_is_compiled_as_the_model_inside():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    x = torch.randn(2, 8)
    fast = sparta.compile(AveragedModel(nn.DataParallel(model)).eval(), x, tune="off")
    assert {name.split(".")[0] for name, _ in fast.graph.named_buffers()} == {"0"}
    torch.testing.assert_close(fast(x), model(x))
