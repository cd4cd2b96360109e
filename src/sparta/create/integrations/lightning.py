"""Sparse training inside Lightning's Trainer.

:func:`lightning_callback` returns a callback that initializes when training starts, whose state Lightning keeps in its
checkpoints, and that finalizes at the end. The Trainer decides how long to train, so ``num_epochs`` of the recipe
follows ``max_epochs``, and the learning rate stays with the module unless ``lr=`` is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparta.create.initialize import initialize
from sparta.create.integrations import CallbackOf, TrainingRun, with_epochs
from sparta.errors import MissingPackageError, ValueRangeError, message

__all__ = ["LightningRun", "lightning_callback"]


class LightningRun(TrainingRun):
    """What the callback does, without Lightning's classes."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.pending: Mapping[str, Any] | None = None

    def begin(self, trainer: Any, module: Any) -> None:
        """Initialize, and go on where a checkpoint left off."""
        if len(trainer.optimizers) != 1:
            raise ValueRangeError(message(f"the module has {len(trainer.optimizers)} optimizers", "one"))
        batches = trainer.num_training_batches
        if not math.isfinite(batches):
            raise ValueRangeError(
                message("the loader has no length", "an epoch of known length", "set limit_train_batches to a number")
            )
        epochs = trainer.max_epochs
        options = {"lr": None, **self.options}
        if options.get("recipe") is None and epochs is not None and epochs > 0:
            options["recipe_variables"] = with_epochs(options.get("recipe_variables"), float(epochs))
        steps = math.ceil(batches / trainer.accumulate_grad_batches)
        self.manager, _ = initialize(module, trainer.optimizers[0], steps, **options)
        if self.pending is not None:
            self.manager.load_state_dict(self.pending)
            self.pending = None

    def state(self) -> dict[str, Any]:
        """Return what belongs in a checkpoint."""
        return {} if self.manager is None else self.manager.state_dict()


def lightning_callback(**options: Any) -> Any:
    """Return a ``lightning.pytorch.Callback`` that makes the training sparse; its ``manager`` is the manager.

    Parameters
    ----------
    options
        Keyword arguments of :func:`~sparta.create.initialize.initialize`. ``lr`` is None unless given: the module has
        its own schedule.

    Examples
    --------
    >>> callback = lightning_callback(pruning="magnitude", quantization=False)  # doctest: +SKIP
    >>> trainer = lightning.Trainer(max_epochs=20, callbacks=[callback])  # doctest: +SKIP
    """
    try:
        from lightning.pytorch import Callback
    except ImportError as error:
        raise MissingPackageError(
            message("the callback needs lightning", fix="install it with `pip install 'sparta-torch[lightning]'`")
        ) from error

    class SparseTrainingCallback(CallbackOf, Callback):  # type: ignore[misc, unused-ignore]
        """Calls :class:`LightningRun` at Lightning's moments."""

        run = LightningRun(options)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.run.begin(trainer, pl_module)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            self.run.end()

        def state_dict(self) -> dict[str, Any]:
            return self.run.state()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.run.pending = state_dict or None

    return SparseTrainingCallback()
