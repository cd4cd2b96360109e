"""Compiling at a precision: round, compile what was rounded, and measure what that cost.

``precision="int8"`` rounds weights and inputs (:mod:`sparta.precision`) and compiles the rounded model, whose kernels
in real numbers compete as well; ``"bf16"`` casts, and on a CPU the model as it was competes; ``"auto"`` takes what is
fastest of those within the allowed loss. What competes is timed side by side, because each compilation knows only the
speed of what it was given. The report has the accuracy of what runs beside its speed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparta.compiler.calls import runnable
from sparta.compiler.choose.timer import Timer
from sparta.compiler.clock import Rounds
from sparta.compiler.session import Session
from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError, did_you_mean, message
from sparta.measure.machine import probe_cpu
from sparta.precision.api import quantize
from sparta.precision.data import checked_batches
from sparta.precision.losses import Judge, Metric
from sparta.precision.report import LayerPrecision, PrecisionReport
from sparta.propagation.capture import call_arguments
from sparta.tesa.bits import bit_format
from sparta.tesa.spec import Spec

__all__ = ["DEFAULT_LOSS", "PRECISIONS", "Wanted", "compiled_at", "computes_in_bf16", "side_by_side"]

PRECISIONS = ("int8", "bf16", "fp8", "auto")
DEFAULT_LOSS = 0.1
"""What `max_loss` is where nobody says it: the norm of the change of the outputs over their norm."""
_FP8_CAPABILITY = (8, 9)
_LONG_SECONDS = 1.0  # for one call of each that is compared

CompileOne = Callable[[nn.Module, Spec | None, Mapping[str, Any], float], Any]
"""Compiles a model with a spec and grids of inputs in a share of the budget."""
Compare = Callable[[Mapping[str, Any]], Rounds]
"""Times compiled models side by side."""


@dataclass(frozen=True)
class Wanted:
    """What was asked for.

    Parameters
    ----------
    precision
        One of :data:`PRECISIONS`, or None for the model's own.
    calibration
        Batches; None takes the example inputs.
    max_loss, metric
        What is allowed, and how it is measured; see :func:`sparta.precision.quantize`.
    """

    precision: str | None = None
    calibration: Any = None
    max_loss: float | None = None
    metric: Metric | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("calibration", "max_loss", "metric") if getattr(self, name) is not None]
        if self.precision is None and given:
            raise ValueRangeError(message(f"{given[0]} without a precision", f"precision={PRECISIONS[0]!r} beside it"))
        if self.precision is not None and self.precision not in PRECISIONS:
            raise NameNotFoundError(did_you_mean(str(self.precision), PRECISIONS, "precision"))
        if self.metric is not None and not callable(self.metric):
            raise ValueRangeError(message(f"metric={self.metric!r}", "a function of a model that returns a number"))
        loss = self.max_loss
        if loss is not None and not (isinstance(loss, int | float) and not isinstance(loss, bool) and loss >= 0):
            raise ValueRangeError(message(f"max_loss={loss!r}", "0 or more"))

    @property
    def bound(self) -> float | None:
        """The loss that is allowed: a tenth of the outputs' norm unless it is said; None where a metric decides."""
        return self.max_loss if self.max_loss is not None or self.metric is not None else DEFAULT_LOSS

    def batches(self, calls: Sequence[Any]) -> tuple[list[Any], str]:
        """Return the calibration data where the example inputs are, and a note where it is not the user's."""
        if self.calibration is not None:
            return [_like(batch, calls[0]) for batch in checked_batches(self.calibration, calls[0])], ""
        note = "calibrated on the example inputs alone: pass calibration=batches of real data"
        return checked_batches(list(calls)), note


