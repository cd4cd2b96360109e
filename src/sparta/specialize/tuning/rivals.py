"""Rivals: dense and the candidates for one problem, built, checked against what is expected, and ready to be timed.

A problem is a kernel spec with the tensors to measure it on. On CUDA, several calls are replayed from one graph, so
that the device's time counts and not the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparta.common.tuning import PrunedTrial
from sparta.errors import CheckError, SpartaError, message
from sparta.measure.checks import check
from sparta.measure.timing import Timing
from sparta.specialize.implement import Kernel, implement_named
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.significance import timed

__all__ = ["DENSE", "QUICK_SECONDS", "Problem", "Rivals", "build", "call_of", "replayed"]

DENSE = "dense"
QUICK_SECONDS = 0.02
_GRAPH_MILLISECONDS, _MOST_CALLS = 0.2, 20  # of the calls in one graph: enough for the host to keep ahead


@dataclass(frozen=True)
class Problem:
    """A kernel spec with the tensors to measure it on.

    Attributes
    ----------
    spec
        What is to be run.
    operand
        What the kernels pack: the sparse operand, dense, or the mask of one that is an input or a result; None where
        nothing is known beforehand.
    inputs
        What the kernels take beside it, by the operation's convention.
    expected
        The right result in float64.
    reduction
        How many terms the longest sum of one element has.
    backward
        Whether the gradients of the inputs are measured too, by autograd through the kernel.
    checked
        Which of the result's rows (or images) `expected` holds; None for all.
    """

    spec: KernelSpec
    operand: Tensor | None
    inputs: tuple[Tensor | None, ...]
    expected: Tensor
    reduction: int
    backward: bool = False
    checked: Tensor | None = None

    def check(self, found: Tensor, what: str) -> None:
        """Raise CheckError where a result is not the right one."""
        part = found if self.checked is None else found.index_select(0, self.checked)
        check(part, self.expected, reduction=self.reduction, what=what)


def build(spec: KernelSpec, config: Mapping[str, Any]) -> Kernel:
    """Build the kernel that a sample of the nested search space names."""
    params = {key: value for key, value in config.items() if key != "_name"}
    implement = implement_named(config["_name"], spec.op)
    answer = implement.answer(spec)
    if not answer:
        raise SpartaError(message(f"{implement.name} cannot run {spec}: {answer.reason}", fix="choose another one"))
    return implement.build(spec, params)


def call_of(problem: Problem, kernel: Kernel) -> Callable[[], Tensor]:
    """Return a call of a kernel on a problem, its operand packed; with gradients where the problem has them."""
    packed = () if problem.operand is None else kernel.pack(problem.operand)
    if not problem.backward:

        def call() -> Tensor:
            with torch.no_grad():
                return kernel.run(packed, *problem.inputs)

        return call

    # A tensor without dims is a number, such as a temperature, and is not trained.
    inputs = [
        t.detach().requires_grad_() if t is not None and t.dim() and t.is_floating_point() else t
        for t in problem.inputs
    ]
    varied = [t for t in inputs if t is not None and t.requires_grad]

    def call_with_gradients() -> Tensor:
        with torch.enable_grad():
            result = kernel.run(packed, *inputs)
            torch.autograd.grad(result, varied, torch.ones_like(result))
        return result.detach()

    return call_with_gradients


@dataclass(frozen=True)
class Rivals:
    """Dense and candidates of one problem as they are timed, several calls of each at a time in CUDA graphs."""

    problem: Problem
    dense: Callable[[], Tensor]
    calls: int
    in_graphs: bool
    fault: str = ""
    """What is wrong with dense, which is a measure of time only then."""

    @staticmethod
    def of(problem: Problem, *, in_graphs: bool) -> Rivals:
        """Return the rivals of a problem, dense checked."""
        kernel = build(problem.spec, {"_name": DENSE})
        dense = call_of(problem, kernel)
        try:
            problem.check(dense(), DENSE)
        except CheckError as error:
            return Rivals(problem, dense, 1, in_graphs=False, fault=str(error).splitlines()[0])
        if not in_graphs:
            return Rivals(problem, dense, 1, in_graphs=False)
        alone = Rivals(problem, dense, 1, in_graphs=False).dense_times().min
        calls = max(1, min(_MOST_CALLS, round(_GRAPH_MILLISECONDS / max(alone, 1e-3))))
        return Rivals(problem, replayed(problem, kernel, calls), calls, in_graphs=True)

    def dense_times(self) -> Timing:
        """Return what dense takes alone, measured briefly."""
        return timed({DENSE: self.dense}, warmup=2, iters=20, seconds=QUICK_SECONDS)[DENSE]

    def candidate(self, config: Mapping[str, Any], kernel: Kernel) -> Callable[[], Tensor]:
        """Return a candidate ready to be timed; raises PrunedTrial when it fails or computes something else."""
        try:
            call = call_of(self.problem, kernel)
            self.problem.check(call(), config["_name"])
        except CheckError as error:
            raise PrunedTrial(f"wrong result: {str(error).splitlines()[0]}") from error
        except SpartaError as error:
            raise PrunedTrial(str(error)) from error
        return replayed(self.problem, kernel, self.calls) if self.in_graphs else call


def replayed(problem: Problem, kernel: Kernel, calls: int) -> Callable[[], Tensor]:
    """Return so many calls of a kernel, replayed from a CUDA graph; one by one where it cannot be recorded."""
    from sparta.specialize.cuda.graphs import copies, recorded

    packed = () if problem.operand is None else kernel.pack(problem.operand)
    held = copies(packed, calls) if packed else [()]

    def run() -> Tensor:
        with torch.no_grad():
            for number in range(calls - 1):
                kernel.run(held[number % len(held)], *problem.inputs)
            return kernel.run(held[(calls - 1) % len(held)], *problem.inputs)

    try:
        graph, result = recorded(run)
    except RuntimeError:
        return run

    def replay(_held: object = held) -> Tensor:  # a graph does not keep what it reads
        graph.replay()
        return result

    return replay
