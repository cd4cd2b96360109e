"""A model wrapped by DistributedDataParallel, in a gloo group of one process: cut, compiled, saved, pruned, swapped."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparta
from sparta.propagation import compact, propagate, prune_structured


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    with torch.no_grad():
        model[0].weight[:5] = 0
    x = torch.randn(3, 4)
    expected = model(x).detach()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        wrapped = DistributedDataParallel(model).eval()
        assert set(propagate(wrapped, x).spec) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        fast = sparta.compile(wrapped, x, tune="off")
        fast.save(Path(folder) / "model.sparta")
        runs = [compact(wrapped, x), fast, sparta.load(Path(folder) / "model.sparta")]
        for run in runs:
            torch.testing.assert_close(run(x).detach(), expected)
        assert prune_structured(wrapped, x, 0.5)[0](x).shape == (3, 2)
        assert sparta.optimize(wrapped, x, tune="off") is wrapped
        torch.testing.assert_close(wrapped(x).detach(), expected)
        dist.destroy_process_group()
    sys.stdout.write("all the same")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads need not end in order


if __name__ == "__main__":
    main()
