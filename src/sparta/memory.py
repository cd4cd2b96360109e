"""Memory that was freed and that the process still holds.

The C library keeps freed pieces for the next caller. Reading or compiling a model makes and frees several copies of its
weights, so without this a process would hold them as long as it lives.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["give_back"]


def give_back() -> bool:
    """Give freed memory back to the system; return whether the C library can (glibc's can, others cannot).

    >>> give_back() in (True, False)
    True
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True
