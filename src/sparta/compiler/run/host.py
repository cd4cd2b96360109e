"""Hosts: what runs a graph between its kernels. Eager, Inductor, panels, or any of them from a CUDA graph.

A host changes how a graph is called and never what it computes; which one pays is measured end to end, not
here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from sparta.compiler.run.cuda_graph import Graphed, on_cuda
from sparta.compiler.run.eager import with_fast_paths
from sparta.compiler.run.panels import panelled

__all__ = ["EAGER", "GRAPH", "INDUCTOR", "PANELS", "hosted", "without_graph"]

EAGER, INDUCTOR, GRAPH, PANELS = "eager", "inductor", "graph", "panels"


def hosted(module: fx.GraphModule, host: str) -> Callable[..., Any]:
    """Return a graph as its host runs it; without a CUDA graph where its tensors are not on CUDA."""
    plain = without_graph(host)
    if plain == INDUCTOR:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run: Callable[..., Any] = torch.compile(module)
    else:
        run = with_fast_paths(panelled(module) if plain == PANELS else module)
    return Graphed(run, module=module) if plain != host and on_cuda(module) else run


def without_graph(host: str) -> str:
    """Return the host whose calls a host replays from a CUDA graph; any other is itself."""
    return (host.removesuffix(GRAPH).rstrip() or EAGER) if host.endswith(GRAPH) else host
