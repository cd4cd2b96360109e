"""What everything counts on is looked for before long work begins."""

import importlib.machinery

import pytest
import torch
from torch import nn

import sparta
from sparta import packages
from sparta.errors import MissingPackageError


@pytest.fixture
def without(monkeypatch):
    """Return a function that makes packages look as if they were not installed."""

    def hide(*names):
        found = packages.find_spec
        monkeypatch.setattr(packages, "find_spec", lambda name: None if name in names else found(name))
        packages._missing.cache_clear()

    yield hide
    monkeypatch.undo()
    packages._missing.cache_clear()


def test_all_that_is_needed_is_a_dependency_and_is_found():
    assert packages._missing() == ()
    assert all(isinstance(packages.find_spec(name), importlib.machinery.ModuleSpec) for name in packages._NEEDED)


def test_compiling_names_what_is_missing_and_how_to_get_it(without):
    without("platformdirs", "optuna")
    ran = []
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda *_: ran.append(True))
    with pytest.raises(MissingPackageError, match=r"optuna, platformdirs.*pip install optuna platformdirs"):
        sparta.compile(model, torch.randn(2, 4))
    assert not ran
