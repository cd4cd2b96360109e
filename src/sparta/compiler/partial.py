"""Partial compilation: what cannot be captured whole is compiled by its modules, the largest that can be.

The modules are found by calling the model and looking at what each is called with. Each compiled module is put in the
place of the original in a copy of the model, and stays there only if the whole still computes what it did.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparta.compiler.certificate import Certificate
from sparta.compiler.copying import model_copy
from sparta.compiler.plan import EndToEnd, LayerPlan, Plan
from sparta.compiler.provenance import provenance_of
from sparta.compiler.report import Report, Totals
from sparta.compiler.run.compiled_model import CompiledModel, tensor_bytes
from sparta.compiler.run.partial_model import PartialModel
from sparta.compiler.session import Session, in_words
from sparta.compiler.variant import Base
from sparta.compiler.verify import TOLERANCES, agree, tolerance_of
from sparta.errors import ValueRangeError, message
from sparta.measure.untouched import untouched
from sparta.modules import replace_module
from sparta.propagation.caches import without_caches
from sparta.propagation.capture import call_arguments
from sparta.propagation.inputs import fresh_inputs
from sparta.tesa.spec import Spec

__all__ = ["compiled_in_parts"]

_DEEPEST = 8  # objects within objects, such as the layers of a cache

Call = tuple[tuple[Any, ...], dict[str, Any]]
CompileWhole = Callable[[nn.Module, Sequence[Any], Spec], CompiledModel]


def compiled_in_parts(
    session: Session, model: nn.Module, sizes: Sequence[Any], spec: Spec | None, why: Exception, whole: CompileWhole
) -> PartialModel:
    """Return a copy of a model with compiled modules inside.

    Parameters
    ----------
    sizes
        Example inputs; the first ones are what modules are compiled for.
    why
        What the model as a whole raised.
    whole
        Compiles a module as a whole with calls of it, within a spec; raises where it cannot.
    """
    session.note(f"compiled in parts, because the whole cannot be captured: {in_words(why)}")
    known = Spec.from_zeros(model) if spec is None else spec
    tesas = {name: tesa for name, tesa in known.resolve(model).items() if tesa.density < 1}
    work = _Parts(session, model, sizes[0], tesas, whole)
    if tesas:
        work.visit("", work.copy)
    else:
        session.note("nothing is pruned, so no module was compiled")
    certificate = work.certificate()
    report = _report(session, model, work, certificate)
    device = next((t.device.type for t in model.parameters()), "cpu")
    provenance = provenance_of(type(model).__qualname__, device, session.tune)
    return PartialModel(work.copy, tuple(work.done), report, known, provenance)


class _Parts:
    """A copy of a model under way."""

    def __init__(
        self, session: Session, model: nn.Module, example: Any, tesas: Mapping[str, Any], whole: CompileWhole
    ) -> None:
        self.session, self.tesas, self.whole = session, tesas, whole
        self.example = call_arguments(example)
        self.copy = model_copy(model)
        with torch.no_grad():
            for name, tensor in [*self.copy.named_parameters(), *self.copy.named_buffers()]:
                if name in tesas:
                    tensor.copy_(tesas[name].apply(tensor))
        self.calls = self._seen_calls()
        # A language model goes another way without its cache, and may read there what no other call reads.
        self.trials = [(self.example, True), (fresh_inputs(self.example, seed=0), True), (self.example, False)]
        self.expected = [self._results(*trial) for trial in self.trials]
        self.done: dict[str, CompiledModel] = {}
        self._replaced: dict[str, nn.Module] = {}

    def visit(self, path: str, module: nn.Module) -> None:
        """Compile the modules of a module, or those inside them."""
        for name, child in list(module.named_children()):
            inner = f"{path}.{name}" if path else name
            pruned = {n.removeprefix(f"{inner}."): t for n, t in self.tesas.items() if n.startswith(f"{inner}.")}
            if not pruned:
                continue
            if not self._compiled(inner, child, pruned):
                self.visit(inner, child)

    def _compiled(self, path: str, child: nn.Module, pruned: Mapping[str, Any]) -> bool:
        """Put a compiled module in the place of one; False where that cannot be done."""
        calls = self.calls.get(id(child))
        if not calls:
            return False
        self.session.show(f"compiling {path}")
        notes = len(self.session.notes)
        try:
            part = self.whole(child, [_example_of(child, calls[0])], Spec(dict(pruned)))
            for args, kwargs in calls:
                part.signature.flatten(args, kwargs)
            self._check_numbers(part)
        except Exception as error:  # noqa: BLE001 - the modules inside it may do
            del self.session.notes[notes:]
            if not list(child.children()):
                self.session.note(f"{path} stays as it is: {in_words(error)}")
            return False
        replace_module(self.copy, path, part)
        problem = self._problem()
        if problem:
            replace_module(self.copy, path, child)
            self.session.note(
                f"{path} stays as it is, because its place in the model asks for its own class: {problem}"
            )
            return False
        self.done[path], self._replaced[path] = part, child
        return True

    def _check_numbers(self, part: CompiledModel) -> None:
        """Raise for a module that is called with a size as a number, which would be fixed for all calls."""
        sizes = {size for leaf in pytree.tree_leaves(self.example) if isinstance(leaf, Tensor) for size in leaf.shape}
        for given in part.signature.inputs:
            if given.shape is None and type(given.constant) is int and given.constant in sizes:
                raise ValueRangeError(
                    message(f"{given.name}={given.constant}, a size", "tensors, from which it follows")
                )

    def _problem(self) -> str:
        """Return why the copy does not compute what the model does; empty where it does."""
        for trial, expected in zip(self.trials, self.expected, strict=True):
            try:
                results = self._results(*trial)
                if (expected is None) != (results is None):
                    return "it does not run on fresh inputs, or without a cache"
                if expected is not None and results is not None:
                    agree(expected, results, least=tolerance_of(self.copy.parameters()))
            except Exception as error:  # noqa: BLE001 - whatever the code around it makes of a compiled module
                return in_words(error)
        return ""

    def certificate(self) -> Certificate:
        """Return how well the copy agrees with the model; parts that do not agree together are taken out again."""
        problem = self._problem()
        if problem and self.done:
            for path, child in self._replaced.items():
                replace_module(self.copy, path, child)
            self.session.note(f"no module is compiled, because they do not agree together: {problem}")
            self.done, problem = {}, self._problem()
        if problem:
            self.session.note(f"nothing could be compared, because the model does not repeat itself: {problem}")
        floats = [t.dtype for t in self.expected[0] or () if isinstance(t, Tensor) and t.is_floating_point()]
        coarsest = max(floats, key=lambda dtype: TOLERANCES.get(dtype, 0.0), default=torch.float32)
        worst = max((part.report.certificate.error for part in self.done.values()), default=0.0)
        name = str(coarsest).removeprefix("torch.")
        count = len(self.expected[0] or ())
        return Certificate((0,), name, TOLERANCES.get(coarsest, 0.0), worst, worst, count, passed=not problem)

    def _results(self, inputs: Call, cached: bool) -> list[Any] | None:  # noqa: FBT001 - of a trial
        """Return the flat results of a call, of which nothing remains; None for trials that the model does not take."""
        args, kwargs = inputs
        with untouched(self.copy, inputs), torch.no_grad(), without_caches(self.copy, active=not cached):
            torch.manual_seed(0)
            try:
                return list(_leaves(self.copy(*args, **kwargs)))
            except Exception:
                if inputs is self.example and cached:
                    raise
                return None

    def _seen_calls(self) -> dict[int, list[Call]]:
        """Return what each module of the copy is called with, by the module's identity."""
        seen: dict[int, list[Call]] = {}

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept = pytree.tree_map(_kept, (args, kwargs))
            seen.setdefault(id(module), []).append((kept[0], kept[1]))

        hooks = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in self.copy.modules()]
        args, kwargs = self.example
        try:
            with untouched(self.copy, self.example), torch.no_grad():
                self.copy(*args, **kwargs)
        finally:
            for each in hooks:
                each.remove()
        return seen


