"""Compile the C++ kernels for an instruction set, and keep the libraries in a folder that only the user can write.

:func:`build` returns the path of a library: the one that came with the package, or one compiled now or found in the
cache under a hash of sources, flags and compiler. A library is code that will run in this process, so it is loaded only
from the package or from a folder that no one else can write, and only if it is a plain file of this user's that no one
else can write and its checksum still matches; anything doubtful is compiled again.

Environment: ``SPARTA_CPU_ISA`` forces an instruction set, ``SPARTA_CACHE`` moves the folder, ``CXX`` names a compiler,
and ``SPARTA_CPU_SANITIZE=1`` builds with the address and undefined-behaviour sanitizers (the Python that loads such a
library needs ``LD_PRELOAD`` of the compiler's libasan and libubsan, and ``ASAN_OPTIONS=detect_leaks=0``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from sparta.errors import (
    MissingPackageError,
    NameNotFoundError,
    ValueRangeError,
    did_you_mean,
    message,
)
from sparta.files import private_folder, write_atomic
from sparta.measure.machine import Compiler, probe_compiler, probe_cpu
from sparta.specialize.cpu.flags import ISAS, NEEDS, compiler_flags, intact_library, source_files

__all__ = ["ISAS", "build", "isa_flags", "prebuilt", "prebuilt_state", "runnable_isas"]

SOURCES = Path(__file__).parent / "native"

PREBUILT = Path(__file__).parent / "prebuilt"
_COMPILE_SECONDS, _SANITIZED_SECONDS = 600.0, 3600.0
# What was compiled and could not be written, by its path: the next attempt need not compile it again.
_unwritten: dict[Path, bytes] = {}


def runnable_isas() -> tuple[str, ...]:
    """Return the instruction sets this processor can run, the best first.

    >>> runnable_isas()[-1]
    'portable'
    """
    have = set(_cpu_flags())
    return tuple(isa for isa, needed in NEEDS.items() if have.issuperset(needed))


def chosen_isa(isa: str | None = None) -> str:
    """Return the instruction set to use: the argument, else ``$SPARTA_CPU_ISA``, else the best this processor runs.

    Examples
    --------
    >>> chosen_isa("portable")
    'portable'
    """
    wanted = isa or os.environ.get("SPARTA_CPU_ISA", "").strip()
    if not wanted:
        return runnable_isas()[0]
    if wanted not in ISAS:
        raise NameNotFoundError(did_you_mean(wanted, ISAS, "CPU instruction set"))
    if wanted not in runnable_isas():
        given = f"the instruction set {wanted!r}, which this processor does not have"
        raise ValueRangeError(message(given, ", ".join(runnable_isas()), "unset SPARTA_CPU_ISA to let it be chosen"))
    return wanted


def build(isa: str | None = None, source: str | None = None) -> Path:
    """Return the path of the kernel library for an instruction set: the package's own, or compiled and cached.

    Parameters
    ----------
    isa
        ``'avx512'``, ``'avx2'`` or ``'portable'``. ``None`` means ``$SPARTA_CPU_ISA``, else the best one.
    source
        C++ text to compile instead of the library's own; it may include the library's headers.

    Raises
    ------
    sparta.errors.MissingPackageError
        If there is no C++ compiler, or it fails, or its library cannot be kept, on a full disk for one.

    Examples
    --------
    >>> from sparta.specialize.cpu.toolchain import build
    >>> build("portable").suffix
    '.so'
    """
    wanted = chosen_isa(isa)
    if sys.platform == "win32":
        raise MissingPackageError(
            message("CPU kernels on Windows", "Linux and macOS", "use WSL; until then these layers run dense")
        )
    ready = prebuilt(wanted) if source is None else None
    if ready is not None:
        return ready
    compiler = _compiler()
    flags = isa_flags(wanted)
    folder = private_folder("cpu")
    library = folder / f"{wanted}-{_digest(compiler, flags, source)}.so"
    if _is_intact(library):
        return library
    try:
        # One process at a time; the system frees the lock when a process dies.
        with FileLock(library.with_suffix(".lock"), mode=0o600):
            # Another process may have built it while this one waited.
            if not _is_intact(library):
                code = _unwritten.get(library) or _compile(compiler, flags, source)
                _unwritten[library] = code
                _keep(library, code)
                del _unwritten[library]
    except OSError as error:
        given = f"the CPU kernels cannot be compiled and kept in {folder}: {error.strerror or error}"
        fix = "make room or set SPARTA_CACHE to another folder; until then these layers run dense"
        raise MissingPackageError(message(given, fix=fix)) from error
    return library


def _keep(library: Path, code: bytes) -> None:
    """Write a library and its checksum, for this user alone."""
    # The checksum comes first: a crash in between leaves a mismatch, which is built again.
    for path, data in ((_checksum_file(library), hashlib.sha256(code).hexdigest().encode()), (library, code)):
        write_atomic(path, data)
        path.chmod(0o600)  # whatever the umask is


def sources() -> tuple[Path, ...]:
    """Return the C++ files of the library, in a fixed order."""
    return source_files(SOURCES)


def prebuilt(isa: str | None = None) -> Path | None:
    """Return the library that was compiled when the package was built, or None where there is none that is intact.

    >>> prebuilt("portable") in (None, PREBUILT / "portable.so")
    True
    """
    return None if _sanitizing() else _checked_once(PREBUILT, chosen_isa(isa))


def prebuilt_state() -> tuple[bool, str]:
    """Return whether the kernel library that came with the package is what runs here, and which one or why not.

    >>> isinstance(prebuilt_state()[0], bool)
    True
    """
    isa = chosen_isa()
    found = prebuilt(isa)
    if found is not None:
        return True, f"{isa}: {found}"
    if _sanitizing():
        return False, "SPARTA_CPU_SANITIZE is set, so kernels are compiled with sanitizers"
    if not (PREBUILT / f"{isa}.so").exists():
        return False, f"the package was built without a library for {isa}; kernels are compiled at their first use"
    return False, f"{PREBUILT / f'{isa}.so'} is damaged or of other sources; kernels are compiled at their first use"


@functools.cache
def _checked_once(folder: Path, isa: str) -> Path | None:
    return intact_library(folder, SOURCES, isa)


def _compiler() -> Compiler:
    compiler, reason = _probed_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))
    if compiler is None:
        raise MissingPackageError(
            message(f"CPU kernels cannot be compiled, {reason}", fix="until then these layers run dense")
        )
    return compiler


@functools.lru_cache(maxsize=4)
def _probed_compiler(cxx: str, path: str) -> tuple[Compiler | None, str]:
    """Return the compiler; the arguments are what the probe reads from the environment."""
    del cxx, path
    return probe_compiler()


@functools.cache
def _cpu_flags() -> tuple[str, ...]:
    return probe_cpu().vector_isa


def isa_flags(isa: str) -> tuple[str, ...]:
    """Return what the kernels are compiled with for an instruction set.

    >>> "-shared" in isa_flags("portable")
    True
    """
    return compiler_flags(isa, sanitize=_sanitizing())


def _sanitizing() -> bool:
    return os.environ.get("SPARTA_CPU_SANITIZE", "").strip() not in ("", "0")


def _digest(compiler: Compiler, flags: tuple[str, ...], source: str | None) -> str:
    """Return a hash of everything the library depends on."""
    sha = hashlib.sha256("\0".join((*compiler.command, compiler.version, *flags, source or "")).encode())
    for path in sources():
        sha.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return sha.hexdigest()[:32]


def _compile(compiler: Compiler, flags: tuple[str, ...], source: str | None) -> bytes:
    """Return the library as the compiler makes it; raises OSError where there is no room for what it reads."""
    with tempfile.TemporaryDirectory(prefix="sparta-") as folder:
        output, text = Path(folder) / "kernels.so", SOURCES / "api.cpp"
        if source is not None:
            text = Path(folder) / "kernels.cpp"
            text.write_text(source, encoding="utf-8")
        command = [*compiler.command, *flags, f"-I{SOURCES}", str(text), "-o", str(output)]
        try:
            status, said = _finished(command)
            if status == 0:
                return output.read_bytes()
            reason = "\n".join(said.strip().splitlines()[:20])
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
    given = f"the CPU kernels do not compile with {shlex.join(command)}:\n{reason}\n"
    raise MissingPackageError(message(given, "g++ 10 or newer, or clang++ with OpenMP", "set CXX to such a compiler"))


def _finished(command: list[str]) -> tuple[int, str]:
    """Run a compiler; return its exit status and what it said. One that takes too long ends with all it has started.

    What is loaded before this process, such as a sanitizer, is not for the compiler, which it would slow down.
    """
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with subprocess.Popen(  # noqa: S603 - an argument list, and no shell
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=own,
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=_SANITIZED_SECONDS if _sanitizing() else _COMPILE_SECONDS)
        except BaseException:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_intact(library: Path) -> bool:
    """Tell whether the library is there, is what was written, and can have been written by this user alone."""
    try:
        if not all(_is_own(path) for path in (library, _checksum_file(library))):
            return False
        expected = _checksum_file(library).read_text(encoding="ascii", errors="replace").strip()
        return hashlib.sha256(library.read_bytes()).hexdigest() == expected
    except OSError:
        return False


def _is_own(path: Path) -> bool:
    """Tell whether a path is a plain file, no link, of this user, that no one else can write."""
    status = path.lstat()
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return stat.S_ISREG(status.st_mode) and mine and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
