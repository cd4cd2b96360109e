"""Trials that leave no trace: what calls of a user's model change is put back after them.

Measuring and checking call a model many times. A model may count its calls, keep a cache or draw random numbers, and
none of that may show afterwards. :func:`untouched` remembers buffers, tensors and plain values that modules hold,
arguments and the random state, and puts back what has changed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["Trace", "untouched"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_PYTORCH = frozenset(nn.Module().__dict__)
_INSTALLED = "_hooks_installed"  # how models of transformers note that their first call has put hooks; no state


class Trace:
    """What a model and its arguments were like, to tell what has changed and to put it back.

    Parameters
    ----------
    model
        Parameters are not remembered: no model changes them in a forward pass.
    arguments
        Of the calls; tensors in them are remembered.

    Examples
    --------
    >>> model = nn.BatchNorm1d(2)
    >>> trace = Trace(model)
    >>> _ = model(torch.randn(4, 2))
    >>> trace.changes()
    ['num_batches_tracked', 'running_mean', 'running_var']
    >>> trace.put_back()
    >>> trace.changes(), int(model.num_batches_tracked)
    ([], 0)
    """

    def __init__(self, model: nn.Module, arguments: Any = ()) -> None:
        self._attributes: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._hooks: list[tuple[Any, dict[int, Any]]] = []
        self._tensors: dict[int, tuple[str, Tensor, Tensor]] = {}
        for prefix, module in model.named_modules():
            self._note(f"{prefix}." if prefix else "", module)
        for leaf in pytree.tree_leaves(arguments):
            self._keep("an argument", leaf)

    def _note(self, prefix: str, module: nn.Module) -> None:
        own = {name: value for name, value in module.__dict__.items() if name not in _OF_PYTORCH}
        buffers = module._buffers
        for holder, values in ((module.__dict__, own), (buffers, dict(buffers))):
            self._attributes.append((prefix, holder, values))
            for name, value in values.items():
                self._hold(f"{prefix}{name}", value)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            self._hooks.append((hooks, dict(hooks)))

    def _hold(self, name: str, value: Any) -> None:
        if isinstance(value, (list, dict)):
            self._containers.append((name, value, value.copy()))
            for item in value.values() if isinstance(value, dict) else value:
                self._keep(name, item)
        self._keep(name, value)

    def _keep(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and id(value) not in self._tensors:
            self._tensors[id(value)] = (name, value, value.detach().clone())

    def changes(self) -> list[str]:
        """Return the names of what is not as it was."""
        found = {name for name, tensor, saved in self._tensors.values() if _changed(tensor, saved)}
        found |= {name for name, now, before in self._containers if _differ(now, before)}
        for prefix, holder, before in self._attributes:
            now = {name: value for name, value in holder.items() if name not in _OF_PYTORCH}
            names = {name for name in now.keys() | before.keys() if not name.endswith(_INSTALLED)}
            found |= {f"{prefix}{name}" for name in names if _moved(now, before, name)}
        return sorted(found)

    def put_back(self) -> None:
        """Make everything as it was."""
        for prefix, holder, before in self._attributes:
            del prefix
            for name in [name for name in holder if name not in before and name not in _OF_PYTORCH]:
                del holder[name]
            for name, value in before.items():
                if holder.get(name) is not value:
                    holder[name] = value
        for hooks, known in self._hooks:
            if hooks.keys() != known.keys():
                hooks.clear()
                hooks.update(known)
        for _, now, before in self._containers:
            if _differ(now, before):
                now.clear()
                now.update(before) if isinstance(now, dict) else now.extend(before)
        for _, tensor, saved in self._tensors.values():
            if _changed(tensor, saved):
                with torch.no_grad(), torch.inference_mode(mode=tensor.is_inference()):
                    tensor.copy_(saved)


@contextmanager
def untouched(model: nn.Module, arguments: Any = ()) -> Iterator[Trace]:
    """Put back, at the end of the block, what calls of `model` have changed in it, in `arguments` and in random state.

    >>> before = torch.get_rng_state()
    >>> with untouched(nn.Identity()):
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    trace = Trace(model, arguments)
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that user code draws from
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=devices):
            yield trace
    finally:
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002
        trace.put_back()


def _changed(tensor: Tensor, saved: Tensor) -> bool:
    """Whether a tensor has other values than before; not every op that writes to one counts its version up."""
    if tensor.shape != saved.shape or torch.equal(tensor, saved):
        return tensor.shape != saved.shape
    return not bool(((tensor == saved) | ((tensor != tensor) & (saved != saved))).all())  # noqa: PLR0124 - NaN is NaN


def _moved(now: dict[str, Any], before: dict[str, Any], name: str) -> bool:
    """Whether an attribute is there only before or after, or has another value; other objects are left aside."""
    if name not in now or name not in before:
        return True
    new, old = now[name], before[name]
    if new is old or type(new) is not type(old):
        return new is not old
    if isinstance(old, Tensor):
        return _changed(new, old)
    if isinstance(old, (list, dict)):
        return _differ(new, old)
    return isinstance(old, _PLAIN) and new != old


def _differ(now: Any, before: Any) -> bool:
    """Whether a list or dict holds other objects than before."""
    if len(now) != len(before):
        return True
    if isinstance(now, dict):
        return any(key not in before or now[key] is not before[key] for key in now)
    return any(a is not b for a, b in zip(now, before, strict=True))
