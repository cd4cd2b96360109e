"""The one call of this package: from a model, an optimizer and a few choices to a sparse training run.

:func:`initialize` makes a recipe (or takes one), checks all of it against the model, and lets it run from the
optimizer's own steps. Everything that can be refused is refused here, before the first step, with what to do about it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparta.create.loop.clock import optimizer_steps
from sparta.create.loop.scaler import check_scaler
from sparta.create.manager import Manager
from sparta.create.modifiers.base import Modifier
from sparta.create.recipe.recipe import Recipe
from sparta.create.template import as_switch, recipe_for
from sparta.errors import ValueRangeError, message
from sparta.sparsify.logs import Logger

if TYPE_CHECKING:
    from sparta.create.variables import RecipeVariables

__all__ = ["initialize"]


def initialize(  # noqa: PLR0913, PLR0917 - one argument a choice of the user, in the document's order
    model: nn.Module,
    optimizer: Any,
    steps_per_epoch: int,
    pruning: str | bool | None = True,  # noqa: FBT001, FBT002 - the document's signature
    quantization: str | bool = True,  # noqa: FBT001, FBT002
    lr: str | None = "linear",
    distillation: str | bool = False,  # noqa: FBT001, FBT002
    distillation_teacher: nn.Module | str | None = None,
    scaler: Any = None,
    recipe_variables: RecipeVariables | Mapping[str, Any] | None = None,
    *,
    recipe: Recipe | str | PathLike[str] | None = None,
    include: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str | None = None,
    loss_closure: Callable[[], Tensor] | None = None,
    data: Iterable[Any] | None = None,
    accumulation_steps: int = 1,
    epoch: float = 0.0,
    seed: int = 0,
    loggers: Sequence[Logger] = (),
) -> tuple[Manager, Any]:
    """Make the training of `model` sparse; call it after model and optimizer are made and before training starts.

    Parameters
    ----------
    model
        Trained in place; wrapped ones (DDP, FSDP2, `torch.compile`) as well. Wrap and shard first.
    optimizer
        Holds the model's parameters. It stays the optimizer it is: the recipe listens to its steps.
    steps_per_epoch
        Batches of an epoch, ``len(dataloader)``.
    pruning
        True or ``"magnitude"``; ``"acdc"``, ``"movement"``, ``"obs"``, ``"mfac"``, ``"gmp"``, ``"structured"``,
        ``"rigl"``, ``"topkast"``; ``"constant"``, ``"transfer"`` or ``"sparse-transfer"`` to keep the zeros that are
        there; False or None for no pruning.
    quantization
        Whether to train quantized at the end.
    lr
        Learning-rate schedule: ``"linear"``, ``"cosine"``, ``"cyclic_linear"``, ``"constant"``, ``"stepped"``,
        ``"exponential"``; None leaves the learning rate to the script.
    distillation
        Whether to learn from a teacher too.
    distillation_teacher
        The teacher: a module; by default the model as it is when distillation begins.
    scaler
        The gradient scaler of a script with mixed precision; it is then what is returned.
    recipe_variables
        Epochs, sparsity, learning rates and so on: a :class:`~sparta.create.variables.RecipeVariables` or a dictionary.
        With `recipe`, values for the variables of that recipe.
    recipe
        A recipe of one's own (or its file) instead of the one made from the choices above.
    include, ignore
        Names of parameters, globs or ``re:`` patterns: what may be pruned, and what may not.
    loss_closure
        Returns the loss of one fresh batch; for second-order pruning.
    data
        A loader of ``(inputs, targets)``, for whatever needs data outside the training loop.
    accumulation_steps
        Batches whose gradients are summed for one optimizer step.
    epoch
        Where to begin, when a run is resumed without the manager's state.
    seed
        Of everything that is left to chance.
    loggers
        Get what happens: callables, writers of TensorBoard, Weights & Biases or MLflow or their names, objects with
        ``log(dict)``.

    Returns
    -------
    tuple of Manager and the optimizer or scaler
        The manager says how long to train (``max_epochs``); the other is the very object that was given.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> manager, optimizer = initialize(
    ...     model, optimizer, 4, quantization=False, recipe_variables={"num_epochs": 2, "sparsity": 0.5}
    ... )
    >>> for _ in range(manager.max_epochs):
    ...     for _ in range(4):
    ...         optimizer.zero_grad()
    ...         model(torch.randn(3, 8)).square().mean().backward()
    ...         optimizer.step()
    >>> manager.finalize()
    >>> manager.spec().density
    0.5
    """
    if not isinstance(model, nn.Module):
        raise ValueRangeError(message(f"the model is a {type(model).__name__}", "a torch.nn.Module"))
    if scaler is not None:
        check_scaler(scaler)
    steps = optimizer_steps(steps_per_epoch, accumulation_steps)
    made = _own_recipe(recipe, recipe_variables)
    if made is None:
        made = recipe_for(
            pruning, quantization, lr, distillation, recipe_variables, model, include=include, ignore=ignore
        )
    modifiers = made.modifiers(steps)
    teacher = _teacher(modifiers, distillation_teacher, asked=as_switch(distillation, "distillation"))
    manager = Manager(modifiers, made)
    for logger in loggers:
        manager.add_logger(logger)
    manager.attach(
        model,
        optimizer,
        steps,
        epoch=epoch,
        teacher=teacher,
        loss_closure=loss_closure,
        data=data,
        generator=torch.Generator().manual_seed(seed),
        include=include,
        ignore=ignore,
        scaler=scaler,
        accumulation_steps=accumulation_steps,
    )
    return manager, optimizer if scaler is None else scaler


def _own_recipe(given: Recipe | str | PathLike[str] | None, variables: Any) -> Recipe | None:
    if given is None:
        return None
    if isinstance(given, Recipe):
        made = given
    elif isinstance(given, str) and "\n" in given:
        made = Recipe.from_yaml(given)
    else:
        made = Recipe.load(given)
    if variables is not None:
        if not isinstance(variables, (Mapping, str)):
            variables = variables.model_dump(exclude_unset=True)
        made = made.override(variables)
    return made


def _teacher(modifiers: Sequence[Modifier], given: nn.Module | str | None, *, asked: bool) -> Any:
    distils = any(entry.kind == "distillation" for entry in modifiers)
    if isinstance(given, str) and given != "self":
        raise ValueRangeError(
            message(f"distillation_teacher is {given!r}", "a module, or 'self'", "load the teacher and pass the module")
        )
    if given is not None and not distils:
        warnings.warn(
            message("a distillation_teacher without distillation has no effect", fix="pass distillation=True"),
            stacklevel=3,
        )
    if asked and not distils:
        raise ValueRangeError(message("distillation=True with a recipe that has none", fix="add Distillation to it"))
    return (given or "self") if distils else None
