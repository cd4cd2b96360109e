"""The shipped table: a guess for untuned use that never outranks what was measured here and never breaks anything."""

import json

import pytest
import torch
from torch import nn

from sparta.nn import SparseLinear, build
from sparta.specialize.implement import implement_named
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning import shipped as module
from sparta.specialize.tuning.select import Problem, choose, tune_kernel
from sparta.specialize.tuning.shipped import (
    CLEAR_WIN,
    ShippedEntry,
    device_kind,
    shipped,
    table_key,
    table_path,
    write_table,
)
from sparta.specialize.tuning.store import Entry, TuningStore
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, linear_reference

MASK = block_mask((64, 96), (1, 1), 0.8, seed=0)
CONFIG = {"_name": "torch-csr"}


def spec_of(mask=MASK, rows=32):
    return linear_spec(TeSA.from_mask(mask), rows, torch.float32)


def entry(speedup=2.0, implement="torch-csr", version=None, params=None, key=None):
    version = implement_named(implement, "linear").version if version is None else version
    return ShippedEntry(key or table_key(spec_of()), implement, version, params or {}, speedup)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Put the tables elsewhere; returns what writes the one of this machine's kind."""
    monkeypatch.setattr(module, "TABLES", tmp_path)
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "cache"))
    module._table.cache_clear()
    yield lambda *entries: write_table(table_path(device_kind("cpu")), device_kind("cpu"), {}, entries)
    module._table.cache_clear()


def test_untuned_use_takes_what_the_table_has(table):
    assert choose(spec_of()).implement == "dense"
    table(entry())
    choice = choose(spec_of(), TuningStore())
    assert choice.config == CONFIG
    assert "shipped" in choice.reason
    assert choice.entry is None  # nothing was measured here


def test_neighbouring_sizes_and_densities_share_an_entry(table):
    table(entry())
    near = block_mask((60, 100), (1, 1), 0.81, seed=3)
    assert choose(spec_of(near, rows=20)).config == CONFIG
    for other in (
        spec_of(rows=64),
        spec_of(block_mask((64, 96), (4, 1), 0.8)),
        spec_of(block_mask((64, 96), sparsity=0.4)),
    ):
        assert shipped(other) is None


def test_what_was_measured_here_comes_first(table):
    table(entry())
    store = TuningStore()
    store.put(spec_of(), Entry("dense", {}, 1.0, 1.0))
    assert choose(spec_of(), store).implement == "dense"


def test_tuning_measures_and_tries_the_shipped_guess_first(table):
    table(entry())
    weight, x = torch.randn(64, 96) * MASK, torch.randn(32, 96)
    problem = Problem(spec_of(), weight, (x, None, None), linear_reference(x, weight, weight_mask=MASK), 96)
    result = tune_kernel(problem, max_trials=2).result
    assert dict(result.trials[0].params) == CONFIG


def test_a_bucket_in_which_dense_won_once_is_left_to_dense(table):
    assert table(entry(3.0), entry(CLEAR_WIN / 1.01)) == 0
    assert shipped(spec_of()) is None


def test_the_slowest_win_stands_for_its_bucket(table):
    assert table(entry(3.0), entry(2.0), entry(4.0)) == 1
    assert shipped(spec_of()).speedup == 2.0


@pytest.mark.parametrize(
    "stale",
    [
        entry(version=99),
        entry(params={"tile": "gone"}),
        ShippedEntry(table_key(spec_of()), "of-another-release", 1, {}, 2.0),
        ShippedEntry(table_key(spec_of()), "cuda-24", 1, {"tile": "x"}, 2.0),
    ],
    ids=["version", "params", "unknown", "unsupported"],
)
def test_an_entry_that_no_longer_fits_is_passed_over(table, stale):
    table(stale)
    assert shipped(spec_of()) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"version": 9, "entries": []}',
        b'{"version": 1, "entries": [{"key": "k"}]}',
        json.dumps({"version": 1, "entries": [vars(entry(1.0))]}).encode(),
    ],
)
def test_a_damaged_table_is_ignored_with_a_warning(table, content):
    table_path(device_kind("cpu")).write_bytes(content)
    with pytest.warns(UserWarning, match="damaged and is ignored"):
        assert choose(spec_of()).implement == "dense"
    assert choose(spec_of()).implement == "dense"  # and said once


def test_modules_are_built_from_it_without_measuring(table):
    table(entry())
    model = nn.Sequential(SparseLinear(nn.Linear(96, 64), weight_mask=MASK))
    x = torch.randn(32, 96)
    build(model, x)
    assert model[0].choice.config == CONFIG
    check(model(x), linear_reference(x, model[0].weight, model[0].bias, weight_mask=MASK), reduction=96)


def test_the_tables_that_come_with_the_package_are_whole():
    files = sorted(module.TABLES.glob("*.json"))
    assert files
    for file in files:
        record = json.loads(file.read_text(encoding="utf-8"))
        assert table_path(record["kind"]) == file
        rows = module._table(file)
        assert len(rows) == len(record["entries"]) > 0


def test_the_table_of_the_package_answers_for_a_common_layer(monkeypatch):
    if not (module.TABLES / "cpu-avx512.json").is_file() or device_kind("cpu") != "cpu avx512":
        pytest.skip("the table is for another kind of CPU")
    common = linear_spec(TeSA.from_mask(block_mask((768, 768), (4, 1), 0.9)), 128, torch.float32)
    if not implement_named("cpu", "linear").supports(common):
        pytest.skip("no compiler")
    assert choose(common).implement == "cpu"