def compiled_at(
    wanted: Wanted,
    model: nn.Module,
    calls: Sequence[Any],
    spec: Spec | None,
    one: CompileOne,
    compare: Compare | None = None,
) -> Any:
    """Return the model compiled at a precision, with its accuracy in the report.

    Parameters
    ----------
    calls
        The example inputs.
    one
        Compiles a model.
    compare
        Times what was compiled; None where nothing is to be measured, and the first precision is taken.
    """
    batches, note = wanted.batches(calls)
    device = next((t.device.type for t in (*model.parameters(), *model.buffers())), "cpu")
    names = _candidates(device, model) if wanted.precision == "auto" else [str(wanted.precision)]
    found = {name: _compiled(name, wanted, model, batches, spec, device, one, compare) for name in names}
    chosen, times = _fastest(found, compare)
    fast = found[chosen]
    told: PrecisionReport = fast.report.precision
    if wanted.precision == "auto":
        tried = ", ".join(f"{name} {times[name]:.4g} ms" if name in times else name for name in names)
        told = replace(told, precision=f"auto ({told.precision})").with_note(f"tried: {tried}")
    fast.report = replace(fast.report, precision=told.with_note(note) if note else told)
    return fast


def _fastest(found: Mapping[str, Any], compare: Compare | None) -> tuple[str, dict[str, float]]:
    """Return which of several compiled models is fastest, the first where that is not known, and milliseconds."""
    first = next(iter(found))
    if compare is None or len(found) == 1:
        return first, {}
    rounds = compare(found)
    best = max(found, key=lambda name: rounds.ratio(first, name).value)
    return best, {name: rounds.median(name) for name in found}


def side_by_side(session: Session, example: Any) -> Compare:
    """Return what times compiled models on an example, each time within the budget of a session like this one."""

    def compare(models: Mapping[str, Any]) -> Rounds:
        fresh = session.again()
        args, kwargs = call_arguments(runnable(next(iter(models.values())), example))

        def call(model: Any) -> Callable[[], Any]:
            def run() -> Any:
                with torch.no_grad():
                    return model(*args, **kwargs)

            return run

        calls = {name: call(model) for name, model in models.items()}
        before = fresh.elapsed
        for run in calls.values():
            run()
        seconds = fresh.elapsed - before
        cuda = any(leaf.is_cuda for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        timer = Timer(fresh, fresh.measure, seconds / len(calls), cuda=cuda)
        return timer.few(calls) if seconds > _LONG_SECONDS else timer.rounds(calls)

    return compare


def _like(batch: Any, example: Any) -> Any:
    """Return a batch on the device of the example inputs, its real numbers in their dtype."""
    leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    real = next((leaf.dtype for leaf in leaves if leaf.is_floating_point()), None)

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device=leaves[0].device if leaves else None, dtype=real if leaf.is_floating_point() else None)

    return pytree.tree_map(moved, batch)


def _candidates(device: str, model: nn.Module) -> list[str]:
    """Return the precisions that a device may be faster in."""
    if _is_trained(model):
        return ["int8"]
    if device == "cuda":
        return ["fp8", "bf16"] if torch.cuda.get_device_capability() >= _FP8_CAPABILITY else ["bf16"]
    return ["int8", "bf16"] if computes_in_bf16() else ["int8"]


