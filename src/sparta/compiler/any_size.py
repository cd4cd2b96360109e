"""Any size: the graph that a compiled model runs at other sizes than the example's, and which sizes those are.

It has the same kernels as the graph for the example. Where `torch.export` assumed something of the sizes that it
traced, or fixed a dim, the model itself is asked: it is called at other sizes beside the graph, and what the graph gets
right is taken, what it gets wrong is left to the model as given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparta.compiler.choose.end_to_end import Contest
from sparta.compiler.choose.outcome import Outcome
from sparta.compiler.choose.partition import partition
from sparta.compiler.choose.precision import rounding_kernels
from sparta.compiler.choose.workshop import Workshop
from sparta.compiler.graph.sizes import Shapes, Sizes
from sparta.compiler.job import Job
from sparta.compiler.layerwise import LayerByLayer
from sparta.compiler.lower.joined import JoinedSubGraph
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.run.combine import combined
from sparta.compiler.run.host import Host, hosted
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.variant import Base
from sparta.compiler.verify import agree
from sparta.errors import CheckError

__all__ = ["AnySize", "any_size", "resized"]

_MOST_PROBES = 12


@dataclass(frozen=True)
class AnySize:
    """What runs at other sizes than the example's.

    Parameters
    ----------
    graph
        For any size; None where the sizes of the example are all that it takes.
    sizes
        The sizes it takes.
    model_takes_more
        Whether the model takes sizes that the graph does not take.
    """

    graph: fx.GraphModule | None
    sizes: Sizes | None
    model_takes_more: bool = False


def any_size(job: Job, contest: Contest, outcome: Outcome, *, check: bool, all_sizes: bool = True) -> AnySize:
    """Return the graph for any size with the kernels that were chosen, and the sizes that it is right at.

    Parameters
    ----------
    check
        Whether the model is called at other sizes.
    all_sizes
        Whether sizes that the graph does not take are wanted as well: the model as given then runs them.
    """
    sizes = job.signature.sizes
    if sizes is None or not job.inputs[0]:
        return AnySize(None, sizes)
    graph, kernels = _general(job, contest.workshop, outcome) if sizes.dynamic else (None, {})
    if not check:
        return AnySize(graph, sizes)
    host = Host.CHAIN if outcome.variant.host is Host.CHAIN else Host.EAGER
    probes = _Probes(job, sizes, contest.timer.call_seconds, _Rounded.of(job, graph, kernels, host))
    if graph is None:
        return AnySize(None, sizes, all_sizes and probes.model_takes_more())
    run = hosted(graph, host, any_size=True)
    if not probes.right(run, sizes.example):
        job.session.note("sizes: the example's only, because the graph for any size did not agree with the model")
        return AnySize(None, sizes, model_takes_more=all_sizes)
    probes.try_others(run)
    return AnySize(graph, probes.sizes, all_sizes and probes.model_takes_more())


def _general(job: Job, workshop: Workshop, outcome: Outcome) -> tuple[fx.GraphModule, Mapping[SubGraph, KernelModule]]:
    """Return the graph for any size, with kernels where the one for the example has them, and these."""
    original, reduced = job.any_size
    if outcome.variant.base is not Base.REDUCED:
        return original.module(), {}
    if reduced is workshop.reduced:
        return workshop.graph(outcome.variant, outcome.plans), workshop.kernels(outcome.plans, outcome.variant.kernels)
    kernels = workshop.kernels(outcome.plans, outcome.variant.kernels)
    parts = partition(reduced, reduced.shapes(job.inputs[0], computed=not job.session.slow)) if kernels else ()
    found = {part.name: part for part in parts}
    pairs: dict[SubGraph, KernelModule] = {}
    for subgraph, kernel in kernels.items():
        here = _found_again(subgraph, found)
        if here is not None:
            pairs[here] = kernel
    return combined(reduced, pairs), pairs


def _found_again(chosen: SubGraph, found: Mapping[str, SubGraph]) -> SubGraph | None:
    """Return a sub-graph in the graph for any size, whose own have these names; None where it is another there."""
    if isinstance(chosen, JoinedSubGraph):
        parts = [_found_again(part, found) for part in chosen.parts]
        same = {id(part.anchor.x) for part in parts if part is not None}
        return None if None in parts or len(same) != 1 else chosen.with_parts([part for part in parts if part])
    here = found.get(chosen.name)
    return None if here is None or here.epilogue != chosen.epilogue else _as_chosen(here, chosen)


def _as_chosen(found: SubGraph, chosen: SubGraph) -> SubGraph:
    """Return a sub-graph of the graph for any size with what was found out about it: its operation, grids, pattern."""
    anchor = replace(found.anchor, attributes=chosen.anchor.attributes)
    return replace(chosen, anchor=anchor, nodes=found.nodes, residual=found.residual)


@dataclass(frozen=True)
class _Rounded:
    """What a graph whose kernels round their inputs is compared with.

    Parameters
    ----------
    plain
        The same graph in real numbers, which agrees with the model.
    layers
        What compares the kernels with the same graph with inputs rounded.
    """

    plain: Callable[..., Any]
    layers: LayerByLayer

    @staticmethod
    def of(
        job: Job, graph: fx.GraphModule | None, kernels: Mapping[SubGraph, KernelModule], host: Host
    ) -> _Rounded | None:
        """Return it where a kernel rounds, else None."""
        if graph is None or not rounding_kernels(kernels):
            return None
        reduced = job.any_size[1]
        return _Rounded(reduced.module(), LayerByLayer(reduced, graph, kernels, host, any_size=True))


class _Probes:
    """Calls of the model at other sizes."""

    def __init__(self, job: Job, sizes: Sizes, call_seconds: float, rounded: _Rounded | None = None) -> None:
        self.sizes, self._seconds = sizes, 2 * call_seconds
        self._job, self._reference, self._rounded = job, job.reference(), rounded
        self._left = _MOST_PROBES
        self._more = False
        self._tried: set[Shapes] = set()

    def right(self, run: Callable[..., Any], shapes: Shapes) -> bool | None:
        """Whether the graph computes what the model does at these shapes; None where the model does not run at them."""
        leaves = [resized(leaf, shape) for leaf, shape in zip(self._job.inputs[0], shapes, strict=True)]
        with torch.no_grad():
            try:
                expected = pytree.tree_leaves(self._reference(*leaves))
            except Exception:  # noqa: BLE001 - the model does not take these sizes
                return None
            try:
                if self._rounded is not None:
                    agree(expected, pytree.tree_leaves(self._rounded.plain(*leaves)), least=self._job.tolerance)
                    self._rounded.layers(run, leaves)
                else:
                    agree(expected, pytree.tree_leaves(run(*leaves)), least=self._job.tolerance)
            except (CheckError, RuntimeError, TypeError, ValueError, IndexError):
                return False
        self.sizes = self.sizes.relaxed(shapes)
        return True

    def try_others(self, run: Callable[..., Any]) -> None:
        """Take in what the graph gets right, and leave out what it gets wrong."""
        for names, shapes in self._others():
            if self._spent(shapes):
                continue
            claimed = not self.sizes.problem(shapes)
            right = self.right(run, shapes)
            if right is False:
                self._more = True
                if claimed:
                    self.sizes = self.sizes.fixed_at_example(names)
                    self._job.session.note(f"sizes: {', '.join(sorted(names))} has the example's size only")

    def model_takes_more(self) -> bool:
        """Whether the model runs at sizes of dims that are fixed in the graph."""
        if self._more:
            return True
        for shapes in _fixed_dims_changed(self.sizes):
            if self._spent(shapes) or not self.sizes.problem(shapes):
                continue
            leaves = [resized(leaf, shape) for leaf, shape in zip(self._job.inputs[0], shapes, strict=True)]
            try:
                with torch.no_grad():
                    self._reference(*leaves)
            except Exception:  # noqa: BLE001, S112 - nor does the model take it
                continue
            self._job.session.note(
                f"sizes: the graph is for {_shapes_text(self.sizes)}; at other sizes, such as "
                f"{' '.join(_text(shape) for shape in shapes if shape is not None)}, the model as given runs"
            )
            return True
        return False

    def _others(self) -> Iterator[tuple[set[str], Shapes]]:
        """Yield sizes to try, with the symbols that were changed: each dim of all inputs that have it alone."""
        at = self.sizes.bound(self.sizes.example)
        groups: dict[tuple[int, int], set[str]] = {}
        for terms in self.sizes.dims:
            for place, term in enumerate(terms or ()):
                if isinstance(term, str):
                    groups.setdefault((place, at[term]), set()).add(term)
        for (_, size), names in groups.items():
            for other in (1, size + 1, 2 * size):
                if other != size:
                    yield names, self.sizes.with_symbols(dict.fromkeys(names, other))
        everything = {name for names in groups.values() for name in names}
        if len(groups) > 1:
            yield everything, self.sizes.with_symbols({name: 2 * at[name] for name in everything})

    def _spent(self, shapes: Shapes) -> bool:
        if shapes in self._tried or self._left <= 0 or not self._job.session.affords(self._seconds):
            return True
        self._tried.add(shapes)
        self._left -= 1
        return False


def resized(leaf: Any, shape: Sequence[int] | None) -> Any:
    """Return a tensor with the values of another, repeated or cut to a shape.

    >>> resized(torch.tensor([1, 2]), (3,)).tolist()
    [1, 2, 1]
    """
    if not isinstance(leaf, Tensor) or shape is None:
        return leaf
    for dim, size in enumerate(shape):
        if leaf.shape[dim] != size:
            there = torch.arange(size, device=leaf.device) % max(1, leaf.shape[dim])
            leaf = leaf.index_select(dim, there)
    return leaf


def _fixed_dims_changed(sizes: Sizes) -> Iterator[Shapes]:
    """Yield shapes in which one fixed size of the example is another, wherever inputs have it at that place."""
    fixed = {
        (place, size)
        for terms, shape in zip(sizes.dims, sizes.example, strict=True)
        for place, (term, size) in enumerate(zip(terms or (), shape or (), strict=True))
        if isinstance(term, int)
    }
    for at in sorted(fixed):
        yield tuple(
            None
            if shape is None
            else tuple(size + 1 if (place, size) == at else size for place, size in enumerate(shape))
            for shape in sizes.example
        )


def _shapes_text(sizes: Sizes) -> str:
    given = [terms for terms in sizes.dims if terms is not None]
    return ", ".join("×".join(str(t) if isinstance(t, int) else "any" for t in terms) or "a scalar" for terms in given)


def _text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
