"""Which parameters a modifier means: the `params` field of a recipe, matched with a model.

Entries are exact names, globs, ``re:`` patterns, ``__ALL__`` and ``__ALL_PRUNABLE__``. Names are those of the bare
model, whatever DDP, FSDP or `torch.compile` put before them, and an entry that matches nothing is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparta.create.modifiers.base import Run
from sparta.errors import ShapeError, ValueRangeError, message
from sparta.sparsify import Layer, find_layers
from sparta.sparsify.layers import along_inputs, without_frozen, without_misfits
from sparta.sparsify.shards import gradient_part, local
from sparta.tesa import names
from sparta.tesa.patterns import Pattern

__all__ = [
    "ALL",
    "ALL_PRUNABLE",
    "fresh_gradients",
    "gradient_of",
    "layers_for",
    "mean_fresh_loss",
    "parameters_for",
    "refuse_shards",
]

ALL = "__ALL__"
ALL_PRUNABLE = "__ALL_PRUNABLE__"


def layers_for(
    run: Run, params: Sequence[str] | str, pattern: Pattern | None = None, *, with_frozen: bool = False
) -> list[Layer]:
    """Return the layers that `params` names, in the model's order.

    ``__ALL_PRUNABLE__`` are the weights of linear, convolution and attention layers within ``run.include``; whatever
    ``run.ignore`` names is left out in any case. Of layers that nobody named, frozen ones are left out, with a warning,
    unless `with_frozen` is true, and so are those that are too small for `pattern`; a named one is an error then.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1), ignore="2.*")
    >>> [layer.name for layer in layers_for(run, "__ALL_PRUNABLE__")]
    ['0.weight']
    """
    entries = _entries(params)
    ignored = set()
    if run.ignore:
        ignored = {id(layer.parameter) for layer in find_layers(run.model, run.ignore)}
    chosen: dict[int, Layer] = {}
    for entry in entries:
        if entry == ALL_PRUNABLE:
            found = [layer for layer in find_layers(run.model, run.include) if id(layer.parameter) not in ignored]
            if run.include is None and not with_frozen:
                found = without_frozen(found)
            if run.include is None and pattern is not None:
                found = without_misfits(found, pattern)
        else:
            found = find_layers(run.model, "*" if entry == ALL else entry)
        chosen |= {id(layer.parameter): layer for layer in found}
    order = {id(parameter): place for place, parameter in enumerate(run.model.parameters())}
    kept = [layer for key, layer in chosen.items() if key not in ignored]
    if not kept:
        raise ValueRangeError(
            message(f"params {entries} leave nothing to prune once `ignore` is left out", "one layer or more")
        )
    if pattern is not None:
        for layer in kept:
            along_inputs(pattern, layer)
    return sorted(kept, key=lambda layer: order[id(layer.parameter)])


def parameters_for(run: Run, params: Sequence[str] | str) -> dict[str, nn.Parameter]:
    """Return the parameters that `params` names, by their names in the bare model."""
    known = dict(run.model.named_parameters())
    chosen: dict[str, nn.Parameter] = {}
    for entry in _entries(params):
        if entry == ALL:
            found = list(known)
        elif entry == ALL_PRUNABLE:
            wanted = {id(layer.parameter) for layer in layers_for(run, ALL_PRUNABLE, with_frozen=True)}
            found = [name for name, parameter in known.items() if id(parameter) in wanted]
        else:
            found = names.resolve(entry, known)
        chosen |= {names.canonical(name): known[name] for name in found}
    return chosen


def gradient_of(parameter: Tensor, optimizer: Optimizer) -> Tensor | None:
    """Return what is here of the gradient of `parameter`, unscaled also where a fused optimizer is to unscale it."""
    scale = getattr(optimizer, "grad_scale", None)
    gradient = gradient_part(parameter)
    return gradient if gradient is None or scale is None else gradient / scale


def fresh_gradients(run: Run, layers: Sequence[Layer], count: int) -> Iterator[list[Tensor]]:
    """Yield what is here of the gradients of `layers` on fresh batches, from ``run.loss_closure`` or ``run.data``.

    The model is in evaluation mode meanwhile, and neither its gradients nor its buffers are touched. The batches of
    ``run.data`` start over when they are used up. A batch is ``(inputs, targets)`` (the loss is the cross entropy of
    class numbers, else the mean squared error) or a mapping of arguments for a model that returns a ``loss``.
    """
    weights = [layer.parameter for layer in layers]
    losses = _losses(run)
    is_sharded = any(hasattr(weight, "placements") for weight in weights)
    _reshard(run.model)
    parameters = list(run.model.parameters())  # between the passes a module may hold others, put together for them
    with _evaluating(run.model), torch.enable_grad():
        for _ in range(count):
            loss = next(losses)
            if is_sharded:  # shards get their gradients from hooks of a backward pass, averaged
                yield _backward(parameters, loss, weights)
                continue
            found = torch.autograd.grad(loss, weights, allow_unused=True)
            gradients = [
                torch.zeros_like(weight) if gradient is None else gradient.detach()
                for gradient, weight in zip(found, weights, strict=True)
            ]
            if isinstance(run.model, DistributedDataParallel):  # every process must come to the same masks
                for gradient in gradients:
                    torch.distributed.all_reduce(gradient)
                    gradient.div_(torch.distributed.get_world_size())
            yield gradients


def _reshard(model: nn.Module) -> None:
    """Make FSDP2 forget the whole weights that it keeps after a forward pass, so that the next sees those of now."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _backward(parameters: Sequence[Tensor], loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return what this process holds of the gradients; those that the parameters have are put back."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        found = [gradient_part(weight) for weight in weights]
        return [torch.zeros_like(local(w)) if g is None else g.clone() for w, g in zip(weights, found, strict=True)]
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def mean_fresh_loss(run: Run, count: int) -> float:
    """Return the mean loss on `count` fresh batches, the same on every process; `data` begins at its first batch."""
    losses = _losses(run)
    with _evaluating(run.model), torch.no_grad():
        mean = torch.stack([next(losses).detach().float() for _ in range(count)]).mean()
    _reshard(run.model)
    if isinstance(run.model, DistributedDataParallel) or any(hasattr(p, "placements") for p in run.model.parameters()):
        torch.distributed.all_reduce(mean)
        mean.div_(torch.distributed.get_world_size())
    return float(mean)


