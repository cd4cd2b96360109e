"""Integrations: the same call inside other people's training loops.

Each file is about one optional package and imports it only when it is used. A loop of one's own needs none of them;
they only know *when* to call :func:`sparta.create.initialize` and where to keep its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparta.create.manager import Manager

__all__ = ["CallbackOf", "TrainingRun", "with_epochs"]


class TrainingRun:
    """What a callback does in one training, without the classes of the package that calls it.

    Parameters
    ----------
    options
        Keyword arguments of :func:`~sparta.create.initialize.initialize`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.manager: Manager | None = None

    def end(self) -> None:
        """Finalize; the model is a plain one with zeros in it."""
        if self.manager is not None:
            self.manager.finalize()


class CallbackOf:
    """What every callback shows of its run: the manager, once training has started."""

    run: TrainingRun

    @property
    def manager(self) -> Manager | None:
        """The manager of the recipe."""
        return self.run.manager


def with_epochs(variables: Any, epochs: float) -> dict[str, Any]:
    """Return recipe variables with the length that a trainer has decided on, unless they have one of their own.

    >>> with_epochs({"sparsity": 0.9}, 3.0)
    {'num_epochs': 3.0, 'sparsity': 0.9}
    """
    given = {} if variables is None else variables
    plain = dict(given) if isinstance(given, Mapping) else given.model_dump(exclude_unset=True)
    return {"num_epochs": epochs, **plain}
