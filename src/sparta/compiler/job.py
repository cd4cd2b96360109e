"""The job: one model under compilation, from its capture to the compiled module.

A step that fails, whatever it raises, costs speed and never the result: what it was to change stays as it was, and the
report has a line on it. Only wrong arguments and models that cannot be captured raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparta.compiler.certificate import Certificate
from sparta.compiler.choose.calls import with_operators
from sparta.compiler.choose.end_to_end import Contest
from sparta.compiler.choose.layers import choose_layers, looked_at
from sparta.compiler.choose.outcome import Outcome
from sparta.compiler.choose.partition import partition
from sparta.compiler.choose.precision import Calibration
from sparta.compiler.choose.siblings import of_layers, with_products
from sparta.compiler.choose.timer import Timer
from sparta.compiler.choose.unlowered import unlowered
from sparta.compiler.choose.workshop import Workshop
from sparta.compiler.clock import machine_load
from sparta.compiler.graph.capturing import captured_for
from sparta.compiler.graph.constants import fold_constants
from sparta.compiler.graph.fixed import fixed_program
from sparta.compiler.graph.fold import fold_batch_norms
from sparta.compiler.graph.program import Program, original_program, reduced_program
from sparta.compiler.graph.signature import Signature
from sparta.compiler.graph.sizes import Sizes
from sparta.compiler.graph.weights import with_computed_weights
from sparta.compiler.lower.experts import opaque_experts
from sparta.compiler.lower.samples import SizeSample, size_samples
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.plan import LayerPlan, Plan
from sparta.compiler.provenance import provenance_of
from sparta.compiler.report import Report, Totals
from sparta.compiler.run.compiled_model import CompiledModel, tensor_bytes
from sparta.compiler.run.given import GivenModel
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.session import Session
from sparta.compiler.variant import Base
from sparta.compiler.verify import tolerance_of
from sparta.errors import SpartaError
from sparta.propagation.api import given_tesas
from sparta.propagation.capture import Captured, call_arguments
from sparta.propagation.compact import masked_tensors
from sparta.propagation.engine import Facts, derive
from sparta.propagation.result import PropagationResult
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec

__all__ = ["Job"]

_CALLS_TO_VERIFY = 6  # the original and the compiled model, each on three inputs
_MANY_CALLS = 32  # between layers: from so many on, compiling them is worth the wait
_CONVOLUTIONS = frozenset({torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default})
_T = TypeVar("_T")
_Parts = tuple[tuple[SubGraph, ...], tuple[SizeSample, ...]]


@dataclass(frozen=True)
class Job:
    """A model under compilation: what it was, the two graphs, and the inputs it is measured with.

    The two graphs are for the sizes of the example where there is one, and for any size where there are several;
    `any_size` has both for any size.
    """

    model: nn.Module
    example: Any
    result: PropagationResult
    signature: Signature
    any_size: tuple[Program, Program]
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
        cast: bool = False,
        cuda_graphs: bool = True,
    ) -> Job:
        """Capture, propagate, reduce and partition."""
        session.show("capturing and propagating")
        with opaque_experts(model):
            captured, sizes = captured_for(model, example, dynamic_shapes, session.note)
            result, derived = _propagated(model, captured, spec, session)
        signature = Signature.of(model, result.captured, cast=cast, sizes=sizes)
        inputs = tuple(_flat_inputs(signature, one) for one in (example, *more))
        original = original_program(result)
        if cuda_graphs and _replayable(original, inputs[0]):
            session.use_graphs()
        with torch.no_grad():
            reduced = _reduced(result, original, inputs[0], session, cut=derived)
            any_size = original, reduced
            if not more:
                quick = {"computed": not session.slow}
                original = fixed_program(original, inputs[0], **quick)
                reduced = original if any_size[0] is any_size[1] else fixed_program(reduced, inputs[0], **quick)
                reduced = _without_masks(reduced, session)
            unchanged: tuple[Program, list[LayerPlan]] = (reduced, [])
            reduced, operators = _tried(
                session,
                "attention, products and experts stay as they are",
                lambda: with_operators(unchanged[0], inputs[0], session),
                unchanged,
            )
            none: _Parts = ((), tuple(SizeSample({}) for _ in inputs))
            subgraphs, samples = _tried(
                session, "no layer was looked at", lambda: _parts(reduced, inputs, session), none
            )
            for line in unlowered(reduced, subgraphs):
                session.note(line)
        return cls(
            model,
            example,
            result,
            signature,
            any_size,
            original,
            reduced,
            subgraphs,
            inputs,
            samples,
            session,
            operators=tuple(operators),
        )

    def calibrated(self, activations: Mapping[str, Any]) -> Job:
        """Return the job with its int8 layers as such."""
        facts, tensors = self.result.facts, self.result.captured.tensors
        known = Calibration(facts.given, activations, self.session.note, tensors, as_read=facts.as_read)
        try:
            subgraphs, samples = known.quantized(self.reduced, self.subgraphs, self.samples)
        except SpartaError:
            raise  # a grid that is none
        except Exception as error:  # noqa: BLE001 - in real numbers it runs in any case
            self.session.gave_up("no layer runs in int8", error)
            return self
        return replace(self, subgraphs=tuple(subgraphs), samples=tuple(samples))

    def contest(self, *, inductor: bool | None) -> Contest:
        """Choose layer by layer, and return what competes for the whole.

        Parameters
        ----------
        inductor
            Whether `torch.compile` competes; None lets it where graphs are replayed and it can gain: there is much
            between layers, or there are convolutions, for which it also chooses the layout.
        """
        if inductor is None:
            inductor = self.session.in_graphs and self.session.tune != "off" and self._gains_by_inductor()
        args, kwargs = call_arguments(self.example)

        def as_given() -> Any:
            with torch.no_grad():
                return self.model(*args, **kwargs)

        self._time_a_call(as_given)
        _tried(self.session, "no zeros were found", lambda: looked_at(self.subgraphs, self.samples), None)
        self.session.begin_measuring(_CALLS_TO_VERIFY * len(self.inputs))
        none: tuple[tuple[SubGraph, ...], list[LayerPlan]] = ((), [])
        subgraphs, plans = _tried(
            self.session,
            "no layer was chosen for",
            lambda: (self.subgraphs, choose_layers(self.subgraphs, self.samples, self.session)),
            none,
        )
        single = (tuple(subgraphs), self.samples, list(plans))
        subgraphs, samples, plans = _tried(
            self.session, "layers run one by one", lambda: with_products(*single, self.session), single
        )
        timed = self._given() if self.session.tune != "off" else None
        replays = self.session.in_graphs
        workshop = Workshop(self.original, self.reduced, subgraphs, samples, timed, replays)
        timer = Timer(self.session, self.session.measure, self.session.call_seconds, cuda=self._cuda)
        return Contest(as_given, workshop, tuple(plans), self.inputs, timer, inductor=inductor)

    def _gains_by_inductor(self) -> bool:
        """Whether it is likely that Inductor makes the model faster than the same calls replayed."""
        calls = [node for node in self.reduced.graph.nodes if node.op == "call_function"]
        return len(calls) - len(self.subgraphs) >= _MANY_CALLS or any(node.target in _CONVOLUTIONS for node in calls)

    def _time_a_call(self, as_given: Callable[[], Any]) -> None:
        """Tell the session what a call of the model takes, unless it knows of a slow one already."""
        if self.session.slow:
            return
        as_given()  # the first call of all may load libraries
        before = self.session.elapsed
        as_given()
        if any(t.is_cuda for t in self.original.tensors.values()):
            torch.cuda.synchronize()
        self.session.call_seconds = self.session.elapsed - before

    @property
    def tolerance(self) -> float:
        """What results may differ by, whatever dtype they come back in."""
        return tolerance_of(self.model.parameters())

    def reference(self) -> Callable[..., Any]:
        """Return the masked dense model as a function of flat inputs."""
        masked = masked_tensors(self.result.captured, self.result.facts)

        def run(*leaves: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(list(leaves), self.signature.in_spec)
            return torch.func.functional_call(self.model, dict(masked), args, kwargs)

        return run

    def finished(
        self,
        workshop: Workshop,
        outcome: Outcome,
        certificate: Certificate,
        earlier: float | None,
        general: fx.GraphModule | None = None,
        sizes: Sizes | None = None,
        *,
        model_takes_more: bool = False,
    ) -> CompiledModel:
        """Return the module with its report.

        Parameters
        ----------
        general, sizes
            The graph for any size, and the sizes that it takes.
        model_takes_more
            Whether the model as given is kept, for sizes that no graph takes.
        """
        graph = workshop.graph(outcome.variant, outcome.plans)
        lost = outcome.variant.base is not Base.REDUCED
        note = f"dense: the {outcome.variant} runs"
        operators = [one.made_dense(note) if lost and one.sparse else one for one in self.operators]
        plan = Plan((*of_layers(outcome.plans), *operators), outcome.whole)
        self.session.note(self.session.store.problem)
        unknown = self.result.facts.notes
        if unknown:
            place, text = next(iter(unknown.items()))
            self.session.note(f"propagation stopped at {len(unknown)} places, the first of them {place}: {text}")
        totals = _totals(self, plan, graph, earlier)
        report = Report(plan, totals, certificate, tuple(self.session.notes), _machine(self))
        spec = Spec(dict(self.result.facts.given))
        run = workshop.run(outcome.variant, outcome.plans)
        signature = replace(self.signature, sizes=sizes)
        given = self._given() if model_takes_more else None
        done = CompiledModel(graph, signature, report, spec, _provenance(self), run, general=general, given=given)
        done.remember(self.model)
        return done

    def _given(self) -> GivenModel | None:
        """Return the model as given, to run in a graph's place; None where it cannot be copied."""
        try:
            return GivenModel(self.model, self.any_size[0].tensors, self.signature)
        except Exception:  # noqa: BLE001 - whatever a module does when it is copied; a graph of it remains
            return None

    @property
    def _cuda(self) -> bool:
        tensors = [*self.original.tensors.values(), *(x for x in self.inputs[0] if isinstance(x, Tensor))]
        return any(t.is_cuda for t in tensors)


