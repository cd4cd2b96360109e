"""The memory of a chain: what is used at the same time lies apart, all else may share."""

from itertools import combinations

import pytest
import torch
from torch import nn

import sparta
from compiler import nets
from compiler.conftest import choosing
from compiler.run.test_chain import Layer, tiled
from sparta.compiler.run.chain import memory
from sparta.compiler.run.chain.layouts import hand_over_panels, round_early, share_packed
from sparta.compiler.run.chain.memory import planned
from sparta.compiler.run.chain.trace import Linear, Native, PythonCall, Trace
from sparta.compiler.run.chain.values import Made
from sparta.measure.machine import probe_compiler
from sparta.specialize.cpu.chain import StepKind

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_in_use_at_the_same_time_does_not_overlap(monkeypatch, threads):
    choosing(monkeypatch, tiled)
    model, x = nets.pruned(nn.Sequential(Layer(), Layer())), torch.randn(2, 20, 32)
    trace = Trace(sparta.compile(model, x, tune="off").graph, [x], threads)
    round_early(trace)
    hand_over_panels(trace)
    share_packed(trace)
    total = planned(trace.items, threads)
    pieces = {id(i.result.source): i.result.source for i in trace.items if not isinstance(i, PythonCall)}
    pieces |= {id(i.packed): i.packed for i in trace.items if isinstance(i, Linear) and i.packed is not None}
    made = [piece for piece in pieces.values() if isinstance(piece, Made)]
    assert sum(piece.nbytes for piece in made) > total  # memory is used again
    for one in made:
        for two in made:
            meet = one is not two and one.first <= two.last and two.first <= one.last
            assert not meet or one.offset + one.nbytes <= two.offset or two.offset + two.nbytes <= one.offset


def test_small_pieces_share_memory_only_where_threads_share_them_alike(monkeypatch):
    choosing(monkeypatch, tiled)
    model, x = nets.pruned(nn.Sequential(Layer(), Layer())), torch.randn(2, 20, 32)

    def planned_pieces(threads):
        trace = Trace(sparta.compile(model, x, tune="off").graph, [x], threads)
        planned(trace.items, threads)
        return [
            (i.result.source, isinstance(i, Native) and i.call.step.kind is StepKind.ATTENTION) for i in trace.items
        ]

    def sharing(pieces):
        return [
            (one.nbytes, two.nbytes, of_heads, others)
            for (one, of_heads), (two, others) in combinations(pieces, 2)
            if one is not two and one.offset < two.offset + two.nbytes and two.offset < one.offset + one.nbytes
        ]

    found = sharing(planned_pieces(2))
    assert found  # memory is used again
    assert all(one == two and of_heads == others for one, two, of_heads, others in found)
    alone = sharing(planned_pieces(1))  # no other core has written anything
    assert any(one != two for one, two, _, _ in alone)
    assert any(of_heads != others for _, _, of_heads, others in alone)
    monkeypatch.setattr(memory, "_NEAR", 0)  # large pieces have left the caches
    assert any(one != two for one, two, _, _ in sharing(planned_pieces(2)))
