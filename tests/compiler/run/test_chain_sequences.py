"""Batches of sequences: a chain may take a few of them at a time, where no sequence sees another."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from sparta.compiler.run.chain import batches
from sparta.compiler.run.chain.batches import parts_of
from sparta.compiler.run.chain.chained import Chained
from sparta.measure.machine import probe_compiler

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


class Attending(nn.Module):
    """A layer of an encoder, whose shapes or order of dims a test changes."""

    def __init__(self, change=None):
        super().__init__()
        self.joint, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("seen", torch.rand(5, 5) < 0.8)
        self.seen.fill_diagonal_(True)
        self.change = change

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (each.reshape(b, t, 2, -1).transpose(1, 2) for each in self.joint(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, self.seen).transpose(1, 2).reshape(b, t, c)
        y = self.norm(x + self.out(y))
        return y if self.change is None else self.change(y)


MEETING = {
    "sequences as tokens": lambda y: y.transpose(0, 1).reshape(y.shape) + y,
    "one long sequence": lambda y: y.reshape(1, -1, 16) * 2.0,
    "attention between sequences": lambda y: functional.scaled_dot_product_attention(
        *[y.reshape(2, 2, 5, 16).transpose(0, 1).contiguous()] * 3
    ),
}


def parts(model, x):
    graph = sparta.compile(model, x, tune="off").graph
    chain = Chained(graph)
    program = chain.program(x)
    assert program is not None
    return chain, parts_of(program, graph, (x,), chain.program_of)


@pytest.mark.parametrize("batch", [2, 6])
def test_sequences_run_in_parts(monkeypatch, batch):
    monkeypatch.setattr(batches, "_LARGE_BYTES", 0)
    monkeypatch.setattr(batches, "_PART_BYTES", (1 << 30, 0))
    monkeypatch.setattr(batches, "_CLEARLY", 1e9)  # whatever the clock says, parts run
    model, x = Attending().eval(), torch.randn(batch, 5, 16)
    chain, found = parts(model, x)
    assert [each.images for each in found] == ([1] if batch == 2 else [3, 1])
    with torch.no_grad():
        for run in (*found, lambda leaves: chain(*leaves)):
            torch.testing.assert_close(run((x,))[0], model(x), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", MEETING)
def test_sequences_that_meet_run_as_they_are(monkeypatch, name):
    monkeypatch.setattr(batches, "_LARGE_BYTES", 0)
    model, x = Attending(MEETING[name]).eval(), torch.randn(4, 5, 16)
    chain, found = parts(model, x)
    assert not found
    with torch.no_grad():
        torch.testing.assert_close(chain(x)[0], model(x), rtol=2e-5, atol=2e-6)
