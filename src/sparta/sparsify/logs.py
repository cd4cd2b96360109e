"""Records: where managers and schedulers send the numbers they log.

A record is numbers by name. Whatever a script already has takes them: a function, a TensorBoard writer, a run of
Weights & Biases, MLflow, or anything with a method ``log`` or ``log_metrics``. :class:`History` keeps them for the
curves of a report; :func:`writer` makes a writer of a package by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from sparta.errors import MissingPackageError, NameNotFoundError, ValueRangeError, did_you_mean, message

__all__ = ["RECORDS", "History", "Logger", "Loggers", "send", "writer"]

Logger = Any  # a callable, a writer of a package, or its name


RECORDS = 100
"""How many records of a number that changes at every step a run sends."""


class Loggers:
    """What sends records: a base of schedulers."""

    @property
    def loggers(self) -> list[Logger]:
        """Where records go."""
        found: list[Logger] = self.__dict__.setdefault("_loggers", [])
        return found

    def add_logger(self, logger: Logger) -> None:
        """Send records to a callable, a writer of a package or its name, or anything with ``log(dict)``."""
        if isinstance(logger, str):
            logger = writer(logger)
        send(logger, {}, 0)
        self.loggers.append(logger)

    def log(self, record: dict[str, float], iteration: int) -> None:
        """Send a record to all loggers."""
        for logger in self.loggers:
            send(logger, record, iteration)


class History:
    """Keeps records in memory, one entry for each step that has some: ``report.to_html(path, history=history)``.

    Examples
    --------
    >>> history = History()
    >>> send(history, {"sparsity": 0.5}, step=1)
    >>> send(history, {"loss": 0.25}, step=1)
    >>> list(history)
    [{'step': 1, 'sparsity': 0.5, 'loss': 0.25}]
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, float]] = {}

    def log_metrics(self, record: dict[str, float], step: int) -> None:
        """Keep a record; later numbers of the same name and step replace earlier ones."""
        self._steps.setdefault(step, {"step": step}).update(record)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter([self._steps[step] for step in sorted(self._steps)])

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, place: int) -> dict[str, float]:
        return list(self)[place]

    def to_dict(self) -> dict[str, Any]:
        """Return all records as plain values."""
        return {"steps": list(self)}


def send(logger: Logger, record: dict[str, float], step: int) -> None:
    """Send a record; an empty one only checks that the logger is one.

    >>> send(print, {"sparsity": 0.5}, step=3)
    {'sparsity': 0.5}
    """
    if callable(getattr(logger, "add_scalar", None)):
        for name, value in record.items():
            logger.add_scalar(name, value, global_step=step)
    elif callable(getattr(logger, "log_metrics", None)):
        if record:
            logger.log_metrics(record, step=step)
    elif callable(getattr(logger, "log", None)):
        if record:
            logger.log(record, **({"step": step} if _takes_step(logger.log) else {}))
    elif callable(logger):
        if record:
            logger(record)
    else:
        raise ValueRangeError(
            message(
                f"a logger is a {type(logger).__name__}",
                "a callable, a writer of TensorBoard, Weights & Biases or MLflow, or an object with log(dict)",
            )
        )


def _takes_step(log: Callable[..., Any]) -> bool:
    try:
        return "step" in inspect.signature(log).parameters
    except (TypeError, ValueError):  # not written in Python
        return False


def writer(name: str, folder: str | Path = "runs") -> Logger:
    """Return a writer of an installed package, by its name.

    Parameters
    ----------
    name
        ``"tensorboard"``, ``"wandb"`` or ``"mlflow"``.
    folder
        Where it writes: TensorBoard's folder, or the name of the project or experiment of the others.
    """
    makers: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: _tensorboard(folder),
        "wandb": lambda: _wandb(folder),
        "mlflow": lambda: _mlflow(folder),
    }
    if not isinstance(name, str) or name not in makers:
        raise NameNotFoundError(did_you_mean(str(name), makers, "writer"))
    try:
        return makers[name]()
    except ImportError as error:
        raise MissingPackageError(
            message(f"the writer {name!r} without its package", fix=f"pip install {name}")
        ) from error


def _tensorboard(folder: str | Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _wandb(project: str | Path) -> Any:
    wandb: Any = import_module("wandb")
    return wandb.run if wandb.run is not None else wandb.init(project=str(project))


def _mlflow(experiment: str | Path) -> Any:
    mlflow: Any = import_module("mlflow")
    if mlflow.active_run() is None:
        mlflow.set_experiment(str(experiment))
        mlflow.start_run()
    return mlflow
