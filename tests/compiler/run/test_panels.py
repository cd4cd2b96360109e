"""Neighbouring sparse layers hand over panels: the intermediate stays packed, and results are the same bits."""

import copy

import pytest
import torch
from torch import nn

import sparta
from compiler import nets
from compiler.clocks import Clock
from compiler.clocks import compiled as with_clock
from compiler.conftest import choosing, chosen
from sparta.compiler.job import Job
from sparta.compiler.run.eager import with_fast_paths
from sparta.compiler.run.host import Host
from sparta.compiler.run.panels import PanelStep, panelled
from sparta.compiler.session import Session
from sparta.measure.machine import probe_compiler
from sparta.specialize.cpu.panel import Panel
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.tuning.select import Choice

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


class Chain(nn.Module):
    """Three layers in a row, and one whose input is used twice."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.across, self.down = nn.Linear(width, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, width)
        self.last = nn.Linear(width, width)

    def forward(self, x):
        y = self.down(torch.relu(self.across(nn.functional.gelu(self.up(x))))) + x
        return self.last(y) + y


def tiled(widths):
    """Let layers run panels of these widths, by the number of their input channels."""

    def choose(spec):
        plain = chosen(spec)
        if plain.implement == "dense":
            return plain
        tile = str(Tile("panel", 4, widths.get(spec["weight"].shape, 1)))
        return Choice("cpu", {"tile": tile}, "forced", plain.entry)

    return choose


def compiled(monkeypatch, widths=(), lead=(2, 20), **options):
    choosing(monkeypatch, tiled(dict(widths)))
    model, x = nets.pruned(Chain()), torch.randn(*lead, 32)
    return model, x, sparta.compile(model, x, tune="off", **options)


@pytest.mark.parametrize("lead", [(2, 20), (33,), (1, 2)])
def test_what_lies_between_layers_stays_packed(monkeypatch, lead):
    model, x, fast = compiled(monkeypatch, lead=lead)
    linked = panelled(fast.graph)
    steps = {name.split(".")[0]: step for name, step in linked.named_modules() if isinstance(step, PanelStep)}
    assert {name: step.gives_panel for name, step in steps.items()} == {"up": True, "across": True, "down": False}
    seen = []
    for step in steps.values():
        step.register_forward_hook(lambda _, args, kwargs, y: seen.append((type(args[0]), type(y))), with_kwargs=True)
    with torch.no_grad():
        y = linked(x)[0]
        assert seen == [(torch.Tensor, Panel), (Panel, Panel), (Panel, torch.Tensor)]
        assert torch.equal(y, fast.graph(x)[0])
        assert torch.equal(with_fast_paths(linked)(x)[0], y)
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)


def test_tiles_of_two_widths_are_not_linked_until_they_are_aligned(monkeypatch):
    _, _, fast = compiled(monkeypatch, {(64, 64): 2})
    assert panelled(fast.graph) is fast.graph
    job = Job.started(nets.pruned(Chain()), torch.randn(2, 20, 32), None, None, (), Session())
    contest = job.contest(inductor=False)
    kept = contest.workshop.aligned(contest.plans)
    tiles = {plan.name: Tile.parse(plan.first.params["tile"]).mv for plan in kept}
    assert tiles == {"up": 2, "across": 2, "down": 2, "last": 1}  # as the layer with the most work
    assert {plan.name for plan in kept if "neighbour" in plan.first.reason} == {"up", "down"}


def test_panels_compete_and_a_win_is_kept_saved_and_remembered(monkeypatch, own_stores, tmp_path):
    def cost(key):
        return 4.0 if getattr(key, "host", None) is Host.PANELS else 6.0 if getattr(key, "kernels", ()) else 10.0

    choosing(monkeypatch, tiled({(64, 64): 2}))
    model, x = nets.pruned(Chain()), torch.randn(2, 20, 32)
    fast = with_clock(model, x, Clock(cost))
    again = with_clock(model, x, Clock(cost))
    assert "remembered" in again.report.plan.whole.reason
    fast.save(tmp_path / "model.sparta")
    for each in (fast, again, copy.deepcopy(fast), sparta.load(tmp_path / "model.sparta")):
        assert each.report.plan.whole.host is Host.PANELS
        assert panelled(each.graph) is not each.graph
        torch.testing.assert_close(each(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    moved = copy.deepcopy(fast).to(torch.bfloat16)  # panels are float32: layers hand over tensors again
    assert moved(x.bfloat16()).dtype == torch.bfloat16


def test_convolutions_are_left_alone(forced):
    layers = [nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(72, 16)]
    model, x = nets.pruned(nn.Sequential(*layers)), torch.randn(2, 8, 3, 3)
    fast = sparta.compile(model, x, tune="off")
    assert panelled(fast.graph) is fast.graph
