"""The command line: what it prints, as tables and as JSON, and how it fails."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sparta import cli
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec
from sparta.testing import block_mask
from sparta.version import __version__


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    weight = torch.rand(64, 96) + 1
    blocks = weight * block_mask((64, 96), (32, 32), 0.5, seed=0)
    halves = torch.tensor([0.0, 1.0, 2.0, 0.0]).repeat(16, 8).to(torch.bfloat16)
    small = torch.tensor([0.5, 0.0, 0.0, 1.0]).to(torch.float8_e4m3fn)
    save_file({"dense": weight, "blocks": blocks, "halves": halves, "small": small, "scalar": torch.tensor(3)}, path)
    return path


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.strip() == f"sparta {__version__}"


def test_env_is_a_table_or_json():
    table = run("env")
    assert table.exit_code == 0
    assert "dense (PyTorch)" in table.stdout
    data = run("env", "--json")
    assert data.exit_code == 0
    found = json.loads(data.stdout)
    assert found["torch"] == torch.__version__
    assert found["backends"][-1]["name"] == "C++ (came with the package)"
    assert found["backends"][-1]["reason"]


def test_inspect_tells_shape_density_and_pattern_of_a_checkpoint(checkpoint):
    result = run("inspect", checkpoint, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["kind"] == "checkpoint"
    assert found["file"] == str(checkpoint)
    tensors = found["tensors"]
    assert set(tensors) == {"dense", "blocks", "halves", "small", "scalar"}
    assert tensors["dense"] == {"shape": [64, 96], "dtype": "float32", "density": 1.0, "pattern": "dense"}
    assert tensors["blocks"]["density"] == 0.5
    assert "32" in tensors["blocks"]["pattern"]
    assert tensors["halves"]["dtype"] == "bfloat16"
    assert tensors["halves"]["density"] == 0.5
    assert tensors["small"]["density"] == 0.5
    assert tensors["scalar"]["shape"] == []


def test_inspect_prints_the_same_as_a_table(checkpoint):
    result = run("inspect", checkpoint)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["tensor", "shape", "dtype", "density", "pattern"]
    assert any(line.split()[:4] == ["blocks", "64×96", "float32", "0.5000"] for line in lines)
    assert lines[-1].startswith("5 tensors")


def test_inspect_shows_a_saved_spec(tmp_path):
    path = tmp_path / "model.spec"
    spec = Spec({"0.weight": TeSA.from_mask(block_mask((8, 8), (4, 4), 0.5, seed=0))})
    spec.save(path)
    assert run("inspect", path).stdout.strip() == spec.table().strip()
    found = json.loads(run("inspect", path, "--json").stdout)
    assert found["kind"] == "spec"
    assert found["tensors"]["0.weight"]["shape"] == [8, 8]


def one_line_error(result):
    """The error of a user: exit status 2, nothing on stdout, one line on stderr, no traceback."""
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_file_that_is_not_there(tmp_path):
    assert "does not exist" in one_line_error(run("inspect", tmp_path / "none.safetensors"))


def test_a_folder(tmp_path):
    assert "is a folder" in one_line_error(run("inspect", tmp_path))


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\xff" * 64])
def test_a_file_of_another_kind(tmp_path, content):
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    assert "cannot be read" in one_line_error(run("inspect", path))


def test_a_truncated_checkpoint(checkpoint):
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    assert "cannot be read" in one_line_error(run("inspect", checkpoint))


def test_a_file_of_ours_of_a_kind_to_come(tmp_path):
    path = tmp_path / "new"
    save_file({"x": torch.ones(1)}, path, {"sparta": "specs"})
    assert "did you mean 'spec'" in one_line_error(run("inspect", path))


def test_an_edited_spec(tmp_path):
    path = tmp_path / "model.spec"
    Spec({"weight": TeSA.from_mask(block_mask((8, 8), (4, 4), 0.5, seed=0))}).save(path)
    path.write_bytes(path.read_bytes().replace(b"weight", b"weighs"))
    assert "checksum" in one_line_error(run("inspect", path))


def test_an_unknown_command():
    result = run("inspekt")
    assert result.exit_code == 2
    assert "inspekt" in result.stderr


def test_the_entry_point_exits_without_a_traceback(tmp_path):
    code = "from sparta.cli import main; main()"
    missing = tmp_path / "none.safetensors"
    result = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(missing)], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "does not exist" in result.stderr


def test_tuning_results_are_exported_and_imported(tmp_path, monkeypatch):
    from sparta.specialize.linear.spec import linear_spec
    from sparta.specialize.tuning.store import Entry, TuningStore

    spec = linear_spec(TeSA.dense((8, 8)), 4, torch.float32)
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "one"))
    TuningStore().put(spec, Entry("dense", {}, 1.0, 1.0))
    assert run("tune").stdout.startswith("1 results in")
    assert run("tune", "--export", tmp_path / "shared.json").exit_code == 0
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "two"))
    assert run("tune").stdout.startswith("0 results in")
    assert "took 1 results" in run("tune", "--import", tmp_path / "shared.json").stdout
    assert TuningStore().get(spec) == Entry("dense", {}, 1.0, 1.0)
    missing = run("tune", "--import", tmp_path / "nothing.json")
    assert missing.exit_code == 2
    assert "export it again" in missing.stderr
