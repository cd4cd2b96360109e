"""Tables of whole models and of trust on CUDA: what was measured stands beside its aim, the rest is left out."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tables():
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("renderers.cuda_models")
    finally:
        sys.path.remove(folder)


def record(results):
    environment = {"torch": "2.11", "torch_threads": 8, "cpu": {"model": "Some CPU"}}
    return [
        {"device": "NVIDIA H200", "date": "2026-01-02T03:04:05+00:00", "environment": environment, "results": results}
    ]


@pytest.fixture(scope="module")
def kernels(tables):
    del tables  # it finds the folder
    return importlib.import_module("renderers.cuda")


def test_blocks_stand_beside_their_bounds(kernels):
    row = {"shape": [4096, 4096], "block": 32, "sparsity": 0.8, "ratio": 1.5}
    few, many = ({**row, "tokens": tokens, "us": {"dense": us}} for tokens, us in ((16, 12.0), (4096, 172.0)))
    page = kernels.block_linear(record({"dtype": "bf16", "linear": [few, many]}))
    assert "| 32×32 | 80 % | 1.50 | 1.50 | 2.0 | 5.0 | 1.6 |" in page
    page = kernels.block_linear(record({"dtype": "bf16", "linear": [few, many], "ceilings": {"cache": 16e6}}))
    assert "| 2.0 | 5.0 | 2.8 |" in page
    assert "| 1.50 | 2.0 |  |  |" in kernels.block_linear(record({"dtype": "bf16", "linear": [few]}))


def test_products_attention_and_two_of_four_stand_beside_their_bounds(kernels):
    case = {"what": "sdd", "batches": 8, "size": 2048, "depth": 2048, "block": 128, "density": 0.5, "ratio": 1.4}
    case |= {"compressed": True, "biased": False, "backward": False, "us": {"dense": 180.0}}
    others = [{**case, "what": what, "backward": True} for what in ("softmax", "attention")]
    page = kernels.products(record({"dtype": "bf16", "cases": [case, *others]}))
    assert "| sdd compressed | 8×2048×2048 | 128×128 | 0.5 | 1.40 | 1.3 | 2.0 |" in page
    layer = {"shape": [8192, 8192], "tokens": 1, "us": {"dense": 30.0}, "ratio": 1.6, "best": "cuda-24"}
    page = kernels.two_four(
        record({"dtype": "bf16", "linear": [layer, {**layer, "tokens": 1024, "us": {"dense": 180}}]})
    )
    assert "| 8192×8192, bound | 1.71 | 2.00 |" in page
    assert "| target | 1.4 | 1.6 |" in page
    mask = {"queries": 64, "keys": 64, "width": 128, "pattern": "blocks", "density": 0.5, "ratio": 1.5, "tflops": 500.0}
    mask |= {"backward": True, "of_limit": 0.75, "us": {"FlexAttention": 13.0, "triton-flash": 10.0}}
    rest = {"decode": [], "lengths": {"fill": 0.4, "ratio": 2.0, "of_limit": 0.8}}
    page = kernels.attention(record({"dtype": "bf16", "attention": [mask], **rest}))
    assert "| 64×64×128 | blocks, forward and backward | 0.50 | 1.50 | 2.0 | 1.30 | 1.2 | 75 % | 500 |" in page


def test_two_of_four_stands_beside_what_parts_of_its_work_take(kernels):
    parts = {"bytes": 4e6, "operations": 7e8, "sparse": {"bf16": 1e9, "fp8": 2e9}, "stream": [[1e6, 2.0], [81e6, 22.0]]}
    layer = {"shape": [8192, 8192], "tokens": 1, "us": {"dense": 30.0}, "ratio": 1.6, "best": "cuda-24"}
    many = {**layer, "tokens": 1024, "us": {"dense": 180}}
    page = kernels.two_four(record({"dtype": "bf16", "linear": [layer, many], "ceilings": parts}))
    assert "| 8192×8192, bound | 1.45 | 1.29 |" in page
    assert "(1000 TFLOP/s, those of zeros counted)" in page
    times = dict.fromkeys(("dense_ms", "ms", "graphed_dense_ms", "graphed_ms"), 1.2)
    step = {"sparsity": 0.5, "runs": "cuda-24-matrix", "ratio": 1.0, "graphed_ratio": 1.0, "target": 1.3, "bound": 1.5}
    steps = [{**step, **times, "pattern": pattern} for pattern in ("64×64", "2:4", "2:4 both ways")]
    given = {"dtype": "bf16", "shape": [8192, 4096, 4096], "steps": steps, "ceilings": parts}
    assert [line.split("|")[-2].strip() for line in kernels.training_step(record(given)).splitlines()[-3:]] == [
        "1.50", "1.10", "1.24",
    ]  # fmt: skip
    case = {**layer, "pattern": "2:4", "format": "fp8_e4m3", "dense_us": 16.0, "us": 10.0, "product": 1.5, "aim": 1.4}
    rows = [case | {"bound": 9.0, "over_bf16": 2.0}, case | {"pattern": "blocks", "bound": 9.0, "over_bf16": 2.0}]
    page = kernels.fp8(record({"linear": rows, "ceilings": parts}))
    assert "| 1.60 | 1.50 | 1.4 | 1.31 | 2.00 |" in page
    assert "| 1.60 | 1.50 | 1.4 | 9.00 | 2.00 |" in page


def test_stacks(tables):
    case = {
        "case": "llama decode 1, 2:4, 50%", "layers": 4, "ms": {"bf16": 2.0, "fp8": 1.0, "sparta": 0.5},
        "ratio_fp8": 2.0, "ratio_bf16": 4.0, "over_fp8": 1.3, "over_bf16": None,
        "implements": {"cuda-24": 28}, "change": 0.025, "products": 0.25, "least": 0.15,
    }  # fmt: skip
    page = tables.stacks_fp8(record({"cases": [case, {**case, "change": None, "ratio_fp8": None, "products": None}]}))
    numbers = "| 4 | 2.000 | 1.000 | 0.500 | 0.250 | 0.150 | 2.00 | 1.3 | 4.00 |  | 5.00 |"
    assert f"| llama decode 1, 2:4, 50% {numbers} 28 cuda-24 | 2.5 % |" in page
    assert "| 0.500 |  |  |  | 1.3 | 4.00 |  |  | 28 cuda-24 |  |" in page


def test_training_of_a_model(tables):
    numbers = (
        "ms",
        "dense_ms",
        "ratio",
        "graphed_ms",
        "graphed_dense_ms",
        "graphed_ratio",
        "linear_ms",
        "bound",
        "target",
    )
    row = {"layers": 12, "batch": 128, "sparsity": 0.9, **dict.fromkeys(numbers, 1.5)}
    assert "| 12 layers, batch 128 | 90 % | 1.50 |" in tables.training_model(record({"steps": [row]}))


def test_layers_that_were_slower_are_counted(tables):
    layers = [
        {"pattern": "2:4", "graph": graph, "ratio": ratio} for graph, ratio in ((True, 0.9), (True, 1.5), (False, 1))
    ]
    page = tables.never_slower(record({"least": 0.97, "layers": layers}))
    assert "1 fell below 0.97" in page
    assert "| 2:4 | graph | 2 | 0.90 | 1.50 | 1 |" in page
    assert "| 2:4 | eager | 1 | 1.00 | 1.00 | 0 |" in page


def test_choices_of_several_processes(tables):
    layer = {"n": 64, "k": 32, "pattern": "block 64", "sparsity": 0.9, "tokens": 1}
    layer |= {"choices": 2, "best_us": 7.5, "over_best": [1.0, 1.04]}
    page = tables.stability(record({"allowed": 1.05, "layers": [layer]}))
    assert "| 64×32, block 64, 90 % | 1 | 2 | 2 | 7.5 | 1.040 |" in page


def test_the_grid_has_a_column_for_every_rival_and_step(tables):
    cases = [
        {"model": "bert-base", "pattern": "channels", "ms": {"eager": 2.0, "cut": 1.0}, "ratio": 2.0},
        {"model": "bert-base", "pattern": "channels + fp8", "ms": {"eager": 2.0, "fewer bits": 0.5}, "ratio": 4.0},
    ]
    page = tables.paper_grid(record({"batch": 32, "cases": cases}))
    assert "| model | pattern | eager | cut | fewer bits | over the best |" in page
    assert "| bert-base | channels + fp8 | 2.000 |  | 0.500 | 4.00 |" in page
