"""The plan: for each sub-graph which implement runs, with which parameters, how fast, and why; and what hosts the rest.

A plan is plain data, written into artifacts and reports. A layer may have several choices, one for each size that was
measured; at run time the nearest size decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparta.compiler.numbers import a_flag, a_number, a_whole_number
from sparta.compiler.run.host import Host
from sparta.compiler.variant import Base
from sparta.errors import FileFormatError, message
from sparta.specialize.implement import Support
from sparta.specialize.kernel_spec import operation_named
from sparta.specialize.tuning.select import DENSE, Choice
from sparta.specialize.tuning.store import Entry

__all__ = ["EndToEnd", "LayerPlan", "Plan", "choice_from_dict"]


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
    picture
        The density of the weight in each cell of a coarse grid, for people to look at.
    joined
        The layers that one product runs, this one among them; none where it has a product of its own.
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
    picture: tuple[tuple[float, ...], ...] = ()
    joined: tuple[str, ...] = ()

    @property
    def sparse(self) -> bool:
        """Whether a sparse kernel runs it at any size."""
        return any(choice.implement != DENSE for choice in self.choices.values())

    @property
    def first(self) -> Choice:
        """The choice at the size of the example."""
        return next(iter(self.choices.values()))

    def made_dense(self, note: str, size: int | None = None) -> LayerPlan:
        """Return this plan with dense at one size, or at all; what is dense at all sizes is joined to no other."""
        changed = {
            at: Choice(DENSE, {}, note, choice.entry, choice.refused) if size in (None, at) else choice
            for at, choice in self.choices.items()
        }
        return replace(self, choices=changed, note=note, joined=() if size is None else self.joined)

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
            "picture": [list(row) for row in self.picture],
            "joined": list(self.joined),
        }

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> LayerPlan:
        """Return what :meth:`to_dict` wrote."""
        choices = {int(size): choice_from_dict(choice) for size, choice in fields["choices"].items()}
        if not choices:
            raise FileFormatError(message(f"no choice for the layer {str(fields['name'])[:100]!r}", "one or more"))
        ratio = None if fields["best_ratio"] is None else a_number(fields["best_ratio"], "the best ratio of a layer")
        if ratio is not None and ratio <= 0:
            raise FileFormatError(message(f"the best ratio of a layer: {ratio}", "above 0", "save it again"))
        return LayerPlan(
            name=str(fields["name"]),
            op=operation_named(fields["op"]),
            pattern=str(fields["pattern"]),
            density=a_number(fields["density"], "the density of a layer"),
            shape=tuple(a_whole_number(size, "a size of a layer") for size in fields["shape"]),
            choices=choices,
            flops=a_whole_number(fields["flops"], "the FLOPs of a layer"),
            live_flops=a_whole_number(fields["live_flops"], "the FLOPs of a layer"),
            best_ratio=ratio,
            note=str(fields["note"]),
            picture=tuple(
                tuple(a_number(cell, "a cell of a picture") for cell in row) for row in fields.get("picture", ())
            ),
            joined=tuple(str(name) for name in fields.get("joined", ())),
        )


@dataclass(frozen=True)
class EndToEnd:
    """What was measured end to end.

    Parameters
    ----------
    base
        Which graph runs; for the model as given, a file holds the original graph in its place.
    host
        What runs the calls between the kernels.
    milliseconds
        Medians of the whole model by variant, interleaved; empty where nothing was timed, or nothing is claimed.
    reason
        Why this one runs.
    chosen
        The variant that runs, a key of `milliseconds`; empty where nothing was timed.
    ratio, interval
        How many times faster than the model as given it is: the median of the ratios of single rounds, and the 95 %
        interval of that median. None where it is not known.
    bound
        The ratio if the layers that could be sparse took no time at all, from rounds in which they were timed as well.
    beyond
        Where the ratio is more than the sparse layers can account for, what else was gained.
    loaded
        Whether it was measured elsewhere, and comes from a file.
    """

    base: Base = Base.REDUCED
    host: Host = Host.EAGER
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    reason: str = "not measured"
    chosen: str = ""
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    bound: float | None = None
    beyond: str = ""
    loaded: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "base": self.base.value,
            "host": self.host.value,
            "milliseconds": dict(self.milliseconds),
            "reason": self.reason,
            "chosen": self.chosen,
            "ratio": self.ratio,
            "interval": None if self.interval is None else list(self.interval),
            "bound": self.bound,
            "beyond": self.beyond,
            "loaded": self.loaded,
        }

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> EndToEnd:
        """Return what :meth:`to_dict` wrote; older files lack what was not known then."""
        times = {str(name): a_number(value, "a time") for name, value in fields["milliseconds"].items()}
        if any(time <= 0 for time in times.values()):
            raise FileFormatError(message("a time of a whole model of 0 or less", "milliseconds", "save it again"))
        ratio, interval, bound = (fields.get(name) for name in ("ratio", "interval", "bound"))
        low, high = (None, None) if interval is None else interval
        return EndToEnd(
            Base.from_text(fields["base"]),
            Host.from_text(fields["host"]),
            times,
            str(fields["reason"]),
            str(fields["chosen"]),
            None if ratio is None else a_number(ratio, "the ratio"),
            None if interval is None else (a_number(low, "the interval"), a_number(high, "the interval")),
            None if bound is None else a_number(bound, "the bound"),
            str(fields.get("beyond", "")),
            a_flag(fields.get("loaded", False), "whether it was loaded"),
        )


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
