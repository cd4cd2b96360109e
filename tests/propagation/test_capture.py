"""Capture: the model's own names, tied weights, modes, nested inputs, in-place ops; and what it says when it fails."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparta.errors import SpartaError
from sparta.propagation import CaptureError, capture, propagate


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x, *, extra, scale=2.0):
        with torch.no_grad():
            shift = torch.cos(self.shift)
        y = self.drop(self.a(x)) * scale + shift
        return {"out": self.b(y), "rest": [y, extra["z"] + 1]}


def targets(captured):
    return [str(n.target) for n in captured.graph.nodes if n.op == "call_function"]


def test_names_ties_modes_and_nesting():
    model = Nested().train()
    model.drop.eval()
    inputs = torch.randn(3, 4), {"z": torch.randn(2)}
    captured = capture(model, inputs[0], kwargs={"extra": inputs[1]})
    assert model.training
    assert not model.drop.training
    assert set(captured.nodes()) <= set(captured.tensors)
    assert captured.tied in ({"a.weight": "b.weight"}, {"b.weight": "a.weight"})
    assert not any("wrap" in t for t in targets(captured))
    expected = model.eval()(inputs[0], extra=inputs[1])
    actual = captured.module(inputs[0], extra=inputs[1])
    assert pytree.tree_structure(expected) == pytree.tree_structure(actual)
    for one, two in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
        torch.testing.assert_close(one, two)


def test_keyword_inputs_keep_their_signature_through_compaction():
    model = Nested()
    with torch.no_grad():
        model.a.weight[1] = 0
    given = {"x": torch.randn(3, 4), "extra": {"z": torch.randn(2)}}
    small = propagate(model, given).compact()
    torch.testing.assert_close(small(**given)["out"], model.eval()(**given)["out"])


class InPlace(nn.Module):
    def __init__(self, *, alias):
        super().__init__()
        self.fc, self.alias = nn.Linear(4, 4), alias

    def forward(self, x):
        y = self.fc(x)
        if self.alias:
            y[:, 1].zero_()
            return torch.relu(y)
        y.add_(1).relu_()
        return y * 2


@pytest.mark.parametrize("alias", [False, True])
def test_in_place_ops_become_functional(alias):
    model, x = InPlace(alias=alias), torch.randn(3, 4)
    captured = capture(model, x)
    writes = [n for n in captured.graph.nodes if n.op == "call_function" and n.target._schema.is_mutable]
    assert not writes
    torch.testing.assert_close(captured.module(x), model(x))
    torch.testing.assert_close(propagate(model, x).compact()(x), model(x))


def test_a_buffer_that_the_forward_writes_has_no_fixed_value():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(3))
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            self.calls.add_(1)
            return self.fc(x * self.calls)

    result = propagate(Counter(), torch.randn(2, 3))
    assert result.activations["mul"].count("live") == 6


def test_dynamic_dims():
    dims = ({0: torch.export.Dim.DYNAMIC},)
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten())
    captured = capture(model, torch.randn(3, 4), dims)
    assert captured.module(torch.randn(7, 4)).shape == (7, 4)


class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # the line that breaks
            return x
        return -x


def test_an_untraceable_model_names_the_line_and_the_way_out():
    with pytest.raises(CaptureError, match=r"test_capture.py:\d+ \(`if x.sum\(\) > 0:") as caught:
        capture(Branches(), torch.randn(3))
    assert "torch.where" in str(caught.value)
    assert isinstance(caught.value, SpartaError)


def test_wrong_inputs_are_a_capture_error():
    with pytest.raises(CaptureError, match="Linear"):
        capture(nn.Linear(3, 2), torch.randn(2, 5))
