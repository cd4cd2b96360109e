"""``sparta train``: a script that knows nothing of sparsity ends with a sparse model."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import sparta
from sparta import cli

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.body(x)


def main():
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16)
    model, loss_of = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(int(sys.argv[1])):
        for batch, target in loader:
            optimizer.zero_grad()
            loss_of(model(batch), target).backward()
            optimizer.step()
    print("trained", sys.argv)


if __name__ == "__main__":
    main()
"""
RECIPE = """
modifiers:
  - !EpochRangeModifier {start_epoch: 0.0, end_epoch: 4.0}
  - !MagnitudePruningModifier
    {params: ["body.0.weight"], init_sparsity: 0.2, final_sparsity: 0.75, start_epoch: 0.0, end_epoch: 3.0,
     update_frequency: 0.5}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(cli.app, ["train", *map(str, arguments)])


def test_a_script_as_it_is_ends_with_the_zeros_of_the_recipe(folder):
    before = torch.utils.data.DataLoader.__iter__
    result = run("-o", "out.safetensors", "--json", "recipe.yaml", "script.py", "4")
    assert result.exit_code == 0, result.output
    assert "trained ['script.py', '4']" in result.stdout
    facts = json.loads(result.stdout[result.stdout.index("{") :])
    assert facts["model"] == "Net"
    assert facts["epochs"] == 4
    assert facts["zeros"] == pytest.approx(0.75, abs=0.01)
    weight = load_file("out.safetensors")["body.0.weight"]
    assert float((weight == 0).float().mean()) == pytest.approx(0.75, abs=0.01)
    assert set(sparta.Spec.load(facts["spec"])) == {"body.0.weight"}
    assert torch.utils.data.DataLoader.__iter__ is before


def test_an_epoch_may_be_said(folder):
    result = run("--steps-per-epoch", 2, "--json", "recipe.yaml", "script.py", "2")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout[result.stdout.index("{") :])["epochs"] == 4


def test_a_run_that_ends_early_is_told(folder):
    result = run("recipe.yaml", "script.py", "1")
    assert result.exit_code == 0, result.output
    assert "warning: " in result.stderr
    assert "1.00 of 4 epochs" in result.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("print('nothing to train')", [], "trained nothing"),
        (
            SCRIPT.replace("for batch, target in loader", "for batch, target in list(loader.dataset)"),
            ["1"],
            "--steps-per",
        ),
        (SCRIPT.replace("(model(batch)", "(model.eval()(batch)"), ["1"], "training mode"),
        ("no python here", [], "no Python script"),
        (SCRIPT, ["1", "-o", "no/such/folder/x"], None),
    ],
    ids=["no step", "no loader", "eval mode", "syntax", "an option of the script"],
)
def test_what_cannot_be_trained_is_one_line(folder, script, arguments, told):
    (folder / "script.py").write_text(script)
    result = run("recipe.yaml", "script.py", *arguments)
    assert result.exit_code == (0 if told is None else 2), result.output
    assert "Traceback" not in result.output
    assert told is None or told in result.stderr


def test_missing_and_unwritable_files_are_told_before_anything_runs(folder):
    assert run("missing.yaml", "script.py", "1").exit_code == 2
    assert run("recipe.yaml", "missing.py", "1").exit_code == 2
    result = run("-o", "no/such/folder/out.safetensors", "recipe.yaml", "script.py", "1")
    assert result.exit_code == 2
    assert "trained" not in result.stdout


def test_a_script_that_fails_shows_its_own_traceback_and_status_1(folder):
    (folder / "script.py").write_text(SCRIPT.replace("loss_of(model(batch), target)", "loss_of(model(batch), nothing)"))
    result = run("recipe.yaml", "script.py", "1")
    assert result.exit_code == 1
    assert "NameError: name 'nothing' is not defined" in result.stderr
    assert "runpy" not in result.stderr
    assert "around.py" not in result.stderr
    (folder / "script.py").write_text("raise SystemExit('no data')")
    result = run("recipe.yaml", "script.py")
    assert result.exit_code == 1
    assert "no data" in result.stderr


def test_ctrl_c_ends_the_script_and_leaves_nothing_behind(folder):
    (folder / "script.py").write_text(SCRIPT.replace("optimizer.step()", "raise KeyboardInterrupt"))
    before = torch.utils.data.DataLoader.__iter__
    result = run("recipe.yaml", "script.py", "1")
    assert result.exit_code == 130
    assert "Traceback" not in result.output
    assert torch.utils.data.DataLoader.__iter__ is before
