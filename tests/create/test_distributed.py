"""Two processes make the masks of one, under DDP and under FSDP2, by the names of the bare model."""

import pytest

import pairs
from create.two_processes import RUNS


@pytest.mark.slow
def test_two_processes_make_the_masks_of_one(tmp_path):
    report = tmp_path / "report"
    pairs.run("create.two_processes", report)
    found = report.read_text().splitlines()
    assert found == [
        f"{wrap} {kind} names=True ranks=True agree=True" for wrap, kinds in RUNS.items() for kind in kinds
    ]
