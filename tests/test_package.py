"""What the package is made of: a wheel has every file, and the dependencies are those that the code imports."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "sparta"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"yaml": "pyyaml", "tvm": "apache-tvm"}
NOT_IMPORTED = {
    "accelerate",
    "onnx",
    "onnxscript",
}  # the Trainer of transformers needs the first, PyTorch's exporter the others


def test_a_wheel_has_every_file_of_the_package(tmp_path):
    pytest.importorskip("setuptools", "77")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "prebuilt"))
    files = {p.relative_to(tree / "src").as_posix() for p in (tree / "src").rglob("*") if p.is_file()}
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(tree)]
    environment = {**os.environ, "SPARTA_NO_PREBUILT": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"sparta/compiler/aot/native/ops.cpp", "sparta/specialize/cpu/native/api.cpp"} <= files
    assert sorted(files - names) == []


def imported_packages():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.partition(".")[0]


def declared(requirements):
    names = (re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower() for requirement in requirements)
    return {name for name in names if name != "sparta-torch"}


def test_every_dependency_is_imported_and_every_import_is_a_dependency():
    found = {DISTRIBUTIONS.get(name, name) for name in imported_packages() if name not in sys.stdlib_module_names}
    found -= {"sparta"}
    extras = PROJECT["optional-dependencies"]
    needed = declared(PROJECT["dependencies"])
    optional = set().union(*(declared(names) for extra, names in extras.items() if extra != "dev"))
    everything = needed | optional | declared(extras["dev"])
    assert sorted(found - everything) == []
    assert sorted(needed - found) == []
    assert sorted(optional - found - NOT_IMPORTED) == []


def test_every_public_name_is_reached_without_another_import():
    code = (
        "import inspect, sparta; found = {name: getattr(sparta, name) for name in sparta.__all__}; "
        "print(inspect.ismodule(sparta.specialize), inspect.isfunction(sparta.propagate), len(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["True", "True"]
