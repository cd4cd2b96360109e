"""The commands around a model: compile, report, bench, prune, inspect, tune; and how each of them fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import sparta
from sparta import cli

FACTORY = """
import torch
from torch import nn
import sparta

def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.75).apply(model)
    return model

def with_inputs():
    return small(), torch.randn(4, 64)

def no_model():
    return 3
"""


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def error_of(result):
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    [line] = [line for line in result.stderr.strip().splitlines() if line.startswith("error: ")]
    return line


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "their_nets.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "their_nets", raising=False)
    return tmp_path


@pytest.fixture
def artifact(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.75).apply(model)
    path = tmp_path / "model.sparta"
    sparta.compile(model, torch.randn(4, 64), tune="off").save(path)
    return path


def test_compile_writes_a_model_that_loads_and_a_page(here):
    result = run("compile", "their_nets:with_inputs", "--tune", "off", "-o", "out.sparta", "--html", "out.html")
    assert result.exit_code == 0, result.output
    assert "verified" in result.stdout
    assert sparta.load("out.sparta")(torch.randn(4, 64)).shape == (4, 8)
    assert (here / "out.html").read_text().startswith("<!doctype html>")


def test_compile_takes_shapes_and_prints_json(here):
    result = run("compile", "their_nets:small", "--input", "4x64", "--tune", "off", "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["layers"]) == 2


def test_a_speed_up_below_the_one_asked_for_is_status_1(here):
    result = run("compile", "their_nets:with_inputs", "--tune", "off", "--fail-under", "1000")
    assert result.exit_code == 1, result.output
    assert "not as asked" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere_at_all:net"], "nowhere_at_all"),
        (["their_nets:nothing"], "nothing"),
        (["their_nets:no_model", "--input", "1x4"], "returned a int"),
        (["their_nets:small"], "example inputs"),
        (["their_nets:small", "--input", "4 by 64"], "4 by 64"),
        (["their_nets:small", "--input", "4x64", "--input", "x=4x64"], "all of one kind"),
        (["missing.folder"], "transformers"),
        (["their_nets:with_inputs", "--tune", "off", "-o", "no/such/folder/out.sparta"], "folder does not exist"),
    ],
)
def test_what_compile_refuses(here, arguments, told):
    assert told in error_of(run("compile", *arguments))


def test_report_as_text_data_and_page(artifact, tmp_path):
    assert "verified" in run("report", artifact).stdout
    assert "break-even" in run("report", artifact, "--full").stdout
    assert "plan" in json.loads(run("report", artifact, "--json").stdout)
    page = tmp_path / "page.html"
    assert run("report", artifact, "--html", page).exit_code == 0
    assert "roof of the machine" in page.read_text() or "Layers" in page.read_text()


def test_report_of_what_is_no_model(tmp_path):
    assert "none.sparta" in error_of(run("report", tmp_path / "none.sparta"))


@pytest.mark.usefixtures("hurried")
def test_bench_beside_eager(here):
    result = run(
        "bench", "their_nets:with_inputs", "--against", "eager", "--batch", "1,2", "--seconds", "0.1", "--json"
    )
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["results"]
    assert (first["batch"], second["batch"]) == (1, 2)
    assert [row["name"] for row in first["rows"]] == ["sparta", "eager"]
    assert all(0 < row["p50"] <= row["p90"] <= row["p99"] for row in first["rows"])


@pytest.mark.usefixtures("hurried")
def test_bench_of_a_file_beside_its_model(here, artifact):
    named = ["--model", "their_nets:with_inputs", "--against", "eager", "--seconds", "0.1"]
    result = run("bench", artifact, *named)
    assert result.exit_code == 0, result.output
    assert "eager" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--against", "egar", "--input", "4x64"], "eager"),
        (["--batch", "one", "--input", "4x64"], "joined by commas"),
        (["--batch", "0", "--input", "4x64"], "1 and more"),
        (["--input", "4x64", "--against", "eager"], "--model"),
        ([], "--input"),
    ],
)
def test_what_bench_refuses(artifact, arguments, told):
    assert told in error_of(run("bench", artifact, *arguments))


class Speaker(nn.Module):
    """A language model without weights, which remembers how much it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def generate(self, prompt, max_new_tokens, min_new_tokens, do_sample):
        assert max_new_tokens == min_new_tokens
        assert not do_sample
        self.asked.append(max_new_tokens)
        return torch.cat([prompt, torch.zeros(len(prompt), max_new_tokens, dtype=prompt.dtype)], 1)


