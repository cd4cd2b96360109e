"""Search spaces: written in NNI's notation and read back, listed, sampled, and strict about what they take."""

# ruff: noqa: S301, S311 - nothing here is secret, and only our own pickles are read

import copy
import json
import pickle
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.spaces import finite_spaces, items, spaces
from sparta.common.space import coordinates, draw, key_of, mutate, sample_at
from sparta.common.tuning import (
    TunableItemCfg,
    default_of,
    from_json,
    from_nni_search_space,
    includes,
    normalize,
    samples_of,
    size_of,
    to_json,
    to_nni_search_space,
)
from sparta.errors import NameNotFoundError, ShapeError, SpartaError, ValueRangeError


def choice(*values):
    return TunableItemCfg("choice", _value=values)


def nested(**options):
    return TunableItemCfg("choice", _is_nested=True, _value=options)


def few_samples(space, limit=200):
    return min(size_of(space), limit)


# ---------------------------------------------------------------------- the documented sample


def test_the_documented_sample_runs_as_printed():
    a1, a2, a3, a4, a5, a6 = 1, 2, 3, 4, 5, 6
    b1, b2, b3, b4, b5, b6 = "b1", "b2", "b3", (4, 4), (5, 5), (6, 6)
    op_search_space = TunableItemCfg('choice', _is_nested=True, _value={
        'implement-A': {
            'A1': TunableItemCfg('choice', _value=[a1,a2,a3]),
            'A2': TunableItemCfg('choice', _value=[a4,a5,a6]),
        },
        'implement-B': {
            'B1': TunableItemCfg('choice', _value=[b1,b2,b3]),
            'B2': TunableItemCfg('choice', _value=[b4,b5,b6]),
        },
    })  # fmt: skip
    assert op_search_space.size() == 18
    assert op_search_space.default() == {"_name": "implement-A", "A1": a1, "A2": a4}
    assert op_search_space.includes({"_name": "implement-B", "B1": b3, "B2": b6})
    assert not op_search_space.includes({"_name": "implement-B", "A1": a1, "A2": a4})
    assert op_search_space.to_nni_search_space() == {
        "_type": "choice",
        "_value": [
            {
                "_name": "implement-A",
                "A1": {"_type": "choice", "_value": [1, 2, 3]},
                "A2": {"_type": "choice", "_value": [4, 5, 6]},
            },
            {
                "_name": "implement-B",
                "B1": {"_type": "choice", "_value": ["b1", "b2", "b3"]},
                "B2": {"_type": "choice", "_value": [[4, 4], [5, 5], [6, 6]]},
            },
        ],
    }


def test_importing_does_not_import_optuna():
    code = "import sys, sparta.common.tuning; print(sorted({'optuna', 'rich'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[]"


# ---------------------------------------------------------------------- notation


@given(spaces)
def test_what_is_written_is_read_back(space):
    data = to_nni_search_space(space)
    assert from_nni_search_space(json.loads(json.dumps(data))) == space
    assert from_json(to_json(space)) == space


@given(items)
def test_items_are_values(item):
    for twin in (copy.deepcopy(item), pickle.loads(pickle.dumps(item)), TunableItemCfg.from_json(item.to_json())):
        assert twin == item
        assert hash(twin) == hash(item)
    assert item != "something else"


def test_items_differ_when_their_values_do():
    assert choice(1, 2) != choice(2, 1)
    assert choice(0, 1) != choice(False, True)
    assert TunableItemCfg("uniform", [0, 1]) != TunableItemCfg("randint", [0, 1])


def test_items_cannot_be_changed():
    values = [1, 2]
    inner = {"tile": TunableItemCfg("choice", values)}
    item = TunableItemCfg("choice", {"a": inner}, _is_nested=True)
    values.append(3)
    inner["more"] = choice(1)
    assert item.size() == 2
    with pytest.raises(AttributeError):
        item._type = "uniform"
    with pytest.raises(TypeError):
        item.options["b"] = {}
    with pytest.raises(TypeError):
        item.options["a"]["more"] = choice(1)


# ---------------------------------------------------------------------- samples


@given(finite_spaces)
def test_all_samples_are_listed_once_and_lie_inside(space):
    count = few_samples(space)
    listed = [sample for sample, _ in zip(samples_of(space), range(count), strict=False)]
    assert len(listed) == count
    assert all(includes(space, sample) for sample in listed)
    assert len({key_of(coordinates(space, sample)) for sample in listed}) == count
    assert listed == [sample_at(space, index) for index in range(count)]
    if count == size_of(space):
        assert len(list(samples_of(space))) == count


@given(spaces, st.integers(0, 99))
def test_drawn_mutated_and_default_samples_lie_inside(space, seed):
    rng = random.Random(seed)
    drawn = draw(space, rng)
    for sample in (drawn, mutate(space, drawn, rng), default_of(space)):
        assert normalize(space, sample) == sample
        # JSON turns tuples into lists; such a sample is the same sample.
        assert normalize(space, json.loads(json.dumps(sample))) == sample


