"""How tests choose kernels without timing anything."""

from contextlib import contextmanager

import pytest

from sparta.specialize.conv.cpu_grid import GRID
from sparta.specialize.implement import implement_named
from sparta.specialize.tuning.select import Choice
from sparta.specialize.tuning.store import Entry


def chosen(spec, name="cpu"):
    """Return the choice of an implement with its default parameters, or dense where it cannot."""
    implement = implement_named(name, spec.op)
    if not implement.supports(spec):
        return Choice("dense", {}, "dense: forced", None)
    params = implement.default(spec)
    return Choice(name, params, f"{name}: forced", Entry(name, params, 1.0, 2.0))


def choosing(patch, choice):
    """Let layers run what a function of their kernel specs returns, as if that had been stored, and still held."""
    patch.setattr("sparta.compiler.choose.layers.choose", lambda spec, _store=None: choice(spec))
    patch.setattr("sparta.compiler.choose.layers.tune_kernel", lambda problem, **_options: choice(problem.spec))


@contextmanager
def forcing(name="cpu"):
    """Let every layer that has zeros run one implement, as if it had been tuned."""
    with pytest.MonkeyPatch.context() as patch:
        choosing(patch, lambda spec: chosen(spec, name))
        yield


@pytest.fixture
def grids(monkeypatch):
    """Let the C++ kernels of convolutions read every image as a grid of regions."""
    monkeypatch.setattr("sparta.specialize.conv.cpu.conv_layouts", lambda _spec: (GRID,))


@pytest.fixture
def forced():
    """Let every layer that has zeros run the C++ kernels."""
    with forcing():
        yield


@pytest.fixture
def own_stores(tmp_path, monkeypatch):
    """Give a test empty stores of its own; compiled kernels stay where they are."""
    folders = []
    for module in ("sparta.compiler.choose.decisions", "sparta.specialize.tuning.store"):
        folder = tmp_path / module
        folder.mkdir()
        folders.append(folder)
        monkeypatch.setattr(f"{module}.private_folder", lambda _name, folder=folder: folder)
    return folders
