"""Kernels that were started before are started again by what calls share, with other tensors in their places."""

from types import SimpleNamespace

import pytest
import torch

from sparta.specialize.cuda import launcher
from sparta.specialize.cuda.launcher import Launcher

CPU = torch.device("cpu")


class Started:
    """A compiled kernel that only takes notes."""

    def __init__(self):
        self.calls = []

    def start(self, programs, values, stream):
        self.calls.append((programs, list(values), stream))


class Function:
    """What Triton would compile: it counts how often it is asked to."""

    params = tuple(SimpleNamespace(is_constexpr=constant) for constant in (False, False, False, True))

    def __init__(self):
        self.compiled = 0

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.compiled += 1

        return run


@pytest.fixture
def made(monkeypatch):
    kernel, function = Started(), Function()
    monkeypatch.setattr(launcher, "current_device", lambda: None)  # that of tensors on the CPU
    monkeypatch.setattr(launcher, "raw_stream", lambda device: 7)
    monkeypatch.setattr(launcher, "direct_kernel", lambda compiled: kernel)
    return Launcher(function, interpreted=False), kernel, function


def test_what_was_started_is_started_again_with_other_tensors(made):
    launch, kernel, function = made
    x, table, y = torch.zeros(4), torch.zeros(8), torch.zeros(4)
    assert not launch.again(CPU, "like", (x,))
    launch(3, (x, table, 5, 64), CPU, None, "like", (0,))
    assert (function.compiled, kernel.calls) == (1, [])  # Triton has started it
    assert launch.again(CPU, "like", (y,))
    assert kernel.calls == [(3, [y.data_ptr(), table.data_ptr(), 5, 64], 7)]
    assert launch.again(CPU, "like", (None,))
    assert kernel.calls[-1][1][0] is None
    assert not launch.again(CPU, "another", (x,))
    assert function.compiled == 1


def test_calls_of_equal_facts_share_a_kernel(made):
    launch, kernel, function = made
    x, table = torch.zeros(4), torch.zeros(8)
    launch(3, (x, table, 5, 64), CPU)
    launch(4, (x, table, 7, 64), CPU)
    assert function.compiled == 1
    assert kernel.calls == [(4, [x.data_ptr(), table.data_ptr(), 7, 64], 7)]
    launch(4, (x, table, 32, 64), CPU)  # Triton compiles for numbers that 16 divides
    launch(4, (x, table, 7, 128), CPU)
    assert function.compiled == 3


def test_what_does_not_move_is_held(made):
    launch, _, _ = made
    x, table = torch.zeros(4), torch.zeros(8)
    launch(3, (x, table, 5, 64), CPU, None, "like", (0,))
    (known,) = launch._alike.values()
    assert any(value is table for value in known[-1])
    assert not any(value is x for value in known[-1])


def test_another_device_looks_again(made, monkeypatch):
    launch, kernel, _ = made
    x, table = torch.zeros(4), torch.zeros(8)
    launch(3, (x, table, 5, 64), CPU, None, "like", (0,))
    monkeypatch.setattr(launcher, "current_device", lambda: 1)
    assert not launch.again(CPU, "like", (x,))
    assert not kernel.calls
