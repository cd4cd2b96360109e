"""`compile`: a model in, the same model out, faster; and what happens on the way, in order.

Capture, propagate, cut what can be cut exactly, fold BatchNorms, partition into fused sub-graphs, time the candidates
of each, time the whole, verify, hand over. Every step can only take away from the time; where it does not, or where
anything does not work, the step before it is what runs, down to the dense original.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparta.common.progress import Progress
from sparta.compiler.choose.calls import with_operators
from sparta.compiler.choose.decisions import Decision, model_key, recall, remember
from sparta.compiler.choose.end_to_end import Contest
from sparta.compiler.choose.layers import SizeSample, choose_layers, size_samples
from sparta.compiler.choose.partition import partition
from sparta.compiler.choose.precision import Calibration, rounding_kernels, simulated
from sparta.compiler.graph.constants import fold_constants
from sparta.compiler.graph.fold import fold_batch_norms
from sparta.compiler.graph.program import Program, original_program, reduced_program
from sparta.compiler.graph.serialize import graph_text
from sparta.compiler.graph.signature import Signature
from sparta.compiler.lower.experts import opaque_experts
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.plan import EndToEnd, LayerPlan, Plan
from sparta.compiler.report import Report, Totals
from sparta.compiler.run.compiled_model import CompiledModel, tensor_bytes
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.session import Session, Tune, shown
from sparta.compiler.verify import Certificate, relative_error, verify, wrong_kernels
from sparta.errors import CheckError, SpartaError, ValueRangeError, message
from sparta.measure.untouched import Trace, untouched
from sparta.propagation.api import propagate
from sparta.propagation.capture import call_arguments
from sparta.propagation.compact import masked_tensors
from sparta.propagation.result import PropagationResult
from sparta.specialize.tuning.store import device_name
from sparta.spelling import also
from sparta.tesa.spec import Spec
from sparta.version import __version__

__all__ = ["compile_model"]

_CALLS_TO_VERIFY = 6  # the original and the compiled model, each on three inputs


@also(inputs="example_inputs", sample_inputs="example_inputs", dummy_input="example_inputs", target="device")
def compile_model(  # noqa: PLR0913 - one call says all there is to say about a compilation
    model: nn.Module,
    example_inputs: Any,
    spec: Spec | None = None,
    *,
    device: str | torch.device | None = None,
    tune: Tune = "quick",
    dynamic_shapes: Any = None,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    budget_s: float | None = None,
    more_inputs: Sequence[Any] = (),
    activations: Mapping[str, Any] | None = None,
    inductor: bool | None = None,
    cuda_graphs: bool = True,
    progress: Progress | bool | None = None,
) -> CompiledModel:
    """Return a model that computes what the masked dense model computes, as fast as measurement can make it.

    Parameters
    ----------
    model
        It is not changed. One that `torch.compile` wrapped is unwrapped, and Inductor competes.
    example_inputs
        A tensor, a tuple of positional arguments, or a dict of keyword arguments, of the sizes it will be used with.
    spec
        What is pruned; None reads the zeros that are in the weights.
    device
        The device to compile for; None stays where the model is.
    tune
        ``"quick"`` times a few candidates a layer, ``"full"`` many, and `torch.compile` as a host for the rest;
        ``"off"`` measures nothing and takes what earlier runs stored, else dense.
    dynamic_shapes
        Dims that may change their size, as in :func:`torch.export.export`.
    dtype
        Compile the model in this dtype; floating-point inputs are converted.
    verify
        Compare with the original on fresh inputs before handing over.
    budget_s
        Seconds for the whole compilation; what is not measured by then stays dense. Ctrl-C has the same effect. Every
        step gets its share: trials end with it, and Inductor only begins what should fit. What comes once and cannot
        be cut short is capture and propagation, one candidate under way, and compiling the kernels for the first time.
    more_inputs
        Further example inputs of other sizes (needs `dynamic_shapes`); kernels are chosen for each.
    activations
        Grids of the inputs of layers with int8 weights in the spec, by ``"layer.input"``: (scale, zero point), or what
        :func:`sparta.create.quantize.export` returned. Those that are not given follow from the example inputs.
    inductor
        Whether `torch.compile` competes as a host; None decides by `tune`.
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
    session = Session(tune=tune, budget_s=budget_s, show=shown(progress))
    given = getattr(model, "_orig_mod", model)
    competes = inductor if inductor is not None else (tune == "full" or given is not model)
    if not isinstance(given, nn.Module):
        raise ValueRangeError(message(f"a {type(given).__name__}", "a torch.nn.Module"))
    given, (example_inputs, *more_inputs) = _moved(given, [example_inputs, *more_inputs], device, dtype)
    with untouched(given, (example_inputs, more_inputs)) as trace, _evaluating(given):
        _check_stateless(given, example_inputs, trace)
        job = _Job.started(
            given,
            example_inputs,
            spec,
            dynamic_shapes,
            more_inputs,
            session,
            cast=dtype is not None,
            cuda_graphs=cuda_graphs,
        )
        job = job.calibrated(activations or {})
        contest = job.contest(inductor=competes)
        whole, earlier = _decided(contest, session)
        whole, certificate = _verified(job, contest, whole, check=verify)
        return job.finished(contest, whole, certificate, earlier)


