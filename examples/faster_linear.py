"""Specialise: a pruned model whose linear layers choose their kernels by measurement, and what that gains.

Run it with ``make demo`` or ``python examples/faster_linear.py``. The first run compiles the C++ kernels for this
machine (a few seconds, if there is a compiler); without one every layer stays dense, and says so.
"""

from __future__ import annotations

import torch
from torch import nn

import sparta
from sparta.tables import table
from sparta.testing import check, compare


def main() -> None:
    """Prune a feed-forward model in 4×1 blocks, swap in sparse layers, tune them, and compare end to end."""
    torch.manual_seed(0)
    width, tokens = 768, 128
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)).eval()
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.9)
    spec.apply(model)
    print(spec)

    x = torch.randn(tokens, width)
    with torch.no_grad():
        expected = model.double()(x.double())
    model.float()
    dense = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)).eval()
    dense.load_state_dict(model.state_dict())

    sparta.nn.swap(model)  # reads the zeros
    print("\ntuning (every candidate is checked against float64 and timed interleaved with dense) ...\n")
    sparta.nn.tune(model, x)
    rows = [[name, op.choice.implement, op.choice.reason] for name, op in sparta.nn.operators_of(model).items()]
    print(table(["layer", "runs", "why"], rows))

    with torch.no_grad():
        agreement = check(model(x), expected, reduction=4 * width, what="the sparse model")
        print(f"\n{agreement}\n")
        print(compare({"dense": lambda: dense(x), "sparse": lambda: model(x)}, max_seconds=2.0))


if __name__ == "__main__":
    main()
