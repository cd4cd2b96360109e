"""Sparse training inside the Trainer of Hugging Face transformers.

:func:`trainer_callback` returns a callback that initializes when training begins, keeps the manager's state in every
checkpoint, takes it back when the Trainer resumes, and finalizes at the end. The Trainer decides how long to train, so
``num_epochs`` of the recipe follows it, and the learning rate stays with the Trainer unless ``lr=`` is given.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sparta.create.initialize import initialize
from sparta.create.integrations import CallbackOf, TrainingRun, with_epochs
from sparta.create.loop.state_file import load_state, save_state
from sparta.errors import MissingPackageError, ValueRangeError, message

__all__ = ["TrainerRun", "trainer_callback"]

_STATE, _RECIPE = "sparta_state.safetensors", "sparta_recipe.yaml"


class TrainerRun(TrainingRun):
    """What a Trainer's callback does, without the Trainer's classes."""

    def begin(self, args: Any, state: Any, model: Any, optimizer: Any, loader: Any) -> None:
        """Initialize, and go on where a checkpoint left off."""
        if hasattr(loader, "__len__"):
            steps = max(1, math.ceil(len(loader) / args.gradient_accumulation_steps))
        else:  # a stream: the Trainer counts it as one epoch
            steps = state.max_steps
        epochs = state.max_steps / steps
        options = {"lr": None, **self.options}
        if options.get("recipe") is None:
            options["recipe_variables"] = with_epochs(options.get("recipe_variables"), epochs)
        self.manager, _ = initialize(model, optimizer, steps, **options)
        if self.manager.max_epochs > math.ceil(epochs - 1e-6):
            raise ValueRangeError(
                message(
                    f"the recipe needs {self.manager.max_epochs} epochs, the Trainer trains {epochs:g}",
                    fix=f"set num_train_epochs={self.manager.max_epochs}, or shorten the recipe",
                )
            )
        saved = self._folder(args, state) / _STATE
        if state.global_step > 0 and saved.exists():
            self.manager.load_state_dict(load_state(saved))

    def save(self, args: Any, state: Any) -> None:
        """Keep the state and the recipe in the checkpoint that was just written."""
        folder = self._folder(args, state)
        if self.manager is not None and folder.is_dir() and state.is_world_process_zero:
            save_state(folder / _STATE, self.manager.state_dict())
            self.manager.save(folder / _RECIPE)

    @staticmethod
    def _folder(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def trainer_callback(**options: Any) -> Any:
    """Return a ``transformers.TrainerCallback`` that makes the training sparse; its ``manager`` is the manager.

    Parameters
    ----------
    options
        Keyword arguments of :func:`~sparta.create.initialize.initialize`: pruning, quantization, distillation,
        recipe_variables, recipe, ignore and so on. ``lr`` is None unless given: the Trainer has its own schedule.

    Examples
    --------
    >>> callback = trainer_callback(pruning="magnitude", quantization=False)  # doctest: +SKIP
    >>> trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])  # doctest: +SKIP
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingPackageError(
            message("the Trainer's callback needs transformers", fix="install it with `pip install 'sparta-torch[hf]'`")
        ) from error

    class SparseTrainingCallback(CallbackOf, TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Calls :class:`TrainerRun` at the Trainer's moments."""

        run = TrainerRun(options)

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            self.run.begin(args, state, kwargs["model"], kwargs["optimizer"], kwargs.get("train_dataloader"))

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            self.run.save(args, state)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            self.run.end()

    return SparseTrainingCallback()
