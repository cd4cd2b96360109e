"""Libraries that register operators with PyTorch's dispatcher: compiled against its headers, on demand.

They are for programs that have no Python, and are no part of what is built when the package is installed. Like every
library of ours, one is kept in a folder that only the user can write to, and used only if it is what was written there.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from sparta.errors import MissingPackageError, message
from sparta.files import private_folder, write_atomic
from sparta.measure.machine import probe_compiler

__all__ = ["build_flags", "operator_library"]

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


def operator_library(name: str, source: Path, flags: Sequence[str] = (), includes: Iterable[Path] = ()) -> Path:
    """Return the library of one C++ file, compiled if it is not in the cache.

    Parameters
    ----------
    name
        What the library is called, and the folder of the cache that it lies in.
    flags
        For the compiler, beside those that PyTorch's headers need.
    includes
        Every other file of ours that `source` includes: a change of one compiles the library again.

    Raises
    ------
    sparta.errors.MissingPackageError
        If there is no C++ compiler, or it fails.
    """
    compiler, reason = probe_compiler()
    if compiler is None:
        raise MissingPackageError(message(f"the library {name} cannot be compiled, {reason}"))
    compiled, linked = build_flags()
    command = [*compiler.command, "-O2", "-shared", "-fPIC", *flags, *compiled, str(source), *linked]
    digest = hashlib.sha256("\0".join([*command, compiler.version, torch.__version__]).encode())
    for path in (source, *includes):
        digest.update(path.read_bytes())
    library = private_folder(name) / f"lib{name}-{digest.hexdigest()[:32]}.so"
    if not _is_intact(library):
        code = _compile(name, command)
        write_atomic(library.with_suffix(".sha256"), hashlib.sha256(code).hexdigest().encode())
        write_atomic(library, code)
    return library


def _compile(name: str, command: list[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="sparta-") as folder:
        output = Path(folder) / "library.so"
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
    raise MissingPackageError(message(f"the library {name} does not compile:\n{reason}", "a compiler for C++20"))


def _is_intact(library: Path) -> bool:
    try:
        expected = library.with_suffix(".sha256").read_text(encoding="ascii", errors="replace").strip()
        return hashlib.sha256(library.read_bytes()).hexdigest() == expected
    except OSError:
        return False
