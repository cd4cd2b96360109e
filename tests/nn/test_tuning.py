"""Tuning a whole model: what it shows, and what an interrupt leaves."""

import sys

import pytest
import torch
from torch import nn

from sparta.nn import SparseLinear, tune
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
    def stop(name, choice):
        raise KeyboardInterrupt

    configs = tune(model, X, max_trials=1, progress=stop)
    assert list(configs) == ["0"]
    assert model[0].ready
    assert not model[1].ready
