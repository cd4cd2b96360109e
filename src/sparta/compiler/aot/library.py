"""The operator library: our CPU kernels registered with PyTorch's dispatcher, compiled on demand.

It needs PyTorch's headers, so it is not part of the kernel library that modules load; it is built once for a processor
and a version of PyTorch. The one idea to know: like every library of ours it is kept in a folder that only the user can
write to, and used only if it is what was written there.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparta.errors import MissingPackageError, message
from sparta.files import private_folder, write_atomic
from sparta.specialize.cpu.toolchain import SOURCES, chosen_isa, isa_flags, sources
from sparta.testing.machine import probe_compiler

__all__ = ["build_flags", "library_path", "load_operators"]

_OPERATORS = Path(__file__).parent / "native" / "ops.cpp"
_SECONDS = 900.0


def build_flags() -> tuple[list[str], list[str]]:
    """Return what a C++ program that uses PyTorch is compiled with, and what it is linked with.

    >>> compile_flags, link_flags = build_flags()
    >>> "-ltorch_cpu" in link_flags
    True
    """
    root = Path(torch.__file__).parent
    include = root / "include"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    compiled = ["-std=c++20", f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    linked = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    return [*compiled, f"-D_GLIBCXX_USE_CXX11_ABI={abi}"], linked


def library_path() -> Path:
    """Return the operator library for this processor and version of PyTorch, compiled if it is not in the cache.

    Raises
    ------
    sparta.errors.MissingPackageError
        If there is no C++ compiler, or it fails.
    """
    compiler, reason = probe_compiler()
    if compiler is None:
        raise MissingPackageError(message(f"the operator library cannot be compiled, {reason}"))
    compiled, linked = build_flags()
    isa = [flag for flag in isa_flags(chosen_isa()) if not flag.startswith("-std=")]
    command = [*compiler.command, "-O2", *isa, *compiled, f"-I{SOURCES}", str(_OPERATORS), *linked]
    digest = hashlib.sha256("\0".join([*command, compiler.version, torch.__version__]).encode())
    for path in (_OPERATORS, *sources()):
        digest.update(path.read_bytes())
    library = private_folder("aot") / f"libsparta_ops-{digest.hexdigest()[:32]}.so"
    if not _is_intact(library):
        code = _compile(command)
        write_atomic(library.with_suffix(".sha256"), hashlib.sha256(code).hexdigest().encode())
        write_atomic(library, code)
    return library


@functools.cache
def load_operators() -> Path:
    """Load the operators into this process and tell `torch.export` the shapes they return."""
    path = library_path()
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    torch.library.register_fake("sparta_aot::linear", _linear_shape)
    torch.library.register_fake("sparta_aot::conv2d", _conv_shape)
    torch.library.register_fake("sparta_aot::int8_linear", _int8_shape)
    return path


def _linear_shape(
    x: Tensor,
    values: Tensor,
    arrays: Sequence[Tensor],
    numbers: Sequence[int],
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    del values, arrays, bias, residual
    return x.new_empty(x.shape[0], numbers[1])


def _conv_shape(
    x: Tensor,
    values: Tensor,
    arrays: Sequence[Tensor],
    numbers: Sequence[int],
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    del values, arrays, bias, residual
    return x.new_empty(x.shape[0], numbers[0], *numbers[10:12])


def _int8_shape(
    x: Tensor, operands: Sequence[Tensor], arrays: Sequence[Tensor], numbers: Sequence[int], offset: Tensor | None
) -> Tensor:
    del operands, arrays, offset
    return x.new_empty(x.shape[0], numbers[0], dtype=(torch.float32, torch.int8, torch.uint8)[numbers[8]])


def _compile(command: list[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="sparta-") as folder:
        output = Path(folder) / "ops.so"
        try:
            done = subprocess.run(  # noqa: S603 - an argument list, and no shell
                [*command, "-o", str(output)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=_SECONDS, check=False,
            )  # fmt: skip
            if done.returncode == 0:
                return output.read_bytes()
            reason = "\n".join(done.stderr.strip().splitlines()[:20])
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
    raise MissingPackageError(message(f"the operator library does not compile:\n{reason}", "a compiler for C++20"))


def _is_intact(library: Path) -> bool:
    try:
        expected = library.with_suffix(".sha256").read_text(encoding="ascii", errors="replace").strip()
        return hashlib.sha256(library.read_bytes()).hexdigest() == expected
    except OSError:
        return False
