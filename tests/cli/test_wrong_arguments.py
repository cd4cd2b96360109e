"""Whatever a person types, every command ends with a line and a status, never with a traceback.

All commands are walked: each argument and each option that takes a value gets what it does not take, while the others
are as they should be.
"""

import inspect

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from sparta import cli

RECIPE = "modifiers:\n  - !ConstantPruningModifier {start_epoch: 0.0, end_epoch: 2.0, params: __ALL_PRUNABLE__}\n"


def commands():
    """Return every command by its words, groups opened."""
    found, waiting = {}, [((), typer.main.get_command(cli.app))]
    while waiting:
        words, command = waiting.pop()
        if hasattr(command, "commands"):
            waiting += [((*words, name), each) for name, each in command.commands.items()]
        else:
            found[words] = command
    return found


COMMANDS = commands()
ARGUMENTS = {
    words: [each for each in command.params if each.param_type_name == "argument"]
    for words, command in COMMANDS.items()
}
TAKING_A_VALUE = [
    (words, option)
    for words, command in COMMANDS.items()
    for option in command.params
    if option.param_type_name == "option" and not getattr(option, "is_flag", False)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of good and bad files, in which commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a folder").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    (tmp_path / "text.py").write_text("no model = here")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    save_file({"weight": torch.eye(8)}, tmp_path / "good.safetensors")
    (tmp_path / "short.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:-9])
    (tmp_path / "good.yaml").write_text(RECIPE)
    return tmp_path


FILES = ["missing", "", "a folder", "empty", "bytes", "text.py", "deep.json", "short.safetensors", "x" * 5000]
VALUES = ["", "a folder", "bytes", "x" * 5000, "-1", "nan", "=", "text.py:no_such"]
PLAIN = {"recipe": "good.yaml", "prune": "good.safetensors", "inspect": "good.safetensors"}
REQUIRED = {("prune",): {"out": ("--out", "pruned")}, ("demo",): {"weights": ("--weights", "missing")}}


def ended(words, *arguments):
    """Run a command; return its status, after a look at how it ended."""
    result = CliRunner().invoke(cli.app, [*words, *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, repr(result.exception))
    assert "Traceback" not in result.output
    assert result.exit_code in (0, 1, 2), (arguments, result.output)
    return result.exit_code


@pytest.mark.parametrize("words", [words for words, arguments in ARGUMENTS.items() if arguments], ids=" ".join)
def test_no_command_takes_a_bad_file(words, folder):
    count = len(ARGUMENTS[words])
    for name in FILES:
        rest = [text for pair in REQUIRED.get(words, {}).values() for text in pair]
        assert ended(words, *[name] * count, *rest) == 2, name


@pytest.mark.parametrize(
    ("words", "option"), TAKING_A_VALUE, ids=[f"{' '.join(words)} {option.opts[0]}" for words, option in TAKING_A_VALUE]
)
def test_no_option_ends_in_a_traceback(words, option, folder):
    plain = PLAIN.get(words[0], "missing")  # what compiles is not made for each of many wrong options
    rest = [text for name, pair in REQUIRED.get(words, {}).items() if name != option.name for text in pair]
    for value in VALUES:
        ended(words, *[plain] * len(ARGUMENTS[words]), f"{option.opts[0]}={value}", *rest)


def test_too_few_and_too_many(folder):
    for words, arguments in ARGUMENTS.items():
        if arguments:
            assert ended(words) == 2
        assert ended(words, *["missing"] * (len(arguments) + 1)) == 2
        assert ended(words, "--no-such-option") == 2


def test_the_walk_sees_all_commands():
    assert {words[0] for words in COMMANDS} >= {
        "compile",
        "bench",
        "env",
        "inspect",
        "prune",
        "report",
        "tune",
        "recipe",
    }
    assert all(inspect.isfunction(command.callback) for command in COMMANDS.values())
    assert len(TAKING_A_VALUE) > 15


GOOD = {
    ("env",): [],
    ("inspect",): ["good.safetensors"],
    ("prune",): ["good.safetensors", "--out", "pruned.safetensors"],
    ("tune",): [],
    ("recipe", "new"): [],
    ("recipe", "show"): ["good.yaml"],
    ("recipe", "check"): ["good.yaml"],
}
MODEL = {("compile",): [], ("bench",): [], ("plan",): ["--speedup", "2"]}


@pytest.mark.parametrize("words", GOOD, ids=" ".join)
def test_ctrl_c_at_the_output_is_a_line(words, folder, monkeypatch):
    def interrupted(*_args, err=False, **_options):
        if not err:
            raise KeyboardInterrupt

    monkeypatch.setattr(typer, "echo", interrupted)
    result = CliRunner().invoke(cli.app, [*words, *GOOD[words]])
    assert result.exit_code == 130, result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("words", MODEL, ids=" ".join)
def test_ctrl_c_while_a_model_is_made_is_a_line(words, folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    for name in ("model_of", "model_and_data"):
        monkeypatch.setattr(f"sparta.cli.sources.{name}", interrupted)
    result = CliRunner().invoke(cli.app, [*words, "any:factory", *MODEL[words]])
    assert result.exit_code == 130, result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("words", [words for words in GOOD if words in {("prune",), ("recipe", "new")}], ids=" ".join)
def test_what_cannot_be_written_is_a_line(words, folder):
    (folder / "a file").write_text("")
    for out in ("no such folder/out", "a file/out", "a folder"):
        given = [each for each in GOOD[words] if each not in ("--out", "pruned.safetensors")]
        result = CliRunner().invoke(cli.app, [*words, *given, "--out", out])
        assert result.exit_code == 2, (out, result.output)
        assert "Traceback" not in result.output
        assert "error: " in result.stderr


def test_every_command_is_interrupted_somewhere():
    elsewhere = {("train",), ("demo",), ("report",)}  # in files of their own, or with a model to read first
    assert set(COMMANDS) == {*GOOD, *MODEL} | elsewhere
