"""What people add from outside the package is one file and one registration, and works end to end.

Each toy runs in a process of its own: what it registers would be there for the other tests too.
"""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOYS = sorted(path.stem for path in HERE.glob("toy_*.py"))


def test_all_six_kinds_are_here():
    kinds = ("implement", "lowering", "modifier", "pattern", "rule", "scheduler")
    assert [f"toy_{kind}" for kind in kinds] == TOYS


@pytest.mark.parametrize("toy", TOYS)
def test_one_file_and_one_registration_are_enough(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path))
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import {toy}; {toy}.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
