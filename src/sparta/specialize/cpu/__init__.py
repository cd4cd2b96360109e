"""CPU kernels: C++ templates compiled for this machine, and packed weights that run on them.

:class:`PackedLinear` and :class:`PackedConv` are pruned layers in the layout their kernels read; :func:`candidates`
lists the tiles that are worth timing for a layer. The one idea to know: without a compiler everything here raises one
clear error, and callers run dense instead.
"""

from sparta.specialize.cpu.candidates import candidates, default
from sparta.specialize.cpu.conv import PackedConv
from sparta.specialize.cpu.library import Library, load
from sparta.specialize.cpu.linear import PackedLinear
from sparta.specialize.cpu.panel import Panel
from sparta.specialize.cpu.toolchain import ISAS, build, runnable_isas

__all__ = [
    "ISAS",
    "Library",
    "PackedConv",
    "PackedLinear",
    "Panel",
    "build",
    "candidates",
    "default",
    "load",
    "runnable_isas",
]
