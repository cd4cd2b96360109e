"""Recipes on the command line: what is made, shown and checked, and how it fails."""

import json

import pytest
from typer.testing import CliRunner

from sparta import cli
from sparta.create import Recipe, recipe_for
from sparta.create.template import LR_KINDS, PRUNING_KINDS


def run(*arguments):
    return CliRunner().invoke(cli.app, ["recipe", *(str(argument) for argument in arguments)])


def printed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def one_line_error(result):
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.yaml"
    recipe_for(variables={"num_epochs": 20, "sparsity": 0.9}).save(path)
    return path


STAGED = """
variables: {num_epochs: 4}
stages:
  prune:
    modifiers:
      - EpochRange: {end_epoch: "${num_epochs}"}
      - MagnitudePruning: {end_epoch: "${num_epochs / 2}", final_sparsity: 0.5}
  quantize:
    after: prune
    modifiers:
      - Quantization: {start_epoch: 1}
"""
STEPS = """
modifiers:
  - EpochRange: {end_epoch: 2}
  - SetLearningRate: {learning_rate: 0.01, start_epoch: 50 steps}
"""


# ---------------------------------------------------------------------- new


def test_without_options_the_recipe_is_the_default_one():
    assert Recipe.from_yaml(printed("new")) == recipe_for()


@pytest.mark.parametrize("kind", [*PRUNING_KINDS, "transfer", "gmp", "True"])
def test_every_kind_of_pruning_is_reached(kind):
    assert Recipe.from_yaml(printed("new", "--pruning", kind)) == recipe_for(None if kind == "none" else kind)


@pytest.mark.parametrize("lr", [*LR_KINDS, "none"])
def test_every_schedule_is_reached(lr):
    assert Recipe.from_yaml(printed("new", "--lr", lr)) == recipe_for(lr=None if lr == "none" else lr)


@pytest.mark.parametrize("quantization", [True, False])
@pytest.mark.parametrize("distillation", [True, False])
def test_quantization_and_distillation_are_switched(quantization, distillation):
    switches = [
        "--quantization" if quantization else "--no-quantization",
        "--distillation" if distillation else "--no-distillation",
    ]
    made = Recipe.from_yaml(printed("new", *switches))
    assert made == recipe_for(quantization=quantization, distillation=distillation)
    kinds = {modifier.kind for modifier in made.modifiers()}
    assert ("quantization" in kinds, "distillation" in kinds) == (quantization, distillation)


def test_values_are_read_as_a_recipe_reads_them(tmp_path):
    path = tmp_path / "made.yaml"
    settings = ["sparsity=0.9", "num_epochs=1e1", "mask_type=[4, 1]", "global_sparsity=false", "init_lr = 0.1"]
    options = [part for setting in settings for part in ("--set", setting)]
    assert "10 epochs" in printed("new", *options, "--out", path)
    variables = {
        "sparsity": 0.9,
        "num_epochs": 10.0,
        "mask_type": [4, 1],
        "global_sparsity": False,
        "init_lr": 0.1,
    }
    assert Recipe.load(path) == recipe_for(variables=variables)


def test_a_value_without_effect_is_warned_of_in_one_line():
    result = run("new", "--pruning", "constant", "--set", "sparsity=0.9")
    assert result.exit_code == 0
    assert Recipe.from_yaml(result.stdout) == recipe_for("constant")
    assert result.stderr.splitlines() == ["warning: the recipe variable sparsity has no effect without pruning."]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--pruning", "magnitud"], "did you mean 'magnitude'"),
        (["--lr", "linea"], "did you mean 'linear'"),
        (["--set", "sparsty=0.9"], "did you mean 'sparsity'"),
        (["--set", "sparsity"], "--set name=value"),
        (["--set", "=0.9"], "--set name=value"),
        (["--set", "sparsity=1.5"], "sparsity is 1.5"),
        (["--set", "sparsity=[0.5"], "not valid YAML"),
        (["--set", "sparsity=0.5", "--set", "sparsity=0.6"], "given twice"),
        (["--set", "target=tensorrt", "--set", "mask_type=block4"], "does not pay"),
        (["--out", "recipe.txt"], "ends in .yaml"),
    ],
)
def test_what_cannot_be_made_says_why(options, reason):
    assert reason in one_line_error(run("new", *options))


# ---------------------------------------------------------------------- show


