"""Several processes make the masks of one: under DDP, FSDP2 and tensor parallelism, also after they were killed."""

import os

import pytest

import pairs
from create.four_processes import FRESH, KINDS
from create.killed import ALL_KINDS as ALL_KILLED
from create.killed import KINDS as KILLED
from create.two_processes import RUNS

LONG = pytest.mark.skipif(not os.environ.get("SPARTA_LONG"), reason="takes long: SPARTA_LONG=1")


def compared(folder, killed, sharded, parallel):
    pairs.run("create.together", folder, ",".join(killed), ",".join(sharded), ",".join(parallel))
    found = {path: (folder / path).read_text().splitlines() for path in ("four", "mesh.txt", "killed", "two")}
    runs = [("fsdp", kind) for kind in sharded] + [("tensor", kind) for kind in parallel]
    runs += [("unit", kind) for kind in FRESH]
    assert found["four"] == [f"{wrap} {kind} ranks=True same=True" for wrap, kind in runs]
    assert found["mesh.txt"] == ["mesh masks=True"]
    assert found["killed"] == [f"{kind} masks=True weights=True" for kind in killed]
    expected = [f"{wrap} {kind} ranks=True same=True" for wrap, kinds in RUNS.items() for kind in kinds]
    assert found["two"] == expected


def test_processes_make_the_masks_of_one_and_go_on_after_a_kill_in_fewer(tmp_path):
    compared(tmp_path, KILLED, ("topkast",), ("magnitude", "obs"))


@LONG
def test_processes_make_the_masks_of_one_for_every_kind(tmp_path):
    compared(tmp_path, ALL_KILLED, KINDS, KINDS)
