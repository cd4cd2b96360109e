"""Tune or build every sparse module of a model at once.

`tune` runs the model once to see which inputs each sparse module gets, then tunes them one after the other, equal ones
once. What it finds is kept in the user's store on disk, where `build` looks; it also returns plain configs by module
name, which `build` takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from sparta.common.progress import Progress, Step, many_view
from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.nn.operator import OperatorBase
from sparta.specialize.tuning.select import Choice
from sparta.spelling import also

__all__ = ["build", "operators_of", "tune"]


Inputs = Sequence[Any] | Mapping[str, Any] | Tensor
_LEAST_SECONDS = 1e-3


def operators_of(model: nn.Module) -> dict[str, OperatorBase]:
    """Return the sparse modules of a model by name; the model itself has the name ``""``."""
    return {name: child for name, child in model.named_modules() if isinstance(child, OperatorBase)}


@also(sample_inputs="example_inputs", inputs="example_inputs")
def tune(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    budget_s: float | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Tune every sparse module of a model on the inputs it gets when the model runs on `example_inputs`.

    Parameters
    ----------
    example_inputs
        Positional inputs, a mapping of keyword inputs, or a single tensor.
    budget_s
        Seconds for all modules together; each gets an equal share of what is left. None sets no limit but that of each
        module.
    progress
        A callable that gets a :class:`~sparta.common.progress.Step` as each module is done: its name, and the choice.
        True shows them, and each trial, live in a terminal and as plain lines elsewhere; None, the default, in a
        terminal only; False shows nothing.
    options
        For each module's ``tune``: ``backward``, ``algo``, ``max_trials``, ``seed``, and ``store``, which is the user's
        store on disk by default; ``store=False`` measures again and keeps nothing.

    Returns
    -------
    dict
        The config of each module by name, as :func:`build` takes it. An interrupt keeps what was tuned so far.

    Examples
    --------
    >>> from sparta.nn import SparseLinear
    >>> mask = torch.rand(8, 16) < 0.5
    >>> model = nn.Sequential(SparseLinear(nn.Linear(16, 8), weight_mask=mask), nn.ReLU())
    >>> sorted(tune(model, torch.randn(4, 16), max_trials=1))
    ['0']
    """
    if budget_s is not None and not budget_s > 0:
        raise ValueRangeError(message(f"budget_s={budget_s}", "seconds above 0, or None for no limit"))
    deadline = None if budget_s is None else perf_counter() + budget_s
    configs: dict[str, dict[str, Any]] = {}
    known: dict[str, Choice] = {}
    seen = _seen_inputs(model, example_inputs)
    with many_view(progress, len(seen)) as view:
        try:
            for name, (operator, inputs) in seen.items():
                show = view.trials(name)
                shown: dict[str, Any] = {} if show is None else {"progress": show}
                if deadline is not None:
                    share = (deadline - perf_counter()) / (len(seen) - len(configs))
                    options["budget_s"] = max(share, _LEAST_SECONDS)
                choice = operator.tune(inputs, known=known, **options, **shown)
                configs[name] = choice.config
                view.done(Step(name or "model", choice))
                if choice.result is not None and choice.result.interrupted:
                    break
        except KeyboardInterrupt:
            # Between two searches, or while one was set up: what was tuned before stays.
            return configs
    return configs


@also(sample_inputs="example_inputs", inputs="example_inputs")
def build(
    model: nn.Module,
    example_inputs: Inputs,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Build the sparse modules of a model from the configs that :func:`tune` returned, without measuring.

    Without `configs`, each module takes what was tuned for it, in this process or, as the store on disk tells, in any
    other; else what the package's table has for machines of this kind, else dense.
    """
    found = operators_of(model)
    for name in configs or ():
        if name not in found:
            raise NameNotFoundError(did_you_mean(name, found, "sparse module"))
    for name, (operator, inputs) in _seen_inputs(model, example_inputs).items():
        if configs is None or name in configs:
            operator.build(inputs, None if configs is None else configs[name])


def _seen_inputs(model: nn.Module, example_inputs: Inputs) -> dict[str, tuple[OperatorBase, tuple[Tensor, ...]]]:
    """Run the model once; return each sparse module with the inputs of its first call."""
    found = operators_of(model)
    if not found:
        raise ValueRangeError(message("a model without sparse modules", "at least one", "put SparseLinear in first"))
    seen: dict[str, tuple[OperatorBase, tuple[Tensor, ...]]] = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(operator: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if name not in seen and isinstance(operator, OperatorBase):
                bound = inspect.signature(operator.forward).bind(*inputs, **named)
                bound.apply_defaults()
                given = bound.arguments.values()
                seen[name] = (operator, tuple(t.detach() if isinstance(t, Tensor) else t for t in given))

        return hook

    hooks = [operator.register_forward_pre_hook(remember(name), with_kwargs=True) for name, operator in found.items()]
    try:
        with torch.no_grad():
            if isinstance(example_inputs, Mapping):
                model(**example_inputs)
            else:
                model(*((example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs))
    finally:
        for hook in hooks:
            hook.remove()
    missing = sorted(set(found) - set(seen))
    if missing:
        raise ValueRangeError(message(f"the example inputs never reach {', '.join(missing)}", fix="pass others"))
    return {name: seen[name] for name in found}
