"""Two processes make the masks of one, under DDP and under FSDP2, with every scheduler."""

import pytest

import pairs


@pytest.mark.slow
def test_two_processes_make_the_masks_of_one(tmp_path):
    report = tmp_path / "report"
    pairs.run("scheduler.two_processes", report)
    lines = dict(line.split(" same=") for line in report.read_text().splitlines())
    assert lines.pop("export fsdp") == "True rate=True"
    assert lines == {
        f"{name} {kind}": "True rate=True"
        for name in ("levels", "ampere", "ampere 2d", "str", "admm", "admm filters", "probmask")
        for kind in ("ddp", "fsdp")
    }
