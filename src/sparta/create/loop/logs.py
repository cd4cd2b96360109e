"""Records: where a manager sends the numbers it logs.

A record is numbers by name. Whatever a script already has takes them, a function, a TensorBoard writer, or anything
with a method ``log`` that takes a dictionary.
"""

from __future__ import annotations

from typing import Any

from sparta.errors import ValueRangeError, message

__all__ = ["Logger", "send"]

Logger = Any  # a callable, a SummaryWriter, or an object with `log`


def send(logger: Logger, record: dict[str, float], step: int) -> None:
    """Send a record; an empty one only checks that the logger is one.

    >>> send(print, {"sparsity": 0.5}, step=3)
    {'sparsity': 0.5}
    """
    if hasattr(logger, "add_scalar"):
        for name, value in record.items():
            logger.add_scalar(name, value, global_step=step)
    elif callable(getattr(logger, "log", None)):
        if record:
            logger.log(record)
    elif callable(logger):
        if record:
            logger(record)
    else:
        raise ValueRangeError(
            message(
                f"a logger is a {type(logger).__name__}", "a callable, a SummaryWriter, or an object with log(dict)"
            )
        )
