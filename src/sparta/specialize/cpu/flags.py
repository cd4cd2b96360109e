"""What the C++ kernels are compiled with, for each instruction set, and what tells one build from another.

Both the package's build (``setup.py``, where there is no torch) and the toolchain at run time read it. It imports the
standard library alone and is also loaded by path, so it must stay on its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

__all__ = ["COMPILERS", "ISAS", "MANIFEST", "NEEDS", "compiler_flags", "intact_library", "manifest", "source_files"]

# Each instruction set with the processor flags it needs and the compiler flags it is built with; the best first.
NEEDS = {"avx512": ("avx512f", "avx512bw", "avx512vl", "avx2", "fma"), "avx2": ("avx2", "fma"), "portable": ()}
_FLAGS = {
    "avx512": (
        "-DSPARTA_AVX512",
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma", "-mpopcnt"),
        "-mprefer-vector-width=512",
    ),
    "avx2": ("-DSPARTA_AVX2", "-mavx2", "-mfma"),
    "portable": (),
}
ISAS = tuple(NEEDS)
COMPILERS = ("g++", "clang++", "c++")
MANIFEST = "manifest.json"
_OPTIMIZED = ("-O3",)
# Errors end the process at once, so that a test cannot pass over them. Below -O2, a * b + c is rounded twice.
_SANITIZED = ("-O2", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_COMMON = (
    *("-std=c++17", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # One rounding for a * b + c; NaN, inf and -0 keep their meaning.
    *("-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"),
)


def compiler_flags(isa: str, *, sanitize: bool = False) -> tuple[str, ...]:
    """Return what the kernels are compiled with for an instruction set.

    >>> "-O3" in compiler_flags("portable"), "-O3" in compiler_flags("portable", sanitize=True)
    (True, False)
    """
    return (*_COMMON, *(_SANITIZED if sanitize else _OPTIMIZED), *_FLAGS[isa])


def source_files(folder: Path) -> tuple[Path, ...]:
    """Return the C++ files in a folder, in a fixed order."""
    return tuple(sorted(path for path in folder.iterdir() if path.suffix in (".h", ".cpp")))


def manifest(sources: Path, libraries: Mapping[str, bytes]) -> bytes:
    """Return what a folder of prebuilt libraries says about itself: what each is made of, and its checksum.

    Parameters
    ----------
    sources
        The folder of the C++ files.
    libraries
        The libraries by instruction set.
    """
    built = {
        isa: {"made_of": _made_of(sources, isa), "sha256": hashlib.sha256(code).hexdigest()}
        for isa, code in libraries.items()
    }
    return (json.dumps(built, indent=1) + "\n").encode()


def intact_library(folder: Path, sources: Path, isa: str) -> Path | None:
    """Return the prebuilt library of an instruction set, or None: it is not there, damaged, or of other sources.

    >>> intact_library(Path("no/such/folder"), Path("no/sources"), "portable") is None
    True
    """
    try:
        said = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))[isa]
        library = folder / f"{isa}.so"
        whole = hashlib.sha256(library.read_bytes()).hexdigest() == said["sha256"]
        return library if whole and said["made_of"] == _made_of(sources, isa) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _made_of(sources: Path, isa: str) -> str:
    """Return a hash of the sources and the flags."""
    sha = hashlib.sha256("\0".join(compiler_flags(isa)).encode())
    for path in source_files(sources):
        sha.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return sha.hexdigest()
