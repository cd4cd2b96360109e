"""Hypothesis strategies for search spaces: every type of parameter, nested a few levels deep, sometimes joint."""

from hypothesis import strategies as st

from sparta.common.tuning import TunableItemCfg

names = st.text("ab/~_é ", min_size=1, max_size=3).filter(lambda name: name not in {"_name", "_type", "_value"})
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([0.5, -1.25, 1e9]),
    st.sampled_from(["x", "true", "1"]),
)
values = scalars | st.lists(scalars, max_size=2).map(tuple)


def identity(value):
    """Python's equality, except that True is not 1, also inside tuples."""
    return tuple(map(identity, value)) if isinstance(value, tuple) else (isinstance(value, bool), value)


choices = st.lists(values, min_size=1, max_size=4, unique_by=identity).map(
    lambda listed: TunableItemCfg("choice", _value=listed)
)
integers = st.builds(
    lambda low, count: TunableItemCfg("randint", [low, low + count]), st.integers(-9, 9), st.integers(1, 5)
)
steps = st.builds(
    lambda low, width, q: TunableItemCfg("quniform", [low, low + width, q]),
    st.sampled_from([-1.0, 0.0, 0.3, 7.0]),
    st.sampled_from([0.1, 1.0, 3.0]),
    st.sampled_from([0.5, 1.0, 10.0]),
)
intervals = st.sampled_from([("uniform", [-1.0, 1.0]), ("uniform", [0, 3]), ("loguniform", [1e-3, 10.0])]).map(
    lambda made: TunableItemCfg(*made)
)
finite_leaves = choices | integers | steps


def nested_in(items):
    params = st.dictionaries(names, items, max_size=2)
    options = st.dictionaries(names, params, min_size=1, max_size=3)
    return options.map(lambda value: TunableItemCfg("choice", _is_nested=True, _value=value))


finite_items = st.recursive(finite_leaves, nested_in, max_leaves=5)
items = st.recursive(finite_leaves | intervals, nested_in, max_leaves=5)
finite_spaces = finite_items | st.dictionaries(names, finite_items, max_size=2)
spaces = items | st.dictionaries(names, items, max_size=3)
