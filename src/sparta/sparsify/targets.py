"""Targets: the hardware that presets are for, and the patterns that can be faster than dense there.

Scheduler presets and generated recipes read this one list; to add hardware, add a line here. It says where to look, not
what pays: that is measured by `sparta.compile`.
"""

from __future__ import annotations

__all__ = ["TARGETS"]

TARGETS: dict[str, tuple[str, ...]] = {
    "vnni": ("block4",),
    "tensorrt": ("2:4",),
    "nvidia-ampere": ("2:4", "block:32x32", "block:64x64", "channel:0", "channel:1"),
    "nvidia-hopper": ("2:4", "block:64x64", "block:128x128", "channel:0", "channel:1"),
    "x86-avx512": ("block:16x1", "block:4x1", "block:1x16", "block4", "channel:0", "channel:1"),
    "generic": ("unstructured", "channel:0", "channel:1"),
}
"""For each target the text forms of its patterns, the usual one first."""
