"""A disk without room: a saved model loads and runs dense, and says why."""

import errno
import os

import pytest
import torch
from torch import nn

import sparta
from compiler import nets
from compiler.conftest import forcing
from sparta.specialize.cpu import library, toolchain


@pytest.fixture
def full_cache(tmp_path, monkeypatch):
    """An empty cache into which nothing can be written, and a package without libraries of its own."""

    def no_room(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill():
        monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "full"))
        monkeypatch.setattr(toolchain, "PREBUILT", tmp_path / "nothing")
        toolchain._checked_once.cache_clear()
        library._loaded.cache_clear()
        for module in ("sparta.specialize.cpu.toolchain", "sparta.specialize.tuning.store"):
            monkeypatch.setattr(f"{module}.write_atomic", no_room)
        monkeypatch.setattr(toolchain, "_compile", lambda *_: b"a library")

    yield fill
    toolchain._checked_once.cache_clear()
    library._loaded.cache_clear()


def test_a_model_loads_from_a_full_cache_and_runs_dense(full_cache, tmp_path):
    model, x = nets.pruned(nn.Sequential(nn.Linear(24, 24), nn.ReLU()), sparsity=0.5), torch.randn(4, 24)
    with forcing("cpu"):
        sparta.compile(model, x, tune="off").save(tmp_path / "model.sparta")
    full_cache()
    with pytest.warns(UserWarning, match=r"cpu does not run here.*No space left"):
        loaded = sparta.load(tmp_path / "model.sparta")
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))
