"""environment: complete, printable, JSON-able, and clear about what is missing."""

import json
import subprocess
import warnings

import pytest
import torch

from sparta.measure import Environment, capabilities, environment, machine
from sparta.measure.machine import Cuda, Gpu, probe_compiler, probe_cpu, probe_cuda, probe_memory_gib, probe_package

BACKENDS = [
    "dense (PyTorch)",
    "C++ (compiled at run time)",
    "Triton",
    "Triton interpreter",
    "CUDA C++ (NVRTC)",
    "cuSPARSELt 2:4",
]
H200 = Gpu("H200", (9, 0), 139.7)
PASCAL = Gpu("P100", (6, 0), 16.0)


def cuda(*devices, reason="no CUDA device", nvrtc="13.0", cusparselt="800"):
    return Cuda(devices, "" if devices else reason, "13.0", "13.0", nvrtc, cusparselt)


def backend(name):
    return next(found for found in environment().backends if found.name == name)


def script(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_everything_is_there_and_json_can_hold_it():
    plain = json.loads(json.dumps(environment().to_dict(), allow_nan=False))
    assert list(plain) == list(Environment.__dataclass_fields__)
    assert [entry["name"] for entry in plain["backends"]] == BACKENDS
    assert all(entry["reason"] for entry in plain["backends"])
    assert plain["cpu"]["cores"] >= 1
    assert plain["torch"] == torch.__version__
    expected = (
        "numpy optuna pydantic yaml safetensors rich typer filelock platformdirs transformers accelerate lightning "
        "onnx tvm"
    )
    assert list(plain["packages"]) == expected.split()
    assert plain["packages"]["numpy"]


def test_it_prints_all_of_it():
    text = str(environment())
    for word in [*BACKENDS, "C++ compiler", "memory", "numpy", torch.__version__]:
        assert word in text
    assert "\x1b" not in text


def test_packages_are_not_imported_to_be_found(monkeypatch):
    import builtins

    original = builtins.__import__

    def guard(name, *args, **kwargs):
        assert name.partition(".")[0] not in {"optuna", "triton", "rich", "transformers"}
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guard)
    assert environment().packages["optuna"] == probe_package("optuna")


def test_without_a_compiler_the_reason_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert environment().compiler is None
    found = backend("C++ (compiled at run time)")
    assert not found.available
    assert found.reason == "no C++ compiler: install g++ or set CXX"


def test_a_cxx_that_does_not_run_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert probe_compiler() == (None, "no C++ compiler: CXX='/no/such/compiler' does not run; install g++ or set CXX")
    other = script(tmp_path, "c++", "echo other compiler 1.0")
    compiler, reason = probe_compiler()
    assert compiler.command == (str(other),)
    assert reason == f"{other}; CXX='/no/such/compiler' does not run"