def test_bench_of_a_language_model_counts_tokens(monkeypatch):
    fast, eager = Speaker(), Speaker()
    given = {"sparta": fast, "eager": eager}, {"input_ids": torch.ones(1, 5, dtype=torch.long)}
    monkeypatch.setattr("sparta.cli.bench._given", lambda *_: given)
    options = ["--against", "eager", "--batch", "2", "--tokens", "8", "--seconds", "0.1"]
    [found] = json.loads(run("bench", "any", *options, "--json").stdout)["results"]
    assert (found["batch"], found["prompt"], found["tokens"]) == (2, 5, 8)
    assert [row["name"] for row in found["rows"]] == ["sparta", "eager"]
    assert all(row["first_ms"] > 0 and row["per_second"] > 0 for row in found["rows"])
    assert fast.asked == eager.asked
    assert {1, 8} < {*fast.asked, 2}
    assert "tokens per second" in run("bench", "any", *options).stdout
    assert "allowed: eager" in error_of(run("bench", "any", "--against", "onnxruntime"))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text("{}")
    torch.manual_seed(0)
    save_file({"a.weight": torch.randn(32, 32), "embed.weight": torch.randn(16, 32)}, path / "model-1.safetensors")
    save_file({"b.weight": torch.randn(8, 32), "b.bias": torch.zeros(8)}, path / "model-2.safetensors")
    return path


def test_prune_a_folder_of_shards(folder, tmp_path):
    out = tmp_path / "pruned"
    result = run("prune", folder, "--pattern", "2:4", "-o", out, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["tensors"] == 2
    assert facts["zeros"] == 0.5
    assert (out / "config.json").exists()
    first, second = load_file(out / "model-1.safetensors"), load_file(out / "model-2.safetensors")
    assert sparta.NM(2, 4).holds(first["a.weight"] != 0)
    assert bool((first["embed.weight"] != 0).all())
    assert bool((second["b.bias"] == 0).all())
    assert set(sparta.Spec.load(facts["spec"])) == {"a.weight", "b.weight"}


def test_prune_one_file_by_share(folder, tmp_path):
    out = tmp_path / "one.safetensors"
    source = folder / "model-1.safetensors"
    result = run("prune", source, "--pattern", "4x1", "--sparsity", 0.75, "--include", "a.", "-o", out)
    assert result.exit_code == 0, result.output
    assert int((load_file(out)["a.weight"] == 0).sum()) == 768


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--pattern", "5 of 7"], "pattern"),
        (["--pattern", "4x1", "--sparsity", 90], "[0, 1]"),
        (["--include", "nothing"], "sparta inspect"),
        (["--pattern", "64x64", "--sparsity", 0.5, "--include", "nothing"], "no weight"),
    ],
)
def test_what_prune_refuses(folder, tmp_path, arguments, told):
    assert told in error_of(run("prune", folder, "-o", tmp_path / "out", *arguments))


def test_prune_does_not_write_over_its_source(folder):
    assert "another place" in error_of(run("prune", folder, "-o", folder))


def test_inspect_folders_models_and_files_of_torch(folder, artifact, tmp_path):
    found = json.loads(run("inspect", folder, "--json").stdout)
    assert set(found["tensors"]) == {"a.weight", "embed.weight", "b.weight", "b.bias"}
    assert "compiled by sparta" in run("inspect", artifact).stdout
    saved = tmp_path / "state.pt"
    torch.save({"state_dict": {"fc.weight": torch.eye(4)}}, saved)
    found = json.loads(run("inspect", saved, "--json").stdout)
    assert found["tensors"]["fc.weight"]["density"] == 0.25


def test_inspect_runs_no_code_of_a_file(tmp_path):
    class Bad:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    path = tmp_path / "bad.pt"
    torch.save({"x": Bad()}, path)
    error_of(run("inspect", path))
    assert not (tmp_path / "ran").exists()


def test_tune_lists_and_clears(monkeypatch, tmp_path):
    kernels = Path(os.environ["SPARTA_CACHE"])  # those of this run; its results stay where they are
    if kernels.is_dir():
        shutil.copytree(kernels, tmp_path / "cache", ignore=shutil.ignore_patterns("tuning*", "*.lock"))
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "cache"))
    assert "0 results" in run("tune").stdout
    model = nn.Linear(256, 256).requires_grad_(requires_grad=False)
    sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.9).apply(model)
    sparta.compile(model, torch.randn(8, 256), budget_s=20)
    listed = json.loads(run("tune", "--list", "--json").stdout)
    assert len(listed) == json.loads(run("tune", "--json").stdout)["results"]
    assert "forgot" in run("tune", "--clear").stdout
    assert "no results" in run("tune", "--list").stdout
    assert "0 results" in run("tune").stdout


