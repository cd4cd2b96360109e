"""Ahead of time: a compiled model as a package that a C++ program runs without Python.

:func:`package` hands the combined graph to AOTInductor, with our kernels as C++ operators; :func:`library_path` is the
shared library of those operators, which the program loads first. Packed operands are constants of the package, so the
two files are all that a program needs beside libtorch.
"""

from sparta.compiler.aot.library import library_path
from sparta.compiler.aot.package import package
from sparta.specialize.runtime.cpp_library import build_flags

__all__ = ["build_flags", "library_path", "package"]