def _example_of(module: nn.Module, call: Call) -> Any:
    """Return a call as example inputs: positional arguments alone, or all by name."""
    args, kwargs = call
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments) if kwargs else args


def _kept(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _leaves(result: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors and plain values of a result, also from inside objects whose class torch does not know."""
    for leaf in pytree.tree_leaves(result):
        if leaf is None or isinstance(leaf, (Tensor, bool, int, float, str)):
            yield _kept(leaf)
        elif hasattr(leaf, "__dict__") and depth < _DEEPEST:
            fields = {name: value for name, value in vars(leaf).items() if not name.startswith("_")}
            yield from _leaves(fields, depth + 1)
        else:
            yield type(leaf).__qualname__


def _report(session: Session, model: nn.Module, work: _Parts, certificate: Certificate) -> Report:
    """Return one report on all parts."""
    layers: list[LayerPlan] = []
    for path, part in work.done.items():
        for layer in part.report.plan.layers:
            name, *joined = (path if each == "weight" else f"{path}.{each}" for each in (layer.name, *layer.joined))
            layers.append(replace(layer, name=name, joined=tuple(joined)))
    sparse = sum(layer.sparse for layer in layers)
    reason = f"{len(work.done)} modules are compiled ({sparse} sparse layers); the rest runs as it was written"
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    rest = {n: t for n, t in [*work.copy.named_parameters(), *work.copy.named_buffers()] if not _inside(n, work.done)}
    totals = Totals(
        parameters=sum(t.numel() for t in tensors.values()),
        live_parameters=sum(int(t.count_nonzero()) for t in rest.values())
        + sum(part.report.totals.live_parameters for part in work.done.values()),
        memory=tensor_bytes(tensors),
        compiled_memory=tensor_bytes(rest) + sum(p.report.totals.compiled_memory for p in work.done.values()),
        flops=sum(layer.flops for layer in layers),
        live_flops=sum(layer.live_flops if layer.sparse else layer.flops for layer in layers),
        compile_seconds=session.elapsed,
    )
    whole = EndToEnd(base=Base.GIVEN, reason=reason)
    return Report(Plan(tuple(layers), whole), totals, certificate, tuple(session.notes))


def _inside(name: str, parts: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{path}.") for path in parts)
