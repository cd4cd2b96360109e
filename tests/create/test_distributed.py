"""Several processes make the masks of one, under DDP and under FSDP2, by the names of the bare model."""

import os

import pytest

import pairs
from create.another_world import KINDS as RESUMED
from create.four_processes import KINDS
from create.two_processes import RUNS

LONG = pytest.mark.skipif(not os.environ.get("SPARTA_LONG"), reason="takes long: SPARTA_LONG=1")


@pytest.mark.slow
def test_two_processes_make_the_masks_of_one(tmp_path):
    report = tmp_path / "report"
    pairs.run("create.two_processes", report)
    found = report.read_text().splitlines()
    assert found == [
        f"{wrap} {kind} names=True ranks=True agree=True" for wrap, kinds in RUNS.items() for kind in kinds
    ]


def compared_in_four_processes(tmp_path, kinds):
    report = tmp_path / "report"
    pairs.run("create.four_processes", report, *kinds)
    found = report.read_text().splitlines()
    assert found == [f"{kind} names=True ranks=True counts=True agree=True" for kind in kinds]


def test_four_processes_make_the_masks_of_one(tmp_path):
    compared_in_four_processes(tmp_path, ("magnitude", "obs"))


@LONG
def test_four_processes_make_the_masks_of_one_for_every_kind(tmp_path):
    compared_in_four_processes(tmp_path, KINDS)


@LONG
def test_a_run_of_four_processes_goes_on_in_two_and_ends_as_one_does(tmp_path):
    report = tmp_path / "report"
    pairs.run("create.another_world", tmp_path, report)
    assert report.read_text().splitlines() == [f"{kind} agree=True" for kind in RESUMED]
