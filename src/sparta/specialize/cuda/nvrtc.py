"""Run-time compilation of CUDA C++: source and numbers in, a function that can be launched out.

NVRTC, which comes with every CUDA build of PyTorch, compiles; the driver loads; both are called through ctypes, so
nothing is built when the package is installed. Machine code is cached by the hash of all it depends on, in a folder
that only the user can write to, and is loaded only if it is what was written there.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparta.errors import MissingPackageError, SpartaError, ValueRangeError, message
from sparta.files import private_folder, write_atomic
from sparta.specialize.cuda.launch_config import launch_config, overlap_attribute

__all__ = [
    "NO_CONTEXT",
    "Function",
    "compile_cuda",
    "compile_native",
    "cuda_driver",
    "current_device",
    "driver_reason",
    "load_function",
    "nvrtc_obstacle",
    "raw_stream",
]

NO_CONTEXT = 201
"""The driver's error for a thread that has not used the GPU before (CUDA_ERROR_INVALID_CONTEXT)."""

_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_NATIVE = Path(__file__).parent / "native"
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def nvrtc_obstacle() -> str:
    """Return why CUDA C++ cannot be compiled here; empty when it can."""
    return "" if _nvrtc() is not None else "NVRTC was not found; it comes with CUDA builds of PyTorch"


def compile_native(
    name: str, numbers: Mapping[str, int], capability: tuple[int, int], *, exactly: bool = False
) -> bytes:
    """Return the machine code of ``native/<name>.cu`` as :func:`compile_cuda` does."""
    return compile_cuda(*_with_headers(_NATIVE / f"{name}.cu"), numbers, capability, exactly=exactly)


def compile_cuda(
    source: str,
    headers: Mapping[str, str],
    numbers: Mapping[str, int],
    capability: tuple[int, int],
    *,
    exactly: bool = False,
) -> bytes:
    """Return the machine code of `source` for a GPU of this compute capability, from the cache if it is there.

    Parameters
    ----------
    source
        CUDA C++.
    headers
        The text of every file that it includes, by the name by which it does.
    numbers
        Preprocessor names and their values.
    exactly
        Whether the source uses instructions that GPUs of this compute capability have and later ones may not.
    """
    library = _nvrtc()
    if library is None:
        raise MissingPackageError(message(nvrtc_obstacle(), fix="install a CUDA build of PyTorch"))
    major, minor = c_int(), c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}{'a' if exactly else ''}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in sorted(numbers.items())]
    texts = [text for name in sorted(headers) for text in (name, headers[name])]
    key = "\0".join([source, *texts, *options, f"{major.value}.{minor.value}"])
    path = private_folder("cuda") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    code = _cached(path)
    if code is None:
        code = _compile(library, source, headers, options)
        write_atomic(path, hashlib.sha256(code).digest() + code)
    return code


def raw_stream(device: torch.device) -> int:
    """Return the current stream of a device, as the driver knows it."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)  # the public way costs microseconds
    return stream


def current_device() -> int:
    """Return the index of the current device, in a process that has used CUDA."""
    index: int = torch._C._cuda_getDevice()  # the public way asks first whether CUDA was used
    return index


@dataclass(frozen=True)
class Function:
    """A kernel that is loaded on one device.

    Attributes
    ----------
    shared
        The dynamic shared memory that it is launched with.
    early
        Whether it is set up while the kernel before it ends; it then waits for that one's results itself.
    """

    handle: c_void_p
    context: c_void_p
    name: str
    code: Tensor  # bytes on the CPU
    block: int
    shared: int
    early: bool = False

    def launch(self, grid: tuple[int, int], argument: ctypes.Structure, device: torch.device) -> None:
        """Start the kernel with one structure as its argument, on the current stream of its device."""
        if device.index != current_device():
            with torch.cuda.device(device):
                self.launch(grid, argument, device)
            return
        arguments = (c_void_p * 1)(ctypes.addressof(argument))
        driver, stream = cuda_driver(), raw_stream(device)
        attribute = overlap_attribute() if self.early else None
        config = launch_config(grid, self.block, self.shared, attribute, stream)
        given = (ctypes.addressof(config), self.handle, arguments, None)
        failed = driver.cuLaunchKernelEx(*given)
        if failed == NO_CONTEXT:  # a thread that has not used the GPU before
            driver.cuCtxSetCurrent(self.context)
            failed = driver.cuLaunchKernelEx(*given)
        if failed:
            raise SpartaError(message(f"the kernel did not start: {driver_reason(failed)}"))


def load_function(
    code: bytes, name: str, block: int, shared: int, device: torch.device, *, early: bool = False
) -> Function:
    """Load machine code on a device and return its function `name`, for blocks of `block` threads."""
    module, function, context = c_void_p(), c_void_p(), c_void_p()
    driver = cuda_driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # PyTorch has a context from here on
        driver.cuCtxGetCurrent(byref(context))
        if not context:  # a thread that has not used the GPU before
            driver.cuDevicePrimaryCtxRetain(byref(context), device.index)
            driver.cuCtxSetCurrent(context)
        for failed in (
            driver.cuModuleLoadData(byref(module), code),
            driver.cuModuleGetFunction(byref(function), module, name.encode()),
        ):
            if failed:
                raise SpartaError(message(f"{name} cannot be loaded: {driver_reason(failed)}"))
        if driver.cuFuncSetAttribute(function, _MAX_SHARED, shared):
            raise ValueRangeError(message(f"{name} needs {shared} bytes of shared memory, more than the GPU has"))
    held = torch.frombuffer(bytearray(code), dtype=torch.uint8)
    return Function(function, context, name, held, block, shared, early)


def _cached(path: Path) -> bytes | None:
    """Return the code in a file if it is what was written there."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def _with_headers(path: Path) -> tuple[str, dict[str, str]]:
    """Return a source and, by name, the headers beside it that it includes."""
    source = path.read_text(encoding="utf-8")
    return source, {name: (path.parent / name).read_text(encoding="utf-8") for name in _INCLUDE.findall(source)}


def _compile(library: ctypes.CDLL, source: str, headers: Mapping[str, str], options: list[str]) -> bytes:
    program, size = c_void_p(), c_size_t()
    names, texts = (
        (c_char_p * len(headers))(*(each.encode() for each in side)) for side in (headers, headers.values())
    )
    library.nvrtcCreateProgram(byref(program), source.encode(), b"sparta.cu", len(headers), texts, names)
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
def cuda_driver() -> ctypes.CDLL:
    """Return the CUDA driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MissingPackageError(message(f"the CUDA driver cannot be loaded: {error}")) from error
    driver.cuModuleLoadData.argtypes = [c_void_p, c_char_p]
    driver.cuModuleGetFunction.argtypes = [c_void_p, c_void_p, c_char_p]
    driver.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    driver.cuLaunchKernelEx.argtypes = [c_void_p] * 4
    return driver


def driver_reason(code: int) -> str:
    """Return what an error of the driver means."""
    text = c_char_p()
    cuda_driver().cuGetErrorString(code, byref(text))
    return text.value.decode() if text.value else f"error {code}"
