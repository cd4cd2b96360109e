"""Run by a test: all that four and then two processes are asked, in one start of each."""

import sys
from pathlib import Path

import pairs
from create import four_processes, killed, two_processes


def four(rank, folder, kinds, sharded_kinds, parallel_kinds):
    four_processes.work(rank, f"{folder}/four", sharded_kinds, parallel_kinds)
    killed.from_another_mesh(rank, folder, f"{folder}/mesh.txt")
    killed.until_killed(rank, folder, kinds)


def two(rank, folder, kinds):
    two_processes.work(rank, f"{folder}/two")
    killed.afterwards(rank, folder, f"{folder}/killed", kinds)


if __name__ == "__main__":
    target, killed_kinds, *more = sys.argv[1:]
    lists = [text.split(",") if text else [] for text in (killed_kinds, *more)]
    beyond = [Path(target, f"beyond.{rank}") for rank in range(4)]
    pairs.spawn_and_kill(four, target, *lists, processes=4, when=beyond)
    pairs.spawn(two, target, lists[0])
