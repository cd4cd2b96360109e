"""Did a thread give up its processor, or was it taken away? What the operating system knows of that.

A call that never waits takes as long as its thread has a processor, however long other processes have it in between:
its own time is the time of the thread, which a busy machine does not change much. A call that waits, for other threads
or for a file, takes longer than that, and only the wall clock can tell how long.
"""

from __future__ import annotations

import time

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["waits"]

_FINEST_SECONDS = 1e-6  # what the clock of a thread must resolve
_THREAD = getattr(resource, "RUSAGE_THREAD", None)  # Linux only


def waits() -> int | None:
    """Return how often the calling thread has given up its processor to wait; None where the system does not tell.

    Examples
    --------
    >>> before = waits()
    >>> _ = sum(range(1000))
    >>> waits() == before
    True
    """
    if _THREAD is None or time.get_clock_info("thread_time").resolution > _FINEST_SECONDS:
        return None
    return resource.getrusage(_THREAD).ru_nvcsw