@dataclass(frozen=True)
class _Job:
    """A model under compilation: what it was, the two graphs, and the inputs it is measured with."""

    model: nn.Module
    result: PropagationResult
    signature: Signature
    original: Program
    reduced: Program
    subgraphs: tuple[SubGraph, ...]
    inputs: tuple[list[Any], ...]
    samples: tuple[SizeSample, ...]
    session: Session
    operators: tuple[LayerPlan, ...] = ()

    @classmethod
    def started(
        cls,
        model: nn.Module,
        example: Any,
        spec: Spec | None,
        dynamic_shapes: Any,
        more: Sequence[Any],
        session: Session,
        *,
        cast: bool,
        cuda_graphs: bool,
    ) -> _Job:
        """Capture, propagate, reduce and partition."""
        session.show("capturing and propagating")
        with opaque_experts(model):
            result = propagate(model, example, spec, dynamic_shapes)
        signature = Signature.of(model, result.captured, cast=cast)
        inputs = tuple(_flat_inputs(signature, one) for one in (example, *more))
        original = original_program(result)
        if cuda_graphs and _replayable(signature, original, inputs[0]):
            session.use_graphs()
        with torch.no_grad():
            reduced = _reduced(result, original, inputs[0], session)
            reduced, operators = with_operators(reduced, inputs[0], session)
            subgraphs = tuple(partition(reduced, reduced.values(inputs[0])))
            samples = tuple(size_samples(reduced, subgraphs, inputs))
        return cls(
            model, result, signature, original, reduced, subgraphs, inputs, samples, session, operators=tuple(operators)
        )

    def calibrated(self, activations: Mapping[str, Any]) -> _Job:
        """Return the job with its int8 layers as such."""
        known = Calibration(self.result.facts.given, activations, self.session.note)
        subgraphs, samples = known.quantized(self.reduced, self.subgraphs, self.samples)
        return replace(self, subgraphs=tuple(subgraphs), samples=tuple(samples))

    def contest(self, *, inductor: bool) -> Contest:
        """Choose layer by layer, and return what competes for the whole."""
        args, kwargs = self.result.captured.args, dict(self.result.captured.kwargs)

        def as_given() -> Any:
            with torch.no_grad():
                return self.model(*args, **kwargs)

        as_given()  # the first call of all may load libraries
        before = self.session.elapsed
        as_given()
        if any(t.is_cuda for t in self.original.tensors.values()):
            torch.cuda.synchronize()
        call_seconds = self.session.elapsed - before
        self.session.reserve = _CALLS_TO_VERIFY * len(self.inputs) * call_seconds
        plans = choose_layers(self.subgraphs, self.samples, self.session)
        return Contest(
            as_given,
            self.original,
            self.reduced,
            self.subgraphs,
            plans,
            self.inputs,
            self.samples,
            self.session,
            inductor=inductor,
            call_seconds=call_seconds,
        )

    def reference(self) -> Callable[..., Any]:
        """Return the masked dense model as a function of flat inputs."""
        masked = masked_tensors(self.result.captured, self.result.facts)

        def run(*leaves: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(list(leaves), self.signature.in_spec)
            return torch.func.functional_call(self.model, dict(masked), args, kwargs)

        return run

    def finished(
        self, contest: Contest, whole: EndToEnd, certificate: Certificate, earlier: float | None
    ) -> CompiledModel:
        """Return the module with its report."""
        graph = contest.built(whole.base)
        note = "dense: the original graph runs"
        lost = whole.base == "original"
        operators = [one.made_dense(note) if lost and one.sparse else one for one in self.operators]
        plan = Plan((*contest.plans, *operators), whole)
        self.session.note(self.session.store.problem)
        unknown = self.result.facts.notes
        if unknown:
            place, text = next(iter(unknown.items()))
            self.session.note(f"propagation stopped at {len(unknown)} places, the first of them {place}: {text}")
        totals = _totals(self, plan, graph, earlier)
        report = Report(plan, totals, certificate, tuple(self.session.notes))
        spec = Spec(dict(self.result.facts.given))
        run = contest.hosted(whole.base, whole.host)
        return CompiledModel(graph, self.signature, report, spec, _provenance(self), run)


def _check_stateless(model: nn.Module, example: Any, trace: Trace) -> None:
    """Call the model once, and raise if that changes the model or its arguments: a graph would change copies."""
    args, kwargs = call_arguments(example)
    with torch.no_grad():
        model(*args, **kwargs)
    changed = trace.changes()
    if changed:
        names = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
        raise ValueRangeError(
            message(
                f"a model that changes {names} when it is called",
                "a forward in evaluation mode that is a function of its arguments",
                "pass what it keeps as an argument and return it, or use nn.swap, which keeps the model's own code",
            )
        )


def _replayable(signature: Signature, program: Program, inputs: Sequence[Any]) -> bool:
    """Whether a CUDA graph could hold a model: its tensors are on CUDA, and its sizes fixed."""
    tensors = [*program.tensors.values(), *(x for x in inputs if isinstance(x, Tensor))]
    fixed = all(given.shape is None or None not in given.shape for given in signature.inputs)
    return fixed and bool(tensors) and all(t.is_cuda for t in tensors)


def _reduced(result: PropagationResult, original: Program, inputs: Sequence[Any], session: Session) -> Program:
    """Return the compact and folded program, or as much of it as works."""
    try:
        program, cut = reduced_program(result)
        if cut:
            session.note(f"{cut} parameters that change nothing were cut out")
    except SpartaError as error:
        session.note(f"nothing was cut out: {error}")
        program = original
    program, folded = fold_batch_norms(program, program.values(inputs))
    if folded:
        session.note(f"{folded} BatchNorms were folded into the layers before them")
    program, plain = fold_constants(program)
    if plain:
        session.note(f"{plain} masks of attention keep everything or the past, and are not read any more")
    return program


def _decided(contest: Contest, session: Session) -> tuple[EndToEnd, float | None]:
    """Return what runs, remembered or found now, and the seconds of the first compilation if this is not it."""
    if session.tune == "off":
        return EndToEnd(reason="not timed: tune='off'"), None
    device = next(iter(contest.original.tensors.values())).device.type if contest.original.tensors else "cpu"
    effort = f"{session.tune} {contest.inductor} {session.in_graphs}"
    key = model_key(graph_text(contest.reduced.graph), contest.plans, device, effort)
    decision = recall(key)
    if decision is not None:
        before = list(contest.plans)
        contest.make_dense(set(decision.dense), "dense: remembered, it does not win in the whole model")
        whole = contest.again(decision.base, decision.host)
        if whole is not None:
            return whole, decision.seconds
        contest.plans[:] = before
    whole = contest.decide()
    if not session.interrupted and not contest.hurried and whole.milliseconds:
        dense = tuple(plan.name for plan in contest.plans if not plan.sparse)
        try:
            remember(key, Decision(whole.base, whole.host, dense, session.elapsed))
        except OSError as error:
            session.note(f"the decision for the whole model cannot be kept: {error}")
    return whole, None


def _verified(job: _Job, contest: Contest, whole: EndToEnd, *, check: bool) -> tuple[EndToEnd, Certificate]:
    """Check against the original, and replace what is wrong until it agrees."""
    if not check:
        return whole, Certificate((), "", 0.0, 0.0, 0.0, 0, passed=False)
    original = job.reference()
    while True:
        job.session.show("verifying against the original")
        rounding = rounding_kernels(contest.kernels()) if whole.base != "original" else {}
        reference = simulated(job.reduced, rounding) if rounding else original
        compiled = contest.hosted(whole.base, whole.host)
        try:
            certificate = verify(reference, compiled, job.inputs, rounding=bool(rounding))
            if rounding:
                loss = relative_error(original, compiled, job.inputs[0])
                layers = f"{len(rounding)} layers round their inputs to 8 bits"
                job.session.note(f"{layers}, which changes the outputs by {loss:.2g} of their norm on the example")
        except (CheckError, RuntimeError) as error:
            whole = _less(job, contest, whole, error)
        else:
            return whole, certificate


def _less(job: _Job, contest: Contest, whole: EndToEnd, error: Exception) -> EndToEnd:
    """Give up the next thing that may be wrong: kernels by name, the host, all kernels, the reduced graph."""
    reason = str(error).strip().splitlines()[0]
    kernels: dict[SubGraph, KernelModule] = contest.kernels() if whole.base != "original" else {}
    wrong = wrong_kernels(kernels, job.samples)
    if wrong:
        for name, found in wrong.items():
            job.session.note(f"the kernel of {name} computed wrong numbers and was replaced by dense: {found}")
        contest.make_dense(set(wrong), "dense: the chosen kernel computed wrong numbers")
        return EndToEnd(whole.base, whole.host, {}, "not timed after a wrong kernel was replaced")
    if whole.host != "eager":
        job.session.note(f"not hosted by {whole.host}, which did not agree with the original: {reason}")
        return EndToEnd(whole.base, "eager", {}, f"not timed after {whole.host} was given up")
    if kernels:
        job.session.note(f"all kernels were replaced by dense, because the whole did not agree: {reason}")
        contest.make_dense({subgraph.name for subgraph in kernels}, "dense: the whole did not agree with the original")
        return EndToEnd(whole.base, whole.host, {}, "dense: the kernels together did not agree with the original")
    if whole.base != "original":
        job.session.note(f"the original graph runs, because the reduced one did not agree: {reason}")
        return EndToEnd("original", "eager", {}, "dense: the reduced graph did not agree with the original")
    raise CheckError(
        message(
            f"the captured graph does not compute what the model does: {reason}",
            "a forward that is a function of its inputs",
            "look for randomness or state in evaluation mode, or pass verify=False",
        )
    ) from error


def _totals(job: _Job, plan: Plan, graph: fx.GraphModule, earlier: float | None) -> Totals:
    given = dict(job.result.captured.tensors)
    kernels = [child for child in graph.modules() if isinstance(child, KernelModule)]
    packed = {id(t) for kernel in kernels for t in kernel.buffers()}
    others = {name: t for name, t in graph.named_buffers() if id(t) not in packed}
    biases = sum(kernel.bias.numel() * kernel.bias.element_size() for kernel in kernels if kernel.bias is not None)
    unique = {t.untyped_storage()._cdata: t.numel() for t in given.values()}
    return Totals(
        parameters=sum(unique.values()),
        live_parameters=sum(int(t.count_nonzero()) for t in graph.buffers()),
        memory=tensor_bytes(given),
        compiled_memory=tensor_bytes(others) + biases + sum(kernel.nbytes for kernel in kernels),
        flops=sum(layer.flops for layer in plan.layers),
        live_flops=sum(layer.live_flops if layer.sparse else layer.flops for layer in plan.layers),
        compile_seconds=job.session.elapsed,
        first_compile_seconds=earlier,
    )


def _provenance(job: _Job) -> dict[str, Any]:
    tensors: Mapping[str, Tensor] = job.original.tensors
    device = next((t.device.type for t in tensors.values()), "cpu")
    return {
        "model": type(job.model).__qualname__,
        "sparta": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": device_name(device),
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tune": job.session.tune,
    }


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


def _flat_inputs(signature: Signature, given: Any) -> list[Any]:
    if isinstance(given, Mapping):
        return signature.flatten((), given)
    sequence = isinstance(given, Sequence) and not isinstance(given, str)
    return signature.flatten(tuple(given) if sequence else (given,), {})


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation mode and each back to its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
