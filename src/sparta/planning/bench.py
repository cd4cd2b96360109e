"""The bench: what is measured for a sparsity plan, layers one by one and models as a whole.

The model is captured once. It and one layer of each kind are timed interleaved, so that what a layer takes is a share
of what the model takes, however busy the machine is. The time of an option is that of the best kernel that the tuner
finds for the layer with a mask of that kind, with the layer's real input; results of earlier runs come from the tuning
store. The solver needs nothing else of the compiler, so a test passes a bench of its own and no clock runs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparta.compiler.api import compile_in
from sparta.compiler.choose.layers import best_ratio, choice_for
from sparta.compiler.choose.precision import Calibration
from sparta.compiler.clock import Rounds
from sparta.compiler.graph.program import Program
from sparta.compiler.job import Job
from sparta.compiler.lower.samples import SizeSample
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.plan import LayerPlan
from sparta.compiler.session import Session
from sparta.errors import SpartaError
from sparta.oneshot.targets import Target
from sparta.planning.options import BF16, Option
from sparta.planning.rounding import rounded
from sparta.precision.api import FORMATS
from sparta.precision.formats import Float8, round_weight
from sparta.propagation.capture import call_arguments
from sparta.specialize.cpu.library import load as load_kernels
from sparta.specialize.tuning.select import DENSE as DENSE_KERNEL
from sparta.specialize.tuning.select import Choice
from sparta.tesa.attribute import TeSA
from sparta.tesa.patterns import Pattern
from sparta.tesa.spec import Spec

__all__ = ["Bench", "CompilerBench", "Whole"]

_GIVEN = "the model as given"
_SECONDS = 0.1  # for a layer that becomes narrower
_SHARE = 0.03  # of what is left for layers, for one option: a model has some fifty
_WHOLE_SECONDS = 1.5
_FOR_DENSE = 0.25  # of what is left, for timing the model and its layers as they are
_FEWEST = 3  # rounds, of which two warm up
_ROUNDS = 9
_LEAST_S = 2.0  # for compiling a whole, whatever the budget is


@dataclass(frozen=True)
class Whole:
    """A compiled model, measured.

    Parameters
    ----------
    given_ms, ms
        Milliseconds of the model as given, and those that the compiled one would have taken beside it by the ratio:
        other programs may slow both down while it is compared.
    ratio
        How many times faster it is: the median of the ratios of single rounds.
    memory_mb
        Of what the compiled model holds, in MB (10^6 bytes).
    dense
        The layers that run dense although they are sparse, because their kernels lost to dense when measured alone.
    hurried
        Whether there was too little time to find what is fastest.
    """

    given_ms: float
    ms: float
    ratio: float
    memory_mb: float
    dense: frozenset[str] = frozenset()
    hurried: bool = False


class Bench(Protocol):
    """What a plan needs to have measured."""

    @property
    def device(self) -> str:
        """The kind of device that is measured."""
        ...

    def given_ms(self) -> float:
        """Return the milliseconds of the model as given."""
        ...

    def dense_ms(self, name: str) -> float | None:
        """Return the milliseconds of a layer that is dense; None for one that no kernel can run."""
        ...

    def kind(self, name: str) -> str:
        """Return what layers have in common that take the same time, dense and in every option."""
        ...

    def option_ms(self, name: str, option: Option) -> float:
        """Return the milliseconds of a layer that became an option; those of dense where no kernel is faster."""
        ...

    def narrow_ms(self, name: str, *, rows: float, columns: float) -> float:
        """Return the milliseconds of a dense layer of which these shares of the outputs and inputs stay."""
        ...

    def whole(self, masks: Mapping[str, tuple[Option, Pattern | None]]) -> Whole:
        """Compile the model with layers that became such options, and measure it; one that prunes has a pattern."""
        ...


@dataclass(eq=False)
class CompilerBench:
    """Measures with the compiler.

    Parameters
    ----------
    model
        In evaluation mode, on the device.
    example
        What the model is measured with.
    targets
        The layers that may become sparse.
    session
        The clock, the store and the budget.
    """

    model: nn.Module
    example: Any
    targets: Mapping[str, Target]
    session: Session
    notes: list[str] = field(default_factory=list)
    _known: dict[str, Choice] = field(default_factory=dict)
    _dense: dict[str, float] = field(default_factory=dict)
    _shares: dict[str, tuple[float, float]] = field(default_factory=dict)
    _given: float | None = None
    _inductor_seconds: float = 0.0  # the most that one of its calls took to compile, of all wholes
    _found: dict[str, tuple[SubGraph, Tensor, Tensor | None]] | None = None
    _program: Program | None = None

    @property
    def device(self) -> str:
        """The kind of device that the model is on."""
        return next(self.model.parameters()).device.type

    def given_ms(self) -> float:
        """Return the milliseconds of the model as given."""
        if self._given is None:
            self._given = self._time_dense()
            self.session.begin_measuring(0)
        return self._given

    def dense_ms(self, name: str) -> float | None:
        """Return the milliseconds of a layer that is dense; layers alike are timed once."""
        if name not in self._layers:
            return None
        self.given_ms()
        return self._dense[self.kind(name)]

    def _time_dense(self) -> float:
        """Time the model and a layer of each kind, interleaved; a layer takes its share of the model in each round.

        Where the budget has no time for several rounds, it is one.
        """
        if self.device == "cpu":
            with self.session.uncounted(), suppress(SpartaError, OSError):  # what is missing, implements tell
                load_kernels()
        calls: dict[str, Any] = {_GIVEN: lambda: self._call(self.model)}
        for name, (subgraph, x, _) in self._layers.items():
            calls.setdefault(self.kind(name), partial(self._run, subgraph, subgraph.weight, x, subgraph.bias))
        self.session.begin_measuring(0)  # what was captured and loaded by now cannot be cut short
        with torch.no_grad():
            once = Rounds(self.session.measure(calls, 0.0))
            round_seconds = 1e-3 * sum(once.median(key) for key in calls)
            most = max(_WHOLE_SECONDS, _FOR_DENSE * self.session.left)
            wanted = max(_WHOLE_SECONDS, 2 * _ROUNDS * round_seconds)
            fits = _FEWEST * round_seconds <= most
            rounds = Rounds(self.session.measure(calls, min(wanted, most))) if fits else once
        given = rounds.median(_GIVEN)
        self._dense = {kind: given / rounds.ratio(_GIVEN, kind).value for kind in calls if kind != _GIVEN}
        return given

    def kind(self, name: str) -> str:
        """Return the operation of a layer with its sizes and what follows it."""
        subgraph, x, _ = self._layers[name]
        spec, sizes = subgraph.spec(x), (tuple(subgraph.weight.shape), tuple(x.shape), subgraph.weight.dtype)
        return f"{spec.op} {sizes} {spec.epilogue} {sorted(spec.attributes.items())}"

    def option_ms(self, name: str, option: Option) -> float:
        """Return the milliseconds of the best kernel, by its ratio to dense."""
        dense = self.dense_ms(name) or 0.0
        subgraph, x, residual = self._layers[name]
        pruned = subgraph
        if option.prunes:
            mask = _mask(self.targets[name], option.made, option.sparsity)
            pruned = replace(subgraph, weight=subgraph.weight * mask.to(subgraph.weight.device))
        if option.precision == BF16:
            product, casts = self._in_bf16(name)
            share = self._kernel_share(_shortened(pruned), *_short(x, residual)) if option.prunes else 1.0
            return dense * min(1.0, casts + product * share)
        if option.precision is not None:
            pruned = self._rounded(name, pruned, option.precision, x, residual)
            if pruned.scales is None:
                return dense  # no kernel takes it rounded
        return dense * self._kernel_share(pruned, x, residual)

    def _kernel_share(self, subgraph: SubGraph, x: Tensor, residual: Tensor | None) -> float:
        """Return the time of the best kernel as a share of that of the dense one; 1 where none is faster."""
        spec = subgraph.spec(x)

        def problem() -> Any:
            return subgraph.lowering.problem(spec, subgraph.weight, x, subgraph.bias, residual)

        with torch.no_grad():
            choice = choice_for(spec, problem, self._known, self.session, share=_SHARE)
        if self.session.interrupted:
            raise KeyboardInterrupt  # it was taken as the end of one measurement; it ends all of them
        ratio = None if choice.implement == DENSE_KERNEL else best_ratio(choice)
        return 1.0 if ratio is None else min(1.0, ratio)

    def _in_bf16(self, name: str) -> tuple[float, float]:
        """Return what a dense layer takes in bfloat16, and what the casts take, as shares of what it takes as it is."""
        kind = self.kind(name)
        if kind not in self._shares:
            subgraph, x, _ = self._layers[name]
            short, narrow = _shortened(subgraph), x.to(torch.bfloat16)
            wide = self._run(subgraph, subgraph.weight, x, subgraph.bias)
            back = wide.to(torch.bfloat16)
            calls = {
                "dense": lambda: self._run(subgraph, subgraph.weight, x, subgraph.bias),
                "short": lambda: self._run(short, short.weight, narrow, short.bias),
                "casts": lambda: self._waited((x.to(torch.bfloat16), back.to(wide.dtype))),
            }
            rounds = Rounds(self.session.measure(calls, _SECONDS))
            product, casts = (1 / rounds.ratio("dense", key).value for key in ("short", "casts"))
            self._shares[kind] = (product, casts)
        return self._shares[kind]

    def narrow_ms(self, name: str, *, rows: float, columns: float) -> float:
        """Return the milliseconds of a dense layer of which some rows and columns stay, by its ratio to the whole."""
        dense = self.dense_ms(name) or 0.0
        subgraph, x, _ = self._layers[name]
        weight, axis = subgraph.weight, 1 if subgraph.weight.dim() > 2 else -1
        kept_rows, kept = max(1, round(rows * weight.shape[0])), max(1, round(columns * weight.shape[1]))
        small = weight[:kept_rows, :kept].contiguous()
        bias = None if subgraph.bias is None else subgraph.bias[:kept_rows].contiguous()
        narrow = x.narrow(axis, 0, kept).contiguous()
        calls = {
            "dense": lambda: self._run(subgraph, weight, x, subgraph.bias),
            "narrow": lambda: self._run(subgraph, small, narrow, bias),
        }
        ratio = Rounds(self.session.measure(calls, _SECONDS)).ratio("dense", "narrow").value
        return dense / max(1.0, ratio)

    def whole(self, masks: Mapping[str, tuple[Option, Pattern | None]]) -> Whole:
        """Compile a copy with masks by magnitude, whose times are those of any mask of the kind, and measure it."""
        given_ms = self.given_ms()
        model = copy.deepcopy(self.model)
        spec = Spec(
            {
                name: TeSA.from_mask(self._stored(name, pattern, option), format=self.targets[name].parameter.dtype)
                for name, (option, pattern) in masks.items()
                if pattern is not None
            }
        )
        spec.apply(model)
        short = {name: option.precision for name, (option, _) in masks.items() if option.precision is not None}
        grids: Mapping[str, Any] = {}
        if short:
            found = rounded(model, [self.example], spec, short, quick=True)
            model, spec, grids = found.model, found.spec, found.activations
        fast, hurried = self._compiled(model, spec, grids)
        if _gave_up(fast):  # timing was unstable, or the time was up: kernels are stored by now
            fast, hurried = self._compiled(model, spec, grids)
        args, kwargs = call_arguments(self.example)
        with torch.no_grad():
            calls = {"given": lambda: self._call(self.model), "fast": lambda: self._waited(fast(*args, **kwargs))}
            seconds = max(_WHOLE_SECONDS, 2 * _ROUNDS * given_ms / 1e3)
            rounds = Rounds(self.session.measure(calls, seconds))
        lost = {layer.name for layer in fast.report.plan.layers if _lost(layer)}
        wanted = {name for name, (option, _) in masks.items() if option.prunes or option.precision != BF16}
        dense = frozenset(name for name in wanted if _module(name) in lost)
        ratio = rounds.ratio("given", "fast").value
        memory = fast.report.totals.compiled_memory / 1e6
        return Whole(given_ms, given_ms / ratio, ratio, memory, dense, hurried)

    # ------------------------------------------------------------------ within

    def _compiled(self, model: nn.Module, spec: Spec, grids: Mapping[str, Any]) -> tuple[Any, bool]:
        """Return a compiled model, and whether it was hurried; what an interrupt cut short is no measurement."""
        session = Session(tune=self.session.tune, budget_s=self._left(), show=self.session.show, brief=True)
        session.measure, session.inductor_seconds = self.session.measure, self.session.inductor_seconds
        fast = compile_in(  # all that competes in a plain call of `sparta.compile` competes here, Inductor too
            session, model, [self.example], spec, dynamic_shapes=None, activations=grids, inductor=None, check=False
        )
        if session.interrupted:  # the compiler took it as the end of its measuring; it ends all of it
            self.session.interrupted = True
            raise KeyboardInterrupt
        if session.inductor_seconds != self.session.inductor_seconds:  # the cache makes later ones short
            self._inductor_seconds = max(self._inductor_seconds, session.inductor_seconds)
            self.session.inductor_seconds = self._inductor_seconds
        return fast, session.hurried

    @property
    def _layers(self) -> dict[str, tuple[SubGraph, Tensor, Tensor | None]]:
        if self._found is None:
            with torch.no_grad():
                job = Job.started(self.model, self.example, None, None, (), self.session)
            self._found, self._program = {}, job.reduced
            for subgraph in job.subgraphs:
                name = job.reduced.source(subgraph.anchor.weight)
                if name in self.targets and tuple(subgraph.weight.shape) == self.targets[name].layout.shape:
                    self._found[name] = (subgraph, *job.samples[0].values[subgraph])
        return self._found

    def _rounded(self, name: str, subgraph: SubGraph, precision: str, x: Tensor, residual: Tensor | None) -> SubGraph:
        """Return a sub-graph whose weight and inputs are rounded; as it is where no operation takes it so."""
        if self._program is None:
            return subgraph
        target, format = self.targets[name], FORMATS[precision]
        live = subgraph.weight != 0
        on_grid = round_weight(subgraph.weight, 0, format)
        axis = 1 if target.transposed else 0
        shape = [-1 if dim == axis else 1 for dim in range(live.dim())]
        group = [1 if dim == axis else size for dim, size in enumerate(target.seen(live).shape)]
        known = TeSA.from_mask(target.seen(live)).with_format(format, scale=on_grid.scales.reshape(shape), group=group)
        as_given = replace(subgraph, weight=on_grid.values)
        grids = {} if precision == "int8" else {f"{name.removesuffix('weight')}input": Float8()}
        calibration = Calibration({name: known}, grids, self.notes.append, {name: target.seen(on_grid.values)})
        sample = SizeSample({as_given: (x, residual)})
        with torch.no_grad():
            (found,), _ = calibration.quantized(self._program, [as_given], [sample])
        return found

    def _stored(self, name: str, pattern: Pattern, option: Option) -> Tensor:
        target = self.targets[name]
        return target.seen(_mask(target, pattern, option.sparsity))

    def _run(self, subgraph: SubGraph, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        with torch.no_grad():
            result = subgraph.lowering.dense(weight, x, bias, subgraph.anchor.attributes)
        self._waited(result)
        return result

    def _call(self, model: nn.Module) -> Any:
        args, kwargs = call_arguments(self.example)
        with torch.no_grad():
            return self._waited(model(*args, **kwargs))

    def _waited(self, result: Any) -> Any:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return result

    def _left(self) -> float | None:
        """Return the seconds for compiling one whole: a share of what is left, since there may be several."""
        left = self.session.left
        return None if left == float("inf") else max(_LEAST_S, left / 3)


def _mask(target: Target, pattern: Pattern, sparsity: float | None) -> Tensor:
    """Return the mask of a layer's weight by magnitude, outputs first."""
    return pattern.project(target.seen(target.parameter.detach()).abs(), sparsity)


def _shortened(subgraph: SubGraph) -> SubGraph:
    """Return a sub-graph whose weight is in bfloat16."""
    bias = None if subgraph.bias is None else subgraph.bias.to(torch.bfloat16)
    return replace(subgraph, weight=subgraph.weight.to(torch.bfloat16), bias=bias)


def _short(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return x.to(torch.bfloat16), None if residual is None else residual.to(torch.bfloat16)


def _lost(layer: LayerPlan) -> bool:
    """Whether a layer runs dense because its kernels lost to dense in measurement, and not for want of time."""
    return not layer.sparse and not layer.note and layer.first.entry is not None


def _gave_up(fast: Any) -> bool:
    """Whether nothing of a compiled model is sparse, and that was not measured to be best."""
    whole = fast.report.plan.whole
    return whole.ratio is None and not any(layer.sparse for layer in fast.report.plan.layers)


def _module(name: str) -> str:
    return name.removesuffix(".weight")