def refuse_shards(layers: Sequence[Layer], name: str) -> None:
    """Raise :class:`ShapeError` when a layer is sharded, for modifiers that compute with whole weights."""
    if any(hasattr(layer.parameter, "placements") for layer in layers):
        raise ShapeError(message(f"{name} with sharded weights", "whole weights", "train under DDP instead of FSDP"))


def _entries(params: Sequence[str] | str) -> list[str]:
    entries = [params] if isinstance(params, str) else list(params)
    if not entries:
        raise ValueRangeError(message("params is empty", f"names, re: patterns, {ALL} or {ALL_PRUNABLE}"))
    return entries


def _losses(run: Run) -> Iterator[Tensor]:
    if run.loss_closure is not None:
        while True:
            yield run.loss_closure()
    if run.data is None:
        raise ValueRangeError(
            message(
                "gradients on fresh batches are needed, and there is neither a loss_closure nor data",
                fix="pass loss_closure=, a function that returns the loss of one fresh batch, or data= to initialize",
            )
        )
    while True:
        empty = True
        for batch in run.data:
            empty = False
            yield _loss_of(run.model, batch)
        if empty:
            raise ValueRangeError(message("data has no batch (an iterator that is used up?)", "a loader or a list"))


def _loss_of(model: nn.Module, batch: object) -> Tensor:
    bare = getattr(model, "module", model)  # the reducer of DDP does not know `torch.autograd.grad`
    if isinstance(batch, dict):
        outputs = bare(**batch)
        loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        if loss is None:
            raise ValueRangeError(message("the model returns no loss for a batch of data", fix="pass loss_closure="))
        return torch.as_tensor(loss)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueRangeError(
            message(f"a batch of data is a {type(batch).__name__}", "(inputs, targets) or a mapping of arguments")
        )
    inputs, targets = batch
    outputs = bare(*inputs) if isinstance(inputs, (tuple, list)) else bare(inputs)
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs, targets)
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
