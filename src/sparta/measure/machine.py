"""Probes of the machine: processor, memory, compilers, CUDA, installed packages.

:func:`sparta.testing.environment` puts them together. A probe answers "unknown" or ``None`` rather than raise, imports
no optional package, and runs other programs only by argument list and with a time limit.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = [
    "Compiler",
    "Cpu",
    "Cuda",
    "Gpu",
    "probe_c_compiler",
    "probe_compiler",
    "probe_cpu",
    "probe_cuda",
    "probe_memory_gib",
    "probe_package",
]

_PROGRAM_SECONDS = 2.0
# The flags that matter to kernels, as /proc/cpuinfo names them, narrowest first; and the compiler's macros
# for them.
_VECTOR_ISA = {
    "asimd": "__ARM_NEON",
    "sve": "__ARM_FEATURE_SVE",
    "avx2": "__AVX2__",
    "fma": "__FMA__",
    "avx_vnni": "__AVXVNNI__",
    "avx512f": "__AVX512F__",
    "avx512bw": "__AVX512BW__",
    "avx512vl": "__AVX512VL__",
    "avx512_vnni": "__AVX512VNNI__",
    "avx512_bf16": "__AVX512BF16__",
    "avx512_fp16": "__AVX512FP16__",
    "amx_tile": "__AMX_TILE__",
    "amx_int8": "__AMX_INT8__",
    "amx_bf16": "__AMX_BF16__",
    "amx_fp16": "__AMX_FP16__",
}


@dataclass(frozen=True)
class Cpu:
    """The processor: its name, the cores this process may use, the vector instructions it and torch have.

    Virtual machines give several generations one name ("AMD EPYC"); `family` tells them apart where the system does.
    """

    model: str
    family: str
    cores: int
    vector_isa: tuple[str, ...]
    torch_isa: str


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how to call it, what it says it is, the vector instructions it uses natively."""

    command: tuple[str, ...]
    version: str
    vector_isa: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """A CUDA device."""

    name: str
    compute_capability: tuple[int, int]
    memory_gib: float


@dataclass(frozen=True)
class Cuda:
    """CUDA: its devices or the reason for none, the version torch is built for, tools and libraries."""

    devices: tuple[Gpu, ...]
    reason: str
    version: str | None
    nvcc: str | None
    nvrtc: str | None
    cusparselt: str | None


def probe_cpu() -> Cpu:
    """Return what is known of the processor.

    >>> probe_cpu().cores >= 1
    True
    """
    information = _cpuinfo()
    flags = set((information.get("flags") or information.get("Features") or "").split())
    model = information.get("model name") or platform.processor() or platform.machine() or "unknown"
    numbers = [information.get(field) for field in ("cpu family", "model")]
    return Cpu(
        model=model,
        family=f"family {numbers[0]}, model {numbers[1]}" if all(numbers) else "",
        cores=_usable_cores(),
        vector_isa=tuple(name for name in _VECTOR_ISA if name in flags),
        torch_isa=torch.backends.cpu.get_cpu_capability(),
    )


def probe_memory_gib() -> float | None:
    """Return the size of the main memory in GiB.

    >>> memory = probe_memory_gib()
    >>> memory is None or memory > 0
    True
    """
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (AttributeError, OSError, ValueError):
        return None


