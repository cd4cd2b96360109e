"""Freed memory goes back to the system, where the C library can."""

import ctypes
import subprocess
import sys

import pytest

_READ = """
import re, sys, torch, sparta
from pathlib import Path
from sparta.memory import give_back

def mib():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

kept, freed = [], []
for number in range(4000):  # pieces of 64 KiB; those between the freed ones keep the heap from shrinking by itself
    (freed if number % 8 else kept).append(torch.ones(1 << 14))
freed.clear()
before = mib()
give_back()
print(before - mib())
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="only glibc gives memory back when asked",
)
def test_what_was_freed_goes_back():
    done = subprocess.run([sys.executable, "-c", _READ], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 100
