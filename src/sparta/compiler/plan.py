"""The plan: for each sub-graph which implement runs, with which parameters, how fast, and why; and what hosts the rest.

A plan is plain data, written into artifacts and reports. A layer may have several choices, one for each size that was
measured; at run time the nearest size decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparta.specialize.implement import Support
from sparta.specialize.kernel_spec import operation_named
from sparta.specialize.tuning.select import DENSE, Choice
from sparta.specialize.tuning.store import Entry

__all__ = ["GIVEN", "REDUCED", "EndToEnd", "LayerPlan", "Plan", "choice_from_dict"]

GIVEN, REDUCED = "model as given", "reduced graph"  # variants that reports name


@dataclass(frozen=True)
class LayerPlan:
    """What runs one sub-graph.

    Parameters
    ----------
    name, op
        The layer and its operation.
    pattern, density
        Of its weight.
    shape
        Of its weight.
    choices
        For each size that was measured (the rows of a linear layer, say), what runs.
    flops, live_flops
        Of one call at the first size, with all weights and with the live ones.
    best_ratio
        The fastest candidate's time over dense's at the first size; None where nothing but dense was tried.
    note
        What end-to-end measurement or verification had to say, if anything.
    """

    name: str
    op: str
    pattern: str
    density: float
    shape: tuple[int, ...]
    choices: Mapping[int, Choice]
    flops: int
    live_flops: int
    best_ratio: float | None = None
    note: str = ""

    @property
    def sparse(self) -> bool:
        """Whether a sparse kernel runs it at any size."""
        return any(choice.implement != DENSE for choice in self.choices.values())

    @property
    def first(self) -> Choice:
        """The choice at the size of the example."""
        return next(iter(self.choices.values()))

    def made_dense(self, note: str, size: int | None = None) -> LayerPlan:
        """Return this plan with dense at one size, or at all."""
        changed = {
            at: Choice(DENSE, {}, note, choice.entry, choice.refused) if size in (None, at) else choice
            for at, choice in self.choices.items()
        }
        return replace(self, choices=changed, note=note)

    def to_dict(self) -> dict[str, Any]:
        """Return the layer's plan as JSON values."""
        return {
            "name": self.name,
            "op": self.op,
            "pattern": self.pattern,
            "density": self.density,
            "shape": list(self.shape),
            "choices": {str(size): choice.to_dict() for size, choice in self.choices.items()},
            "flops": self.flops,
            "live_flops": self.live_flops,
            "best_ratio": self.best_ratio,
            "note": self.note,
        }

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> LayerPlan:
        """Return what :meth:`to_dict` wrote."""
        return LayerPlan(
            name=str(fields["name"]),
            op=operation_named(fields["op"]),
            pattern=str(fields["pattern"]),
            density=float(fields["density"]),
            shape=tuple(int(size) for size in fields["shape"]),
            choices={int(size): choice_from_dict(choice) for size, choice in fields["choices"].items()},
            flops=int(fields["flops"]),
            live_flops=int(fields["live_flops"]),
            best_ratio=None if fields["best_ratio"] is None else float(fields["best_ratio"]),
            note=str(fields["note"]),
        )


@dataclass(frozen=True)
class EndToEnd:
    """What was measured end to end.

    Parameters
    ----------
    base
        Which graph runs: ``"reduced"`` (compact, folded) or ``"original"``.
    host
        What runs the calls between the kernels: ``"eager"``, ``"panels"`` (eager, and neighbouring layers hand over
        activations in their kernels' layout) or ``"inductor"``; with ``" graph"`` behind it (or
        ``"graph"`` alone) all of it is replayed from a CUDA graph.
    milliseconds
        Medians of the whole model by variant, interleaved; empty where nothing was timed.
    reason
        Why this one runs.
    chosen
        The variant that runs, a key of `milliseconds`; empty where nothing was timed.
    """

    base: str = "reduced"
    host: str = "eager"
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    reason: str = "not measured"
    chosen: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "base": self.base,
            "host": self.host,
            "milliseconds": dict(self.milliseconds),
            "reason": self.reason,
            "chosen": self.chosen,
        }

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> EndToEnd:
        """Return what :meth:`to_dict` wrote."""
        times = {str(name): float(value) for name, value in fields["milliseconds"].items()}
        return EndToEnd(str(fields["base"]), str(fields["host"]), times, str(fields["reason"]), str(fields["chosen"]))


@dataclass(frozen=True)
class Plan:
    """The whole model: every sub-graph and the host.

    Examples
    --------
    >>> Plan.from_dict(Plan((), EndToEnd()).to_dict()) == Plan((), EndToEnd())
    True
    """

    layers: tuple[LayerPlan, ...]
    whole: EndToEnd

    @property
    def sparse(self) -> tuple[LayerPlan, ...]:
        """The layers that a sparse kernel runs."""
        return tuple(layer for layer in self.layers if layer.sparse)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {"layers": [layer.to_dict() for layer in self.layers], "whole": self.whole.to_dict()}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Plan:
        """Return what :meth:`to_dict` wrote."""
        layers = tuple(LayerPlan.from_dict(layer) for layer in fields["layers"])
        return Plan(layers, EndToEnd.from_dict(fields["whole"]))


def choice_from_dict(fields: Mapping[str, Any]) -> Choice:
    """Return the choice that :meth:`Choice.to_dict` wrote."""
    config = dict(fields["config"])
    entry = None if fields["entry"] is None else Entry.from_dict(fields["entry"])
    refused = {str(name): Support.from_dict(why) for name, why in dict(fields["refused"]).items()}
    return Choice(str(config.pop("_name")), config, str(fields["reason"]), entry, refused)
