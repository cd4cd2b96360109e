"""Tiers of tests: `tests/gpu` needs CUDA and is skipped with a reason without it; all else runs on the CPU."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Triton reads this when it is imported: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("sparta", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("sparta")

_TESTS = Path(__file__).parent / "tests"
_GPU_TESTS = _TESTS / "gpu"
_TRAINING = ("create", "scheduler", "sparsify")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(_GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread(request):
    """Train with one thread: these networks are so small that a second one only waits for the first."""
    if not request.path.is_relative_to(_TESTS) or request.path.relative_to(_TESTS).parts[0] not in _TRAINING:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def hurried(monkeypatch):
    """Let the compiler try few candidates: for tests of what is shown, which any choice serves."""
    from sparta.compiler.session import EFFORT

    monkeypatch.setitem(EFFORT, "quick", (2, 0.2))


@pytest.fixture(scope="session", autouse=True)
def _one_cache_for_the_run(tmp_path_factory):
    """Keep compiled kernels and tuning results of a run in one folder of its own, and compile each library once."""
    base = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist have folders of their own side by side; the cache goes next to them.
    shared = base.parent if base.name.startswith("popen-") else base
    with pytest.MonkeyPatch.context() as patch:
        # Whoever runs the tests may have compiled the kernels already, in a folder for them alone.
        patch.setenv("SPARTA_CACHE", os.environ.get("SPARTA_TEST_CACHE", str(shared / "sparta-cache")))
        yield
