"""Several processes prune as one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oneshot.models import Model, make, tokens
from sparta.errors import ValueRangeError
from sparta.oneshot import prune
from sparta.oneshot.team import Team

WORKER = """
import sys
sys.path[:0] = {paths!r}
import torch
import torch.distributed as dist
from pathlib import Path
from oneshot.models import Model, make, tokens
from sparta.errors import SpartaError
from sparta.oneshot import prune
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{{folder}}/meet", rank=rank, world_size=2)
data = tokens(4)
for method in ("wanda", "sparsegpt", "alps"):
    model = make(Model)
    spec, log = prune(model, data, "2:4", method=method)
    torch.save({{**model.state_dict()}}, folder / f"{{method}}{{rank}}.pt")
    (folder / f"{{method}}{{rank}}.log").write_text(repr([round(layer.error, 5) for layer in log]))
model = make(Model)
with torch.no_grad():
    model.embed.weight[0, 0] = float("nan")
try:
    prune(model, [torch.zeros(1, 3, dtype=torch.long)] * 2, "2:4")
except SpartaError as error:
    (folder / f"error{{rank}}").write_text(str(error))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes made."""
    found = tmp_path_factory.mktemp("team")
    paths = [str(Path(__file__).parents[1])]
    code = WORKER.format(paths=paths)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(found)], env=environment) for rank in (0, 1)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "alps"])
def test_two_processes_give_the_masks_and_weights_of_one(folder, method):
    one = make(Model)
    _, log = prune(one, tokens(4), "2:4", method=method)
    for rank in (0, 1):
        state = torch.load(folder / f"{method}{rank}.pt", weights_only=True)
        for name, value in one.state_dict().items():
            assert torch.equal(state[name] == 0, value == 0), name
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
        errors = [float(x) for x in (folder / f"{method}{rank}.log").read_text().strip("[]").split(",")]
        assert errors == pytest.approx([layer.error for layer in log], abs=1e-4)


def test_both_processes_hold_the_same_weights_to_the_bit(folder):
    first, second = (torch.load(folder / f"alps{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_problem_of_one_process_ends_both(folder):
    texts = [(folder / f"error{rank}").read_text() for rank in (0, 1)]
    assert any("NaN" in text for text in texts)
    assert all("NaN" in text or "could not go on" in text for text in texts)


def test_fewer_batches_than_processes():
    with pytest.raises(ValueRangeError, match="one batch for each"):
        Team(0, 3).part([1, 2])
