"""Whether the C++ kernels run on this machine, in which dtypes, or why not; and their layouts for others."""

from __future__ import annotations

import functools
import os

from sparta.measure.machine import probe_compiler
from sparta.specialize.cpu.library import Library
from sparta.specialize.cpu.packing import Layout
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.cpu.toolchain import prebuilt
from sparta.specialize.implement import Cause, KernelLayout, Support
from sparta.specialize.kernel_spec import KernelSpec
from sparta.tesa.bits import bit_format

__all__ = ["DTYPES", "FORMATS", "compiles_here", "float32_here", "layout_of", "library_here", "runs_here"]

FORMATS = ("fp32", "bf16", "fp16")
"""The bit formats that the kernels take; all are summed in float32."""
DTYPES = tuple(dtype for name in FORMATS if (dtype := bit_format(name).dtype) is not None)
"""Their dtypes."""


def layout_of(layout: Layout, tile: Tile, library: Library) -> KernelLayout:
    """Return the layout of a packed C++ kernel as other programs need it."""
    launch = {"isa": library.isa, "lanes": library.lanes, "tile": tile.to_dict()}
    return KernelLayout(layout.arrays, {**launch, "groups": layout.groups, "shape": list(layout.shape)}, layout.nbytes)


def runs_here(spec: KernelSpec) -> Support:
    """Say whether there are kernels for this spec's device and float dtype."""
    if str(spec["input"].format) not in FORMATS:
        return Support.no(f"it computes {', '.join(FORMATS)}, not {spec['input'].format}", Cause.DTYPE)
    return library_here(spec)


def float32_here(spec: KernelSpec) -> Support:
    """Say whether a spec is for the CPU in fp32, for implements that bring kernels of their own."""
    if spec.device != "cpu":
        return Support.no(f"it runs on the CPU, not on {spec.device}", Cause.DEVICE)
    if str(spec["input"].format) != "fp32":
        return Support.no(f"it computes fp32, not {spec['input'].format}", Cause.DTYPE)
    return Support.yes()


def library_here(spec: KernelSpec) -> Support:
    """Say whether the kernel library is there for this spec's device, or can be compiled."""
    if spec.device != "cpu":
        return Support.no(f"it runs on the CPU, not on {spec.device}", Cause.DEVICE)
    return Support.yes("C++ kernels that came with the package") if prebuilt() is not None else compiles_here()


def compiles_here() -> Support:
    """Say whether C++ can be compiled on this machine."""
    reason = _missing_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))
    return Support.no(reason, Cause.MISSING_TOOL) if reason else Support.yes("C++ kernels for this machine")


@functools.lru_cache(maxsize=4)
def _missing_compiler(cxx: str, path: str) -> str:
    """Return why nothing can be compiled, or nothing; the arguments are what the probe reads."""
    del cxx, path
    compiler, reason = probe_compiler()
    return "" if compiler is not None else reason
