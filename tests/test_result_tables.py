"""Tables in the documentation agree with the committed results, and the script that makes them does what it says."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("benchmark_tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documentation_agrees_with_the_results():
    command = [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}run `python benchmarks/tables.py`"


def test_every_renderer_has_a_place_in_the_documentation(tables):
    text = "".join(page.read_text() for page in tables.pages())
    assert {found["name"] for found in tables.REGION.finditer(text)} == set(tables.RENDERERS)


ROW = {"model": "mlp", "asked": None, "sparsity": 0.0, "exact": None, "spread": 0.1, "accuracies": [98.0]}
ACCURACY = {
    "question": "training_accuracy_mnist",
    "date": "2026-01-02T03:04:05+00:00",
    "device": "x86_64 cpu",
    "environment": {"torch": "2.11", "torch_threads": 8, "cpu": {"model": "Some CPU"}},
    "results": {
        "data": "mnist",
        "seeds": 3,
        "rows": [
            {**ROW, "method": "dense", "accuracy": 98.0},
            {**ROW, "method": "levels", "asked": 0.9, "sparsity": 0.9, "exact": True, "accuracy": 97.5},
            {**ROW, "method": "odd", "asked": 0.9, "sparsity": 0.8, "exact": False, "accuracy": 98.25},
        ],
    },
}
PAGE = "before\n<!-- table: training-accuracy-mnist -->\nold\n<!-- end table -->\nafter\n"


def test_only_what_is_between_the_marks_is_rewritten(tables, tmp_path):
    (tmp_path / "training_accuracy_mnist.some.json").write_text(json.dumps(ACCURACY))
    page = tables.rewritten(PAGE, tmp_path)
    assert page.startswith("before\n<!-- table: training-accuracy-mnist -->\n\nMNIST, mean of 3 seeds")
    assert page.endswith("\n\n<!-- end table -->\nafter\n")
    assert "old" not in page
    assert "| levels | 90 % | 90.0 % | 97.50 ± 0.10 (-0.50) |" in page
    assert "80.0 % (not as asked) | 98.25 ± 0.10 (+0.25)" in page
    assert "Some CPU, 8 threads, PyTorch 2.11, 2026-01-02." in page
    assert tables.rewritten(page, tmp_path) == page


def test_what_is_not_measured_says_so_and_an_unknown_table_is_an_error(tables, tmp_path):
    assert "Not measured yet." in tables.rewritten(PAGE, tmp_path)
    with pytest.raises(SystemExit, match="no renderer makes the table 'other'"):
        tables.rewritten(PAGE.replace("training-accuracy-mnist", "other"), tmp_path)


REACHED = {"share": 0.5, "bound": "arithmetic"}
CPU = {
    "cpu_layers": {
        "rivals": ["compile", "eager", "onnxruntime"],
        "summary": [
            {"tokens": 16, "height": 4, "sparsity": 0.9, "drop-in": 6.0, "panel": 7.0, "target": 7.5}
            | {"drop-in repeated": 8.0, "panel repeated": 9.0}
            | {"roof_share": {"drop-in": 0.4, "panel": 0.5, "drop-in repeated": 0.6, "panel repeated": 0.7}},
            {"tokens": 1, "height": 1, "sparsity": 0.9, "cold": 8.0, "target": None, "roof_share": {"cold": 0.9}},
        ],
    },
    "cpu_conv": {
        "rivals": ["eager", "channels last"],
        "summary": [
            {"kernel": 3, "height": 8, "sparsity": 0.9, "speedup": 6.0, "roof_share": 0.4, "target": 7.5},
            {"kernel": 3, "height": 4, "sparsity": 0.8, "speedup": 3.0, "roof_share": 0.3, "target": None},
        ],
    },
    "cpu_int8": {
        "summary": [
            {
                "tokens": 128,
                "block": [4, 4],
                "sparsity": 0.9,
                "drop-in": 7.0,
                "panel": 8.0,
                "drop-in repeated": 7.5,
                "panel repeated": 9.0,
                "real repeated": 5.0,
                "fp32 repeated": 12.0,
                "target": 10,
                "roof_share": {"drop-in": 0.3, "panel": 0.4, "drop-in repeated": 0.5, "panel repeated": 0.6},
            }
        ]
    },
    "cpu_bounds": {
        "roof": {"multiply_adds": 5e10, "byte_multiply_adds": None, "bytes_read": {"32768": 1e11}},
        "rows": [
            {"kind": "fp32", "tokens": 16, "block": [4, 1], "sparsity": 0.9, "shape": [768, 768], "target": 7.5}
            | {"ms": {"dense": 8.0, "ours": 2.0, "empty": 0.5, "least": 0.5}}
        ],
    },
    "cpu_few_bits": {
        "rows": [
            {"name": "3x3", "block": [4, 4], "sparsity": 0.8}
            | {"median_ms": {"int8": 2.0, "ours fp32": 3.0, "dense fp32": 7.0, "onnxruntime": 5.0}}
        ],
    },
    "cpu_chains": {
        "chains": [
            {"kind": "ffn", "size": 1, "height": 1, "sparsity": 0.9, "speedup": {"apart": 7.0}, "target": 7.5}
            | {"roof": {"apart": REACHED}, "ahead": 1.5},
            {"kind": "conv", "size": 28, "height": 1, "sparsity": 0.9, "speedup": {"apart": 2.0, "kept": 3.0}}
            | {"roof": {"kept": REACHED}, "target": None},
        ]
    },
    "cpu_peers": {
        "layers": [
            {"kind": "linear", "sizes": [16, 768, 768], "height": 1, "sparsity": 0.9, "ahead": 2.0}
            | {
                "speedup": {"best dense": 4.0, "onnxruntime": 4.0},
                "deepsparse": {"onnxruntime": 2.0, "deepsparse": 1.0},
            },
            {"kind": "linear", "sizes": [1, 768, 768], "height": 1, "sparsity": 0.9, "deepsparse": {}, "ahead": None}
            | {"speedup": {"best dense": 4.0, "onnxruntime": 4.5}},
        ]
    },
}


@pytest.mark.parametrize(
    ("question", "lines"),
    [
        (
            "cpu_layers",
            [
                "| 16 | block 4×1 | interleaved | 6.0 (7.0) | 7.5 | 50 to 50 % |",
                "| repeated | 8.0 (9.0) | 7.5 | 70",
                "| cold | 8.0 |",
            ],
        ),
        ("cpu_conv", ["| 3×3 | block 8×1 |  | 6.0 | 7.5 | 40", "| 3×3 | block 4×1 | 3.0 |  |  | 30", "channels last"]),
        (
            "cpu_int8",
            [
                "| 128 | block 4×4 | 8 bits | interleaved | 7.0 (8.0) | 10 | 40",
                "| repeated | 7.5 (9.0) | 10 | 60",
                "| fp32 | repeated | 5.0 (12.0) |  |",
            ],
        ),
        (
            "cpu_bounds",
            ["| 16 | fp32, block 4×1 | 90 % | 7.5 | 4.0 | 8.0 | 25 % | 25 % |", "100 GFLOP/s in fp32, and GB/s"],
        ),
        ("cpu_few_bits", ["| 3x3 | block 4×4 | 80 % | 2.5 | 1.5 |", "the best of dense fp32, onnxruntime"]),
        (
            "cpu_chains",
            ["| 1 token | unstructured | 90 % | 7.0 |  | 7.5 | 50 % | 1.5 |", "| 2.0 | 3.0 |  | 50 % |  |"],
        ),
        ("cpu_peers", ["| linear 16×768×768 | unstructured | 90 % | 4.0 | 4.0 | 2.0 | 2.0 |", "in 1 of 1 rows"]),
    ],
)
def test_tables_of_the_cpu_have_targets_beside_and_leave_out_what_is_empty(tables, question, lines, tmp_path):
    (tmp_path / f"{question}.some.json").write_text(
        json.dumps({**ACCURACY, "question": question, "results": CPU[question]})
    )
    text = tables.made(question.replace("_", "-"), tmp_path)
    for line in lines:
        assert line in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "question"),
    [
        ("accuracy.py", ["--seeds", "1", "--scale", "0.02", "--models", "mlp", "cnn"], "training_accuracy_digits"),
        ("overhead.py", ["--batch", "2", "--width", "4", "--steps", "2", "--warmup", "1"], "training_overhead"),
    ],
)
def test_the_training_benchmarks_run_and_their_tables_are_made(tables, script, options, question, tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "training" / script, *options, "--out", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob(f"{question}.*.json"))) == 1
    name = question.replace("_", "-")
    assert "| dense |" in tables.made(name, tmp_path)
    (saved,) = tables.records(question, tmp_path)
    if script == "accuracy.py":
        rows = saved["results"]["rows"]
        assert [row for row in rows if row["exact"] is False] == []
        assert len({row["method"] for row in rows}) == 22


SPEEDS = {
    "block_linear": (
        {
            "dtype": "bf16",
            "linear": [
                {"shape": [8, 8], "tokens": 128, "block": 32, "sparsity": 0.9, "ratio": 2.0},
                {"shape": [8, 16], "tokens": 128, "block": 32, "sparsity": 0.9, "ratio": 8.0},
                {"shape": [8, 8], "tokens": 1, "block": 64, "sparsity": 0.5, "ratio": 0.5},
            ],
        },
        "| 32×32 | 90 % |  | 4.00 |\n| 64×64 | 50 % | 0.50 |  |",
    ),
    "compiler_models": (
        {
            "cases": [
                {"model": "mlp", "batch": 1, "pattern": "u", "sparsity": 0.0, "speedup": 1.01, "amdahl_bound": 9.0},
                {"model": "mlp", "batch": 1, "pattern": "u", "sparsity": 0.9, "speedup": 3.5, "amdahl_bound": 9.0},
            ]
        },
        "| mlp | 1 | dense | 1.01 |\n| mlp | 1 | u | 3.50 (9.0) |",
    ),
    "compiler_stacks": (
        {
            "shapes": {"llama-7b": {"layers": 2}},
            "cases": [
                {
                    "model": "llama-7b",
                    "rows": 16,
                    "pattern": "2:4",
                    "sparsity": 0.5,
                    "speedup": 1.5,
                    "amdahl_bound": 2.0,
                }
                | {"median_ms": {"eager": 3.0, "sparta": 2.0}, "best_dense": "eager", "host": "graph"}
                | {"implements": {"cuda-24": 14}}
            ],
        },
        "| llama-7b | decode, 16 tokens | 2:4, 50 % | 3 | 2 | 1.50 (2.0) | graph: 14 cuda-24 |",
    ),
    "two_four": (
        {"dtype": "bf16", "linear": [{"shape": [8, 16], "tokens": 64, "ratio": 1.5, "best": "cuda-24"}]},
        "| 8×16 | 1.50 cuda-24 |",
    ),
}


@pytest.mark.parametrize("question", SPEEDS)
def test_speeds_are_means_over_shapes(tables, tmp_path, question):
    results, line = SPEEDS[question]
    (tmp_path / f"{question}.some.json").write_text(json.dumps({**ACCURACY, "question": question, "results": results}))
    assert line in tables.made(question.replace("_", "-"), tmp_path)


def test_the_charts_agree_with_the_results():
    spec = importlib.util.spec_from_file_location("benchmark_chart", ROOT / "benchmarks" / "chart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.charts().items():
        assert path.read_text("utf-8") == text, "run `python benchmarks/chart.py`"


def test_the_drawing_of_losses_has_a_point_for_each_whole_row():
    spec = importlib.util.spec_from_file_location("benchmark_chart", ROOT / "benchmarks" / "chart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = {"task": "a", "metric_name": "accuracy", "dense": 0.9, "dense_ms": 4.0}
    whole = [{**row, "pattern": "4x1", "sparsity": s, "metric": 0.9 - s / 10, "ms": 4 - 3 * s} for s in (0.5, 0.9)]
    unfinished = [{**row, "pattern": "2:4", "sparsity": None, "metric": 0.8, "ms": None}]
    text = module.scatter.drawn([*whole, *unfinished], "here")
    assert text.count("<title>4x1") == 2
    assert "2:4" not in text
    assert text.startswith("<svg ")


def test_the_figures_of_the_readme_are_those_of_the_results():
    results = ROOT / "benchmarks" / "results"
    readme = " ".join((ROOT / "README.md").read_text().split())
    rows = json.loads((results / "compiler_quantized.amd-zen-5.json").read_text())["results"]["rows"]
    alone = {row["model"]: row["median_ms"] for row in rows if row["batch"] == 1}

    def gained(precision, ours, model="bert-base"):
        times = alone[model]
        dense = [ms for name, ms in times.items() if name.endswith(precision) and not name.startswith("sparta")]
        return f"{min(dense) / times[f'sparta {ours} {precision}']:.1f}x"

    assert f"**{gained('fp32', '4x1 90%')}** the best of eager PyTorch, ONNX Runtime and OpenVINO in fp32" in readme
    assert f"in int8 **{gained('int8', '4x4 90%')}** the best dense int8 of the latter two" in readme
    of_images = (gained("fp32", "4x1 90%", model) for model in ("mobilenetv2", "resnet50"))
    assert "MobileNetV2 **{}** and ResNet-50 **{}** in fp32".format(*of_images) in readme
    decoded = json.loads((results / "generation_decode.x86-64-cpu.json").read_text())["results"]
    [rates] = [row["rates"] for row in decoded["rows"] if row["pattern"] == "unstructured 50 %"]
    faster = rates["ours int8"] / rates["llama.cpp Q8_0"]
    assert f"**{faster:.1f}x** the tokens per second of llama.cpp's Q8_0" in readme
    intel, *amd = (
        [
            layer["ahead"] > 1
            for layer in json.loads((results / f"cpu_peers.{machine}.json").read_text())["results"]["layers"]
            if "ahead" in layer
        ]
        for machine in ("x86-64-cpu", "amd-zen-4", "amd-zen-5")
    )
    shown = f"ahead of DeepSparse 1.8 in **{sum(intel)} of {len(intel)}** cases on one thread of an Intel CPU"
    assert f"{shown}, in {sum(amd[0])} and {sum(amd[1])} on two AMD ones" in readme
    performance = (ROOT / "docs" / "performance.md").read_text()  # made from the results, as is checked above
    [row] = [line for line in performance.splitlines() if line.startswith("| llama-7b | prefill | 128x128, 90 % |")]
    assert f"**{float(row.split('|')[6].split('(')[0]):.1f}x** the best dense prefill" in readme
    generated = json.loads((results / "generate.nvidia-h200.json").read_text())["results"]["rows"]
    [ms] = [row["milliseconds"] for row in generated if row["pattern"] == "64x64 90 %"]
    tokens, prompts = (ms["torch.compile"][what] / ms["sparta"][what] for what in ("token", "prompt"))
    assert f"**{tokens:.1f}x** the tokens and **{prompts:.1f}x** the prompts per second" in readme
