"""Variants: the ways to run a whole model that compete end to end, as values and not as sentences.

A variant says which graph runs, which layers have their sparse kernels in it, and what hosts the rest. Its text is for
people; nothing reads it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sparta.compiler.lower.subgraph import is_joined
from sparta.compiler.run.host import Host
from sparta.errors import FileFormatError, did_you_mean

__all__ = ["GIVEN", "ORIGINAL", "Base", "Variant"]


class Base(StrEnum):
    """Which graph runs; the value is what files say."""

    GIVEN = "given"  # no graph: the model itself, as the user wrote it
    ORIGINAL = "original"  # as captured
    REDUCED = "reduced"  # compact and folded

    @classmethod
    def from_text(cls, text: object) -> Base:
        """Return the graph that a file names; raises :class:`FileFormatError` for any other text."""
        known = {base.value: base for base in cls}
        if not isinstance(text, str) or text not in known:
            raise FileFormatError(did_you_mean(str(text)[:100], known, "graph"))
        return known[text]


@dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Parameters
    ----------
    base
        The graph.
    kernels
        Names of the layers that sparse kernels run, and of products of several layers; only the reduced graph has any.
    host
        What runs the rest, and whether all of it is replayed from a CUDA graph.

    Examples
    --------
    >>> print(Variant(Base.REDUCED, frozenset({"fc"}), Host.INDUCTOR_GRAPH))
    sparse, inductor graph
    """

    base: Base
    kernels: frozenset[str] = frozenset()
    host: Host = Host.EAGER

    @property
    def graphed(self) -> bool:
        """Whether it is replayed from a CUDA graph."""
        return self.host.graphed

    def __str__(self) -> str:
        names = {Base.GIVEN: "model as given", Base.ORIGINAL: "original graph", Base.REDUCED: "reduced graph"}
        joined = {name for name in self.kernels if is_joined(name)}
        kinds = ["sparse"] * bool(self.kernels - joined) + ["joined"] * bool(joined)
        name = ", ".join(kinds) or names[self.base]
        return name if self.host is Host.EAGER else f"{name}, {self.host.value}"


GIVEN = Variant(Base.GIVEN)
ORIGINAL = Variant(Base.ORIGINAL)
