"""CPU kernels: C++ templates compiled for this machine, and packed weights that run on them.

:func:`load` opens the library of kernels, :func:`candidates` lists the tiles that are worth timing for a layer, and a
:class:`Panel` holds activations as kernels read them; nothing here knows an operation. Without a compiler everything
here raises one clear error, and callers run dense instead.
"""

from sparta.specialize.cpu.candidates import candidates, default
from sparta.specialize.cpu.library import Library, load
from sparta.specialize.cpu.panel import Panel
from sparta.specialize.cpu.toolchain import ISAS, build, runnable_isas

__all__ = [
    "ISAS",
    "Library",
    "Panel",
    "build",
    "candidates",
    "default",
    "load",
    "runnable_isas",
]
