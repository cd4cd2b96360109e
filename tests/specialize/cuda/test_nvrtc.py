"""Loading a kernel: also in a thread that has not used the GPU before."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sparta.specialize.cuda import nvrtc


class Driver:
    """A driver that loads nothing unless a context is current."""

    def __init__(self, current):
        self.current = current

    def cuCtxGetCurrent(self, to):  # noqa: N802 - the driver's name
        to._obj.value = self.current
        return 0

    def cuDevicePrimaryCtxRetain(self, to, index):  # noqa: N802
        to._obj.value = 100 + index
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.current = context.value
        return 0

    def cuModuleLoadData(self, *_):  # noqa: N802
        return 0 if self.current else nvrtc.NO_CONTEXT

    def cuModuleGetFunction(self, *_):  # noqa: N802
        return 0

    def cuFuncSetAttribute(self, *_):  # noqa: N802
        return 0


@pytest.mark.parametrize(("current", "used"), [(None, 103), (7, 7)])
def test_a_kernel_is_loaded_in_any_thread(monkeypatch, current, used):
    driver = Driver(current)
    monkeypatch.setattr(nvrtc, "cuda_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    function = nvrtc.load_function(b"code", "kernel", 32, 0, SimpleNamespace(index=3))
    assert function.context.value == driver.current == used
