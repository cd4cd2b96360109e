"""Capturing a model's forward passes, and adding a second loss to the gradient of the first.

The training script computes its loss and calls ``backward`` as it always did. A hook on each captured tensor sees the
gradient that arrives there from the task, scales it, and adds the gradient of the second loss. Where the task's loss
reaches the model only through those tensors, this is exactly the gradient of ``task_weight · task + extra``. Where the
sum can be had as a loss (the script asks for it with :meth:`Capture.blended`, or the model computes its own loss and
returns it), that is done instead, and the hooks of that pass stand back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Capture", "OwnHook", "Pass", "Target"]


@dataclass(eq=False)
class Target:
    """A tensor of the student, and the gradient of the second loss with respect to it (already weighted).

    Parameters
    ----------
    tensor
        Where the gradient is added.
    gradient
        float32, of the shape of `tensor`.
    on_arrival
        Called with the factor when the gradient is used, for losses that have parameters of their own.
    """

    tensor: Tensor
    gradient: Tensor
    on_arrival: Callable[[float | Tensor], None] | None = None
    reached: bool = False


@dataclass(eq=False)
class Pass:
    """One captured forward pass: its targets, and the value of the second loss."""

    targets: dict[str, Target]
    value: Tensor
    by_hand: bool = False
    handles: list[Any] = field(default_factory=list)

    @property
    def reached(self) -> list[str]:
        """Names of the targets at which a gradient arrived."""
        return [name for name, target in self.targets.items() if target.reached]


class OwnHook:
    """A hook that copies and pickles of the model may carry along: on any module but its own it does nothing."""

    def __init__(self, module: nn.Module | None, call: Callable[..., None] | None) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._call = call

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Hand the arguments on."""
        if self._module is not None and self._call is not None and self._module() is module:
            self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnHook:
        return OwnHook(None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnHook, (None, None)


class Capture:
    """Watches the training passes of a model; evaluation and passes without gradients are ignored.

    Parameters
    ----------
    model
        The student, as it is called by the script.
    before
        Called with the arguments before the student runs; what it returns is handed to `after`.
    after
        Called with that and the student's output; returns the targets and the value of the second loss, or None.
    task_weight
        What the task's gradient is multiplied by.
    factor
        Returns the factor of the second loss when its gradient is used: a loss scale, a share of an accumulation.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        after: Callable[[Any, Any], tuple[dict[str, Target], Tensor] | None],
        *,
        task_weight: float = 1.0,
        factor: Callable[[], float | Tensor] = lambda: 1.0,
    ) -> None:
        self._before, self._after = before, after
        self._task_weight, self._factor = task_weight, factor
        self._model = model
        self._started: list[Any] = []
        self.passes: list[Pass] = []  # not yet used by a backward pass or by hand
        self.seen = 0
        self.used = 0
        self.unreached: set[str] = set()
        self._handles = [
            model.register_forward_pre_hook(OwnHook(model, self._enter), with_kwargs=True),
            model.register_forward_hook(OwnHook(model, self._leave)),
        ]

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.clear()

    def clear(self) -> None:
        """Forget the passes of the step that is over, and note targets that no gradient reached."""
        for done in self.passes:
            if done.reached:
                self.unreached |= set(done.targets) - set(done.reached)
            for handle in done.handles:
                handle.remove()
        self.passes, self._started = [], []

    def _watching(self) -> bool:
        return self._model.training and torch.is_grad_enabled()

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._watching():
            self._started = [self._before(args, kwargs)]

    def _leave(self, _: tuple[Any, ...], output: Any) -> None:
        if not self._watching() or not self._started:
            return
        found = self._after(self._started.pop(), output)
        if found is None:
            return
        targets = {name: target for name, target in found[0].items() if target.tensor.requires_grad}
        self.seen += 1
        if targets:
            made = self.add(targets, found[1])
            own = _own_loss(output)
            if own is not None:
                output["loss"] = self._sum(own, [made])

    def add(self, targets: dict[str, Target], value: Tensor) -> Pass:
        """Put hooks on the targets of one forward pass."""
        made = Pass(targets, value)
        for target in targets.values():
            handle = target.tensor.register_hook(self._injector(made, target))  # type: ignore[no-untyped-call]
            made.handles.append(handle)
        self.passes.append(made)
        return made

    def _injector(self, made: Pass, target: Target) -> Callable[[Tensor], Tensor | None]:
        def inject(gradient: Tensor) -> Tensor | None:
            if made.by_hand:
                return None
            own = gradient.float() * self._task_weight
            if target.reached:  # a second backward through the same pass: the second loss is in already
                return own.to(gradient.dtype)
            self.used += not made.reached
            target.reached = True
            factor = self._factor()
            if target.on_arrival is not None:
                target.on_arrival(factor)
            if len(made.reached) == len(made.targets) and made in self.passes:
                self.passes.remove(made)
            return (own + target.gradient.to(gradient.device) * factor).to(gradient.dtype)

        return inject

    def blended(self, loss: Tensor, tensors: list[Tensor] | None = None) -> Tensor | None:
        """Return ``task_weight · loss`` plus the second loss of the waiting passes, whose hooks then stand back.

        A loss whose passes are in it already comes back as it is.

        Parameters
        ----------
        tensors
            Only passes with one of these tensors among their targets; None: all that wait.

        Returns
        -------
        Tensor or None
            None when no pass was captured.
        """
        wanted = None if tensors is None else {id(tensor) for tensor in tensors}
        chosen = [
            waiting
            for waiting in self.passes
            if not waiting.by_hand
            and not waiting.reached
            and (wanted is None or any(id(target.tensor) in wanted for target in waiting.targets.values()))
        ]
        if chosen:
            return self._sum(loss, chosen)
        return loss if any(waiting.by_hand for waiting in self.passes) else None

    def _sum(self, loss: Tensor, chosen: list[Pass]) -> Tensor:
        total = loss * self._task_weight
        for waiting in chosen:
            waiting.by_hand = True
            targets = list(waiting.targets.values())
            tensors = [target.tensor for target in targets]
            extra: Tensor = _SecondLoss.apply(waiting.value, self, targets, *tensors)  # type: ignore[no-untyped-call]
            total = total + extra.to(total.dtype)
        return total


def _own_loss(output: Any) -> Tensor | None:
    """Return the loss that a model computed itself (as those of Hugging Face do) and returned in a mapping."""
    if not isinstance(output, MutableMapping):
        return None
    loss = output.get("loss")
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad else None


class _SecondLoss(torch.autograd.Function):
    """The second loss as a node of the graph: a known value with known gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, capture: Capture, targets: list[Target], *tensors: Tensor) -> Tensor:
        ctx.capture, ctx.targets = capture, targets
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.capture.used += 1
        gradients = []
        for target, dtype in zip(ctx.targets, ctx.dtypes, strict=True):
            target.reached = True
            if target.on_arrival is not None:
                target.on_arrival(gradient)
            gradients.append((target.gradient.to(gradient.device) * gradient).to(dtype))
        return (None, None, None, *gradients)
