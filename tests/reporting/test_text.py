"""What a report says in a terminal."""

from reporting.reports import made


def test_the_headline_has_speed_size_and_agreement():
    first = str(made()).splitlines()[0]
    assert first == "2.6x faster (0.071 -> 0.027 ms), 8.0x smaller, verified to 2.5e-07"


def test_unstable_timing_claims_nothing():
    text = str(made(ratio=None))
    assert text.splitlines()[0].startswith("timing unstable, no speed-up is claimed")
    assert "faster" not in text.splitlines()[0]


def test_a_model_that_gained_nothing_says_so():
    assert str(made(ratio=1.0)).startswith("as fast as before")


def test_at_most_ten_layers_in_eighty_columns_and_all_of_them_in_full():
    report = made(layers=30)
    lines = str(report).splitlines()
    assert sum(line.startswith("encoder.") for line in lines) == 10
    assert all(len(line) <= 80 for line in lines)
    assert "20 of 30 layers run sparse; 20 more in report.full" in lines
    assert sum("encoder." in line and "panel" in line for line in report.full.splitlines()) == 20


def test_long_names_and_reasons_are_shortened_and_the_table_still_fits():
    report = made(layers=1)
    text = str(type(report)(*_renamed(report)))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" in text


def _renamed(report):
    from dataclasses import replace

    [one] = report.plan.layers
    choice = replace(one.first, reason="a reason " * 20)
    plan = replace(report.plan, layers=(replace(one, name="deep." * 20 + "end", choices={128: choice}),))
    return plan, report.totals, report.certificate


def test_notes_are_shown_whole():
    assert "note: 4 BatchNorms were folded" in str(made(notes=("4 BatchNorms were folded",)))


def test_a_report_survives_its_file():
    report = made(layers=3)
    again = type(report).from_dict(report.to_dict())
    assert again == report
    assert str(again) == str(report)
