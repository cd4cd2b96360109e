"""Joint spaces: what kernels share is decided once, and each kernel gets a sample of its own space."""

# ruff: noqa: S311 - nothing here is secret

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparta.common.space import draw
from sparta.common.tuning import TunableItemCfg, includes, search, share, size_of
from sparta.errors import NameNotFoundError, ShapeError, SpartaError, ValueRangeError


def choice(*values):
    return TunableItemCfg("choice", _value=values)


def kernels():
    return {
        "qk": TunableItemCfg(
            "choice",
            _is_nested=True,
            _value={"sparta": {"BM": choice(16, 32, 64), "BN": choice(32, 64)}, "openai": {}},
        ),
        "softmax": {"BH": choice(32, 64, 128), "rows": choice(1, 2)},
        "pv": {"BM": choice(64, 32)},
        "scale": choice(0.5, 1.0),
    }


@given(st.integers(0, 1000))
def test_shared_parameters_agree_and_every_kernel_gets_its_own(seed):
    spaces = kernels()
    joint = share(spaces, {"block": ["qk/BM", "softmax/BH", "pv/BM"]})
    sample = draw(joint.space, random.Random(seed))
    parts = joint.split(sample)
    assert set(parts) == set(spaces)
    assert all(includes(spaces[kernel], part) for kernel, part in parts.items())
    shared = {parts["softmax"]["BH"], parts["pv"]["BM"], parts["qk"].get("BM", sample["block"])}
    assert shared == {sample["block"]}
    assert parts["softmax"]["rows"] == sample["softmax/rows"]


def test_the_joint_space_has_each_shared_parameter_once():
    joint = share(kernels(), {"block": ["qk/BM", "softmax/BH", "pv/BM"]})
    assert set(joint.space) == {"block", "qk", "softmax/rows", "scale"}
    assert joint.space["block"] == choice(32, 64)
    assert size_of(joint.space) == 2 * 3 * 2 * 2


def test_sharing_nothing_is_the_product():
    spaces = kernels()
    joint = share(spaces, {})
    assert size_of(joint.space) == 7 * 6 * 2 * 2
    assert joint.split(draw(joint.space, random.Random(0))).keys() == spaces.keys()


def test_connected_kernels_are_tuned_together():
    joint = share(
        {"forward": {"BK": choice(16, 32, 64)}, "backward": {"BK": choice(16, 32, 64)}},
        {"BK": ["forward/BK", "backward/BK"]},
    )

    def cost(sample):
        parts = joint.split(sample)
        return abs(parts["forward"]["BK"] - 16) + 3 * abs(parts["backward"]["BK"] - 64)

    result = search(joint.space, cost, algo="grid")
    assert joint.split(result.best) == {"forward": {"BK": 64}, "backward": {"BK": 64}}
    assert len(result.trials) == 3


def test_names_with_slashes_are_understood():
    joint = share({"root/qk": {"a/b": choice(1, 2)}, "root": {"x": choice(1, 2)}}, {"s": ["root/qk/a/b", "root/x"]})
    assert joint.split({"s": 2}) == {"root/qk": {"a/b": 2}, "root": {"x": 2}}


def test_equal_ranges_can_be_shared():
    rate = TunableItemCfg("uniform", [0, 1])
    joint = share({"a": {"x": rate}, "b": {"y": rate}}, {"rate": ["a/x", "b/y"]})
    assert joint.split({"rate": 0.5}) == {"a": {"x": 0.5}, "b": {"y": 0.5}}


@pytest.mark.parametrize(
    ("spaces", "shared", "error", "text"),
    [
        ({"a": {"x": choice(1)}, "b": {"x": choice(2)}}, {"s": ["a/x", "b/x"]}, ValueRangeError, "no value in common"),
        ({"a": {"tile": choice(1)}}, {"s": ["a/tyle"]}, NameNotFoundError, "did you mean 'tile'"),
        ({"forward": {"x": choice(1)}}, {"s": ["foward/x"]}, NameNotFoundError, "did you mean 'forward'"),
        ({"a": {"x": choice(1)}}, {"s": ["ax"]}, NameNotFoundError, "unknown kernel 'ax'"),
        ({"a": choice(1)}, {"s": ["a/x"]}, ShapeError, "one plain parameter"),
        ({"a": {"x": choice(1)}}, {"s": []}, ValueRangeError, "stands for no parameter"),
        ({"a": {"x": choice(1)}}, {"s": ["a/x"], "t": ["a/x"]}, ValueRangeError, "one shared name"),
        ({"a": {"x": choice(1)}, "s": choice(2)}, {"s": ["a/x"]}, ValueRangeError, "two parameters"),
        ({"a": {"x": choice(1)}}, {"_name": ["a/x"]}, ValueRangeError, "is named '_name'"),
        ({"a": {"x": [1]}}, {}, ShapeError, "TunableItemCfg"),
        (
            {"a": {"x": choice(1)}, "b": {"x": TunableItemCfg("randint", [0, 2])}},
            {"s": ["a/x", "b/x"]},
            ValueRangeError,
            "differ",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(spaces, shared, error, text):
    with pytest.raises(error, match=text):
        share(spaces, shared)


def test_a_sample_of_another_space_is_refused():
    joint = share({"a": {"x": choice(1)}}, {"s": ["a/x"]})
    with pytest.raises(SpartaError, match="s is 2"):
        joint.split({"s": 2})
