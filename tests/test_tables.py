"""Tables: aligned plain text."""

import pytest

from sparta.errors import ShapeError
from sparta.tables import table


def test_numbers_go_right_and_words_go_left():
    text = table(["name", "count", "note"], [["a", 5, "x"], ["long name", 1234, "yy"]])
    assert text.splitlines() == [
        "name       count  note",
        "---------  -----  ----",
        "a              5  x",
        "long name   1234  yy",
    ]


def test_numbers_with_units_are_numbers_and_mixed_columns_are_words():
    lines = table(["speedup", "version"], [["1.25x", "1.2.3"], ["10.00x", "none"]]).splitlines()
    assert lines[2] == "  1.25x  1.2.3"
    assert lines[3] == " 10.00x  none"


def test_cells_stay_on_one_line_and_none_is_empty():
    text = table(["a", "b"], [["two\nlines", None], [0.123456, True]], title="title")
    assert text.splitlines()[0] == "title"
    assert "two lines" in text
    assert "0.1235" in text
    assert "None" not in text


def test_a_table_without_rows_is_its_headings():
    assert table(["a", "bb"], []).splitlines() == ["a  bb", "-  --"]


def test_a_row_of_another_length_is_an_error():
    with pytest.raises(ShapeError, match="a row of 1 cells under 2 columns"):
        table(["a", "b"], [["only one"]])


def test_a_table_needs_columns():
    with pytest.raises(ShapeError, match="without columns"):
        table([], [])
