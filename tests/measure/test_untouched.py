"""Trials leave no trace in a user's model, its arguments and the random state."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import sparta
from sparta.measure.untouched import Trace, untouched


class Counting(nn.Module):
    """A model that keeps state in every way there is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("rebound", torch.zeros(2))
        self.calls, self.plain, self.seen, self.known = 0, torch.zeros(3), [], {}

    def forward(self, x):
        self.count += 1
        self.rebound = self.rebound + 1
        self.plain += 1
        self.calls += 1
        self.seen.append(self.calls)
        self.known[self.calls] = x
        self.late = True
        return self.layer(x) * self.count


def test_everything_is_put_back():
    model, x = Counting(), torch.randn(2, 8)
    before = dict(model.__dict__), model.rebound
    with untouched(model) as trace:
        for _ in range(3):
            model(x)
        assert trace.changes() == ["calls", "count", "known", "late", "plain", "rebound", "seen"]
    assert trace.changes() == []
    assert float(model.count) == 0
    assert model.calls == 0
    assert not model.plain.any()
    assert model.rebound is before[1]
    assert model.seen == []
    assert model.known == {}
    assert not hasattr(model, "late")


def test_arguments_are_put_back():
    class Writing(nn.Module):
        def forward(self, x):
            return x["a"].add_(1)

    x = {"a": torch.zeros(3)}
    with untouched(Writing(), x):
        Writing()(x)
    assert not x["a"].any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_of_every_mode_are_put_back(mode):
    with mode():
        model = Counting()
        with untouched(model):
            model(torch.randn(2, 8))
        assert float(model.count) == 0


def test_nan_is_no_change():
    model = nn.Module()
    model.register_buffer("odd", torch.tensor([float("nan"), 1.0]))
    trace = Trace(model)
    assert trace.changes() == []


def test_a_failed_trial_is_put_back_too():
    model = Counting()

    def fail():
        with untouched(model):
            model(torch.randn(2, 8))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert float(model.count) == 0


def test_random_states_go_on_as_if_nothing_had_been():
    def draw():
        return torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002, S311

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    with untouched(nn.Identity()):
        inside = draw()
    assert draw() == inside  # the same numbers as if the block had not drawn any


def test_compile_leaves_the_model_and_the_random_state_as_they_were():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()), torch.randn(4, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    kept = x.clone()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    sparta.compile(model, x, budget_s=2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(x, kept)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_model_with_state_runs_in_parts_and_the_original_stays_as_it_was():
    model, x = Counting().eval(), torch.randn(2, 8)
    fast = sparta.compile(model, x)
    assert "changes calls, count" in fast.report.full
    for turn in (1, 2, 3):
        torch.testing.assert_close(fast(x), model.layer(x) * turn)
    assert float(model.count) == 0
    assert model.calls == 0


def test_torch_compile_counts_each_call_once():
    torch._dynamo.reset()
    model, x = Counting().eval(), torch.randn(2, 8)
    fast = torch.compile(model, backend="sparta")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the list grows, so Dynamo compiles each call
        for turn in (1, 2, 3):
            torch.testing.assert_close(fast(x), model.layer(x) * turn)
    assert float(model.count) == 3
    torch._dynamo.reset()


def test_a_cache_that_fills_up_is_written_once_per_call():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("cache", torch.zeros(3, 4))
            self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

        def forward(self, x):
            self.cache.index_copy_(0, self.place, self.layer(x))
            self.place += 1
            return self.cache.sum(0)

    torch._dynamo.reset()
    model, plain = Cached().eval(), Cached().eval()
    plain.load_state_dict(model.state_dict())
    fast = torch.compile(model, backend="sparta")
    with torch.no_grad():
        x = torch.randn(1, 4)
        torch.testing.assert_close(fast(x), plain(x))
        for _ in range(2):  # a fourth call would be out of bounds
            x = torch.randn(1, 4)
            torch.testing.assert_close(fast(x), plain(x))
    assert int(model.place) == 3
    torch._dynamo.reset()


class Hooking(nn.Module):
    """Puts hooks on its layers at its first call and notes that, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2), [0]

    def forward(self, x):
        if not getattr(self, "_capturing_hooks_installed", False):
            self.layer.register_forward_hook(lambda _module, _args, y: y + 1)
            self._capturing_hooks_installed = True
        return self.layer(x)


def test_hooks_of_a_first_call_are_taken_off_and_are_no_change():
    model, x = Hooking(), torch.ones(1, 2)
    with untouched(model) as trace:
        expected = model(x)
        assert trace.changes() == []
    assert not model.layer._forward_hooks
    torch.testing.assert_close(model(x), expected)  # once more, and not twice
