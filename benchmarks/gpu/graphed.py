"""Calls in CUDA graphs over rotated operands, so that neither the host nor the L2 cache flatters anyone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from sparta.specialize.cuda.graphs import recorded

_ROTATED_BYTES = 150 << 20  # more than twice the L2 cache


def copies(item: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    """Return as many copies as it takes to leave the L2 cache, at most `count`."""
    size = sum(t.numel() * t.element_size() for t in item)
    needed = min(count, -(-_ROTATED_BYTES // max(1, size)))
    return [tuple(item), *(tuple(t.clone() for t in item) for _ in range(needed - 1))]


def rotated(function: Callable[..., object], item: Sequence[Tensor], count: int) -> Callable[[], None]:
    """Return the replay of a graph whose calls go round the copies of what `function` reads."""
    sets = copies(item, count)

    def run() -> None:
        for i in range(count):
            function(*sets[i % len(sets)])

    graph, _ = recorded(run)  # the graph keeps the copies

    def replay() -> None:
        graph.replay()

    return replay
