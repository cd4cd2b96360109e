"""`compile`: a model in, the same model out, faster; and what happens on the way, in order.

Capture, propagate, cut what can be cut exactly, fold BatchNorms, partition into fused sub-graphs, time the candidates
of each, time the whole, verify, hand over. Every step can only take away from the time; where it does not, or where
anything does not work, the step before it is what runs, down to the dense original. A model that cannot be captured as
one graph is compiled by its modules; only wrong arguments raise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparta.common.progress import Progress
from sparta.compiler.any_size import any_size
from sparta.compiler.calls import runnable, several
from sparta.compiler.copying import folded_copy, is_folded
from sparta.compiler.graph.capturing import AUTO
from sparta.compiler.job import Job
from sparta.compiler.partial import compiled_in_parts
from sparta.compiler.precise import Wanted, compiled_at, side_by_side
from sparta.compiler.run.compiled_model import CompiledModel
from sparta.compiler.run.partial_model import PartialModel
from sparta.compiler.session import Session, Tune, shown
from sparta.compiler.settle import decided, verified
from sparta.errors import CheckError, SpartaError, ValueRangeError, message
from sparta.measure.untouched import untouched
from sparta.memory import give_back
from sparta.modules import unwrapped
from sparta.packages import check_packages
from sparta.precision.losses import Metric
from sparta.propagation.caches import wants_cache, without_caches
from sparta.propagation.capture import CaptureError, call_arguments, capture
from sparta.spelling import also
from sparta.tesa.spec import Spec

__all__ = ["compile_in", "compile_model", "evaluating"]

_LONG_SECONDS = 0.05
_PADDED = "padded positions of encoder layers hold what is computed there, not the zeros of PyTorch's fast path"


@also(inputs="example_inputs", sample_inputs="example_inputs", dummy_input="example_inputs", target="device")
def compile_model(  # noqa: PLR0913 - one call says all there is to say about a compilation
    model: nn.Module,
    example_inputs: Any,
    spec: Spec | None = None,
    *,
    device: str | torch.device | None = None,
    tune: Tune = "quick",
    dynamic_shapes: Any = AUTO,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    budget_s: float | None = None,
    more_inputs: Sequence[Any] = (),
    activations: Mapping[str, Any] | None = None,
    precision: str | None = None,
    calibration: Any = None,
    max_loss: float | None = None,
    metric: Metric | None = None,
    inductor: bool | None = None,
    cuda_graphs: bool = True,
    progress: Progress | bool | None = None,
) -> CompiledModel | PartialModel:
    """Return a model that computes what the masked dense model computes, as fast as measurement can make it.

    Parameters
    ----------
    model
        It is not changed. One that `torch.compile` wrapped is unwrapped, and Inductor competes.
    example_inputs
        A tensor, a tuple of positional arguments, or a dict of keyword arguments, of the sizes it is mostly used with;
        or a list of such tuples or dicts, of several sizes.
    spec
        What is pruned; None reads the zeros that are in the weights.
    device
        The device to compile for; None stays where the model is.
    tune
        ``"quick"`` times a few candidates per layer, ``"full"`` many, and `torch.compile` as a host for the rest, on
        CUDA also as max-autotune; ``"off"`` measures nothing and takes what earlier runs stored, else dense.
    dynamic_shapes
        By default every size may change that the model lets change: batches, lengths, images. Dims as in
        :func:`torch.export.export` narrow that; None compiles for the sizes of the example alone.
    dtype
        Compile the model in this dtype; floating-point inputs are converted.
    verify
        Compare with the original on fresh inputs before handing over.
    budget_s
        Seconds for the whole compilation, after calibration where there is a precision (each that ``"auto"`` tries has
        as much); what is not measured by then stays dense. Ctrl-C has the same effect. Every
        step gets its share: trials end with it, and Inductor only begins what should fit. What comes once and cannot
        be cut short is capture and propagation (half of the budget is left for measuring whatever they take) and one
        candidate under way; compiling the kernels for the first time on a machine comes on top.
    more_inputs
        Further example inputs of other sizes; kernels are chosen for each.
    activations
        Grids of the inputs of layers with int8 weights in the spec, by ``"layer.input"``: (scale, zero point), or what
        :func:`sparta.create.quantize.export` returned. Those that are not given follow from the example inputs.
    precision
        ``"int8"`` (on the CPU), ``"fp8"`` (on the GPU), ``"bf16"``, or ``"auto"`` for the fastest within `max_loss`:
        the model is rounded after training, layers that would hurt stay as they are, and the report has the accuracy
        beside the speed. None compiles the model as it is. A model under quantization-aware training is taken as
        trained.
    calibration
        Batches of what the model takes, to find ranges and to measure the loss; None takes the example inputs.
    max_loss
        The loss that a precision may cost: what `metric` falls by (by default a hundredth of it), or without one
        the norm of the change of the outputs over their norm (0.1 by default).
    metric
        Takes a model and returns a number, higher is better.
    inductor
        Whether `torch.compile` competes as a host; None lets it with ``tune="full"``, and on CUDA for models with
        many calls between their layers.
    cuda_graphs
        Whether CUDA graphs compete on CUDA, for models whose sizes are all fixed. A model that is replayed copies its
        inputs in and its results out, and holds the memory of its activations.
    progress
        A callable that gets a :class:`~sparta.common.progress.Step` for each thing that is tried; True for lines on
        stderr; None for stderr if it is a terminal.

    Examples
    --------
    >>> from sparta import Block
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> Spec.from_pattern(model, Block(4, 1), 0.9).apply(model)
    >>> fast = compile_model(model, torch.randn(16, 64), tune="off")
    >>> fast(torch.randn(16, 64)).shape, fast.report.certificate.passed
    (torch.Size([16, 8]), True)
    """
    check_packages("sparta.compile")
    wanted = Wanted(precision, calibration, max_loss, metric)
    session = Session(tune=tune, budget_s=budget_s, show=shown(progress))
    if not isinstance(model, nn.Module):
        raise ValueRangeError(message(f"a {type(model).__name__}", "a torch.nn.Module"))
    given = unwrapped(model)
    wrapped = hasattr(model, "_orig_mod")
    competes = inductor if inductor is not None else (True if tune == "full" or wrapped else None)
    if not is_folded(given):
        given, spec = folded_copy(given, spec)
    calls = several(example_inputs, more_inputs)
    if _is_language_model(given, calls[0], precision) and dynamic_shapes == AUTO and not activations:
        where = {"device": device, "dtype": dtype, "precision": precision, "max_loss": max_loss, "metric": metric}
        how = {"tune": tune, "verify": verify, "budget_s": budget_s, "progress": progress, "calibration": calibration}
        generator = _generation().compile_generator(given, calls[0], spec, **where, **how)
        give_back()
        return cast("CompiledModel", generator)
    given, calls = _moved(given, calls, device, dtype)
    rest: dict[str, Any] = {
        "inductor": competes,
        "cuda_graphs": cuda_graphs,
        "cast": dtype is not None,
        "check": verify,
    }

    def one(
        model: nn.Module, spec: Spec | None, activations: Mapping[str, Any] | None, share: float = 1.0
    ) -> CompiledModel | PartialModel:
        own = session if wanted.precision is None else session.again(share)
        return compile_in(own, model, calls, spec, dynamic_shapes=dynamic_shapes, activations=activations, **rest)

    compiled: CompiledModel | PartialModel
    with session.showing():
        if wanted.precision is None:
            compiled = one(given, spec, activations)
        else:
            compare = None if tune == "off" else side_by_side(session, calls[0])
            compiled = compiled_at(wanted, given, calls, spec, one, compare)
    give_back()
    return compiled


def _generation() -> Any:
    """Return the room of language models; it stands above this one, and is found when it is needed."""
    return import_module("sparta.generation")


def _is_language_model(model: nn.Module, example: Any, precision: str | None) -> bool:
    """Whether a model is compiled with its `generate`: one of transformers that can, called with its cache."""
    known = "transformers" in sys.modules and hasattr(model, "generate") and precision in (None, "int8", "fp8", "auto")
    return known and bool(_generation().generates(model, example))


def compile_in(  # noqa: PLR0913 - as above
    session: Session,
    model: nn.Module,
    sizes: Sequence[Any],
    spec: Spec | None = None,
    *,
    dynamic_shapes: Any = AUTO,
    activations: Mapping[str, Any] | None = None,
    inductor: bool | None = False,
    cuda_graphs: bool = True,
    cast: bool = False,
    check: bool = True,
) -> CompiledModel | PartialModel:
    """Compile a model within a session, whose clock and budget are then the caller's.

    Parameters
    ----------
    sizes
        Example inputs, one or more.
    inductor
        As for :func:`compile_model`.
    cast
        Whether floating-point inputs are converted to the model's dtype.
    check
        Whether the result is compared with the original.
    """
    with untouched(model, tuple(sizes)) as trace, evaluating(model):
        sizes = _made_runnable(session, model, sizes)
        changed = trace.changes()
        trace.put_back()
        whole = partial(
            _compiled_whole,
            session,
            dynamic_shapes=dynamic_shapes,
            activations=activations or {},
            inductor=inductor,
            cuda_graphs=cuda_graphs,
            cast=cast,
            check=check,
        )
        try:
            _check_stateless(changed)
            return whole(model, sizes, spec)
        except Exception as error:
            if _is_callers(error, model, sizes[0], dynamic_shapes):
                raise
            if isinstance(error, CheckError) and _takes_fast_path(model):
                session.notes[:] = [_PADDED]
                with suppress(CaptureError, CheckError), _without_fast_path():
                    return whole(model, sizes, spec)

            def part(module: nn.Module, calls: Sequence[Any], known: Spec) -> CompiledModel:
                with untouched(module, tuple(calls)) as inner:
                    calls = _made_runnable(session, module, calls)
                    changed = inner.changes()
                    inner.put_back()
                    _check_stateless(changed)
                    return whole(module, calls, known, dynamic_shapes=AUTO)

            return compiled_in_parts(session, model, sizes, spec, error, part)


def _made_runnable(session: Session, model: nn.Module, sizes: Sequence[Any]) -> list[Any]:
    """Return examples as arguments with which the model runs, and tell the session where the first takes long."""
    found, session.call_seconds = [], 0.0
    for number, one in enumerate(sizes):
        before = session.elapsed
        found.append(runnable(model, one))
        taken = session.elapsed - before
        if number == 0 and taken > _LONG_SECONDS:
            before = session.elapsed  # once more: the first call of all may load libraries
            runnable(model, found[0])
            session.call_seconds = min(taken, session.elapsed - before)
    return found


def _takes_fast_path(model: nn.Module) -> bool:
    """Whether a model has encoder layers that PyTorch runs in another way in evaluation than it traces them."""
    return torch.backends.mha.get_fastpath_enabled() and any(
        isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)) for module in model.modules()
    )


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Let encoder layers run as they are traced."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class _ChangingModelError(ValueRangeError):
    """A model that changes itself or its arguments when it is called: a graph of it would change copies."""


def _compiled_whole(  # noqa: PLR0913 - as above
    session: Session,
    model: nn.Module,
    sizes: Sequence[Any],
    spec: Spec | None,
    *,
    dynamic_shapes: Any,
    activations: Mapping[str, Any],
    inductor: bool | None,
    cuda_graphs: bool,
    cast: bool,
    check: bool,
) -> CompiledModel:
    """Compile a model as one graph."""
    with without_caches(model, active=not wants_cache(call_arguments(sizes[0])[1])):
        job = Job.started(
            model, sizes[0], spec, dynamic_shapes, sizes[1:], session, cast=cast, cuda_graphs=cuda_graphs
        ).calibrated(activations)
        contest = job.contest(inductor=inductor)
        outcome, earlier = decided(contest)
        outcome, certificate = verified(job, contest, outcome, check=check)
        other = any_size(job, contest, outcome, check=check, all_sizes=dynamic_shapes == AUTO)
        return job.finished(
            contest.workshop,
            outcome,
            certificate,
            earlier,
            other.graph,
            other.sizes,
            model_takes_more=other.model_takes_more,
        )


def _check_stateless(changed: Sequence[str]) -> None:
    """Raise if a call changes the model or its arguments."""
    if changed:
        names = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
        raise _ChangingModelError(
            message(
                f"a model that changes {names} when it is called",
                "a forward in evaluation mode that is a function of its arguments",
                "pass what it keeps as an argument and return it",
            )
        )


def _is_callers(error: Exception, model: nn.Module, example: Any, dynamic_shapes: Any) -> bool:
    """Whether an error is that of wrong arguments, which no other way to compile would mend."""
    if not isinstance(error, SpartaError) or isinstance(error, (CheckError, _ChangingModelError)):
        return False
    if not isinstance(error, CaptureError):
        return True
    if dynamic_shapes is None or dynamic_shapes == AUTO:
        return False
    try:
        capture(model, example)
    except CaptureError:
        return False
    return True  # it is the dims that were asked for


def _moved(
    model: nn.Module, inputs: Sequence[Any], wanted: str | torch.device | None, dtype: torch.dtype | None
) -> tuple[nn.Module, list[Any]]:
    """Return model and inputs on the device in the dtype; the model itself where nothing changes."""
    device = None if wanted is None else _device(wanted)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueRangeError(message(f"dtype={dtype}", "a floating-point dtype", "int8 comes from the spec, not here"))
    if device is None and dtype is None:
        return model, list(inputs)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)

    return deepcopy(model).to(device=device, dtype=dtype), [pytree.tree_map(move, one) for one in inputs]


def _device(wanted: str | torch.device) -> torch.device:
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise ValueRangeError(message(f"device={wanted!r}", "'cpu' or 'cuda'")) from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ValueRangeError(message(f"device={wanted!r}", "'cpu', or 'cuda' where torch sees a CUDA device"))
    return device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation mode and each back to its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
