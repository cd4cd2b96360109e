"""Quantised convolutions that won in real numbers one by one compute in integers where the whole chain is faster so."""

import pytest
import torch
from torch import nn

import sparta
from compiler.clocks import Clock, plain_cost
from compiler.conftest import choosing, chosen
from sparta.compiler.choose.timer import Timer
from sparta.compiler.clock import Rounds

CALLS = {"chosen": 5.0, "integers": 4.0}


def compiled(monkeypatch, integers):
    """Compile a small network whose layers all chose kernels of real numbers, by a clock of the test's own."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU()]
    model, x = nn.Sequential(*convolutions, nn.Conv2d(8, 8, 1)).eval(), torch.randn(2, 8, 9, 9)
    choosing(monkeypatch, lambda spec: chosen(spec, "cpu"))
    plain = plain_cost(sparse=4.0, others=3.0)
    times = CALLS | {"integers": integers}
    clock = Clock(lambda key: times[key] if key in times else plain(key))
    monkeypatch.setattr(Timer, "rounds", lambda _timer, calls, _rounds=0: Rounds(clock(calls, 1.0)))
    fast = sparta.compile(model, x, precision="int8", calibration=[x], max_loss=10.0)
    return fast, x, [kind for keys, _ in clock.asked for kind in keys if kind in CALLS]


@pytest.mark.parametrize(("integers", "implement"), [(4.0, "cpu-int8"), (4.99, "cpu"), (6.0, "cpu")])
def test_all_convolutions_are_in_integers_where_that_is_faster_beyond_doubt(
    integers, implement, own_stores, monkeypatch
):
    fast, x, asked = compiled(monkeypatch, integers)
    assert set(asked) == set(CALLS)
    found = {layer.name: layer.first.implement for layer in fast.report.plan.layers}
    assert found["0"] == found["2"] == found["4"] == implement
    assert fast(x).isfinite().all()
