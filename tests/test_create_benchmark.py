"""The accuracy benchmark of `sparta.create` runs on data that is at hand, and its table says what was measured."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("benchmark_tables", BENCHMARKS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROW = {
    "model": "mlp",
    "asked": 0.8,
    "sparsity": 0.8,
    "exact": True,
    "spread": 0.1,
    "accuracy": 97.5,
    "accuracies": [97.4, 97.5, 97.6],
}
RECORD = {
    "date": "2026-01-02T03:04:05+00:00",
    "device": "Some GPU",
    "environment": {"torch": "2.11"},
    "results": {
        "data": "fashion",
        "seeds": 3,
        "epochs": 20,
        "dense_epochs": 10,
        "train_images": 30000,
        "test_images": 10000,
        "rows": [
            {**ROW, "method": "dense", "asked": None, "sparsity": 0.0, "exact": None, "accuracy": 98.0},
            {**ROW, "method": "magnitude", "allocation": "erk"},
            {
                **ROW,
                "method": "magnitude",
                "allocation": "erk",
                "asked": 0.9,
                "sparsity": 0.85,
                "exact": False,
                "accuracy": 97.0,
            },
            {**ROW, "method": "magnitude", "allocation": "erk", "model": "cnn", "accuracy": 99.0},
        ],
    },
}


def test_the_table_has_a_row_a_method_and_a_column_a_network_and_sparsity(tables):
    _, render = tables.RENDERERS["create-accuracy-fashion"]
    text = render([RECORD])
    assert text.startswith("Fashion-MNIST, 30,000 images to train with and 10,000 to test")
    assert "mean of 3 seeds" in text
    assert "Some GPU, PyTorch 2.11, 2026-01-02." in text
    assert "|  | allocation | MLP, 0 % | MLP, 80 % | MLP, 90 % | CNN, 0 % | CNN, 80 % | CNN, 90 % |" in text
    assert "| dense |  | 98.00 ± 0.10 |  |  |  |  |  |" in text
    assert "| magnitude | erk |  | 97.50 ± 0.10 | 97.00 ± 0.10 (85.0 % zeros) |  | 99.00 ± 0.10 |  |" in text


def test_a_single_seed_has_no_spread(tables):
    _, render = tables.RENDERERS["create-accuracy-fashion"]
    rows = [{**row, "accuracies": [row["accuracy"]]} for row in RECORD["results"]["rows"]]
    text = render([{**RECORD, "results": {**RECORD["results"], "seeds": 1, "rows": rows}}])
    assert "one seed" in text
    assert "±" not in text


@pytest.mark.slow
def test_the_benchmark_runs_and_every_row_is_as_sparse_as_asked(tables, tmp_path):
    pytest.importorskip("sklearn")
    options = [
        "--quick",
        "--epochs",
        "2",
        "--models",
        "mlp",
        "--only",
        "dense",
        "default",
        "movement",
        "rigl",
    ]
    command = [sys.executable, BENCHMARKS / "training" / "create.py", *options, "--out", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    (saved,) = tables.records("create_accuracy_digits", tmp_path)
    rows = saved["results"]["rows"]
    assert {row["model"] for row in rows} == {"mlp"}
    assert {row["asked"] for row in rows} == {None, 0.8}
    assert [row for row in rows if row["exact"] is False] == []
    assert len({row["method"] for row in rows}) == 7  # five, and two references
    assert all(row["accuracy"] > 30 for row in rows)  # of ten classes; more would be a matter of time


def test_the_table_of_an_encoder_has_the_loss_beside_dense_and_the_compiled_metric(tables):
    _, render = tables.RENDERERS["training-sts"]
    row = {"sparsity": 0.0, "lowest_density": 1.0, "dev": 88.0, "test": 83.0, "compiled": 83.0, "seconds": 1.0}
    rows = [
        {**row, "row": "dense", "test": 82.03, "compiled": None},
        {**row, "row": "dense, trained"},
        {**row, "row": "80 % 4x1", "sparsity": 0.8, "lowest_density": 0.05, "test": 82.25, "compiled": 82.25},
    ]
    settings = {"steps": 1000, "pairs": 64, "lr": 3e-4, "hardness": 0.9, "unscored": 10}
    text = render([{**RECORD, "results": {**settings, "rows": rows}}])
    assert "1000 steps of 64 pairs and 128 other sentences" in text
    assert "| dense | 0.0 % | 100.0 % | 88.00 | 82.03 |  |  |" in text
    assert "| 80 % 4x1 | 80.0 % | 5.0 % | 88.00 | 82.25 | -0.75 | 82.25 |" in text


def test_the_table_of_recovery_has_perplexity_zeros_and_speed_where_it_was_measured(tables):
    _, render = tables.RENDERERS["training-recover"]
    row = {"pattern": "2:4", "zeros": 0.5, "seconds": 9.0, "tokens_per_s": None, "dense_tokens_per_s": None}
    rows = [
        {**row, "way": "one-shot", "perplexity": 78.6},
        {**row, "way": "recover", "perplexity": 45.0, "tokens_per_s": 60.0, "dense_tokens_per_s": 40.0},
    ]
    settings = {"steps": 300, "batch": 4, "context": 512, "method": "alps", "rank": 16, "perplexity_dense": 37.83}
    text = render([{**RECORD, "results": {**settings, "rows": rows, "speed_on": "Some CPU, 2 threads"}}])
    assert "| dense |  | 37.83 | 0.0 % |  |" in text
    assert "| 2:4 | one-shot | 78.60 | 50.0 % |  |" in text
    assert "| 2:4 | recover | 45.00 | 50.0 % | 60.0 (1.50x) |" in text
    assert "Some CPU, 2 threads" in text