def computes_in_bf16() -> bool:
    """Whether the CPU has instructions for bfloat16."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(probe_cpu().vector_isa))


def _compiled(
    name: str,
    wanted: Wanted,
    model: nn.Module,
    batches: Sequence[Any],
    spec: Spec | None,
    device: str,
    one: CompileOne,
    compare: Compare | None,
) -> Any:
    _check_device(name, device, model)
    if name == "bf16":
        return _in_bf16(wanted, model, batches, spec, one, compare if device == "cpu" else None)
    if _is_trained(model):
        from sparta.precision.trained import from_training

        found = from_training(model, batches, spec=spec, max_loss=wanted.max_loss, metric=wanted.metric)
    else:
        found = quantize(
            model,
            batches,
            name,  # type: ignore[arg-type]
            spec=spec,
            max_loss=wanted.bound,
            metric=wanted.metric,
            dynamic=None if device == "cpu" else True,
        )
    rounded = found.model
    if device == "cuda" and _dtype_of(rounded) == torch.float32:
        rounded = _cast(rounded)  # kernels of fp8 take and give 16 bits
    fast = one(rounded, found.spec, found.activations, 1.0)
    fast.report = replace(fast.report, precision=_measured(found.report, found.judge, fast))
    return fast


def _is_trained(model: nn.Module) -> bool:
    """Whether a model is under quantization-aware training; one that is has imported what does it."""
    layers = sys.modules.get("sparta.create.quantize.layers")
    return layers is not None and any(isinstance(module, layers.QuantizedLayer) for module in model.modules())


def _check_device(name: str, device: str, model: nn.Module) -> None:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if name == "fp8" and device != "cuda":
        raise ValueRangeError(
            message(
                f"precision='fp8' on {device}",
                "int8 or bf16 on the CPU: no CPU computes in 8-bit floating point",
                "pass precision='int8', or device='cuda' on a GPU of capability 8.9 or more",
            )
        )
    if name == "fp8" and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        raise ValueRangeError(
            message(f"precision='fp8' on {torch.cuda.get_device_name()}", "a GPU of capability 8.9 or more", "use bf16")
        )
    if name == "int8" and device == "cuda":
        raise ValueRangeError(
            message("precision='int8' on cuda", "fp8 or bf16 on the GPU", "pass precision='fp8', or device='cpu'")
        )
    if name == "int8" and dtypes - {torch.float32}:
        kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueRangeError(
            message(f"precision='int8' of a model in {kinds}", "float32", "pass dtype=torch.float32 as well")
        )


def _measured(report: PrecisionReport, judge: Judge, fast: Any) -> PrecisionReport:
    """Return the report with the accuracy of what runs; the simulated one stays where it cannot be measured."""
    try:
        change = judge.change(fast)
        loss = judge.loss(fast) if judge.metric is not None else None
    except SpartaError as error:
        return report.with_note(f"the accuracy is that of the simulation: {str(error).splitlines()[0]}")
    both = None if loss is None or judge.baseline is None or loss[1] is None else (judge.baseline, loss[1])
    return report.with_measured(change, both)


# ---------------------------------------------------------------------- bf16


def _in_bf16(
    wanted: Wanted,
    model: nn.Module,
    batches: Sequence[Any],
    spec: Spec | None,
    one: CompileOne,
    compare: Compare | None,
) -> Any:
    """Compile the model in bf16, its inputs and outputs in the dtypes they had.

    As it was where that costs too much, or, with something to compare by, where that is no faster: half of the budget
    is for either.
    """
    judge = Judge.of(model, batches, wanted.metric)
    short = _cast(model)
    loss, reached = judge.loss(short)
    metric = None if judge.baseline is None or reached is None else (judge.baseline, reached)
    bound = judge.allowed(wanted.bound)
    before = str(bit_format(_dtype_of(model)))
    if loss > bound:
        fast = one(model, spec, {}, 1.0)
        why = f"bf16 costs {loss:.2g}, more than max_loss={bound:g}: the model stays as it was"
        row = LayerPrecision("the whole model", before, "", None, why)
        told = PrecisionReport("bf16", (row,), len(batches), 0.0, bound, measured=True)
        fast.report = replace(fast.report, precision=told)
        return fast
    share = 1.0 if compare is None else 0.5
    found = {"bf16": one(short, spec, {}, share)}
    if compare is not None:
        found[before] = one(model, spec, {}, share)
    chosen, times = _fastest(found, compare)
    fast = found[chosen]
    tried = ", ".join(f"{name} {milliseconds:.4g} ms" for name, milliseconds in times.items())
    if chosen == "bf16":
        row = LayerPrecision("the whole model", "bf16", "bf16", judge.change(short))
    else:
        row = LayerPrecision("the whole model", before, "", None, f"it is no slower than in bf16 here ({tried})")
    told = _measured(PrecisionReport("bf16", (row,), len(batches), loss, bound, metric), judge, fast)
    if chosen == "bf16" and tried:
        told = told.with_note(f"tried: {tried}; its speed-up is over the same model in bf16")
    fast.report = replace(fast.report, precision=told)
    return fast


def _cast(model: nn.Module) -> nn.Module:
    """Return a copy in bf16 that takes and returns what the model does."""
    before = _dtype_of(model)
    short = deepcopy(model).eval().to(torch.bfloat16)

    def narrowed(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(_to(torch.bfloat16, before), (args, kwargs))

    def widened(_module: nn.Module, _args: Any, outputs: Any) -> Any:
        return pytree.tree_map(_to(before, torch.bfloat16), outputs)

    short.register_forward_pre_hook(narrowed, with_kwargs=True)
    short.register_forward_hook(widened)
    return short


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _to(dtype: torch.dtype, only: torch.dtype) -> Callable[[Any], Any]:
    return lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == only else leaf