@given(finite_spaces, st.integers(0, 99))
def test_a_mutation_differs_whenever_something_can(space, seed):
    rng = random.Random(seed)
    sample = draw(space, rng)
    changed = mutate(space, sample, rng)
    fixed = all(isinstance(count, int) and count == 1 for count in counts_along(space, sample))
    assert (key_of(coordinates(space, changed)) == key_of(coordinates(space, sample))) == fixed


def counts_along(space, sample):
    """How many values each pick on the way to a sample could have had."""
    if not isinstance(space, TunableItemCfg):
        for name, item in space.items():
            yield from counts_along(item, sample[name])
        return
    yield space.domain.count
    if space.options is not None:
        yield from counts_along(space.options[sample["_name"]], sample)


@given(finite_spaces)
@settings(max_examples=30)
def test_the_default_of_a_finite_space_is_its_first_sample(space):
    assert default_of(space) == sample_at(space, 0)


def test_small_alternatives_are_drawn_as_often_as_large_ones():
    space = nested(dense={}, block={"x": TunableItemCfg("randint", [0, 1000])})
    rng = random.Random(0)
    dense = sum(draw(space, rng)["_name"] == "dense" for _ in range(1000))
    assert 400 < dense < 600


def test_huge_spaces_cost_nothing():
    space = {f"p{index}": TunableItemCfg("randint", [0, 10**12]) for index in range(5)}
    assert size_of(space) == 10**60
    last = sample_at(space, 10**60 - 1)
    assert set(last.values()) == {10**12 - 1}
    assert next(samples_of(space)) == dict.fromkeys(space, 0)


def test_numeric_types_mean_what_they_mean_in_nni():
    assert list(TunableItemCfg("randint", [2, 5]).samples()) == [2, 3, 4]
    assert list(TunableItemCfg("quniform", [1, 10, 4]).samples()) == [1.0, 4.0, 8.0]
    assert list(TunableItemCfg("quniform", [0, 1, 0.25]).samples()) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert TunableItemCfg("quniform", [0, 1, 0.1]).includes(0.3)
    assert TunableItemCfg("uniform", [0, 4]).default() == 2.0
    assert TunableItemCfg("loguniform", [0.01, 100]).default() == pytest.approx(1.0)
    assert TunableItemCfg("uniform", [0, 4]).size() is None
    assert nested(a={}, b={"x": TunableItemCfg("uniform", [0, 4])}).size() is None


def test_positions_outside_are_refused():
    space = {"a": nested(x={}, y={"k": choice(1, 2)}), "b": choice(1, 2)}
    assert sample_at(space, 5) == {"a": {"_name": "y", "k": 2}, "b": 2}
    for index in (-1, 6):
        with pytest.raises(ValueRangeError, match="0 to 5"):
            sample_at(space, index)


def test_a_space_without_parameters_has_one_point():
    assert list(samples_of({})) == [{}]
    assert includes({}, {})
    assert list(nested(dense={}).samples()) == [{"_name": "dense"}]


# ---------------------------------------------------------------------- what lies outside


@pytest.mark.parametrize(
    ("sample", "error", "text"),
    [
        ({"_name": "block", "tile": 64}, ValueRangeError, "/block/tile is 64; allowed: one of 16, 32"),
        ({"_name": "block"}, ShapeError, "/block has no tile; allowed: all of tile"),
        ({"_name": "block", "tile": 16, "tyle": 1}, NameNotFoundError, "did you mean 'tile'"),
        ({"_name": "blok", "tile": 16}, ValueRangeError, "/_name is 'blok'; allowed: one of 'dense', 'block'"),
        ({"tile": 16}, ShapeError, "/_name is missing"),
        (16, ShapeError, "/_name is missing"),
        ({"_name": "dense", "tile": 16}, NameNotFoundError, "unknown parameter of /dense 'tile'"),
    ],
)
def test_a_sample_outside_is_refused_with_the_reason(sample, error, text):
    space = nested(dense={}, block={"tile": choice(16, 32)})
    assert not space.includes(sample)
    with pytest.raises(error) as caught:
        normalize(space, sample)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("item", "outside"),
    [
        (choice(1, 2), True),
        (choice(1, 2), object()),
        (choice(1, 2), float("nan")),
        (choice(True, False), 1),
        (TunableItemCfg("randint", [0, 4]), 4),
        (TunableItemCfg("randint", [0, 4]), 1.5),
        (TunableItemCfg("randint", [0, 4]), True),
        (TunableItemCfg("randint", [0, 4]), 10**400),
        (TunableItemCfg("quniform", [0, 4, 2]), 1.0),
        (TunableItemCfg("quniform", [0, 4, 2]), 6.0),
        (TunableItemCfg("quniform", [0, 4, 2]), "2"),
        (TunableItemCfg("quniform", [0, 4, 1e-3]), 1e308),
        (TunableItemCfg("uniform", [0, 4]), 4.01),
        (TunableItemCfg("uniform", [0, 4]), float("nan")),
        (TunableItemCfg("loguniform", [1, 4]), 0.5),
    ],
)
def test_values_outside_a_domain_are_not_included(item, outside):
    assert not item.includes(outside)
    assert not includes({"x": item}, {"x": outside})


