"""Hosts: what runs a graph between its kernels. Eager, a chain, panels, Inductor, or one of them in a CUDA graph.

A host changes how a graph is called and never what it computes; which one pays is measured end to end, not
here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from sparta.compiler.run.attending import with_own_attention
from sparta.compiler.run.chain.chained import Chained
from sparta.compiler.run.cuda_graph import Graphed, on_cuda
from sparta.compiler.run.eager import with_fast_paths
from sparta.compiler.run.panels import panelled
from sparta.compiler.run.rounding import with_own_norms, with_shared_rounding
from sparta.compiler.run.stages import staged, tuned
from sparta.errors import FileFormatError, did_you_mean

__all__ = ["Host", "hosted"]


class Host(StrEnum):
    """What runs the calls between the kernels; the value is what files and reports say.

    >>> Host.from_text("inductor graph").plain
    <Host.INDUCTOR: 'inductor'>
    """

    EAGER = "eager"
    CHAIN = "chain"  # layers, norms and attentions in a row are one call into C++, with memory planned once
    PANELS = "panels"  # eager, and neighbouring layers hand over activations in their kernels' layout
    INDUCTOR = "inductor"
    GRAPH = "graph"  # eager, replayed from a CUDA graph
    INDUCTOR_GRAPH = "inductor graph"
    TUNED = "max-autotune"  # Inductor with all that it can try, which takes minutes
    TUNED_GRAPH = "max-autotune graph"

    @classmethod
    def from_text(cls, text: object) -> Host:
        """Return the host that a file names; raises :class:`FileFormatError` for any other text."""
        known = {host.value: host for host in cls}
        if not isinstance(text, str) or text not in known:
            raise FileFormatError(did_you_mean(str(text)[:100], known, "host"))
        return known[text]

    @property
    def graphed(self) -> bool:
        """Whether all of it is replayed from a CUDA graph."""
        return self is not self.plain

    @property
    def plain(self) -> Host:
        """The host whose calls are replayed; any other is itself."""
        replayed = {Host.GRAPH: Host.EAGER, Host.INDUCTOR_GRAPH: Host.INDUCTOR, Host.TUNED_GRAPH: Host.TUNED}
        return replayed.get(self, self)

    @property
    def compiles(self) -> bool:
        """Whether Inductor compiles, which takes long."""
        return self.plain in (Host.INDUCTOR, Host.TUNED)


def hosted(
    module: fx.GraphModule, host: Host, *, any_size: bool = False, stages: bool | None = None
) -> Callable[..., Any]:
    """Return a graph as its host runs it; without a CUDA graph where its tensors are not on CUDA.

    Parameters
    ----------
    any_size
        Whether it will be called with inputs of many sizes, so that kernels are looked up at each call.
    stages
        Whether Inductor compiles what lies between layers, and not the whole; by default where that is replayed.
    """
    plain = host.plain
    if on_cuda(module) and not any_size:
        stages = host.graphed if stages is None else stages
        rounded = with_shared_rounding(module, traced=stages and host.compiles)
        rounded = with_own_attention(with_own_norms(rounded) if plain is Host.EAGER else rounded)
    else:
        stages, rounded = False, module
    if host.compiles and stages:
        run: Callable[..., Any] = staged(rounded, tuned if plain is Host.TUNED else None)
    elif host.compiles:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = tuned(module) if plain is Host.TUNED else torch.compile(module)
    elif plain is Host.CHAIN:
        run = Chained(module, any_size=any_size)
    else:
        run = with_fast_paths(panelled(module) if plain is Host.PANELS else rounded, any_size=any_size)
    return Graphed(run, module=module) if host.graphed and on_cuda(module) else run
