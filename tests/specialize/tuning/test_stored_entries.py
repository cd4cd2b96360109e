"""Tuning entries come from files that others may have written: what does not fit is passed over, whatever it says."""

import json
import warnings

import pytest
import torch

from sparta.errors import FileFormatError
from sparta.specialize.implement import implement_named
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning.select import build, choose
from sparta.specialize.tuning.shipped import misfit
from sparta.specialize.tuning.store import Entry, TuningStore, key_of
from sparta.tesa.attribute import TeSA


@pytest.fixture
def spec():
    mask = torch.rand(64, 64, generator=torch.manual_seed(0)) > 0.9
    return linear_spec(TeSA.from_mask(mask, format="fp32"), 16, torch.float32)


@pytest.mark.parametrize(
    ("implement", "params"),
    [
        ("cpu", {}),
        ("cpu", {"tile": "panel", "nothing": 1}),
        ("nonexistent", {}),
        ("", {}),
        ("dense", {"threads": 3}),
        ("../dense", {}),
    ],
)
@pytest.mark.parametrize("imported", [False, True])
def test_an_entry_that_does_not_fit_is_passed_over(spec, tmp_path, implement, params, imported):
    store = TuningStore(tmp_path / "store")
    store.put(spec, Entry(implement, params, 1.0, 3.0))
    if imported:
        store.export(tmp_path / "export.json")
        store = TuningStore(tmp_path / "other")
        assert store.load(tmp_path / "export.json") == 1
    assert misfit(spec, Entry(implement, params, 1.0, 3.0))
    choice = choose(spec, store)
    assert not choice.reason.startswith("stored")
    build(spec, choice.config)


def test_an_entry_that_fits_is_taken(spec, tmp_path):
    implement = implement_named("torch-csr", "linear")
    store = TuningStore(tmp_path)
    store.put(spec, Entry(implement.name, implement.default(spec), 1.0, 3.0))
    assert choose(spec, store).reason == "stored: 3.00x dense"


@pytest.mark.parametrize(
    "entry",
    [
        {"implement": 3, "params": {}, "milliseconds": 1, "dense_milliseconds": 1},
        {"implement": "dense", "params": [], "milliseconds": 1, "dense_milliseconds": 1},
        {"implement": "dense", "params": {}, "milliseconds": 0, "dense_milliseconds": 1},
        {"implement": "dense", "params": {}, "milliseconds": 1, "dense_milliseconds": 1e300},
        {"implement": "dense", "params": {}, "milliseconds": float("nan"), "dense_milliseconds": 1},
        {"implement": "dense", "params": {}, "milliseconds": 10**400, "dense_milliseconds": 1},
        {"implement": "dense", "params": {}, "milliseconds": "1", "dense_milliseconds": 1},
        {"implement": "dense", "params": {}},
        [],
        None,
    ],
)
def test_a_damaged_entry_is_dropped_and_a_damaged_export_is_refused(spec, tmp_path, entry):
    store, record = TuningStore(tmp_path / "store"), {"version": 1, "key": key_of(spec), "entry": entry}
    store.folder.mkdir()
    store._path(spec).write_text(json.dumps(record))
    with pytest.warns(UserWarning, match="damaged and is dropped"):
        assert store.get(spec) is None
    assert len(store) == 0
    (tmp_path / "export.json").write_text(json.dumps({"version": 1, "entries": [record]}))
    with pytest.raises(FileFormatError, match=r"export\.json"):
        store.load(tmp_path / "export.json")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{}", "[]", "3", "", '{"version": 1, "entries": [{"key": 3}]}', "\x00"]
)
def test_what_is_no_entry_and_no_export_is_neither(spec, tmp_path, text):
    store = TuningStore(tmp_path / "store")
    store.folder.mkdir()
    store._path(spec).write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert store.get(spec) is None
    (tmp_path / "export.json").write_text(text)
    with pytest.raises(FileFormatError, match=r"export\.json"):
        store.load(tmp_path / "export.json")
