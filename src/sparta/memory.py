"""Memory that was freed and that the process still holds.

The C library keeps freed pieces for the next caller. Reading or compiling a model makes and frees several copies of its
weights, so without this a process would hold them as long as it lives.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["give_back"]

# Looked up once, when this module is imported: reading a file opens no library.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None


def give_back() -> bool:
    """Give freed memory back to the system; return whether the C library can (glibc's can, others cannot).

    >>> give_back() in (True, False)
    True
    """
    if _TRIM is None:
        return False
    _TRIM(ctypes.c_size_t(0))
    return True
