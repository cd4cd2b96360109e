"""Tables of whole models on the CPU: the paper's grid, and models in several precisions beside targets and bounds."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tables():
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("renderers.compiler")
    finally:
        sys.path.remove(folder)


def row(pattern, times, steps, held):
    files = {"dense": 300.0, "sparta": 30.0}
    return {
        "model": "BERT", "pattern": pattern, "median_ms": times, "ablation_ms": steps, "mib": files, "held_mib": held,
    }  # fmt: skip


def test_the_grid_has_means_steps_and_memory(tables):
    rows = [
        row("channels", {"eager": 40.0, "sparta": 10.0}, {"dense": 40.0, "kernels": 20.0, "sparta": 10.0}, {}),
        row(
            "int8",
            {"eager": 90.0, "onnxruntime int8": 30.0, "tvm fp32": 901.0, "sparta": 10.0},
            {"dense": 90.0, "propagation": 50.0, "sparta": 10.0, "full search": 9.0},
            {"eager": 400.0, "sparta": 50.0},
        ),
    ]
    rows[1]["left_out"] = "TVM is left out: it does not build"
    environment = {"torch": "2.11", "torch_threads": 8, "cpu": {"model": "Some CPU"}}
    results = {"threads": 2, "rows": rows}
    found = {"device": "cpu", "date": "2026-01-02T03:04:05+00:00", "environment": environment, "results": results}
    page = tables.paper_grid([found])
    assert "| BERT | channels | 10.0 | 4.00 |  |" in page
    assert "| geometric mean |  |  | 6.00 | 3.00 |" in page
    assert "\nBERT: TVM is left out: it does not build. tvm fp32 is left out: more than 10 times slower" in page
    assert "| model | pattern | dense | propagation | kernels | sparta | full search |" in page
    assert "| BERT | int8 | 90.0 | 50.0 |  | 10.0 | 9.0 |" in page
    assert "| BERT | int8 | 300 | 30 | 400 | 50 |" in page


def test_models_in_several_precisions_stand_beside_targets_and_bounds(tables):
    times = {"eager fp32": 30.0, "openvino fp32": 24.0, "openvino int8": 8.0}
    ours = {"sparta 4x1 80% fp32": 8.0, "sparta 4x4 80% int8": 2.0, "sparta dense int8": 8.0}
    bound = {"sparta 4x1 80% fp32": {"empty": 3.0, "least": 1.8}}
    row = {"model": "resnet50", "batch": 1, "median_ms": times | ours, "change": {"sparta 4x4 80% int8": 0.01}}
    older = {**row, "model": "mobilenetv2"}
    environment = {"torch": "2.11", "torch_threads": 2, "cpu": {"model": "Some CPU"}}
    results = {"threads": 2, "rows": [{**row, "bound_ms": bound}, older]}
    found = {"device": "cpu", "date": "2026-01-02T03:04:05+00:00", "environment": environment, "results": results}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables.quantized([found]).splitlines()[4:]]
    assert lines[0] == ["resnet50", "1", "4x1 80% fp32", "8.00", "openvino fp32", "24.00", "3.00", "4", "5.00", ""]
    assert lines[1][-4:] == ["4.00", "1.8", "", "0.010"]
    assert lines[2][-4:] == ["1.00", "", "", ""]
    assert lines[3][-4:] == ["3.00", "2", "", ""]
