"""Listening to an optimizer: the recipe runs from the steps that the user's own optimizer takes.

`initialize` returns the optimizer it was given, with two step hooks on it, instead of a wrapper: learning-rate
schedulers, `GradScaler`, Accelerate, Lightning, fused kernels and `isinstance` see nothing new, and every path to
``optimizer.step()`` leads through the hooks. A hook fires for real steps only, so gradient accumulation needs no care
and a step that a scaler skips takes no time. Copies of the optimizer (pickle, deepcopy) are plain ones: hooks do not
travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from sparta.create.loop.scaler import step_is_skipped
from sparta.errors import ValueRangeError, message

__all__ = ["StepListener", "bare_optimizer"]


def bare_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside what Accelerate, Lightning and others put around it.

    >>> plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    >>> bare_optimizer(plain) is plain
    True
    """
    inner = optimizer
    while not hasattr(inner, "_optimizer_step_pre_hooks") and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not isinstance(inner, Optimizer) or not hasattr(inner, "_optimizer_step_pre_hooks"):
        raise ValueRangeError(
            message(f"the optimizer is a {type(optimizer).__name__}", "a torch.optim.Optimizer, or a wrapper of one")
        )
    return inner


class StepListener:
    """Calls back before and after each real step of an optimizer.

    Parameters
    ----------
    before
        Called with all gradients in place, before anything else that listens.
    after
        Called when the step is done, after everything that was hooked before :meth:`listen_after`.

    Examples
    --------
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> listener = StepListener(optimizer, lambda: print("before"), lambda: print("after"))
    >>> listener.listen_before(); listener.listen_after()
    >>> optimizer.step()
    before
    after
    """

    def __init__(self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._optimizer, self._before, self._after = optimizer, before, after
        self._is_real = False
        self._handles: list[Any] = []
        # A compiled step stops at the hooks and calls them as they are: tracing them would be slow, and of no use.
        untraced: Any = torch.compiler.disable
        self._hooks: tuple[Any, Any] = (untraced(self._enter), untraced(self._leave))

    def listen_before(self) -> None:
        """Register the hook at the start of a step."""
        self._handles.append(self._optimizer.register_step_pre_hook(self._hooks[0]))

    def listen_after(self) -> None:
        """Register the hook at the end of a step."""
        self._handles.append(self._optimizer.register_step_post_hook(self._hooks[1]))

    def stop(self) -> None:
        """Take the hooks away; the optimizer is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = _with_closure_run(args, kwargs)
        self._is_real = not step_is_skipped(optimizer)
        if self._is_real:
            self._before()
        return changed

    def _leave(self, *_: object) -> None:
        if self._is_real:
            self._after()


def _with_closure_run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Run the closure of a step now, so that gradients are there for all hooks; the optimizer gets what it returned.

    An optimizer that calls its closure again (LBFGS) reaches the real one from the second call on.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None
    with torch.enable_grad():
        first = [closure()]

    def replayed() -> Any:
        return first.pop() if first else closure()

    if "closure" in kwargs:
        return args, {**kwargs, "closure": replayed}
    return (args[0], replayed, *args[2:]), kwargs
