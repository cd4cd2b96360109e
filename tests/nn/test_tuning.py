"""Tuning a whole model: what it shows, and what an interrupt leaves."""

import copy
import sys

import pytest
import torch
from torch import nn

from sparta.errors import CheckError, FileFormatError, ValueRangeError
from sparta.nn import SparseLinear, build, tune
from sparta.specialize.tuning.select import Choice
from sparta.specialize.tuning.select import build as build_kernel
from sparta.specialize.tuning.store import Entry, TuningStore
from sparta.testing import block_mask

X = torch.randn(6, 24)


@pytest.fixture
def model():
    masks = [block_mask((24, 24), (4, 1), 0.8, seed=seed) for seed in range(2)]
    return nn.Sequential(*(SparseLinear(nn.Linear(24, 24), weight_mask=mask) for mask in masks))


def test_true_shows_a_plain_line_for_each_module_on_a_pipe(model, capsys):
    tune(model, X, max_trials=1, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["1/2 0", "2/2 1"]
    assert "dense" in lines[0]


@pytest.mark.parametrize("progress", [None, False])
def test_nothing_is_shown_on_a_pipe_unless_asked(model, capsys, progress):
    tune(model, X, max_trials=1, progress=progress)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("progress", [None, True])
def test_a_terminal_shows_modules_and_trials_live(model, capsys, monkeypatch, progress):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    tune(model, X, max_trials=2, progress=progress)
    text = capsys.readouterr().err
    assert "2/2" in text
    assert "0: " in text
    assert "dense" in text


def test_false_shows_nothing_even_in_a_terminal(model, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    tune(model, X, max_trials=1, progress=False)
    assert capsys.readouterr().err == ""


def test_an_interrupt_between_modules_keeps_what_was_tuned(model):
    def stop(step):
        raise KeyboardInterrupt

    configs = tune(model, X, max_trials=1, progress=stop)
    assert list(configs) == ["0"]
    assert model[0].ready
    assert not model[1].ready


# ---------------------------------------------------------------------- what was tuned is found again


@pytest.fixture
def winner(monkeypatch):
    """A tuner in which one implement always wins, and which counts what it is asked."""
    asked = []

    def always(problem, *, store, **options):
        asked.append(problem.spec)
        entry = Entry("torch-csr", {}, 1.0, 2.0)
        if store is not None:
            store.put(problem.spec, entry)
        return Choice(entry.implement, entry.params, "2.00x dense", entry)

    monkeypatch.setattr("sparta.nn.operator.tune_kernel", always)
    return asked


def runs(model):
    return [layer.choice.implement for layer in model]


def test_build_takes_what_tune_found_in_this_model_and_in_another(model, winner):
    other = copy.deepcopy(model)
    tune(model, X)
    assert runs(model) == ["torch-csr"] * 2
    build(model, X)
    assert runs(model) == ["torch-csr"] * 2
    build(other, X)
    assert runs(other) == ["torch-csr"] * 2
    assert "stored: 2.00x dense" in other[0].choice.reason


def test_nothing_is_kept_where_that_is_asked(model, winner, own_store):
    other = copy.deepcopy(model)
    tune(model, X, store=False)
    assert list(own_store.iterdir()) == []
    build(other, X)
    assert "torch-csr" not in runs(other)
    build(model, X)  # what this model was tuned to stays, kept or not
    assert runs(model) == ["torch-csr"] * 2


def test_an_empty_store_of_ones_own_is_used(model, winner, own_store, tmp_path):
    store = TuningStore(tmp_path / "mine")
    tune(model, X, store=store)
    assert len(store) == 1
    assert list(own_store.iterdir()) == []


def test_a_store_that_cannot_be_used_ends_nothing(model, winner, monkeypatch):
    def refused(name):
        raise FileFormatError("the folder belongs to another user")

    monkeypatch.setattr("sparta.specialize.tuning.store.private_folder", refused)
    tune(model, X)
    build(model, X)
    assert runs(model) == ["torch-csr"] * 2


@pytest.mark.parametrize("store", [True, "folder", 0])
def test_odd_stores_are_named(model, store):
    with pytest.raises(ValueRangeError, match="store of type"):
        tune(model, X, store=store)


@pytest.mark.parametrize("store", [None, False])
def test_equal_layers_are_tuned_once(winner, store):
    shapes = [(24, 24), (24, 16), (16, 24)] * 10
    masks = [block_mask((outputs, inputs), (4, 1), 0.75, seed=0) for inputs, outputs in shapes]
    layers = [
        SparseLinear(nn.Linear(inputs, outputs), weight_mask=mask)
        for (inputs, outputs), mask in zip(shapes, masks, strict=True)
    ]
    model = nn.Sequential(*layers)
    configs = tune(model, X, store=store)
    assert len(winner) == 3
    assert len(configs) == 30
    assert runs(model) == ["torch-csr"] * 30
    assert "equal layer" in model[5].choice.reason
    tune(model, X, store=store, backward=True)
    assert len(winner) == 9  # forward again, and the three gradients


def test_a_choice_that_is_wrong_for_an_equal_layer_is_replaced(model, monkeypatch):
    wrong = Choice("torch-csr", {}, "2.00x dense")
    monkeypatch.setattr("sparta.nn.operator.tune_kernel", lambda problem, **options: wrong)
    kernel = type(build_kernel(model[0]._spec(X), {"_name": "torch-csr"}))
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda self, packed, *inputs: run(self, packed, *inputs) + 1.0)
    tune(model, X)
    assert runs(model) == ["torch-csr", "dense"]
    assert "torch-csr is wrong here, dense runs instead" in model[1].choice.reason


def test_what_is_built_wrong_is_replaced_with_a_warning(model, monkeypatch):
    kernel = type(build_kernel(model[0]._spec(X), {"_name": "dense"}))
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda self, packed, *inputs: run(self, packed, *inputs) + 1.0)
    with pytest.warns(UserWarning, match="dense is wrong here"):
        model[0].build(X, {"_name": "dense"})
    assert model[0].choice.implement != "dense"
    expected = nn.functional.linear(X, model[0].weight, model[0].bias)
    torch.testing.assert_close(model[0](X), expected)


def test_build_finds_the_kernel_for_gradients_too(model, winner):
    tune(model, X, backward=True)
    other = copy.deepcopy(model)
    build(other, X)
    for layer in (*model, *other):
        assert layer._state.backward is not None


@pytest.mark.parametrize("row", [0, 511, 999])
def test_large_samples_are_checked_at_both_ends_and_between(row, monkeypatch):
    layer, x = SparseLinear(nn.Linear(24, 8), weight_mask=torch.ones(8, 24, dtype=torch.bool)), torch.randn(1000, 24)
    problem = layer._problem(x, backward=False)
    assert len(problem.expected) == len(problem.checked) < 1000
    y = nn.functional.linear(x, layer.weight, layer.bias).detach()
    problem.check(y, "dense")
    y[row : row + 5] += 1.0
    with pytest.raises(CheckError):
        problem.check(y, "dense")
