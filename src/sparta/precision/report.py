"""The report of a precision: which layers have how many bits, which do not and why, and what it costs.

It prints itself, becomes JSON values, and travels with a compiled model's report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparta.errors import FileFormatError, message
from sparta.tables import table

__all__ = ["LayerPrecision", "PrecisionReport"]


@dataclass(frozen=True)
class LayerPrecision:
    """How one layer computes.

    Parameters
    ----------
    layer
        Its name.
    format
        The bits of its weight, as TeSA names them.
    input
        How its inputs are rounded, in words.
    error
        The relative error of the layer's own output on calibration data; None where it is not rounded.
    why
        Why it is not rounded, or what was done for it.
    """

    layer: str
    format: str
    input: str = ""
    error: float | None = None
    why: str = ""


@dataclass(frozen=True)
class PrecisionReport:
    """What a precision does to a model.

    Parameters
    ----------
    precision
        As asked for.
    layers
        Every layer that has weights to round.
    batches
        How many batches of calibration data were seen.
    change
        The norm of the change of the outputs over their norm, on calibration data: simulated, and then as it runs.
    max_loss
        What was allowed; None where nothing was.
    metric
        What the user's metric was for the model as given, and is now; None without one.
    measured
        Whether `change` and `metric` are those of the compiled model, not of the simulation.
    notes
        What the reader should know.
    """

    precision: str
    layers: tuple[LayerPrecision, ...]
    batches: int
    change: float
    max_loss: float | None = None
    metric: tuple[float, float] | None = None
    measured: bool = False
    notes: tuple[str, ...] = ()

    @property
    def rounded(self) -> tuple[LayerPrecision, ...]:
        """The layers that have fewer bits."""
        return tuple(layer for layer in self.layers if layer.error is not None)

    def with_measured(self, change: float, metric: tuple[float, float] | None) -> PrecisionReport:
        """Return the report with what the compiled model does."""
        return replace(self, change=change, metric=metric, measured=True)

    def with_note(self, note: str) -> PrecisionReport:
        """Return the report with one more note."""
        return replace(self, notes=(*self.notes, note))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            **asdict(self),
            "layers": [asdict(layer) for layer in self.layers],
            "metric": None if self.metric is None else list(self.metric),
            "notes": list(self.notes),
        }

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> PrecisionReport:
        """Return what :meth:`to_dict` wrote."""
        metric = fields["metric"]
        before, after = (None, None) if metric is None else metric
        return PrecisionReport(
            str(fields["precision"]),
            tuple(
                LayerPrecision(
                    str(row["layer"]),
                    str(row["format"]),
                    str(row["input"]),
                    _number(row["error"]),
                    str(row["why"]),
                )
                for row in fields["layers"]
            ),
            int(fields["batches"]),
            _number(fields["change"]) or 0.0,
            _number(fields["max_loss"]),
            None if metric is None else (_number(before) or 0.0, _number(after) or 0.0),
            fields["measured"] is True,
            tuple(str(note) for note in fields["notes"]),
        )

    def __str__(self) -> str:
        return "\n".join([self._table(), *self.lines(layers=False)])

    def _table(self) -> str:
        rows: list[list[object]] = [
            [row.layer, row.format, row.input, None if row.error is None else f"{row.error:.2g}", row.why]
            for row in self.layers
        ]
        return table(["layer", "weights", "inputs", "error", "why"], rows)

    def lines(self, *, layers: bool = True) -> list[str]:
        """Return the summary: how many layers, accuracy, and, unless a table has them, the layers not rounded."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            counts[layer.format] = counts.get(layer.format, 0) + 1
        shares = ", ".join(f"{count} in {name}" for name, count in sorted(counts.items())) or "no layer"
        bound = "" if self.max_loss is None else f" (max_loss {self.max_loss:g})"
        how = "as compiled" if self.measured else "simulated"
        several = "batch" if self.batches == 1 else "batches"
        accuracy = f"the outputs change by {self.change:.2g} of their norm"
        if self.metric is not None:
            accuracy = f"metric {self.metric[1]:.4g}, as given {self.metric[0]:.4g}; {accuracy}"
        lines = [
            f"precision {self.precision}: {shares}",
            f"accuracy: {accuracy}{bound}, {how}, on {self.batches} {several} of calibration data",
        ]
        left = [layer for layer in self.layers if layers and layer.error is None and layer.why]
        lines += [f"  {layer.layer} stays in {layer.format}: {layer.why}" for layer in left]
        return lines + [f"note: {note}" for note in self.notes]


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FileFormatError(message(f"a figure of the precision report: {value!r}"[:200], "a finite number"))
    return float(value)