def test_cxx_comes_first_with_its_arguments(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    mine = script(
        tmp_path, "mine", 'if [ "$2" = -march=native ]; then echo "#define __AVX2__ 1"; else echo "my $1"; fi'
    )
    monkeypatch.setenv("CXX", "mine --flag")
    compiler, reason = probe_compiler()
    assert compiler.command == (str(mine), "--flag")
    assert compiler.version == "my --flag"
    assert compiler.vector_isa == ("avx2",)
    assert reason == f"{mine} --flag"


@pytest.mark.parametrize("body", ["exit 1", "exec sleep 60"])
def test_a_compiler_that_fails_or_hangs_is_passed_over(monkeypatch, tmp_path, body):
    monkeypatch.setattr(machine, "_PROGRAM_SECONDS", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    script(tmp_path, "g++", body)
    good = script(tmp_path, "clang++", "echo clang 99")
    monkeypatch.setenv("CXX", "'unclosed")
    compiler, _ = probe_compiler()
    assert compiler.command == (str(good),)


def test_without_triton_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setattr(capabilities, "probe_package", lambda name: None)
    assert environment().triton is None
    for name in ("Triton", "Triton interpreter"):
        assert not backend(name).available
        assert "pip install triton" in backend(name).reason


def test_triton_needs_a_device_the_interpreter_does_not(monkeypatch):
    monkeypatch.setattr(capabilities, "probe_package", lambda name: "3.0")
    monkeypatch.setattr(capabilities, "probe_cuda", lambda: cuda(reason="no CUDA device: gone"))
    assert backend("Triton").reason == "no CUDA device: gone"
    assert backend("CUDA C++ (NVRTC)").reason == "no CUDA device: gone"
    assert backend("cuSPARSELt 2:4").reason == "no CUDA device: gone"
    assert backend("dense (PyTorch)").reason == "on cpu"
    assert backend("Triton interpreter").available
    assert not backend("Triton").available


def test_with_a_recent_device_everything_is_available(monkeypatch):
    monkeypatch.setattr(capabilities, "probe_package", lambda name: "3.0")
    monkeypatch.setattr(capabilities, "probe_c_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(capabilities, "probe_cuda", lambda: cuda(PASCAL, H200))
    for name in ("dense (PyTorch)", "Triton", "CUDA C++ (NVRTC)", "cuSPARSELt 2:4"):
        assert backend(name).available
    assert "H200, sm_90, 139.7 GiB" in str(environment())
    assert backend("dense (PyTorch)").reason == "on cpu and cuda"


def test_an_old_device_or_a_missing_library_is_the_reason(monkeypatch):
    monkeypatch.setattr(capabilities, "probe_package", lambda name: "3.0")
    monkeypatch.setattr(capabilities, "probe_cuda", lambda: cuda(PASCAL))
    assert backend("Triton").reason == "Triton needs compute capability 8.0; P100 has 6.0"
    assert backend("cuSPARSELt 2:4").reason == "2:4 sparsity needs compute capability 8.0; P100 has 6.0"
    assert backend("CUDA C++ (NVRTC)").available
    monkeypatch.setattr(capabilities, "probe_cuda", lambda: cuda(H200, nvrtc=None, cusparselt=None))
    assert "set CUDA_HOME" in backend("CUDA C++ (NVRTC)").reason
    assert "without cuSPARSELt" in backend("cuSPARSELt 2:4").reason
    monkeypatch.setattr(capabilities, "probe_c_compiler", lambda: None)
    assert "set CC" in backend("Triton").reason


def test_c_compilers_as_triton_finds_them(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert machine.probe_c_compiler() is None
    clang = script(tmp_path, "clang", "true")
    assert machine.probe_c_compiler() == str(clang)
    monkeypatch.setenv("CC", "nothing")
    assert machine.probe_c_compiler() is None


class TestCuda:
    def pretend(self, monkeypatch, available, count=1, properties=None):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    def test_devices_are_listed(self, monkeypatch):
        class Properties:
            name, major, minor, total_memory = "Some GPU", 8, 6, 24 * 2**30

        self.pretend(monkeypatch, lambda: True, 2, lambda index: Properties)
        assert probe_cuda().devices == (Gpu("Some GPU", (8, 6), 24.0),) * 2

    def test_a_warning_of_the_driver_is_the_reason(self, monkeypatch):
        def warn():
            warnings.warn("the driver is too old\nupdate it", stacklevel=1)
            return False

        self.pretend(monkeypatch, warn)
        assert probe_cuda().reason == "no CUDA device: the driver is too old"

    def test_an_error_of_the_driver_is_the_reason(self, monkeypatch):
        def fail(index):
            raise RuntimeError("CUDA is unwell")

        self.pretend(monkeypatch, lambda: True, 1, fail)
        assert probe_cuda().devices == ()
        assert probe_cuda().reason == "no CUDA device: CUDA is unwell"

    def test_a_cpu_build_says_so(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", None)
        assert "built for the CPU only" in probe_cuda().reason

    def test_tools_of_an_installation_are_found(self, monkeypatch, tmp_path):
        monkeypatch.setattr(machine, "probe_package", lambda name: None)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        monkeypatch.setenv("PATH", "/no/such/folder")
        for folder in ("bin", "lib64"):
            (tmp_path / folder).mkdir()
        script(tmp_path / "bin", "nvcc", "echo Cuda compilation tools, release 12.9, V12.9.1")
        (tmp_path / "lib64" / "libnvrtc.so.12").touch()
        (tmp_path / "lib64" / "libnvrtc-builtins.so.12").touch()
        found = probe_cuda()
        assert found.nvcc == "12.9"
        assert found.nvrtc == str(tmp_path / "lib64" / "libnvrtc.so.12")

    def test_cusparselt_that_raises_is_absent(self, monkeypatch):
        def fail():
            raise RuntimeError

        monkeypatch.setattr(torch.backends.cusparselt, "is_available", fail)
        assert probe_cuda().cusparselt is None


def test_a_machine_without_proc_or_sysconf(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "Path", lambda *parts: tmp_path / "missing")
    monkeypatch.setattr(machine.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))
    monkeypatch.delattr(machine.os, "sched_getaffinity", raising=False)
    assert probe_cpu().vector_isa == ()
    assert probe_cpu().model
    assert probe_cpu().cores >= 1
    assert probe_memory_gib() is None
    assert str(Environment(**{**vars(environment()), "memory_gib": None})).count("unknown") >= 1


def test_programs_run_without_a_shell(monkeypatch):
    calls = []
    original = subprocess.run

    def watch(command, **options):
        calls.append((command, options))
        return original(command, **options)

    monkeypatch.setattr(subprocess, "run", watch)
    environment()
    assert all(isinstance(command, list) and "shell" not in options for command, options in calls)
    assert all(options["timeout"] <= 2 for _, options in calls)
