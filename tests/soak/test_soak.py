"""What `make soak` must notice: a wrong answer, a thread that ends, memory that grows. It runs before the tests."""

import sys

import pytest
import torch

from soak import serve
from soak.serve import Outcome, Soak

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")


class Faulty(torch.nn.Module):
    """Answers wrongly for one of the sizes."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) * (1.01 if len(x) == 7 else 1.0)


def test_a_wrong_answer_and_a_thread_that_ends_are_noticed(tmp_path, monkeypatch):
    soak = Soak(tmp_path, seconds=0.5, threads=2)
    soak.serving = Faulty(serve.pruned_model())
    monkeypatch.setattr(soak, "_on", lambda: not soak.outcome.wrong)
    soak._guarded(lambda: soak._serve(0))
    assert "(7, 96)" in soak.outcome.wrong[0]
    soak._guarded(lambda: soak.serving(None))
    assert soak.outcome.errors


def test_memory_that_grows_is_noticed_and_memory_that_settles_is_not():
    grown = Outcome(memory=[(second, 400.0 + 4 * second) for second in range(60)])
    settled = Outcome(memory=[(second, 400.0 + 10 * min(second, 15)) for second in range(60)])
    assert "memory grew" in grown.failures[0]
    assert grown.slope == pytest.approx(14400)
    assert not settled.failures
    assert settled.slope == pytest.approx(0, abs=1e-6)
