"""Arguments of ATen calls by name, however the call passes them."""

import pytest
import torch
from torch import fx

from sparta.aten import argument_of, arguments_of, set_argument

CONV = torch.ops.aten.conv2d.default
GIVEN = {"stride": [2, 2], "padding": [1, 1], "groups": 2}


def call(by_position):
    """Return a call with its last arguments by position or by keyword."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("w")
    if by_position:
        return graph.call_function(CONV, (x, weight, None, [2, 2], [1, 1], [1, 1], 2))
    return graph.call_function(CONV, (x, weight), dict(GIVEN))


@pytest.mark.parametrize("by_position", [True, False])
def test_arguments_do_not_depend_on_how_they_are_passed(by_position):
    found = arguments_of(call(by_position))
    assert list(found) == [argument.name for argument in CONV._schema.arguments]
    assert {name: found[name] for name in GIVEN} == GIVEN
    assert found["dilation"] == [1, 1]
    assert found["bias"] is None


@pytest.mark.parametrize("by_position", [True, False])
def test_a_set_argument_is_the_one_that_is_read(by_position):
    node = call(by_position)
    for name, value in (("groups", 1), ("dilation", [3, 3])):
        set_argument(node, name, value)
        assert argument_of(node, name) == value
    assert argument_of(node, "stride") == [2, 2]
