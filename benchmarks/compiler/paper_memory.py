"""The memory that one model needs: a process that loads it, calls it twice, and prints how many MiB it held at most.

``paper_grid.py`` starts it as ``paper_memory.py KIND FILE INPUT THREADS``, since a process of its own knows of nothing
else. What loading alone takes and gives back does not count, nor does what the runtimes are without a model.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparta

sys.path.insert(0, str(Path(__file__).parent))
from runtimes import onnxruntime_call, openvino_call


def main() -> None:
    """Load, call, and print."""
    kind, file, given, threads = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(threads)
    _get_ready(kind)
    x = torch.load(given)
    before = _mib("VmRSS")
    run = _loaded(kind, file, x, threads)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    with torch.no_grad():
        for _ in range(2):
            run(x)
    print(_mib("VmHWM") - before)


def _get_ready(kind: str) -> None:
    """Import what a runtime is without a model; what torch and we import late is there after a small model."""
    small, x = torch.nn.Linear(8, 8).eval(), torch.zeros(2, 8)
    if kind == "eager":
        torch.export.export(small, (x,)).module()(x)
    elif kind == "sparta":
        sparta.compile(small, x, tune="off")(x)
    else:
        importlib.import_module(kind)


def _loaded(kind: str, file: Path, x: Tensor, threads: int) -> Callable[[Tensor], Any]:
    if kind == "eager":
        return torch.export.load(file).module()
    if kind == "onnxruntime":
        return onnxruntime_call(file, threads)
    if kind == "openvino":
        return openvino_call(file, x, threads, "int8" if "int8" in file.name else "fp32")
    return sparta.load(file)


def _mib(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) / 1024 if found else float("nan")


if __name__ == "__main__":
    main()
