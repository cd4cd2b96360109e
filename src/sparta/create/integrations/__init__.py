"""Integrations: the same call inside other people's training loops.

Each file is about one optional package and imports it only when it is used. A loop of one's own needs none of them;
they only know *when* to call :func:`sparta.create.initialize` and where to keep its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["with_epochs"]


def with_epochs(variables: Any, epochs: float) -> dict[str, Any]:
    """Return recipe variables with the length that a trainer has decided on, unless they have one of their own.

    >>> with_epochs({"sparsity": 0.9}, 3.0)
    {'num_epochs': 3.0, 'sparsity': 0.9}
    """
    given = {} if variables is None else variables
    plain = dict(given) if isinstance(given, Mapping) else given.model_dump(exclude_unset=True)
    return {"num_epochs": epochs, **plain}
