"""What the driver takes to start a kernel beside its arguments, as its own structures.

A kernel that overlaps is set up while the one before it ends; it has to wait for that one's results itself.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof, c_char, c_int, c_uint, c_void_p

__all__ = ["LaunchConfig", "launch_config", "overlap_attribute"]

_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("unused", c_int), ("value", c_int), ("rest", c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint),
    )


def overlap_attribute() -> ctypes.Structure:
    """Return the attribute by which a kernel overlaps; it must live as long as a configuration that names it."""
    return _Attribute(_OVERLAP, 0, 1)


def launch_config(
    grid: tuple[int, int], threads: int, shared: int, attribute: ctypes.Structure | None, stream: int | None = None
) -> LaunchConfig:
    """Return a configuration; with an attribute, the kernel overlaps the one before it.

    >>> launch_config((4, 2), 128, 1024, None).grid[1]
    2
    """
    three = c_uint * 3
    given = None if attribute is None else addressof(attribute)
    return LaunchConfig(three(*grid, 1), three(threads, 1, 1), shared, stream, given, int(attribute is not None))
