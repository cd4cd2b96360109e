"""The log of a run: what each layer lost, how dense it is now and how long it took.

Errors are relative: the norm of the change of the layer's output over the norm of the output, on the calibration data
(of the weights where there was no data).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from sparta.errors import MissingPackageError, message
from sparta.tables import table

__all__ = ["LayerLog", "PruneLog"]


@dataclass(frozen=True)
class LayerLog:
    """One layer of a run.

    Parameters
    ----------
    error_before
        Relative error of pruning by magnitude, in the same pattern and number.
    error
        Relative error of the layer as it is now.
    density
        Fraction of the weights that were kept.
    note
        Why the layer is dense, where it is.
    """

    name: str
    pattern: str
    density: float
    error_before: float | None
    error: float | None
    seconds: float
    note: str = ""


@dataclass
class PruneLog:
    """What a run did, layer by layer; prints as a table."""

    method: str
    layers: list[LayerLog] = field(default_factory=list)
    seconds: float = 0.0

    def __iter__(self) -> Iterator[LayerLog]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> LayerLog:
        """Return the entry of a layer."""
        return next(layer for layer in self.layers if layer.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the log as plain values."""
        return {"method": self.method, "seconds": self.seconds, "layers": [asdict(layer) for layer in self.layers]}

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with one row per layer."""
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise MissingPackageError(
                message("pandas is not installed", fix="install pandas, or use `to_dict`")
            ) from error
        return pandas.DataFrame([asdict(layer) for layer in self.layers])

    def plot(self, axes: Any = None) -> Any:
        """Draw the errors of the layers, by magnitude and as they are; return matplotlib's axes."""
        if axes is None:
            try:
                from matplotlib import pyplot as plt
            except ImportError as error:
                raise MissingPackageError(message("a plot needs matplotlib", fix="pip install matplotlib")) from error
            _, axes = plt.subplots(figsize=(8, max(2.0, 0.22 * len(self.layers))))
        known = [layer for layer in self.layers if layer.error is not None]
        places = range(len(known))
        axes.barh(places, [layer.error_before or 0.0 for layer in known], color="lightgray", label="magnitude")
        axes.barh(places, [layer.error or 0.0 for layer in known], height=0.5, label=self.method)
        axes.set_yticks(places, [layer.name for layer in known])
        axes.invert_yaxis()
        axes.set_xlabel("relative error of the layer's output")
        axes.legend()
        return axes

    @property
    def brief(self) -> str:
        """One line: how many layers, what stays and the mean error."""
        errors = [layer.error for layer in self.layers if layer.error is not None]
        if not errors:
            return f"{len(self.layers)} layers"
        density = sum(layer.density for layer in self.layers) / len(self.layers)
        mean = sum(errors) / len(errors)
        return f"{len(self.layers)} layers, density {density:.3f}, error {mean:.4f}, {self.seconds:.1f} s"

    def __str__(self) -> str:
        rows = [
            [e.name, e.pattern, f"{e.density:.4f}", _shown(e.error_before), _shown(e.error), f"{e.seconds:.2f}", e.note]
            for e in self.layers
        ]
        columns = ["layer", "pattern", "density", "error (magnitude)", f"error ({self.method})", "s", "note"]
        return table(columns, rows, f"pruned by {self.method} in {self.seconds:.1f} s")


def _shown(error: float | None) -> str:
    return "" if error is None else f"{error:.4f}"
