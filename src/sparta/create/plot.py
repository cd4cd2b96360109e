"""A picture of a recipe: sparsity and learning rate over the epochs.

Needs matplotlib, which nothing else here does. It shows what is *scheduled*, from the modifiers' closed forms, so that
it can be looked at before a single step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sparta.create.modifiers.base import Modifier
from sparta.errors import MissingPackageError, message

__all__ = ["plot_schedule"]

_POINTS = 400


def plot_schedule(modifiers: Sequence[Modifier], epochs: float, path: str | os.PathLike[str] | None = None) -> Any:
    """Return a matplotlib figure with the scheduled values of all modifiers, and save it if a path is given."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            message("plotting needs matplotlib", fix="install it with `pip install 'sparta-torch[plot]'`")
        ) from error
    figure = Figure(figsize=(8, 4), layout="constrained")
    sparsity = figure.add_subplot()
    rate = sparsity.twinx()
    times = [max(0.0, epochs) * point / _POINTS for point in range(_POINTS + 1)]
    for entry in modifiers:
        for what, axes, style in (("sparsity", sparsity, "-"), ("learning_rate", rate, "--")):
            found = [(time, values[what]) for time in times if what in (values := entry.planned(time))]
            if found:
                axes.plot(*zip(*found, strict=True), style, label=f"{what}: {entry.name}")
        if entry.kind == "quantization":
            sparsity.axvline(max(0.0, entry.start_epoch), linestyle=":", color="gray", label=entry.name)
    sparsity.set(xlabel="epoch", ylabel="sparsity", ylim=(0, 1))
    rate.set(ylabel="learning rate")
    figure.legend(loc="outside lower center", ncols=2)
    if path is not None:
        figure.savefig(path)
    return figure
