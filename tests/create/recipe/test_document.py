"""YAML in and out: no surprises in scalars, nothing dangerous, nothing lost."""

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.create.recipe.document import Tagged, dump, front_matter, parse_document, parse_scalar
from sparta.errors import FileFormatError

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    st.sampled_from(["2:4", "1e-7", "1e5", "yes", "no", "on", "~", "null", "010", "0x1F", "12:30:45", "2024-01-01"]),
    st.sampled_from(["${num_epochs / 2}", "re:.*\\.weight", "{", "- a", "a: b", "#", ".5", "1.", "+1", "!tag", "*a"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=8), values, max_size=4))
def test_what_is_written_is_read_back(data):
    assert parse_document(dump(data)) == data


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(alphabet="abc", min_size=1, max_size=4), scalars, max_size=4))
def test_a_reader_of_yaml_1_1_sees_the_same(data):
    assert yaml.safe_load(dump(data)) == data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2:4", "2:4"),
        ("1:30", "1:30"),
        ("1e-7", 1e-7),
        ("1.e-7", 1e-7),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-3", -3),
        ("010", 10),
        ("0x1f", 31),
        ("0o17", 15),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("-.inf", -math.inf),
        ("'0.5'", "0.5"),
    ],
)
def test_scalars(text, value):
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)
    assert math.isnan(parse_scalar(".nan"))


def test_anchors_and_merges_are_written_out():
    data = parse_document("a: &a 10\nb: *a\nc: &c {x: 1}\nd: {<<: *c, y: 2}")
    assert data == {"a": 10, "b": 10, "c": {"x": 1}, "d": {"x": 1, "y": 2}}


@pytest.mark.parametrize("fence", ["---", "+++"])
@pytest.mark.parametrize("before", ["", "\n\n", "\ufeff", "<!--\na licence\n---\n-->\n\n"])
def test_the_front_matter_of_markdown_is_the_document(fence, before):
    text = f"{before}{fence}\nnum_epochs: 3\n{fence}\n\n# A title\n\n- not yaml: [\n"
    assert parse_document(text) == {"num_epochs": 3}


def test_a_yaml_document_may_begin_with_three_dashes():
    assert parse_document("---\nnum_epochs: 3\n") == {"num_epochs": 3}
    assert front_matter("num_epochs: 3") == "num_epochs: 3"
    assert parse_document("") is None


def test_front_matter_that_is_never_closed_is_an_error():
    with pytest.raises(FileFormatError, match="never closed"):
        parse_document("+++\nnum_epochs: 3\n")


def test_tags_are_kept_apart():
    assert parse_document("- !A {x: 1}\n- !B") == [Tagged("A", {"x": 1}), Tagged("B", {})]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "not valid YAML"),
        ("a: 1\na: 2", "given twice"),
        ("a: {b: 1, b: 2}", "given twice"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a: !!python/name:os.system", "not valid YAML"),
        ("a: !!binary aGk=", "bytes"),
        ("a: !!set {x}", "set"),
        ("a: !Tag [1]", "not on a mapping"),
        ("a: !Tag text", "not on a mapping"),
        ("true: 1", "text"),
        ("[1, 2]: 1", "YAML|text"),
        ("a: &a [*a]", "refers to itself"),
        ("a: " + "[" * 60 + "]" * 60, "too large|deeply"),
        ("a: " + "[" * 1500 + "]" * 1500, "too large|deeply"),
        (BOMB, "too large"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_bad_documents_are_refused(text, says):
    with pytest.raises(FileFormatError, match=says):
        parse_document(text, source="recipe.yaml")


def test_merge_keys_mean_what_yaml_says():
    text = """
base: &base {a: 1, b: 1}
outer: {inner: &inner {<<: *base, b: 2}}
one: {<<: *inner, c: 3}
two: {<<: [{a: 7}, *base], d: 4}
"""
    found = parse_document(text)
    assert found["outer"] == {"inner": {"a": 1, "b": 2}}
    assert found["one"] == {"a": 1, "b": 2, "c": 3}
    assert found["two"] == {"a": 7, "b": 1, "d": 4}


def test_merged_mappings_do_not_grow_with_the_number_of_times_they_are_merged():
    merge = "a: &a {k: 1}\n"
    for level in range(12):
        wanted = ", ".join([f"*b{level - 1}" if level else "*a"] * 8)
        merge += f"b{level}: &b{level} {{<<: [{wanted}]}}\n"
    assert parse_document(merge)["b11"] == {"k": 1}


def bombs():
    keys = ", ".join(f"k{number}: 1" for number in range(2000))
    yield f"a: &a {{{keys}}}\nb: {{<<: [{', '.join(['*a'] * 2000)}]}}\n"
    yield "a: &a {<<: *a}"
    yield "a: &a [1, *a]"
    yield "a0: &a0 [1]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(20))
    yield "[" * 100_000
    yield "- " * 10_000
    yield "{a: " * 10_000
    yield "? " * 10_000
    yield "a" * 600_000


@pytest.mark.parametrize("text", list(bombs()), ids=range(9))
def test_a_text_that_stands_for_a_huge_document_is_refused(text):
    with pytest.raises(FileFormatError, match=r"too large|too deeply|characters|at most"):
        parse_document(text)


@pytest.mark.parametrize(
    "text",
    [
        *("!!int x", "!!bool zz", "!!float x", "!!timestamp x", "!!null x: 1", "!!int [1]", "!!int ''", "!!float ''"),
        *("!!binary x", "!!omap [1]", "!!pairs 3", "!!set {a}", "!!python/object:os.system x", "? [a]\n: 1"),
        *("0x" + "f" * 5000, "9" * 5000, "{<<: 3}", "{<<: [3]}", "\x00", "\ud800", "%YAML 9.9\n---\n", "*a"),
    ],
)
def test_scalars_under_wrong_tags_are_errors_of_ours(text):
    with pytest.raises(FileFormatError, match="the file"):
        parse_document(text, source="the file")
