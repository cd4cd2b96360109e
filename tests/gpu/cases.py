"""What tests of kernels on CUDA share: random operands and masks, and a run that shows what is not written."""

import torch


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def two_four(rows, columns):
    """Return a random mask that keeps two of every four columns."""
    draws = torch.rand(rows, -(-columns // 4), 4)
    kept = torch.zeros_like(draws, dtype=torch.bool).scatter_(2, draws.topk(2, -1).indices, True)
    return kept.flatten(1)[:, :columns]


def run_poisoned(kernel, weight, *inputs):
    """Run on memory that holds NaN, so that an element that is not written shows."""
    packed = kernel.pack(weight)
    kernel.run(packed, *inputs).fill_(torch.nan)  # the next run is given the same memory
    return kernel.run(packed, *inputs)