def test_show_tells_variables_and_windows(file):
    text = printed("show", file)
    lines = [line.split() for line in text.splitlines()]
    assert ["num_pruning_active_epochs", "7.5"] in lines
    assert ["GlobalMagnitudePruning", "0", "7.5"] in lines
    assert ["Quantization", "15", "17.5"] in lines
    assert text.splitlines()[-1] == "4 modifiers, 20 epochs"


def test_an_override_rescales_what_is_shown(file):
    found = json.loads(printed("show", file, "--set", "num_epochs=10", "--json"))
    assert found["file"] == str(file)
    assert found["max_epochs"] == 10
    assert found["variables"]["num_qat_epochs"] == 2
    windows = {one["modifier"]: (one["start"], one["end"]) for one in found["modifiers"]}
    assert windows["GlobalMagnitudePruning"] == (0, 4)
    assert windows["Quantization"] == (8, 9)


def test_yaml_is_the_recipe_with_the_override_in_it(file):
    text = printed("show", file, "--set", "num_epochs=${5 * 2}", "--yaml")
    assert Recipe.from_yaml(text) == Recipe.load(file).override({"num_epochs": "${5 * 2}"})


def test_an_old_recipe_is_shown_in_the_present_form(tmp_path):
    path = tmp_path / "old.md"
    path.write_text("---\nmodifiers:\n  - !EpochRangeModifier {start_epoch: 0.0, end_epoch: 3.0}\n---\n# Old\n")
    assert "EpochRange:" in printed("show", path, "--yaml")
    assert "1 modifier, 3 epochs" in printed("show", path)


def test_stages_are_named_and_lined_up(tmp_path):
    path = tmp_path / "staged.yaml"
    path.write_text(STAGED)
    lines = [line.split() for line in printed("show", path).splitlines()]
    assert ["prune", "MagnitudePruning", "0", "2"] in lines
    assert ["quantize", "Quantization", "5", "-"] in lines


def test_steps_need_to_know_the_steps_of_an_epoch(tmp_path):
    path = tmp_path / "steps.yaml"
    path.write_text(STEPS)
    for command in ("show", "check"):
        assert "steps_per_epoch" in one_line_error(run(command, path))
        assert "2 modifiers, 2 epochs" in printed(command, path, "--steps-per-epoch", 100)
    assert ["SetLearningRate", "0.5", "-"] in [
        line.split() for line in printed("show", path, "--steps-per-epoch", 100).splitlines()
    ]


def test_show_prints_one_thing_at_a_time(file):
    assert "one of the two" in one_line_error(run("show", file, "--yaml", "--json"))


# ---------------------------------------------------------------------- check


def test_check_says_what_a_good_recipe_is(file):
    assert printed("check", file) == f"{file}: 4 modifiers, 20 epochs\n"
    assert printed("check", file, "--set", "num_epochs=1").endswith("1 epoch\n")


def test_a_recipe_without_an_end(tmp_path):
    path = tmp_path / "open.yaml"
    path.write_text("modifiers: [ConstantPruning: {}]")
    assert printed("check", path).endswith("1 modifier, no end of its own\n")
    assert ["ConstantPruning", "at", "once", "-"] in [line.split() for line in printed("show", path).splitlines()]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("modifiers: [EpochRnge: {end_epoch: 1}]", "did you mean 'EpochRange'"),
        ("modifiers: [EpochRange: {end_epoc: 1}]", "did you mean 'end_epoch'"),
        ("modifiers: [EpochRange: {end_epoch: '${epochs}'}]", "epochs"),
        ("variables: {a: '${b}', b: '${a}'}\nmodifiers: []", "circle"),
        ("modifiers: [MagnitudePruning: {end_epoch: 2, final_sparsity: 1.5}]", "1.5"),
        ("modifiers: [", "not valid YAML"),
        ("modifiers: [!UnknownModifier {}]", "Unknown"),
    ],
)
def test_a_bad_recipe_says_why(tmp_path, content, reason):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    for command in ("check", "show"):
        assert reason in one_line_error(run(command, path))


def test_a_file_that_is_not_there(tmp_path):
    assert "cannot read" in one_line_error(run("check", tmp_path / "none.yaml"))
    assert "does not look like a recipe" in one_line_error(run("check", tmp_path / "none.txt"))


def test_a_variable_the_recipe_does_not_have(file):
    assert "did you mean 'num_epochs'" in one_line_error(run("show", file, "--set", "num_epoch=3"))
