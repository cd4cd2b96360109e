"""Build of the package: where there is a C++ compiler, the CPU kernels are compiled into it.

Everything else is in pyproject.toml. A build must work without torch and without a compiler; what
cannot be compiled here is compiled on the user's machine at first use, or runs dense.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CPU = Path(__file__).parent / "src" / "sparta" / "specialize" / "cpu"
PREBUILT = Path("sparta", "specialize", "cpu", "prebuilt")
# Up to which minor version of GLIBCXX_3.4 distributions with this glibc, or a newer one, have it.
LIBSTDCXX = ((19, (2, 17)), (22, (2, 24)), (24, (2, 28)), (28, (2, 31)), (29, (2, 34)), (30, (2, 35)), (33, (2, 39)))


def load_flags() -> ModuleType:
    """Return the module that says how kernels are compiled, without importing the package (and torch with it)."""
    loader = SourceFileLoader("sparta_cpu_flags", str(CPU / "flags.py"))
    module = ModuleType(loader.name)
    loader.exec_module(module)
    return module


def find_compiler(names: tuple[str, ...]) -> list[str] | None:
    """Return the command of the C++ compiler, or None; ``SPARTA_NO_PREBUILT=1`` says to look for none."""
    if os.environ.get("SPARTA_NO_PREBUILT", "").strip() not in ("", "0") or sys.platform == "win32":
        return None
    for command in [shlex.split(os.environ.get("CXX", "")), *([name] for name in names)]:
        path = shutil.which(command[0]) if command else None
        if path is not None:
            return [path, *command[1:]]
    return None


def compiled(compiler: list[str], flags: tuple[str, ...], native: Path) -> bytes | None:
    """Return the library that the compiler makes of the kernels, or None where it cannot."""
    with tempfile.TemporaryDirectory(prefix="sparta-") as folder:
        output = Path(folder) / "kernels.so"
        command = [*compiler, *flags, f"-I{native}", str(native / "api.cpp"), "-o", str(output)]
        try:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=1200)  # noqa: S603 - no shell
            return output.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"the CPU kernels are left to the user's compiler: {error}\n")
            return None


def oldest_glibc(code: bytes) -> tuple[int, int]:
    """Return the oldest release of glibc that a library runs with, or of the distribution that has its libstdc++."""
    needs = [(int(a), int(b)) for a, b in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", code)]
    versions = [int(each) for each in re.findall(rb"\0GLIBCXX_3\.4\.(\d+)", code)]
    needs += [next((glibc for most, glibc in LIBSTDCXX if each <= most), LIBSTDCXX[-1][1]) for each in versions]
    return max([(2, 17), *needs])


class BuildWithKernels(build_py):
    """Copies the modules, then adds the libraries; an editable install compiles at first use instead."""

    def run(self) -> None:
        """Build."""
        super().run()
        flags = load_flags()
        compiler = None if self.editable_mode else find_compiler(flags.COMPILERS)
        if compiler is None:
            return
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        isas = flags.ISAS if x86 else ("portable",)
        native = Path(self.build_lib) / PREBUILT.parent / "native"  # those that go into the package
        built = {isa: compiled(compiler, flags.compiler_flags(isa), native) for isa in isas}
        libraries = {isa: code for isa, code in built.items() if code is not None}
        folder = Path(self.build_lib) / PREBUILT
        folder.mkdir(parents=True, exist_ok=True)
        for isa, code in libraries.items():
            (folder / f"{isa}.so").write_bytes(code)
        (folder / flags.MANIFEST).write_bytes(flags.manifest(native, libraries))


class MaybeNative(Distribution):
    """The package: for one platform where libraries go into it, for any where none do."""

    def has_ext_modules(self) -> bool:
        """Tell whether something in it is machine code."""
        return find_compiler(load_flags().COMPILERS) is not None


class PlatformWheel(bdist_wheel):
    """A wheel for every Python 3 and every Linux whose glibc is new enough: nothing else in the libraries matters.

    They are linked against the system's libgomp.so.1, of which torch has loaded its own copy by then, so that there is
    one OpenMP runtime in a process: it must not be put into the wheel.
    """

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag."""
        system = super().get_tag()[2]
        built = list((Path(self.get_finalized_command("build").build_lib) / PREBUILT).glob("*.so"))  # type: ignore[attr-defined]
        if built and system.startswith("linux_"):
            major, minor = max(oldest_glibc(path.read_bytes()) for path in built)
            system = f"manylinux_{major}_{minor}_{system.removeprefix('linux_')}"
        return ("py3", "none", system)


setup(distclass=MaybeNative, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
