"""Processes that train together, for the tests of distributed training.

The scripts are modules of their own, run by :func:`run` in a fresh interpreter, since processes are spawned from them.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(module, *arguments):
    """Run a module of the tests by its name; return what it printed, and fail with what it complained of."""
    command = [sys.executable, "-m", module, *arguments]
    folder = Path(__file__).parent
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def spawn(work, *arguments, processes=2):
    """Call ``work(rank, *arguments)`` in processes of one gloo group; an exception in one of them ends all."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_one_of_them, (f"{folder}/store", processes, work, arguments), nprocs=processes)


def spawn_and_kill(work, *arguments, processes, when, patience=200):
    """Call ``work`` as :func:`spawn` does, and kill all processes with SIGKILL once the files `when` are there."""
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", processes, work, arguments)
        running = mp.start_processes(_one_of_them, given, nprocs=processes, join=False, start_method="spawn")
        end = time.monotonic() + patience
        while not all(path.exists() for path in when):
            assert time.monotonic() < end, "the processes did not come to where they are killed"
            assert all(process.is_alive() for process in running.processes), "a process ended by itself"
            time.sleep(0.05)
        for process in running.processes:
            process.kill()
        for process in running.processes:
            process.join()
        assert [process.exitcode for process in running.processes] == [-signal.SIGKILL] * processes


def _one_of_them(rank, store, processes, work, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    work(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # Gloo's threads outlive the group where a wrapped model still refers to it. One that frees a tensor while the
    # interpreter is torn down aborts the process, after all the work is done: leave without tearing down.
    os._exit(0)
