"""Calibration: what the inputs of each layer look like, as one Gram matrix per layer.

Hooks add up inputs times inputs while data runs through a model or a part of it; the inputs themselves are not kept.
The sums are in float64, so that neither the order of batches nor the number of processes changes them by much. Layers
that get one tensor object (query, key and value; gate and up) share one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparta.errors import ArgumentError, SpartaError, ValueRangeError, message
from sparta.oneshot.targets import Target, gram_of

__all__ = ["Grams", "Stop", "call", "listed", "moved", "quiet"]


class Stop(Exception):  # noqa: N818 - not an error: it ends a pass early
    """Raised inside a forward pass to end it: everything wanted was seen."""


class Grams:
    """The Gram matrices of some layers, added up while data runs inside :meth:`watch`."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = targets
        self.sums: dict[str, Tensor] = {}
        self._shared: dict[tuple[object, ...], tuple[Tensor, Tensor | None, Tensor]] = {}

    @contextmanager
    def watch(self, *, stop_after: bool = False) -> Iterator[None]:
        """Listen to the layers; with `stop_after` a pass ends when every layer was called once."""
        waiting: set[str] = {target.name for target in self.targets}

        def listen(target: Target) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._add(target, target.inputs(args, kwargs))

            return target.module.register_forward_pre_hook(hook, with_kwargs=True)

        def leave(target: Target) -> Any:
            def hook(*_: Any) -> None:
                waiting.discard(target.name)
                if stop_after and not waiting:
                    raise Stop

            return target.module.register_forward_hook(hook)

        handles = [listen(target) for target in self.targets] + [leave(target) for target in self.targets]
        try:
            yield
        finally:
            self._shared.clear()
            for handle in handles:
                handle.remove()

    def __getitem__(self, name: str) -> Tensor | None:
        """Return the matrix of a layer, None where the layer was never called; NaN and infinity are errors."""
        gram = self.sums.get(name)
        if gram is not None and not bool(gram.isfinite().all()):
            raise ValueRangeError(
                message(
                    f"the inputs of {name!r} hold NaN or infinity",
                    "finite activations",
                    "look at the data, or run the model in float32",
                )
            )
        return gram

    def _add(self, target: Target, x: Tensor) -> None:
        before = self.sums.get(target.name)
        module = target.module
        shape = [getattr(module, name, None) for name in ("kernel_size", "stride", "padding", "dilation", "groups")]
        key = (x.data_ptr(), tuple(x.shape), x.stride(), x._version, id(before), str(shape))
        if key not in self._shared:
            dtype = torch.float64 if target.parameter.dtype == torch.float64 else torch.float32
            gram = gram_of(target, x, dtype)
            self._shared[key] = (x, before, gram if before is None else before + gram)  # keeps all three alive
        self.sums[target.name] = self._shared[key][2]


def listed(data: object) -> list[Any]:
    """Return the batches of `data`; it is read once, and must have one batch or more."""
    if isinstance(data, Tensor | Mapping | str):
        raise ArgumentError(
            message(f"data is a {type(data).__name__}", "an iterable of batches", "pass a list with the batch in it")
        )
    try:
        batches = list(iter(data))  # type: ignore[call-overload]
    except TypeError as error:
        raise ArgumentError(
            message(f"data is a {type(data).__name__}", "an iterable of batches: tensors, tuples or dicts")
        ) from error
    if not batches:
        raise ValueRangeError(
            message("data gives no batch", "one batch or more", "a generator that was used before is empty")
        )
    return batches


def call(model: Callable[..., Any], batch: Any, index: int) -> Any:
    """Run the model on one batch: a tensor, a tuple of arguments, or a dict of keyword arguments."""
    try:
        if isinstance(batch, Tensor):
            return model(batch)
        if isinstance(batch, Mapping):
            return model(**batch)
        if isinstance(batch, tuple | list):
            return model(*batch)
    except (Stop, SpartaError):
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise ValueRangeError(
            message(
                f"the model cannot run batch {index} of the data, {_described(batch)}: {error}",
                "what the model takes: a tensor, a tuple of arguments, or a dict of keyword arguments",
                "leave labels out of the batches",
            )
        ) from error
    raise ArgumentError(message(f"batch {index} is a {type(batch).__name__}", "a tensor, a tuple or a dict"))


def moved(value: Any, device: torch.device | None) -> Any:
    """Return a value with all tensors in it on `device`."""
    if device is None:
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, Mapping):
        return {str(key): moved(item, device) for key, item in value.items()}
    if type(value) in {tuple, list}:
        return type(value)(moved(item, device) for item in value)
    return value


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Run in eval mode, without caches of keys and values and without fused paths that would bypass layers."""
    modes = {module: module.training for module in model.modules()}
    config = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    if isinstance(cached, bool) and config is not None:
        config.use_cache = False
    try:
        yield
    finally:
        if isinstance(cached, bool) and config is not None:
            config.use_cache = cached
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in modes.items():
            module.training = mode


def _described(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "a dict of " + ", ".join(map(str, batch))
    return f"a {type(batch).__name__} of {len(batch)}"
