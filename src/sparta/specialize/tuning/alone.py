"""Candidates in a process of their own: one that breaks memory on a GPU takes that process with it and no other.

An illegal access on CUDA cannot be recovered from, and what it overwrote before may be anyone's. The package's own
kernels are proven by tests; those that others register can be tried here first. What is tried runs on the very tensors
that it would be timed on, and must compute what is expected.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparta.errors import SpartaError
from sparta.specialize.implement import Implement, implement_named
from sparta.specialize.kernel_spec import KernelSpec

if TYPE_CHECKING:
    from sparta.specialize.tuning.rivals import Problem

__all__ = ["fault_alone", "is_builtin"]

_SECONDS = 300.0
_TENSORS, _REQUEST = "tensors.safetensors", "request.json"


def is_builtin(implement: Implement) -> bool:
    """Return whether an implement comes with the package.

    >>> is_builtin(implement_named("dense", "linear"))
    True
    """
    return type(implement) in import_module("sparta.specialize.builtin").IMPLEMENTS


def fault_alone(problem: Problem, config: Mapping[str, Any], seconds: float = _SECONDS) -> str:
    """Return what goes wrong with a candidate in a process of its own, in words; nothing where all is well.

    Parameters
    ----------
    config
        A sample of the nested search space, which names an implement that was registered by a module or a script.
    seconds
        After which it counts as one that hangs.
    """
    implement = implement_named(config["_name"], problem.spec.op)
    module = sys.modules.get(type(implement).__module__)
    path = getattr(module, "__file__", None)
    if path is None:
        return f"{implement.name} was not registered by a module or a script, so no other process can have it"
    script = module.__name__ == "__main__"  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        _write(problem, config, Path(folder))
        command = [sys.executable, "-m", __name__, folder, *(["--script", path] if script else [module.__name__])]  # type: ignore[union-attr]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        try:
            done = subprocess.run(  # noqa: S603 - this very module
                command, env=variables, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{implement.name} did not end within {seconds:g} s in a process of its own"
    if not done.returncode:
        return ""
    last = (done.stdout.strip() or done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    return f"{implement.name} failed in a process of its own: {last}"


def _write(problem: Problem, config: Mapping[str, Any], folder: Path) -> None:
    """Write down what the other process needs."""
    from safetensors.torch import save_file

    given = {"operand": problem.operand, "expected": problem.expected, "checked": problem.checked}
    given |= {f"input{number}": value for number, value in enumerate(problem.inputs)}
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in given.items() if value is not None}
    save_file(tensors, folder / _TENSORS)
    request = {
        "spec": problem.spec.to_dict(), "config": dict(config), "inputs": len(problem.inputs),
        "reduction": problem.reduction, "backward": problem.backward,
    }  # fmt: skip
    (folder / _REQUEST).write_text(json.dumps(request), encoding="utf-8")


def _read(folder: Path) -> tuple[Problem, dict[str, Any]]:
    """Return what the process that asks has written."""
    from safetensors.torch import load_file

    from sparta.specialize.tuning.rivals import Problem

    request = json.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    spec = KernelSpec.from_dict(request["spec"])
    tensors = load_file(folder / _TENSORS, device=spec.device)
    problem = Problem(
        spec,
        tensors.get("operand"),
        tuple(tensors.get(f"input{number}") for number in range(request["inputs"])),
        tensors["expected"],
        request["reduction"],
        backward=request["backward"],
        checked=tensors.get("checked"),
    )
    return problem, request["config"]


def _main(folder: str, *where: str) -> int:
    """Register, build and run a candidate; return 0 if it is right."""
    from sparta.specialize.tuning.rivals import build, call_of

    if where[0] == "--script":
        runpy.run_path(where[1], run_name="sparta_trial")
    else:
        import_module(where[0])
    problem, config = _read(Path(folder))
    try:
        call = call_of(problem, build(problem.spec, config))
        for _ in range(2):  # what it leaves behind may break the next call
            found = call()
        if problem.spec.device == "cuda":
            torch.cuda.synchronize()
        problem.check(found, config["_name"])
    except (SpartaError, RuntimeError) as error:
        sys.stdout.write(f"{str(error).splitlines()[0]}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
