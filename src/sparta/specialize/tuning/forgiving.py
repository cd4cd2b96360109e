"""The user's tuning store for callers that must go on without it: a folder that cannot be used is no reason to stop."""

from __future__ import annotations

from pathlib import Path

from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.store import Entry, TuningStore

__all__ = ["ForgivingStore"]


class ForgivingStore(TuningStore):
    """The user's tuning store, or nothing where its folder cannot be used: every run measures again then.

    Parameters
    ----------
    part
        A part of the store for results that hold under other conditions; empty for the store itself.

    Examples
    --------
    >>> ForgivingStore().problem
    ''
    """

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self.problem = ""
        self._part = part

    @property
    def folder(self) -> Path:
        """The folder of the store, or of its part."""
        return super().folder / self._part if self._part else super().folder

    def get(self, spec: KernelSpec) -> Entry | None:
        """Return the stored result, or None."""
        try:
            return super().get(spec)
        except OSError as error:
            self.problem = f"tuning results cannot be read: {error}"
            return None

    def put(self, spec: KernelSpec, entry: Entry) -> None:
        """Store a result where that can be done."""
        try:
            super().put(spec, entry)
        except OSError as error:
            self.problem = f"tuning results cannot be kept: {error}"
