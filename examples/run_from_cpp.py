"""A sparse model in a C++ program: compile it, package it, build the program, run it, compare.

The package and the operator library are all that the program needs beside libtorch: no Python runs in it.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import sparta
from sparta.compiler.aot import build_flags, library_path, package
from sparta.measure.machine import probe_compiler

HOST = Path(__file__).parent / "cpp" / "host.cpp"


def pruned_model() -> nn.Sequential:
    """Return a small model with 95 % of the weights of its hidden layers at zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight *= torch.rand_like(layer.weight) < 0.05
    return model


def main() -> None:
    """Do it all in a temporary folder."""
    compiler, reason = probe_compiler()
    if compiler is None:
        print(f"skipped: {reason}")
        return
    model, x = pruned_model(), torch.randn(16, 256)
    fast = sparta.compile(model, x, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    print(fast.report)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packaged, operators = package(fast, x, folder / "model.pt2"), library_path()
        compiled, linked = build_flags()
        build = [*compiler.command, "-O1", *compiled, str(HOST), "-o", str(folder / "host"), *linked]
        subprocess.run(build, check=True)  # noqa: S603 - an argument list, and no shell
        for rows in (16, 3):
            x = torch.randn(rows, 256)
            (folder / "x").write_bytes(x.numpy().tobytes())
            arguments = [packaged, operators, folder / "x", folder / "y", rows, 256]
            subprocess.run([str(folder / "host"), *map(str, arguments)], check=True)  # noqa: S603
            y = torch.from_numpy(np.fromfile(folder / "y", dtype=np.float32).reshape(rows, -1))
            torch.testing.assert_close(y, model(x).detach(), rtol=1e-4, atol=1e-5)
            print(f"{rows} rows: the C++ program returns what the model returns")


if __name__ == "__main__":
    main()
