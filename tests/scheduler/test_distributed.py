"""Two processes make the masks of one; what cannot work on shards says so."""

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
    lines = dict(line.split(" same=" if " same=" in line else " refused: ") for line in report.read_text().splitlines())
    refused = lines.pop("admm fsdp")
    assert "whole weights" in refused
    assert lines == {
        f"{name} {kind}": "True rate=True"
        for name in ("levels", "ampere", "ampere 2d", "str", "admm")
        for kind in ("ddp", "fsdp")
        if (name, kind) != ("admm", "fsdp")
    }
