"""Kernels compiled with the package: built without torch, used without a compiler, never if they are not what they say.

A small script stands for the compiler; what it writes is no library, and is never loaded here.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from sparta.specialize.cpu import device, toolchain
from sparta.specialize.cpu.flags import ISAS, MANIFEST, intact_library, manifest
from sparta.specialize.linear.cpu import CpuLinear
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA

ROOT = Path(__file__).parents[3]
FAKE_COMPILER = '#!/bin/sh\nfor last; do :; done\necho "$@" > "$last"\n'
BUILD = """
import sys
sys.modules["torch"] = None  # an isolated build has none
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture
def tree(tmp_path):
    """The parts of the repository that a build reads."""
    copy = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def built(tree, what, **environment):
    pytest.importorskip("setuptools", "77")
    out = tree.parent / "out"
    out.mkdir()
    command = [sys.executable, "-c", BUILD, what, str(out)]
    names = {**{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX")}, **environment}
    done = subprocess.run(command, cwd=tree, env=names, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel, zipfile.ZipFile(wheel).namelist()


@pytest.fixture
def compiler(tmp_path):
    script = tmp_path / "fake-g++"
    script.write_text(FAKE_COMPILER)
    script.chmod(0o700)
    return str(script)


def test_a_wheel_carries_the_kernels(tree, compiler):
    wheel, names = built(tree, "build_wheel", CXX=compiler)
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert wheel.stem.split("-")[-1] != "any"
    libraries = [name for name in names if name.startswith("sparta/specialize/cpu/prebuilt/")]
    assert f"sparta/specialize/cpu/prebuilt/{MANIFEST}" in libraries
    assert "sparta/specialize/cpu/prebuilt/portable.so" in libraries
    assert any(name.startswith("sparta/specialize/tuning/tables/") for name in names)
    zipfile.ZipFile(wheel).extractall(tree.parent / "site")
    folder = tree.parent / "site" / "sparta" / "specialize" / "cpu"
    assert intact_library(folder / "prebuilt", folder / "native", "portable") == folder / "prebuilt" / "portable.so"


@pytest.mark.parametrize("environment", [{"SPARTA_NO_PREBUILT": "1"}, {"PATH": "/nonexistent"}, {"CXX": "/bin/false"}])
def test_without_a_compiler_that_works_the_build_still_does(tree, environment):
    _, names = built(tree, "build_wheel", **environment)
    assert not [name for name in names if name.endswith(".so")]
    assert "sparta/specialize/cpu/native/api.cpp" in names


def test_an_editable_install_compiles_nothing(tree, compiler):
    _, names = built(tree, "build_editable", CXX=compiler)
    assert not [name for name in names if name.endswith(".so")]
    assert not list(tree.rglob("prebuilt"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of prebuilt libraries, for every instruction set."""
    prebuilt = tmp_path / "prebuilt"
    prebuilt.mkdir()
    libraries = {isa: f"library for {isa}".encode() for isa in ISAS}
    for isa, code in libraries.items():
        (prebuilt / f"{isa}.so").write_bytes(code)
    (prebuilt / MANIFEST).write_bytes(manifest(toolchain.SOURCES, libraries))
    monkeypatch.setattr(toolchain, "PREBUILT", prebuilt)
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARTA_CPU_ISA", raising=False)
    monkeypatch.delenv("SPARTA_CPU_SANITIZE", raising=False)
    return prebuilt


def test_what_came_with_the_package_is_used_and_nothing_is_compiled(folder, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert toolchain.build("portable") == folder / "portable.so"
    spec = linear_spec(TeSA.from_mask(torch.eye(8, dtype=torch.bool)), 4, torch.float32)
    assert "came with the package" in CpuLinear().supports(spec).reason
    assert not device.compiles_here()


def test_sanitizers_and_generated_sources_need_a_build_of_their_own(folder, monkeypatch):
    monkeypatch.setenv("SPARTA_CPU_SANITIZE", "1")
    assert toolchain.prebuilt("portable") is None


def _truncate(folder):
    (folder / "portable.so").write_bytes(b"")


def _remove(folder):
    (folder / "portable.so").unlink()


def _edit(folder):
    said = json.loads((folder / MANIFEST).read_text())
    said["portable"]["made_of"] = "other sources"
    (folder / MANIFEST).write_text(json.dumps(said))


def _garble(folder):
    (folder / MANIFEST).write_bytes(b"\xff{")


def _empty(folder):
    (folder / MANIFEST).write_text("[]")


@pytest.mark.parametrize("damage", [_truncate, _remove, _edit, _garble, _empty])
def test_a_library_that_is_not_what_it_says_is_not_used(folder, damage):
    damage(folder)
    assert toolchain.prebuilt("portable") is None


def test_what_runs_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARTA_CPU_SANITIZE", raising=False)
    monkeypatch.setenv("SPARTA_CPU_ISA", "portable")
    for number, (wanted, says) in enumerate([(False, "built without"), (False, "damaged"), (True, "portable: ")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(toolchain, "PREBUILT", folder)
        if number:
            (folder / "portable.so").write_bytes(b"code")
        if wanted:
            (folder / MANIFEST).write_bytes(manifest(toolchain.SOURCES, {"portable": b"code"}))
        available, reason = toolchain.prebuilt_state()
        assert available is wanted
        assert says in reason
    monkeypatch.setenv("SPARTA_CPU_SANITIZE", "1")
    assert toolchain.prebuilt_state()[0] is False
    assert "sanitizers" in toolchain.prebuilt_state()[1]