def probe_compiler() -> tuple[Compiler | None, str]:
    """Return the C++ compiler, the first that runs of ``$CXX``, g++, clang++ and c++, and why it is that one.

    >>> compiler, reason = probe_compiler()
    >>> bool(reason)
    True
    """
    wanted = os.environ.get("CXX", "").strip()
    for command in [_split(wanted), ["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(command[0]) if command else None
        if path is None:
            continue
        call = (path, *command[1:])
        version = _output([*call, "--version"])
        if version is None:
            continue
        macros = _output([*call, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]) or ""
        defined = set(re.findall(r"^#define (\w+)", macros, re.MULTILINE))
        isa = tuple(name for name, macro in _VECTOR_ISA.items() if macro in defined)
        refused = f"; CXX={wanted!r} does not run" if wanted and command != _split(wanted) else ""
        return Compiler(call, _first_line(version), isa), f"{shlex.join(call)}{refused}"
    refused = f"CXX={wanted!r} does not run; " if wanted else ""
    return None, f"no C++ compiler: {refused}install g++ or set CXX"


def probe_c_compiler() -> str | None:
    """Return the path of the C compiler that Triton would take: ``$CC``, else gcc, else clang.

    >>> path = probe_c_compiler()
    >>> path is None or bool(path)
    True
    """
    wanted = _split(os.environ.get("CC", ""))
    return shutil.which(wanted[0]) if wanted else shutil.which("gcc") or shutil.which("clang")


def probe_cuda() -> Cuda:
    """Return what there is of CUDA; torch is the one that is asked for devices.

    >>> cuda = probe_cuda()
    >>> bool(cuda.devices) or bool(cuda.reason)
    True
    """
    devices, reason = _gpus()
    return Cuda(
        devices=devices,
        reason=reason,
        version=torch.version.cuda,
        nvcc=_nvcc(),
        nvrtc=_nvrtc(),
        cusparselt=_cusparselt(),
    )


def probe_package(name: str) -> str | None:
    """Return the version of an installed distribution, without importing it.

    >>> probe_package("torch") == torch.__version__, probe_package("no-such-package")
    (True, None)
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo() -> dict[str, str]:
    """Return the entries of the first processor in Linux's /proc/cpuinfo; elsewhere nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    first = text.split("\n\n", maxsplit=1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _usable_cores() -> int:
    """Return how many cores this process may run on, which a container may have made fewer than there are."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the CUDA devices, or the reason why there is none."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (), "no CUDA device: this torch is built for the CPU only"
    try:
        # A driver that is too old or asleep is reported as a warning; here it is the reason.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            told = f": {_first_line(str(caught[0].message))}" if caught else ""
            return (), f"no CUDA device{told}"
        return tuple(_gpu(index) for index in range(count)), ""
    except (RuntimeError, AssertionError, OSError) as error:
        return (), f"no CUDA device: {_first_line(str(error))}"


def _gpu(index: int) -> Gpu:
    """Return one CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    capability = (int(properties.major), int(properties.minor))
    return Gpu(str(properties.name), capability, round(properties.total_memory / 2**30, 1))


def _nvcc() -> str | None:
    """Return the release of nvcc, on the path or where CUDA_HOME says."""
    folders = [str(home / "bin") for home in _cuda_homes()]
    path = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders))
    text = _output([path, "--version"]) if path else None
    release = re.search(r"release ([\d.]+)", text or "")
    return release.group(1) if release else None


def _nvrtc() -> str | None:
    """Return the version of NVRTC as a package, or the path of its library in a CUDA installation."""
    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12"):
        version = probe_package(name)
        if version:
            return version
    folders = [Path(torch.__file__).parent / "lib"]
    folders += [home / part for home in _cuda_homes() for part in ("lib64", "lib", "bin")]
    return next((str(path) for folder in folders for path in _libraries(folder, "nvrtc")), None)


def _libraries(folder: Path, name: str) -> Iterable[Path]:
    """Return the shared libraries of that name in a folder, sorted; none when it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if re.match(rf"(lib{name}\.so|{name}64.*\.dll$)", path.name))
    except OSError:
        return []


def _cuda_homes() -> list[Path]:
    """Return where a CUDA installation may be."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    return [Path(home) for home in (*named, "/usr/local/cuda") if home]


def _cusparselt() -> str | None:
    """Return the version of cuSPARSELt that torch carries."""
    try:
        return str(torch.backends.cusparselt.version()) if torch.backends.cusparselt.is_available() else None
    except (RuntimeError, AttributeError, OSError):
        return None


def _output(command: Sequence[str]) -> str | None:
    """Run a program and return what it prints; ``None`` when it fails or takes too long."""
    try:
        done = subprocess.run(  # noqa: S603 - an argument list, and no shell
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROGRAM_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout


def _split(command: str) -> list[str]:
    """Split a command line as a shell would; nothing when its quotes do not close."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _first_line(text: str) -> str:
    """Return the first line that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
