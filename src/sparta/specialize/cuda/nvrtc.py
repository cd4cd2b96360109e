"""Run-time compilation of CUDA C++: source and numbers in, a function that can be launched out.

NVRTC, which comes with every CUDA build of PyTorch, compiles; the driver loads; both are called through ctypes, so
nothing is built when the package is installed. The one idea to know: machine code is cached by the hash of all it
depends on, in a folder that only the user can write to, and is loaded only if it is what was written there.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparta.errors import MissingPackageError, SpartaError, ValueRangeError, message
from sparta.files import private_folder, write_atomic

__all__ = ["Function", "compile_cuda", "load_function", "nvrtc_obstacle", "raw_stream"]

_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def nvrtc_obstacle() -> str:
    """Return why CUDA C++ cannot be compiled here; empty when it can."""
    return "" if _nvrtc() is not None else "NVRTC was not found; it comes with CUDA builds of PyTorch"


def compile_cuda(source: str, numbers: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """Return the machine code of `source` for a GPU of this compute capability, from the cache if it is there.

    Parameters
    ----------
    source
        CUDA C++ that includes nothing.
    numbers
        Preprocessor names and their values.
    """
    library = _nvrtc()
    if library is None:
        raise MissingPackageError(message(nvrtc_obstacle(), fix="install a CUDA build of PyTorch"))
    major, minor = c_int(), c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in sorted(numbers.items())]
    key = "\0".join([source, *options, f"{major.value}.{minor.value}"])
    path = private_folder("cuda") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    code = _cached(path)
    if code is None:
        code = _compile(library, source, options)
        write_atomic(path, hashlib.sha256(code).digest() + code)
    return code


def raw_stream(device: torch.device) -> int:
    """Return the current stream of a device, as the driver knows it."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)  # the public way costs microseconds
    return stream


@dataclass(frozen=True)
class Function:
    """A kernel that is loaded on one device; `shared` is the dynamic shared memory that it is launched with."""

    handle: c_void_p
    name: str
    code: Tensor  # bytes on the CPU
    block: int
    shared: int

    def launch(self, grid: tuple[int, int], argument: ctypes.Structure, device: torch.device) -> None:
        """Start the kernel with one structure as its argument, on the current stream of its device."""
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(grid, argument, device)
            return
        arguments = (c_void_p * 1)(ctypes.addressof(argument))
        failed = _driver().cuLaunchKernel(
            self.handle, grid[0], grid[1], 1, self.block, 1, 1, self.shared, raw_stream(device), arguments, None
        )
        if failed:
            raise SpartaError(message(f"the kernel did not start: {_reason(failed)}"))


def load_function(code: bytes, name: str, block: int, shared: int, device: torch.device) -> Function:
    """Load machine code on a device and return its function `name`, for blocks of `block` threads."""
    module, function = c_void_p(), c_void_p()
    driver = _driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes PyTorch's context current
        for failed in (
            driver.cuModuleLoadData(byref(module), code),
            driver.cuModuleGetFunction(byref(function), module, name.encode()),
        ):
            if failed:
                raise SpartaError(message(f"{name} cannot be loaded: {_reason(failed)}"))
        if driver.cuFuncSetAttribute(function, _MAX_SHARED, shared):
            raise ValueRangeError(message(f"{name} needs {shared} bytes of shared memory, more than the GPU has"))
    return Function(function, name, torch.frombuffer(bytearray(code), dtype=torch.uint8), block, shared)


def _cached(path: Path) -> bytes | None:
    """Return the code in a file if it is what was written there."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def _compile(library: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    program, size = c_void_p(), c_size_t()
    library.nvrtcCreateProgram(byref(program), source.encode(), b"sparta.cu", 0, None, None)
    try:
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            library.nvrtcGetProgramLogSize(program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            text = log.value.decode(errors="replace").strip()
            raise SpartaError(message(f"a CUDA kernel does not compile with {' '.join(options)}:\n{text}"))
        library.nvrtcGetCUBINSize(program, byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """Return NVRTC: the one of the process or the system, else the one that PyTorch was installed with."""
    packages = Path(torch.__file__).parents[1] / "nvidia"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64"
    installed = [str(path) for path in sorted(packages.glob("*/lib/libnvrtc.so.*")) if "builtins" not in path.name]
    for name in (*_NAMES, *installed, *(str(toolkit / name) for name in _NAMES)):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MissingPackageError(message(f"the CUDA driver cannot be loaded: {error}")) from error
    unsigned = [c_uint] * 7
    driver.cuLaunchKernel.argtypes = [c_void_p, *unsigned, c_void_p, c_void_p, c_void_p]
    driver.cuModuleLoadData.argtypes = [c_void_p, c_char_p]
    driver.cuModuleGetFunction.argtypes = [c_void_p, c_void_p, c_char_p]
    driver.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    return driver


def _reason(code: int) -> str:
    text = c_char_p()
    _driver().cuGetErrorString(code, byref(text))
    return text.value.decode() if text.value else f"error {code}"
