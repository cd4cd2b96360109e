"""Two processes make the masks of one, under DDP and under FSDP2, by the names of the bare model."""

import subprocess
import sys
from pathlib import Path

import pytest

from create.two_processes import RUNS


@pytest.mark.slow
def test_two_processes_make_the_masks_of_one(tmp_path):
    script = Path(__file__).parent / "two_processes.py"
    report = tmp_path / "report"
    command = [sys.executable, script, report]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    found = report.read_text().splitlines()
    assert found == [
        f"{wrap} {kind} names=True ranks=True agree=True" for wrap, kinds in RUNS.items() for kind in kinds
    ]
