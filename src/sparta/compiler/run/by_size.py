"""By size: what runs a graph at each of the sizes that were seen, in a bounded number.

On the CPU one function serves all sizes. On CUDA a size that comes again is recorded as a CUDA graph of its own, up to
a few; what was used longest ago makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import fx

from sparta.compiler.run.cuda_graph import Graphed

__all__ = ["BySize"]

_MOST_SIZES = 1024  # whose sizes were found to be right
_MOST_GRAPHS = 8  # that hold the memory of their activations


class BySize:
    """Functions of flat inputs by the shapes of these.

    Parameters
    ----------
    make
        Returns the function for any size; called once.
    record
        Whether sizes that come again are recorded as CUDA graphs.
    """

    def __init__(
        self, make: Callable[[], Callable[..., Any]], *, record: bool = False, module: fx.GraphModule | None = None
    ) -> None:
        self._make, self.records, self._module = make, record, module
        self._run: Callable[..., Any] | None = None
        self._known: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
        self._recorded: OrderedDict[Any, Graphed] = OrderedDict()

    def get(self, shapes: Any) -> Callable[..., Any] | None:
        """Return what runs at these shapes, if they were seen before."""
        run = self._known.get(shapes)
        if run is None or not self.records or self._run is None:
            return run
        graph = self._recorded.get(shapes)
        if graph is None:
            graph = self._recorded[shapes] = Graphed(self._run, quiet=True, module=self._module)
            if len(self._recorded) > _MOST_GRAPHS:
                self._recorded.popitem(last=False)
        else:
            self._recorded.move_to_end(shapes)
        return graph

    def made(self, shapes: Any) -> Callable[..., Any]:
        """Return what runs at shapes that are new."""
        if self._run is None:
            self._run = self._make()
        self._known[shapes] = self._run
        if len(self._known) > _MOST_SIZES:
            self._known.popitem(last=False)
        return self._run
