"""Small models, their data, and plans of them over a bench without a clock."""

import copy

import torch
from torch import nn

from planning.benches import FakeBench
from sparta.compiler.session import Session
from sparta.oneshot.targets import find_targets
from sparta.planning.api import plan_with
from sparta.planning.result import Goal

WIDTH = 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.o(mixed.reshape(x.shape))


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def transformer(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Attention(), Perceptron(), Attention(), Perceptron()).eval()


def example():
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))


def batches(count=3):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, 8, WIDTH, generator=generator) for _ in range(count)]


def planned(model=None, patterns=("4x1", "unstructured"), data=None, bench=None, session=None, **goal):
    model = model or transformer()
    options = {key: goal.pop(key) for key in ("metric", "checkpoint", "method", "ignore", "precisions") if key in goal}
    targets = {t.name: t for t in find_targets(model, None, options.get("ignore"))}
    bench = bench or FakeBench(targets)
    bench.targets = targets
    return plan_with(
        bench,
        session or Session(),
        (model, copy.deepcopy(model)),
        example(),
        batches() if data is None else data,
        Goal(**goal),
        patterns=list(patterns),
        **options,
    )