def _tried(session: Session, what: str, step: Callable[[], _T], fallback: _T) -> _T:
    """Return what a step returns, or the fallback, with a line on why; an interrupt comes through."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - whatever it raises, the step before it is what runs
        session.gave_up(what, error)
        return fallback


def _propagated(
    model: nn.Module, captured: Captured, spec: Spec | None, session: Session
) -> tuple[PropagationResult, bool]:
    """Return what follows from the spec, and whether anything does: where deriving fails, the spec itself remains."""
    given = given_tesas(model, captured, spec)
    unchanged: tuple[Captured, dict[str, TeSA]] = (captured, {})
    what = "weights that are computed stay so"
    captured, computed = _tried(session, what, lambda: with_computed_weights(unchanged[0], given), unchanged)
    given.update(computed)
    try:
        return PropagationResult(captured, derive(captured, given, as_read=spec is None)), True
    except Exception as error:  # noqa: BLE001 - a rule of anyone's; what is known without it is enough to run
        session.gave_up("nothing was propagated", error)
        facts = Facts(given, {**captured.tensors, **captured.literals}, as_read=spec is None)
        return PropagationResult(captured, facts), False


def _parts(program: Program, inputs: Sequence[Sequence[Any]], session: Session) -> _Parts:
    """Return the sub-graphs that kernels could run, and what they see."""
    subgraphs = tuple(partition(program, program.shapes(inputs[0], computed=not session.slow)))
    return subgraphs, tuple(size_samples(program, subgraphs, inputs))


def _replayable(program: Program, inputs: Sequence[Any]) -> bool:
    """Whether a CUDA graph could hold a model: its tensors are on CUDA."""
    tensors = [*program.tensors.values(), *(x for x in inputs if isinstance(x, Tensor))]
    return bool(tensors) and all(t.is_cuda for t in tensors)


def _reduced(
    result: PropagationResult, original: Program, inputs: Sequence[Any], session: Session, *, cut: bool
) -> Program:
    """Return the compact and folded program, or as much of it as works."""

    def compact() -> Program:
        program, removed = reduced_program(result, brief=session.slow)
        program.shapes(inputs, computed=not session.slow)  # raises where it does not run
        if removed:
            session.note(f"{removed} parameters that change nothing were cut out")
        return program

    def folded() -> Program:
        found, norms = fold_batch_norms(program, program.shapes(inputs, computed=not session.slow))
        if norms:
            session.note(f"{norms} BatchNorms were folded into the layers before them")
        return found

    program = _tried(session, "nothing was cut out", compact, original) if cut else original
    program = _tried(session, "no BatchNorm was folded", folded, program)
    return _without_masks(program, session)


def _without_masks(program: Program, session: Session) -> Program:
    """Return the program with its fixed masks as tensors, as far as attention must read them."""

    def plain() -> Program:
        found, masks = fold_constants(program)
        if masks:
            session.note(f"{masks} masks of attention keep everything or the past, and are not read any more")
        return found

    return _tried(session, "no mask was folded", plain, program)


def _totals(job: Job, plan: Plan, graph: fx.GraphModule, earlier: float | None) -> Totals:
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


def _machine(job: Job) -> dict[str, str]:
    """Return where this was measured, in words."""
    provenance = _provenance(job)
    versions = ", ".join(f"{name} {provenance[name]}" for name in ("sparta", "torch") if name in provenance)
    threads = f"{torch.get_num_threads()} threads, {machine_load()}"
    return {"machine": str(provenance["machine"]), "threads": threads, "versions": versions}


def _provenance(job: Job) -> dict[str, Any]:
    device = next((t.device.type for t in job.original.tensors.values()), "cpu")
    return provenance_of(type(job.model).__qualname__, device, job.session.tune)


def _flat_inputs(signature: Signature, given: Any) -> list[Any]:
    if isinstance(given, Mapping):
        return signature.flatten((), given)
    sequence = isinstance(given, Sequence) and not isinstance(given, str)
    return signature.flatten(tuple(given) if sequence else (given,), {})
