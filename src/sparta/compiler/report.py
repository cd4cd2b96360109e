"""The report: what runs each layer of a compiled model, how fast, and why; and what the whole gained.

It is read off the plan and the end-to-end timing; nothing is measured here. Every dense layer says why it is dense and
what would make a sparse kernel win, with the break-even sparsity estimated from its own timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from sparta.compiler.certificate import Certificate
from sparta.compiler.numbers import a_number, a_whole_number
from sparta.compiler.plan import LayerPlan, Plan
from sparta.compiler.variant import GIVEN
from sparta.errors import MissingPackageError, message
from sparta.files import write_atomic
from sparta.precision.report import PrecisionReport
from sparta.reporting import page, short
from sparta.specialize.implement import Cause, implements_of
from sparta.specialize.int8_linear.quantized import INT8_IMPLEMENTS
from sparta.specialize.tuning.select import DENSE
from sparta.tables import table

__all__ = ["Report", "Totals", "advice", "break_even"]

_PRUNED_BY_CHANNEL = ("linear", "int8_linear", "conv1d", "conv2d")


@dataclass(frozen=True)
class Totals:
    """Figures of the whole model, before and after.

    Parameters
    ----------
    parameters, live_parameters
        Elements of all tensors of the model; and those that the compiled model keeps.
    memory, compiled_memory
        Bytes of all tensors; and of what the compiled model holds, packed weights with their indices.
    flops, live_flops
        Of one call in the layers that kernels could run.
    compile_seconds, first_compile_seconds
        How long this compilation took, and the first one of this model on this machine (None where it is the first).
    """

    parameters: int
    live_parameters: int
    memory: int
    compiled_memory: int
    flops: int
    live_flops: int
    compile_seconds: float = 0.0
    first_compile_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Totals:
        """Return what :meth:`to_dict` wrote."""
        first = fields["first_compile_seconds"]
        return Totals(
            parameters=a_whole_number(fields["parameters"], "parameters"),
            live_parameters=a_whole_number(fields["live_parameters"], "live_parameters"),
            memory=a_whole_number(fields["memory"], "memory"),
            compiled_memory=a_whole_number(fields["compiled_memory"], "compiled_memory"),
            flops=a_whole_number(fields["flops"], "flops"),
            live_flops=a_whole_number(fields["live_flops"], "live_flops"),
            compile_seconds=a_number(fields["compile_seconds"], "compile_seconds"),
            first_compile_seconds=None if first is None else a_number(first, "first_compile_seconds"),
        )


@dataclass(frozen=True)
class Report:
    """What a compilation decided; prints itself as a headline and a short table, :attr:`full` has all of it.

    Parameters
    ----------
    plan
        Every layer and the whole.
    totals
        Figures of the whole.
    certificate
        How well the compiled model agreed with the original.
    notes
        What could not be done, or was done otherwise than asked.
    machine
        Where it was measured: the processor, threads, load and versions, as text.
    precision
        Which layers have fewer bits, and what that costs; None for a model in its own precision.
    """

    plan: Plan
    totals: Totals
    certificate: Certificate
    notes: tuple[str, ...] = field(default=())
    machine: Mapping[str, str] = field(default_factory=dict)
    precision: PrecisionReport | None = None

    @property
    def speedup(self) -> float | None:
        """How many times faster than the model as given the compiled one is; None where no ratio is claimed."""
        before, after = self.latency
        if self.plan.whole.ratio is not None:
            return self.plan.whole.ratio
        return None if before is None or after is None else before / after  # of a file of an older version

    @property
    def latency(self) -> tuple[float | None, float | None]:
        """Milliseconds of the model as given and of what runs; None where they were not timed."""
        times = self.plan.whole.milliseconds
        return times.get(str(GIVEN)), times.get(self.plan.whole.chosen)

    @property
    def amdahl_bound(self) -> float | None:
        """The speed-up if all layers that could be sparse took no time at all; None where that was not timed.

        The layers are timed alone, one after the other, in the same rounds as the whole, so the bound is an estimate.
        """
        return self.plan.whole.bound

    # ------------------------------------------------------------------ for people and programs

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict per layer: pattern, density, what runs, times in ms, break-even sparsity, reason, advice."""
        return [_row(layer) for layer in self.plan.layers]

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON values."""
        return {
            "plan": self.plan.to_dict(),
            "totals": self.totals.to_dict(),
            "certificate": self.certificate.to_dict(),
            "notes": list(self.notes),
            "machine": dict(self.machine),
            "precision": None if self.precision is None else self.precision.to_dict(),
            "accuracy": [] if self.precision is None else self.precision.lines(),
            "speedup": self.speedup,
            "amdahl_bound": self.amdahl_bound,
            "layers": self.rows(),
        }

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Report:
        """Return what :meth:`to_dict` wrote."""
        return Report(
            Plan.from_dict(fields["plan"]),
            Totals.from_dict(fields["totals"]),
            Certificate.from_dict(fields["certificate"]),
            tuple(str(note) for note in fields["notes"]),
            {str(name)[:100]: str(value)[:1000] for name, value in dict(fields.get("machine", {})).items()},
            None if fields.get("precision") is None else PrecisionReport.from_dict(fields["precision"]),
        )

    def to_dataframe(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        try:
            import pandas as pd  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise MissingPackageError(
                message("a DataFrame needs pandas, which is not installed", fix="pip install pandas, or use rows()")
            ) from error
        return pd.DataFrame(self.rows())

    def html(
        self,
        path: str | Path,
        *,
        title: str = "SparTA report",
        curve: Sequence[Mapping[str, float]] = (),
        history: Sequence[Mapping[str, float]] = (),
        roof: Mapping[str, float] | None = None,
    ) -> Path:
        """Write the report as one self-contained page, and return where it lies.

        Parameters
        ----------
        path
            The file to write.
        title
            Of the page.
        curve, history, roof
            What else to draw: the points of a plan, the steps of a training, what the machine reaches
            (:func:`sparta.measure.reached`); see :func:`sparta.reporting.page`.
        """
        text = page(self.to_dict(), title=title, curve=curve, history=history, roof=roof)
        write_atomic(path, text.encode())
        return Path(path)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def full(self) -> str:
        """The whole report as text: every layer with its times, break-even and advice, all totals and notes."""
        return "\n".join(self._lines())

    def __str__(self) -> str:
        return short(self.to_dict())

    def _lines(self) -> list[str]:
        columns = ["layer", "pattern", "density", "runs", "dense ms", "ms", "break-even", "why"]
        rows: list[list[object]] = [
            [
                row["layer"],
                row["pattern"],
                f"{row['density']:.3g}",
                row["runs"],
                row["dense_ms"],
                row["ms"],
                None if row["break_even"] is None else f"{row['break_even']:.0%}",
                row["why"],
            ]
            for row in self.rows()
        ]
        lines = [table(columns, rows)] if rows else ["no layer that a kernel could run"]
        hints = {row["layer"]: row["advice"] for row in self.rows() if row["advice"]}
        lines += [f"  {layer}: {hint}" for layer, hint in hints.items()]
        if self.precision is not None:
            lines += ["", str(self.precision)]
        lines += ["", *self._total_lines(), str(self.certificate)]
        return lines + [f"note: {note}" for note in self.notes]

    def _total_lines(self) -> list[str]:
        totals, whole = self.totals, self.plan.whole
        rows: list[list[object]] = []
        before, after = self.latency
        if before is not None and after is not None:
            ratio = "" if self.speedup is None else f"{self.speedup:.2f}x"
            rows.append(["latency", f"{before:.4g} ms", f"{after:.4g} ms", ratio])
        rows.append(
            ["parameters", totals.parameters, totals.live_parameters, _ratio(totals.parameters, totals.live_parameters)]
        )
        memory = f"{totals.memory / 2**20:.2f} MiB", f"{totals.compiled_memory / 2**20:.2f} MiB"
        rows.append(["memory", *memory, _ratio(totals.memory, totals.compiled_memory)])
        if totals.flops:
            rows.append(["FLOPs of layers", totals.flops, totals.live_flops, _ratio(totals.flops, totals.live_flops)])
        where = "loaded; where it was compiled: " if whole.loaded else ""
        lines = [table(["whole model", "as given", "compiled", "ratio"], rows), f"runs: {where}{whole.reason}"]
        if whole.interval is not None:
            low, high = whole.interval
            lines.append(f"spread: the median of the rounds' ratios lies between {low:.2f}x and {high:.2f}x")
        bound = self.amdahl_bound
        if bound is not None:
            lines.append(f"bound: {bound:.2f}x if the sparse layers took no time (Amdahl)")
        if whole.beyond:
            lines.append(f"beyond the sparse layers: {whole.beyond}")
        first = totals.first_compile_seconds
        earlier = "" if first is None else f"; the first compilation of this model took {first:.1f} s"
        return [*lines, f"compiled in {totals.compile_seconds:.1f} s{earlier}"]


def break_even(layer: LayerPlan) -> float | None:
    """Return the sparsity from which on the best candidate would beat dense, or None where none was timed.

    The candidate's time is taken to be proportional to the live weights, from its measured time at this density.

    >>> from sparta.specialize.tuning.select import Choice
    >>> layer = LayerPlan("fc", "linear", "unstructured", 0.5, (8, 8), {1: Choice("dense", {}, "")}, 0, 0, 2.0)
    >>> break_even(layer)
    0.75
    """
    if layer.best_ratio is None or layer.density <= 0 or layer.first.implement in INT8_IMPLEMENTS:
        return None  # integers win for another reason than zeros
    return max(0.0, 1.0 - layer.density / layer.best_ratio)


def advice(layer: LayerPlan) -> str:
    """Return what would make a sparse kernel win for a layer that runs dense, or nothing."""
    if layer.sparse or layer.density >= 1.0:
        return ""
    point = break_even(layer)
    hints = []
    if point is not None and 1.0 - layer.density < point:
        hints.append(f"prune it to about {point:.0%} in this pattern")
    irregular = not layer.pattern.startswith("block") and "channel" not in layer.pattern
    if irregular and layer.op in _PRUNED_BY_CHANNEL:
        hints.append(
            "prune in blocks of 4 output channels (sparta.Block(4, 1)), which CPU kernels run about twice as fast"
        )
    text = "to win: " + ", or ".join(hints) if hints else ""
    # Kernels for any mask are what most layers run; of the others people want to hear only if nothing is left.
    others = {each.name: each.any_mask for each in implements_of(layer.op) if each.name != DENSE}
    nothing_left = set(others) <= set(layer.first.refused)
    told = {name: why for name, why in layer.first.refused.items() if others.get(name) or nothing_left}
    refused = [f"{name}: {why.reason}" for name, why in told.items() if why.cause is not Cause.DEVICE]
    return "; ".join([*filter(None, [text]), *refused])


def _row(layer: LayerPlan) -> dict[str, Any]:
    choice = layer.first
    entry = choice.entry
    params = " ".join(f"{key}={value}" for key, value in choice.params.items())
    return {
        "layer": layer.name,
        "op": layer.op,
        "shape": list(layer.shape),
        "pattern": layer.pattern,
        "density": layer.density,
        "implement": choice.implement,
        "params": dict(choice.params),
        "runs": f"{choice.implement} {params}".strip(),
        "dense_ms": None if entry is None else entry.dense_milliseconds,
        "ms": None if entry is None else entry.dense_milliseconds if choice.implement == DENSE else entry.milliseconds,
        "break_even": break_even(layer),
        "why": choice.reason,
        "advice": advice(layer),
        "picture": [list(cells) for cells in layer.picture],
        "sizes": {str(size): other.implement for size, other in layer.choices.items()},
    }


def _ratio(before: float, after: float) -> str:
    return f"{before / after:.2f}x" if after else ""
