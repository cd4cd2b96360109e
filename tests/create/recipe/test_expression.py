"""Expressions: they mean what Python's own arithmetic means, print as they parse, and can run nothing."""

import ast
import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.create.recipe.expression import FUNCTIONS, parse
from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError

VARIABLES = {"num_epochs": 20, "sparsity": 0.8, "_x1": 3}

numbers = st.one_of(
    st.integers(0, 50), st.floats(0, 100, allow_nan=False, allow_subnormal=False).map(lambda x: round(x, 3))
).map(repr)
leaves = numbers | st.sampled_from(sorted(VARIABLES))


def grown(inner):
    spaces = st.sampled_from(["", " "])
    calls = st.one_of(
        st.tuples(st.sampled_from(["abs", "int", "float", "ceil", "floor", "round"]), st.tuples(inner)),
        st.tuples(st.sampled_from(["min", "max"]), st.lists(inner, min_size=2, max_size=3)),
    ).map(lambda call: f"{call[0]}({', '.join(call[1])})")
    marks = st.sampled_from(["+", "-", "*", "/", "//", "%"])
    binary = st.tuples(inner, spaces, marks, spaces, inner).map("".join)
    power = st.tuples(inner.map("({})".format), st.integers(0, 3)).map(lambda parts: f"{parts[0]} ** {parts[1]}")
    signed = st.tuples(st.sampled_from(["-", "+"]), inner).map("".join)
    return st.one_of(signed, binary, power, calls, inner.map("({})".format))


texts = st.recursive(leaves, grown, max_leaves=8)


@settings(max_examples=150, deadline=None)
@given(texts)
def test_what_is_printed_parses_to_the_same_expression(text):
    expression = parse(text)
    assert parse(str(expression)) == expression
    assert ast.dump(ast.parse(str(expression))) == ast.dump(ast.parse(text))


@settings(max_examples=150, deadline=None)
@given(texts)
def test_the_value_is_the_one_python_gives(text):
    names = {name: function for name, (function, _, _) in FUNCTIONS.items()}
    try:
        expected = eval(text, {"__builtins__": {}}, {**names, **VARIABLES})  # noqa: S307 - the oracle
    except ArithmeticError:
        with pytest.raises(ValueRangeError):
            parse(text).evaluate(VARIABLES)
        return
    found = parse(text).evaluate(VARIABLES)
    assert type(found) is type(expected)
    assert math.isclose(found, expected, rel_tol=1e-12, abs_tol=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789.eE+-*/%(), abcmin_x\t\"'[]{}:=", max_size=40))
def test_any_text_is_an_expression_or_an_error_of_ours(text):
    with contextlib.suppress(SpartaError):
        assert math.isfinite(parse(text).evaluate(VARIABLES))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-x", -3),
        ("--x", 3),
        ("2 ** 3 ** 2", 512),
        ("-2 ** 2", -4),
        ("2 ** -1", 0.5),
        ("(num_epochs - 5) / 2", 7.5),
        ("7 // 2 + 7 % 4", 6),
        ("min(1, num_epochs // 15)", 1),
        ("round(2.345, 2)", 2.35),
        ("1e-7", 1e-7),
        (".5 + 5.", 5.5),
    ],
)
def test_values(text, value):
    assert parse(text).evaluate({"x": 3, "num_epochs": 20}) == pytest.approx(value, abs=1e-15)


def test_whole_numbers_stay_whole():
    assert type(parse("2 * 3 + 4 // 2").evaluate({})) is int
    assert type(parse("2 ** 10").evaluate({})) is int


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "x.real",
        "x[0]",
        "lambda: 1",
        "'text'",
        "1 if x else 2",
        "x == 1",
        "x and x",
        "(1",
        "1)",
        "1 +",
        "",
        "* 2",
        "1 2",
        "min(1,,2)",
        "min(1",
        "x = 1",
        "0x10",
        "1j",
        "1_000",
        "f(x)(x)",
        "*x",
        "min(*x, 1)",
        "min(1, **x)",
        "1,",
        "()",
        "not x",
        "x if x else x",
        "x\n1",
    ],
)
def test_what_is_no_arithmetic_is_refused(text):
    with pytest.raises(ValueRangeError, match="allowed"):
        parse(text)


def test_unknown_functions_and_variables_are_named_with_the_nearest():
    with pytest.raises(NameNotFoundError, match="did you mean 'floor'"):
        parse("flor(2.5)")
    with pytest.raises(NameNotFoundError, match="did you mean 'num_epochs'"):
        parse("num_epoch / 2").evaluate(VARIABLES)
    with pytest.raises(NameNotFoundError, match="unknown function"):
        parse("eval(1)")


@pytest.mark.parametrize("text", ["abs()", "abs(1, 2)", "min()", "max(1)", "round(1, 2, 3)", "floor()"])
def test_the_number_of_arguments_is_checked(text):
    with pytest.raises(ValueRangeError, match="arguments"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 / (x - 3)", "divides by zero"),
        ("5 // 0", "divides by zero"),
        ("5 % 0", "divides by zero"),
        ("0 ** -1", "no finite real"),
        ("(0 - 8) ** 0.5", "no finite real"),
        ("9 ** 9 ** 9", "no finite real"),
        ("1e300 * 1e300", "too large"),
        ("9 ** 300 * 9 ** 300", "too large"),
        ("round(1.7e308, -308)", "has no value"),
        ("1e999", "too large"),
        ("9" * 390, "too large"),
    ],
)
def test_what_has_no_finite_value_is_an_error(text, says):
    with pytest.raises(ValueRangeError, match=says):
        parse(text).evaluate({"x": 3})


def test_variables_in_sums_are_numbers():
    for value in ("text", None, True, [1]):
        with pytest.raises(ValueRangeError, match="a number"):
            parse("x + 1").evaluate({"x": value})


@pytest.mark.parametrize("name", ["lambda", "if", "None", "True", "from", "__debug__", "_", "größe"])
def test_words_of_python_are_names_like_any_other(name):
    expression = parse(f"2*{name}")
    assert (str(expression), expression.names()) == (f"2 * {name}", {name})
    assert expression.evaluate({name: 4}) == 8


@pytest.mark.parametrize(
    ("text", "value"),
    [("round(15, -99999999)", 0), ("round(2.5, 99999999)", 2.5), ("round(15, 1e300)", 15), ("007", 7)],
)
def test_digits_of_any_number_cost_nothing(text, value):
    assert parse(text).evaluate({}) == value


def test_equal_expressions_are_equal():
    assert parse("(a+b)*2") == parse("(a + b) * 2") != parse("a + b * 2")
    assert len({parse("a+b"), parse("a + b")}) == 1


def test_long_and_deep_expressions_are_refused_before_they_hurt():
    with pytest.raises(ValueRangeError, match="400 at most"):
        parse("1 + " * 200 + "1")
    with pytest.raises(ValueRangeError, match="brackets"):
        parse("(" * 100 + "1" + ")" * 100)
    with pytest.raises(ValueRangeError, match="signs"):
        parse("-" * 100 + "1")
    assert parse("+".join("1" * 200)).evaluate({}) == 200
    assert parse("1" + "**1" * 130).evaluate({}) == 1