def test_a_joint_sample_must_be_a_mapping():
    with pytest.raises(ShapeError, match="the sample is 3"):
        normalize({"x": choice(3)}, 3)


# ---------------------------------------------------------------------- bad spaces


@pytest.mark.parametrize(
    ("kind", "value", "error", "text"),
    [
        ("choice", [], ValueRangeError, "a choice without values"),
        ("choice", [1, 2, 1.0], ValueRangeError, "holds 1 twice"),
        ("choice", [float("nan")], ValueRangeError, "finite"),
        ("choice", [object], ValueRangeError, "look the object up"),
        ("choice", "abc", ValueRangeError, "the _value of a choice is 'abc'"),
        ("choice", 3, ValueRangeError, "a list of values"),
        ("choice", {"a": {}}, ValueRangeError, "_is_nested=True"),
        ("chioce", [1], NameNotFoundError, "did you mean 'choice'"),
        (None, [1], NameNotFoundError, "unknown parameter type"),
        ("normal", [0, 1], NameNotFoundError, "known: choice"),
        ("uniform", [0], ValueRangeError, r"\[low, high\]"),
        ("uniform", [0, "1"], ValueRangeError, r"\[low, high\]"),
        ("uniform", [1, 1], ValueRangeError, "lower bound below the upper"),
        ("uniform", [-1e308, 1e308], ValueRangeError, "lower bound below the upper"),
        ("uniform", [0, float("inf")], ValueRangeError, r"\[low, high\]"),
        ("loguniform", [0, 1], ValueRangeError, "above 0"),
        ("quniform", [0, 1], ValueRangeError, r"\[low, high, q\]"),
        ("quniform", [0, 1, 0], ValueRangeError, "q > 0"),
        ("quniform", [0, 1, 1e-300], ValueRangeError, "steps"),
        ("randint", [0, 2.5], ValueRangeError, "integers"),
        ("randint", [0, 2**54], ValueRangeError, "integers"),
    ],
)
def test_bad_items_are_refused_when_made(kind, value, error, text):
    with pytest.raises(error, match=text):
        TunableItemCfg(kind, value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "mapping from alternative"),
        ({}, "a choice without values"),
        ({"": {}}, "an alternative is named ''"),
        ({"a": [1]}, "the alternative 'a' is"),
        ({"a": {"t": [1, 2]}}, r"write TunableItemCfg\('choice'"),
        ({"a": {"_name": choice(1)}}, "is named '_name'"),
        ({"a": {3: choice(1)}}, "is named 3"),
    ],
)
def test_bad_nested_choices_are_refused_when_made(value, text):
    with pytest.raises(SpartaError, match=text):
        TunableItemCfg("choice", _is_nested=True, _value=value)


def test_only_choices_can_be_nested():
    with pytest.raises(ValueRangeError, match="a nested uniform"):
        TunableItemCfg("uniform", {"a": {}}, _is_nested=True)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (3, "a mapping in NNI's notation"),
        ({"_type": "choice"}, "_type and _value"),
        ({"_type": "choice", "_value": [1], "_vlaue": 2}, "_type and _value"),
        ({"_type": "choice", "_value": [{"_name": "a"}, 3]}, "_name"),
        ({"_type": "choice", "_value": [{"_name": "a"}, {"_name": "a"}]}, "of their own"),
        ({"_type": "choice", "_value": [{"a": {}}]}, "_name"),
        ({"_type": "choice", "_value": [{"_name": "a", "t": 3}]}, "NNI's notation"),
        ({"x": {"y": {"_type": "choice", "_value": [1]}}}, "one item with _type and _value"),
    ],
)
def test_bad_notation_is_refused(data, text):
    with pytest.raises(SpartaError, match=text):
        from_nni_search_space(data)


def test_bad_json_is_refused():
    with pytest.raises(ValueRangeError, match="not JSON"):
        from_json("{")
    with pytest.raises(ValueRangeError, match="from_nni_search_space"):
        TunableItemCfg.from_json('{"x": {"_type": "choice", "_value": [1]}}')


def test_continuous_spaces_cannot_be_listed():
    with pytest.raises(ValueRangeError, match="quniform instead"):
        TunableItemCfg("uniform", [0, 1]).samples()
    with pytest.raises(ValueRangeError, match="positions of finite spaces"):
        TunableItemCfg("uniform", [0, 1]).domain.at(0)
    with pytest.raises(ValueRangeError, match="continuous"):
        sample_at(TunableItemCfg("uniform", [0, 1]), 0)
