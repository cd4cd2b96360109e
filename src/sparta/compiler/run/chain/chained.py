"""Chained: a graph that runs as programs, one for each size that it has seen; see :mod:`.program`.

Whatever cannot be followed, on another device or with data that decides sizes, runs eagerly as before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from sparta.compiler.run.chain.batches import InParts, parts_of, quicker_of, side_by_side
from sparta.compiler.run.chain.images import IMAGE_LAYERS
from sparta.compiler.run.chain.native import NATIVE
from sparta.compiler.run.chain.program import Program
from sparta.compiler.run.chain.trace import Trace
from sparta.compiler.run.eager import with_fast_paths
from sparta.compiler.run.kernel_module import KernelModule

__all__ = ["Chained", "chainable"]

_MOST_SIZES = 256
_FEWEST_STEPS = 3


def chainable(module: fx.GraphModule) -> bool:
    """Whether a graph has so many calls that the library runs that a chain of it may pay."""
    if any(tensor.device.type != "cpu" for tensor in (*module.parameters(), *module.buffers())):
        return False
    layers, known = dict(module.named_modules()), 0
    for node in module.graph.nodes:
        if node.op == "call_module":
            layer = layers.get(str(node.target))
            known += isinstance(layer, KernelModule)
        elif node.op == "call_function":
            known += (
                node.target in NATIVE or node.target in IMAGE_LAYERS or node.target is torch.ops.aten.linear.default
            )
    return known >= _FEWEST_STEPS


class Chained:
    """A function of flat inputs that computes what a graph module does.

    Like :func:`sparta.compiler.run.eager.with_fast_paths`, it holds the module's tensors as they are now.

    Parameters
    ----------
    module
        The graph.
    any_size
        Whether inputs of many sizes will come.
    """

    def __init__(self, module: fx.GraphModule, *, any_size: bool = False) -> None:
        self._module, self._any_size = module, any_size
        self._programs: OrderedDict[Any, Program | InParts | None] = OrderedDict()
        self._packed: dict[Any, Any] = {}  # what all sizes share
        self._eager: Callable[..., Any] | None = None

    def __call__(self, *leaves: Any) -> Any:
        """Return the flat results."""
        key = (
            torch.get_num_threads(),
            *[(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves],
        )
        program = self._programs[key] if key in self._programs else self._made(key, leaves)
        if program is None or any(isinstance(x, Tensor) and x.is_neg() for x in leaves):
            return self.eager(*leaves)
        return program(leaves)

    def program(self, *leaves: Any) -> Program | None:
        """Return the program for inputs like these; None where they run eagerly."""
        return self.program_of(self._module, leaves)

    def program_of(self, module: fx.GraphModule, leaves: Sequence[Any], threads: int | None = None) -> Program | None:
        """Return the program of a graph like this one's, with what is packed for it."""
        try:
            with torch.no_grad():
                return Program(Trace(module, leaves, threads or torch.get_num_threads(), self._packed))
        except Exception:  # noqa: BLE001 - whatever cannot be followed runs eagerly, and says itself what is wrong
            return None

    @property
    def eager(self) -> Callable[..., Any]:
        """The same without chains."""
        if self._eager is None:
            self._eager = with_fast_paths(self._module, any_size=self._any_size)
        return self._eager

    def _made(self, key: Any, leaves: tuple[Any, ...]) -> Program | InParts | None:
        whole = self.program(*leaves)
        program: Program | InParts | None = whole
        if whole is not None:
            threads, alone = torch.get_num_threads(), partial(self.program_of, threads=1)
            parts = parts_of(whole, self._module, leaves, self.program_of)
            if not self._any_size:  # where sizes come and go, they are not worth so many trials
                parts += side_by_side(whole, self._module, leaves, alone, threads)
            program = quicker_of(whole, parts, leaves) if parts else whole
        self._programs[key] = program
        while len(self._programs) > _MOST_SIZES:
            self._programs.popitem(last=False)
        return program
