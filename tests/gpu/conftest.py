"""What tests on CUDA share: warnings that are PyTorch's own, and global state that is as before after every test."""

import os
from pathlib import Path

import pytest

from gpu.state import state_as_before

# Workers of pytest-xdist share the cores; each of Inductor's own would start one compiler per core.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")

_HERE = Path(__file__).parent
# Warnings are errors here as everywhere, but for these, which PyTorch gives of its own accord.
_OF_PYTORCH = (
    # Its compiler uses TorchScript, which it deprecates.
    r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning",
    r"ignore:`torch\.jit\.\w+` is not supported in Python 3\.14:DeprecationWarning",
    # Its compiler would rather round float32 to TF32.
    r"ignore:TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled:UserWarning",
    # Its own functions ask for the precision of float32 in the way that it deprecates.
    r"ignore:Please use the new API settings to control TF32 behavior:UserWarning",
    # Its reduce-overhead mode records a graph of nothing to find its memory pool.
    r"ignore:The CUDA Graph is empty:UserWarning",
    # A backward pass that is recorded on a stream of its own, as the manual says.
    r"ignore:The AccumulateGrad node's stream does not match:UserWarning",
    # Said by the mode in which a test finds out whether a call waits for the device.
    r"ignore:Synchronization debug mode is a prototype feature:UserWarning",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(_HERE):
            for each in _OF_PYTORCH:
                item.add_marker(pytest.mark.filterwarnings(each))


@pytest.fixture(autouse=True)
def _state_as_before():
    with state_as_before():
        yield
