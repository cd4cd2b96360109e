"""What can go wrong around a compilation: it costs speed, never a result, and the report says so."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sparta
from compiler import nets
from compiler.clocks import Clock, compiled, plain_cost
from sparta.specialize.implement import implement_named
from sparta.specialize.tuning.select import Choice
from sparta.specialize.tuning.store import Entry, TuningStore

ROOT = Path(__file__).parents[1]


def agree(fast, model, x):
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_killed_while_saving_leaves_the_old_artifact_whole(forced, tmp_path):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off")
    path = tmp_path / "model.sparta"
    fast.save(path)
    # The process stops for good in the middle of writing the second version: its data is there, its name is not.
    code = (
        "import os, sys, time; import sparta; "
        "os.fsync = lambda handle: (print('writing', flush=True), time.sleep(60)); "
        "sparta.load(sys.argv[1]).save(sys.argv[1])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "writing"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    assert len(list(tmp_path.iterdir())) == 2  # the half-written file, under another name
    assert torch.equal(sparta.load(path)(x), fast(x))


def test_no_space_left_leaves_the_old_artifact_whole(forced, tmp_path, monkeypatch):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off")
    path = tmp_path / "model.sparta"
    fast.save(path)

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fast.save(path)
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["model.sparta"]
    assert torch.equal(sparta.load(path)(x), fast(x))


def test_a_cache_folder_that_cannot_be_used_costs_only_time(tmp_path, monkeypatch):
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("")
    monkeypatch.setenv("SPARTA_CACHE", str(blocked / "cache"))
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, budget_s=20)
    agree(fast, model, x)
    assert "tuning results cannot be" in fast.report.full


def test_no_compiler_leaves_layers_to_what_there_is(own_stores, monkeypatch):
    from sparta.specialize.implement import Support

    for op in ("linear", "conv2d"):
        implement = type(implement_named("cpu", op))
        monkeypatch.setattr(implement, "supports", lambda self, spec: Support.no("no C++ compiler was found"))
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, budget_s=20)
    agree(fast, model, x)
    assert all(layer.first.implement != "cpu" for layer in fast.report.plan.layers)
    assert any(layer.sparse for layer in fast.report.plan.layers) or "no C++ compiler" in fast.report.full


def test_a_compiler_that_fails_leaves_layers_to_what_there_is(own_stores, monkeypatch):
    from sparta.errors import MissingPackageError

    def fail(self, spec, params):
        raise MissingPackageError("the CPU kernels do not compile")

    monkeypatch.setattr(type(implement_named("cpu", "linear")), "build", fail)
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, budget_s=20)
    agree(fast, model, x)
    assert all(layer.first.implement != "cpu" for layer in fast.report.plan.layers)


def test_a_layer_that_cannot_be_measured_does_not_end_the_compilation(own_stores, monkeypatch):
    def fail(*_args, **_kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("sparta.compiler.choose.layers.tune_kernel", fail)
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x)
    agree(fast, model, x)
    assert "out of memory" in fast.report.full


def test_inductor_that_fails_leaves_the_other_hosts(own_stores, monkeypatch):
    def broken(module, **_options):
        def run(*_args):
            raise RuntimeError("no working compiler")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, inductor=True, budget_s=20)
    agree(fast, model, x)
    assert "inductor" not in fast.report.plan.whole.host
    assert "no working compiler" in fast.report.full


def test_a_damaged_memory_is_forgotten(forced, own_stores):
    model, x = nets.pruned(nets.Mlp(), sparsity=0.5), torch.randn(6, 32)
    compiled(model, x, Clock(plain_cost()))
    files = list(own_stores[0].glob("*.json"))
    assert files
    for file in files:
        file.write_text("{")
    fast = compiled(model, x, Clock(plain_cost()))
    assert fast.report.totals.first_compile_seconds is None
    agree(fast, model, x)


def _stored_at_once(problem, *, store, **_options):
    """Store a result without measuring anything, for how much of it is stable depends on the machine's load."""
    entry = Entry("dense", {}, 1.0, 1.0)
    for _ in range(20):
        store.put(problem.spec, entry)
    return Choice("dense", {}, "dense: nothing was faster", entry)


def _compile_into(cache, seed):
    os.environ["SPARTA_CACHE"] = cache
    pytest.MonkeyPatch().setattr("sparta.compiler.choose.layers.tune_kernel", _stored_at_once)
    torch.manual_seed(0)
    model = nets.pruned(torch.nn.Linear(32, 32))  # the same in both processes
    torch.manual_seed(seed)
    x = torch.randn(6, 32)
    fast = sparta.compile(model, x, budget_s=20)
    assert torch.allclose(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_two_processes_tune_into_one_store(monkeypatch, tmp_path):
    context = multiprocessing.get_context("spawn")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    cache = str(tmp_path)
    workers = [context.Process(target=_compile_into, args=(cache, seed)) for seed in range(2)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + 150
    for worker in workers:
        worker.join(max(1.0, deadline - time.monotonic()))
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(TuningStore(tmp_path / "tuning")) == 1  # the same layer in both
