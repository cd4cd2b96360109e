"""Calls in CUDA graphs over rotated operands, so that neither the host nor the L2 cache flatters anyone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from sparta.specialize.cuda.graphs import copies, recorded


def rotated(function: Callable[..., object], item: Sequence[Tensor], count: int) -> Callable[[], None]:
    """Return the replay of a graph whose calls go round the copies of what `function` reads.

    Like the graph of a compiled model, it reads weights that are older than all of its kernels.
    """
    sets = copies(item, count)

    def run() -> None:
        for i in range(count):
            function(*sets[i % len(sets)])

    graph, _ = recorded(run)  # which keeps the copies
    return graph.replay
