"""Two processes make the masks of one, under DDP and under FSDP2, with every scheduler."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_processes_make_the_masks_of_one(tmp_path):
    script = Path(__file__).parent / "two_processes.py"
    report = tmp_path / "report"
    command = [sys.executable, script, report]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(" same=") for line in report.read_text().splitlines())
    assert lines.pop("export fsdp") == "True rate=True"
    assert lines == {
        f"{name} {kind}": "True rate=True"
        for name in ("levels", "ampere", "ampere 2d", "str", "admm", "admm filters", "probmask")
        for kind in ("ddp", "fsdp")
    }
