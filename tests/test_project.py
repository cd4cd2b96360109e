"""What stands around the code agrees with it: versions, the workflow that runs the tests, and the coverage floor."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_release_is_named_alike_everywhere():
    version = PROJECT["project"]["version"]
    heading = re.search(
        r"^## (\d+\.\d+\.\d+) \((\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert heading.groups() == (version, str(citation["date-released"]))
    assert citation["version"] == version


def test_the_workflow_runs_the_readme_command_on_every_supported_python():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert "make test" in [step.get("run") for step in job["steps"]]
    assert "make test" in (ROOT / "README.md").read_text()


def test_workflows_ask_make_for_targets_that_there_are():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            commands = [step.get("run", "") for step in job["steps"]]
            named = {name for command in commands for name in re.findall(r"^make ([a-z-]+)", command)}
            named |= {command.split()[0] for command in job.get("strategy", {}).get("matrix", {}).get("command", [])}
            assert named <= targets, path.name


def test_hooks_run_the_linters_of_make():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = [hook["entry"].removesuffix(" --force-exclude").removeprefix(".venv/bin/") for hook in hooks]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert entries == ["ruff format", "ruff check", "mypy"]
    assert all(f"$(BIN)/{entry}" in lint for entry in entries)


def test_coverage_has_a_floor_and_make_measures_it():
    assert PROJECT["tool"]["coverage"]["report"]["fail_under"] >= 90
    assert re.search(r"pytest .*--cov\b", (ROOT / "Makefile").read_text())


def test_a_source_distribution_has_all_that_the_tests_read():
    """Those who package it run the tests from it: whatever stands at the top and is not made here is in it."""
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    taken = {name for verb, *names in lines if verb in {"include", "graft"} for name in names}
    by_itself = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "src"}
    made = {line.strip("/\n") for line in (ROOT / ".gitignore").read_text().splitlines()}
    files = {".pre-commit-config.yaml", ".gitignore", ".ci", ".github"}
    files |= {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    kept = {name for name in files if not any(fnmatch(name, pattern) for pattern in made)}
    assert kept - by_itself - {"PKG-INFO", "setup.cfg"} <= taken
