"""The result of propagation: the completed spec, tables for people, reasons, and the way to the compact model.

Everything here is read off the facts and the solved axes; nothing is derived a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from sparta.errors import NameNotFoundError, did_you_mean
from sparta.propagation.axes import Axes
from sparta.propagation.capture import Captured
from sparta.propagation.compact import CompactModel, check_round_to, check_share, compacted
from sparta.propagation.engine import Facts
from sparta.propagation.op import is_tensor, place, shape_of
from sparta.tables import table
from sparta.tesa import names
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec

__all__ = ["PropagationResult"]

_MOST_REASONS = 6


@dataclass(frozen=True)
class PropagationResult:
    """What follows from a spec for a whole model.

    Parameters
    ----------
    captured
        The model as a graph.
    facts
        All that was derived.
    """

    captured: Captured
    facts: Facts

    # ------------------------------------------------------------------ the answer

    @cached_property
    def spec(self) -> Spec:
        """The completed spec: the TeSA of every parameter and floating-point buffer that is used or tied."""
        found: dict[str, TeSA] = {}
        for name, node in self._nodes.items():
            found[name] = self.facts.tesa(node)
        for other, name in self.captured.tied.items():
            if name in found:
                found[other] = found[name]
        return Spec({name: found[name] for name in self.captured.tensors if name in found})

    @cached_property
    def activations(self) -> dict[str, TeSA]:
        """The TeSA of every value between the ops, by the name of its node in the graph."""
        nodes = (n for n in self.captured.graph.nodes if n.op in {"call_function", "placeholder"} and is_tensor(n))
        return {n.name: self.facts.tesa(n) for n in nodes}

    @cached_property
    def axes(self) -> Axes:
        """What can be cut."""
        return Axes.solved(self.facts, self.captured.graph)

    def compact(
        self,
        round_to: int = 1,
        *,
        allow_empty: bool = False,
        check: bool = True,
        seams: float | None = 64,
        keep_blocks: float | None = None,
    ) -> CompactModel:
        """Return a physically smaller model that computes what the masked dense model computes.

        Parameters
        ----------
        round_to
            Keep a few more channels, so that widths are multiples of this.
        allow_empty
            Keep one channel of a layer of which nothing would remain, instead of an error.
        check
            Compare with the masked dense model on the example and on other inputs before returning.
        seams
            Where a layer needs less than its neighbours carry (a residual stream keeps the rest), gather what it reads
            and scatter what it writes, if that saves at least this many multiply-adds for each element that is moved;
            None: never.
        keep_blocks
            Cut weights by whole blocks of the size they are pruned in, so that kernels for blocks still fit, except
            along channels of which at least this share can be cut: all of that is cut. None: cut all that can be cut.
        """
        check_round_to(round_to)
        check_share(keep_blocks)
        blocks = {} if keep_blocks is None else self._blocks()
        axes = Axes.solved(self.facts, self.captured.graph, round_to, blocks, keep_blocks or 0.0)
        options: dict[str, Any] = {"allow_empty": allow_empty, "check": check, "seams": seams, "round_to": round_to}
        return compacted(self.captured, self.facts, axes, blocks=blocks, **options)

    def _blocks(self) -> dict[str, tuple[int, ...]]:
        """Return the size of the blocks that weights are pruned in; 1 along a dim that they cover."""
        found = {}
        for name, node in self._nodes.items():
            value = self.facts.masked(name)
            if value.dim() < 2 or value.is_meta or not value.is_floating_point():
                continue
            # A weight that was rounded to zero is live where the spec says so, and keeps its block whole.
            given = None if self.facts.as_read else self.facts.given.get(name)
            known = TeSA.from_zeros(value) if given is None else TeSA.from_mask(given.mask(value.device))
            sizes = zip(known.state.block, shape_of(node), strict=True)
            block = tuple(1 if size >= extent else size for size, extent in sizes)
            if max(block) > 1:
                found[name] = block
        return found

    # ------------------------------------------------------------------ telling a person

    def to_dict(self) -> dict[str, Any]:
        """Return the table as data, with the notes on what could not be derived."""
        rows = {name: self._row(name, node) for name, node in self._nodes.items()}
        return {
            "tensors": rows,
            "tied": dict(self.captured.tied),
            "notes": dict(self.facts.notes),
            "parameters": sum(torch.Size(r["shape"]).numel() for r in rows.values()),
            "parameters_compact": sum(torch.Size(r["compact"]).numel() for r in rows.values()),
        }

    def table(self) -> str:
        """Return one row per tensor: density before and after, what can be cut, and what derived it."""
        data = self.to_dict()
        rows: list[list[object]] = []
        for name, r in data["tensors"].items():
            sizes = _times(r["shape"]), f"{r['before']:.4f}", f"{r['after']:.4f}", _times(r["compact"])
            rows.append([name, *sizes, r["because"], self._blocked(name)])
        counts = f"{data['parameters']} → {data['parameters_compact']}"
        rows.append([f"{len(data['tensors'])} tensors", counts, "", "", "", "", ""])
        text = table(["tensor", "shape", "before", "after", "compact", "because", "the rest is kept by"], rows)
        if data["notes"]:
            text += "\n\n" + table(["where", "not derived"], [[k, v] for k, v in data["notes"].items()])
        return text

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<PropagationResult of {len(self._nodes)} tensors, {self.facts.steps} steps>"

    def why(self, name: str) -> str:
        """Return in words what is known of a tensor, what derived it, and what keeps the rest.

        Parameters
        ----------
        name
            A parameter or buffer of the model, or a node of the graph (see :attr:`activations`).
        """
        node = self._find(name)
        tesa = self.facts.tesa(node)
        counts = ", ".join(f"{state} {tesa.count(state)}" for state in ("live", "constant", "dead"))
        lines = [f"{place(node)}: {_times(tesa.shape)}, {counts}"]
        if node in self.facts.derived_by:
            lines.append(f"  constants derived by the rule {self.facts.derived_by[node]!r}")
        for user, count in sorted(self.facts.seen_by.get(node, {}).items()):
            lines.append(f"  {user} observes {count} of {tesa.numel} elements")
        if place(node) in self.facts.notes:
            lines.append(f"  {self.facts.notes[place(node)]}")
        for dim in range(len(shape_of(node))):
            lines += self._why_kept(node, dim, tesa)
        return "\n".join(lines)

    # ------------------------------------------------------------------ inside

    def _blocked(self, name: str) -> str:
        """Return the first reason why slices of a tensor without live elements stay."""
        node = self._nodes[name]
        tesa = self.facts.tesa(node)
        for dim in range(len(shape_of(node))) if tesa.density < 1 else []:
            idle = self._idle(node, dim, tesa)
            reasons = self.axes.reasons(node, dim, idle) if bool(idle.any()) else {}
            if reasons:
                reason, where = max(reasons.items(), key=lambda item: int(item[1].sum()))
                return f"dim {dim}, {_ranges(where)}: {reason}"
        return ""

    def _idle(self, node: fx.Node, dim: int, tesa: TeSA) -> Tensor:
        """Return which indices of a dim stay although nothing there is live."""
        live = tesa.kept_blocks([1 if d == dim else max(1, s) for d, s in enumerate(tesa.shape)]).reshape(-1)
        return self.axes.kept(node, dim) & ~live

    def _why_kept(self, node: fx.Node, dim: int, tesa: TeSA) -> list[str]:
        kept = self.axes.kept(node, dim)
        lines = [f"  dim {dim}: {int(kept.sum())} of {len(kept)} indices stay"]
        idle = self._idle(node, dim, tesa)
        if not bool(idle.any()):
            return lines
        reasons = self.axes.reasons(node, dim, idle)
        # The writer that keeps most comes first; a long residual stream has dozens of writers.
        ordered = sorted(reasons.items(), key=lambda item: -int(item[1].sum()))
        for reason, where in ordered[:_MOST_REASONS]:
            lines.append(f"    {_ranges(where)} not live here, kept alive: {reason}")
        if len(ordered) > _MOST_REASONS:
            lines.append(f"    and {len(ordered) - _MOST_REASONS} more reasons")
        return lines

    @cached_property
    def _nodes(self) -> Mapping[str, fx.Node]:
        nodes = self.captured.nodes()
        return {name: nodes[name] for name in self.captured.tensors if name in nodes and is_tensor(nodes[name])}

    def _find(self, name: str) -> fx.Node:
        inner: dict[str, fx.Node] = {
            n.name: n for n in self.captured.graph.nodes if is_tensor(n) and n.op != "get_attr"
        }
        if name in inner:
            return inner[name]
        known = {*self._nodes, *self.captured.tied}
        try:
            (found,) = names.resolve(name, known)
        except (NameNotFoundError, ValueError) as error:
            raise NameNotFoundError(did_you_mean(name, [*known, *inner], "tensor or node")) from error
        return self._nodes[self.captured.tied.get(found, found)]

    def _row(self, name: str, node: fx.Node) -> dict[str, Any]:
        given, tesa = self.facts.given.get(name), self.facts.tesa(node)
        before = 1.0 if given is None else given.density
        shape = shape_of(node)
        kept = [int(self.axes.kept(node, d).sum()) for d in range(len(shape))]
        users = [place(u) for u in node.users]
        because = ""
        if tesa.density < before:
            because = f"{tesa.count('dead')} dead at {users[0]}" if users else "unused"
        elif tuple(kept) != shape:
            because = f"cut with {users[0]}" if users else ""
        return {
            "shape": list(shape),
            "before": before,
            "after": tesa.density,
            "constant": tesa.count("constant"),
            "dead": tesa.count("dead"),
            "compact": kept,
            "because": because,
        }


def _times(shape: Any) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _ranges(flags: Tensor) -> str:
    """Return flagged indices in words: ``"3-5, 8"``."""
    found: list[list[int]] = []
    for index in flags.nonzero().flatten().tolist():
        if found and index == found[-1][1] + 1:
            found[-1][1] = index
        else:
            found.append([index, index])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in found]
    return "indices " + ", ".join(texts[:8]) + (f" and {len(texts) - 8} more ranges" if len(texts) > 8 else "")
