"""What this machine can do: :func:`environment`, which ``sparta env`` shows and every benchmark records.

It lists the hardware, the tools and the packages, and from these which kernel back ends are available. A back end that
is not available says why, in words that tell what to install or set.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from sparta.measure.machine import (
    Compiler,
    Cpu,
    Cuda,
    probe_c_compiler,
    probe_compiler,
    probe_cpu,
    probe_cuda,
    probe_memory_gib,
    probe_package,
)
from sparta.tables import table
from sparta.version import __version__

__all__ = ["Backend", "Environment", "environment"]

# Import names, and the distributions they come in.
_PACKAGES = {
    "numpy": "numpy",
    "optuna": "optuna",
    "pydantic": "pydantic",
    "yaml": "PyYAML",
    "safetensors": "safetensors",
    "rich": "rich",
    "typer": "typer",
    "filelock": "filelock",
    "platformdirs": "platformdirs",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "onnx": "onnx",
    "tvm": "apache-tvm",
}
# Below this, neither Triton nor 2:4 tensor cores exist.
_AMPERE = (8, 0)


@dataclass(frozen=True)
class Backend:
    """One way to run kernels, whether it is available here, and why or why not."""

    name: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Environment:
    """A machine as :func:`environment` found it; ``print`` shows it as tables.

    Attributes
    ----------
    sparta, python, torch
        Versions.
    platform
        Operating system and architecture.
    cpu, memory_gib, cuda, compiler
        The hardware and the tools; see :mod:`sparta.measure.machine`.
    torch_threads
        How many threads torch computes with.
    triton
        The version of Triton, ``None`` when it is not installed.
    packages
        Versions of the packages this one can use, ``None`` for those that are not installed.
    backends
        The kernel back ends.
    """

    sparta: str
    python: str
    platform: str
    cpu: Cpu
    memory_gib: float | None
    torch: str
    torch_threads: int
    cuda: Cuda
    compiler: Compiler | None
    triton: str | None
    packages: Mapping[str, str | None]
    backends: tuple[Backend, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold."""
        return cast("dict[str, Any]", _plain(asdict(self)))

    def with_backend(self, name: str, *, available: bool, reason: str) -> Environment:
        """Return the same with one more back end, of which only its own part of the package can tell.

        >>> environment().with_backend("mine", available=True, reason="always").backends[-1].name
        'mine'
        """
        return replace(self, backends=(*self.backends, Backend(name, available, reason)))

    def __str__(self) -> str:
        rows = [[backend.name, "yes" if backend.available else "no", backend.reason] for backend in self.backends]
        packages = [[name, version or "not installed"] for name, version in self.packages.items()]
        return "\n\n".join(
            [
                table(["machine", ""], self._machine_rows()),
                table(["package", "version"], packages),
                table(["kernels", "available", "reason"], rows),
            ]
        )

    def _machine_rows(self) -> list[list[str]]:
        cpu, compiler, cuda = self.cpu, self.compiler, self.cuda
        rows = [
            ["sparta", self.sparta],
            ["python", self.python],
            ["platform", self.platform],
            ["cpu", ", ".join(part for part in (cpu.model, cpu.family, f"{cpu.cores} cores") if part)],
            ["cpu vector ISA", " ".join(cpu.vector_isa) or "unknown"],
            ["memory", "unknown" if self.memory_gib is None else f"{self.memory_gib:.1f} GiB"],
            ["torch", f"{self.torch}, {self.torch_threads} threads, {cpu.torch_isa}"],
            ["C++ compiler", compiler.version if compiler else "none"],
            ["C++ vector ISA", (" ".join(compiler.vector_isa) or "unknown") if compiler else "none"],
            ["CUDA in torch", cuda.version or "none"],
            ["nvcc", cuda.nvcc or "none"],
            ["NVRTC", cuda.nvrtc or "none"],
            ["cuSPARSELt", cuda.cusparselt or "none"],
            ["Triton", self.triton or "none"],
        ]
        for index, gpu in enumerate(cuda.devices):
            major, minor = gpu.compute_capability
            rows.append([f"GPU {index}", f"{gpu.name}, sm_{major}{minor}, {gpu.memory_gib:.1f} GiB"])
        return rows


def environment() -> Environment:
    """Return what this machine can do. Never raises; asks no more than a few programs for their version.

    Examples
    --------
    >>> env = environment()
    >>> env.torch == torch.__version__
    True
    >>> next(backend.available for backend in env.backends if backend.name == "dense (PyTorch)")
    True
    """
    compiler, compiler_reason = probe_compiler()
    cuda = probe_cuda()
    triton = probe_package("triton")
    return Environment(
        sparta=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=probe_cpu(),
        memory_gib=probe_memory_gib(),
        torch=str(torch.__version__),
        torch_threads=torch.get_num_threads(),
        cuda=cuda,
        compiler=compiler,
        triton=triton,
        packages={name: probe_package(distribution) for name, distribution in _PACKAGES.items()},
        backends=(
            _backend("dense (PyTorch)", "", "on cpu and cuda" if cuda.devices else "on cpu"),
            _backend("C++ (compiled at run time)", "" if compiler else compiler_reason, compiler_reason),
            _backend("Triton", _triton_obstacle(triton, cuda), f"triton {triton}"),
            _backend("Triton interpreter", _package_obstacle(triton), "on cpu, with TRITON_INTERPRET=1"),
            _backend("CUDA C++ (NVRTC)", _nvrtc_obstacle(cuda), f"NVRTC {cuda.nvrtc}"),
            _backend("cuSPARSELt 2:4", _cusparselt_obstacle(cuda), f"cuSPARSELt {cuda.cusparselt}"),
        ),
    )


def _backend(name: str, obstacle: str, ready: str) -> Backend:
    """Return a back end that is available if nothing stands in the way."""
    return Backend(name, not obstacle, obstacle or ready)


def _package_obstacle(triton: str | None) -> str:
    return "" if triton else "Triton is not installed: pip install triton"


def _triton_obstacle(triton: str | None, cuda: Cuda) -> str:
    missing = "" if probe_c_compiler() else "Triton builds its launcher with a C compiler: install gcc or set CC"
    return _package_obstacle(triton) or _device_obstacle(cuda, "Triton", _AMPERE) or missing


def _nvrtc_obstacle(cuda: Cuda) -> str:
    missing = "" if cuda.nvrtc else "NVRTC is not found: pip install nvidia-cuda-nvrtc or set CUDA_HOME"
    return _device_obstacle(cuda, "NVRTC", (0, 0)) or missing


def _cusparselt_obstacle(cuda: Cuda) -> str:
    missing = "" if cuda.cusparselt else "this torch is built without cuSPARSELt: install a CUDA build that has it"
    return _device_obstacle(cuda, "2:4 sparsity", _AMPERE) or missing


def _device_obstacle(cuda: Cuda, what: str, capability: tuple[int, int]) -> str:
    """Return why no CUDA device here can run something; empty when one can."""
    if not cuda.devices:
        return cuda.reason
    best = max(cuda.devices, key=lambda gpu: gpu.compute_capability)
    if best.compute_capability >= capability:
        return ""
    wanted, found = (".".join(map(str, version)) for version in (capability, best.compute_capability))
    return f"{what} needs compute capability {wanted}; {best.name} has {found}"


def _plain(value: object) -> object:
    """Return tuples as lists, all the way down."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    return value