def test_help_does_not_import_torch():
    code = "import sys; from sparta.cli import app; from typer.main import get_command; get_command(app)"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_ctrl_c_is_no_traceback(here, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparta.cli.sources.model_of", interrupted)
    result = run("compile", "their_nets:with_inputs")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_plan_writes_a_spec(here):
    asked = ["--max-loss", "0.5", "--pattern", "4x1", "--budget", "10", "-o", "plan.spec"]
    result = run("plan", "their_nets:with_inputs", *asked, "--json")
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads(result.stdout), dict)
    sparta.Spec.load("plan.spec")


@pytest.mark.parametrize(
    ("given", "asked"),
    [([], "auto"), (["auto"], "auto"), (["none"], None), (["int8"], ["int8"]), (["int8", "bf16"], ["int8", "bf16"])],
)
def test_plan_takes_several_precisions(here, monkeypatch, given, asked):
    seen = []

    def planned(*_args, precisions, **_more):
        seen.append(precisions)
        raise sparta.errors.SpartaError("enough")

    monkeypatch.setattr(sparta, "plan", planned)
    options = [text for each in given for text in ("--precision", each)]
    assert "enough" in error_of(run("plan", "their_nets:with_inputs", "--speedup", "2", *options))
    assert seen == [asked]


@pytest.mark.parametrize("others", ["auto", "none", "int4"])
def test_plan_refuses_precisions_that_are_none(here, others):
    asked = ["--speedup", "2", "--precision", "int8", "--precision", others]
    assert f"unknown precision '{others}'" in error_of(run("plan", "their_nets:with_inputs", *asked))


def test_what_plan_refuses(here):
    assert "example inputs" in error_of(run("plan", "their_nets:small", "--speedup", "2"))
    assert "speedup" in error_of(run("plan", "their_nets:with_inputs"))


@pytest.mark.slow
@pytest.mark.usefixtures("hurried")
def test_the_demo_says_what_stands_in_for_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("sparta.demo.encoder.found_weights", lambda: None)
    monkeypatch.setattr("sparta.demo.encoder.found_pairs", lambda folder: None)
    monkeypatch.setattr("sparta.demo.encoder._BESIDE", {"eager": "PyTorch"})
    for name, value in {"_BLOCK_STEPS": 1, "_BUDGET_S": 5.0, "_TIMED_S": 0.2}.items():
        monkeypatch.setattr(f"sparta.demo.encoder.{name}", value)
    result = run("demo", "--steps", "1", "-o", tmp_path / "demo", "--json")
    assert result.exit_code == 0, result.output
    assert "random weights stands in" in result.stdout
    assert "no accuracy is claimed" in result.stdout
    facts = json.loads(result.stdout[result.stdout.index("\n{") :])
    assert facts["spearman"] is None
    assert facts["same_in_a_fresh_process"]
    assert (tmp_path / "demo" / "report.html").is_file()


def test_the_demo_reads_real_pairs_and_ranks_with_ties(tmp_path):
    from sparta.demo.sentences import _ranks, found_pairs

    line = "a\tb\tc\td\t{}\tA man sings.\tA man is singing.\n"
    for name in ("sts-train.csv", "sts-test.csv"):
        (tmp_path / name).write_text(line.format(4.5) + line.format(1.0))
    learn, _ = found_pairs(tmp_path)
    assert learn.score.tolist() == [4.5, 1.0]
    assert _ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


@pytest.mark.parametrize("steady", [True, False])
def test_the_demo_claims_no_ratio_of_unsteady_times(monkeypatch, steady):
    from sparta.demo import encoder

    slow = [2.0, 2.0] if steady else [2.0, 40.0]

    def timed(calls, **_):
        assert set(calls) == {"sparta", "PyTorch"}
        times = {"sparta": [1.0] * 40, "PyTorch": slow * 20}
        return {name: SimpleNamespace(samples=times[name], median=times[name][0]) for name in calls}

    def missing(name, model, given):
        if name == "eager":
            return lambda: None
        raise sparta.errors.MissingPackageError(f"{name} is not here")

    monkeypatch.setattr(encoder, "compare", timed)
    monkeypatch.setattr(encoder, "rival", missing)
    said = []
    rows = encoder._beside(nn.Identity(), nn.Identity(), {}, said.append)
    assert [row["name"] for row in rows] == ["sparta", "PyTorch"]
    assert any("without ONNX Runtime" in line for line in said)
    assert rows[1]["ratio"] == (2.0 if steady else None)
    assert ("no ratio is claimed" in encoder._text(rows)) is not steady
