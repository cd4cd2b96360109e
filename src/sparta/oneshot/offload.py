"""Models larger than memory: weights come from disk when a part of the model runs, and leave after it.

A *part* is a block of the chain, or a module outside of it that has parameters of its own. Parameters stand on the
``meta`` device between calls; hooks fill them in and take them out, so everything else works as if the model were
there. A part that is held stays until it is let go.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparta.errors import ValueRangeError, message
from sparta.oneshot.shards import Shards
from sparta.oneshot.targets import Target
from sparta.tesa import names

__all__ = ["Offload", "Spill", "empty_weights", "memory_bytes"]

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_MATRICES = 6  # of the size of a Gram matrix, in float64, that a method holds at most
_COPIES = 6  # of one weight


def memory_bytes(memory: float | str) -> int:
    """Return a memory cap in bytes.

    >>> memory_bytes("2 GiB"), memory_bytes(1e9)
    (2147483648, 1000000000)
    """
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", memory)
        if found and found[2].lower() in _UNITS and found[1].count(".") <= 1 and found[1] != ".":
            return int(float(found[1]) * _UNITS[found[2].lower()])
    elif isinstance(memory, int | float) and not isinstance(memory, bool) and 0 < memory < float("inf"):
        return int(memory)
    raise ValueRangeError(message(f"memory={memory!r}", "bytes, or a text such as '2 GiB'"))


@contextmanager
def empty_weights() -> Iterator[None]:
    """Make modules whose parameters take no memory, and whose buffers are real.

    >>> with empty_weights():
    ...     layer = nn.Linear(1000, 1000)
    >>> layer.weight.device.type
    'meta'
    """
    usual = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # tied parameters stay one
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        usual(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = usual  # type: ignore[method-assign]


class Offload:
    """The parameters of a model on disk, filled in part by part.

    Parameters
    ----------
    memory
        Bytes that may be held; None sets no limit.
    """

    def __init__(self, model: nn.Module, shards: Shards, memory: int | None, device: torch.device) -> None:
        self.model, self.shards, self.memory, self.device = model, shards, memory, device
        self.held = self.most = 0
        self._names = _stored_names(model, shards)
        self._depth: dict[nn.Module, int] = {}
        self._empty: dict[nn.Module, dict[tuple[nn.Module, str], nn.Parameter]] = {}
        self._parts: list[nn.Module] = []
        self._handles: list[Any] = []
        missing = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        if missing:
            raise ValueRangeError(
                message(
                    f"the buffer {missing[0]!r} has no values",
                    "parameters without values alone",
                    "make the model inside `sparta.oneshot.empty_weights()`",
                )
            )

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Fill in each part whenever it is called."""
        self.detach()
        inside = {module for block in blocks for module in block.modules()}
        others = [m for m in self.model.modules() if m not in inside and m._parameters]
        self._parts = [*blocks, *others]
        own = {part: [part] if part in others else list(part.modules()) for part in self._parts}
        self._modules = own

        def enter(part: nn.Module, *_: Any) -> None:
            if "forward" not in vars(part):  # a block that is skipped needs no weights
                self._load(part)

        def leave(part: nn.Module, *_: Any) -> None:
            if "forward" not in vars(part):
                self._drop(part)

        for part in self._parts:
            self._handles.append(part.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(part.register_forward_hook(leave, always_call=True))

    def detach(self) -> None:
        """Take all hooks and weights out of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for part in list(self._depth):
            self._depth[part] = 1
            self._drop(part)

    @contextmanager
    def holding(self, targets: Sequence[Target], *, writes: bool = True) -> Iterator[None]:
        """Hold the parts of some layers; what they are at the end is written to disk."""
        modules = {target.module for target in targets}
        parts = [part for part in self._parts if modules & set(self._modules[part])]
        for part in parts:
            self._load(part)
        try:
            yield
            for part in parts if writes else []:
                self._write(part)
        finally:
            for part in parts:
                self._drop(part)

    @contextmanager
    def keeping(self, module: nn.Module) -> Iterator[None]:
        """Hold one part while it is called several times."""
        self._load(module)
        try:
            yield
        finally:
            self._drop(module)

    def check(self, stages: Sequence[Sequence[Target]]) -> None:
        """Raise where a stage needs more memory than there is."""
        if self.memory is None:
            return
        for targets in stages:
            modules = {target.module for target in targets}
            parts = [part for part in self._parts if modules & set(self._modules[part])]
            weights = sum(_bytes(p) for part in parts for m in self._modules[part] for p in m._parameters.values())
            columns = [t.layout.groups * t.layout.columns**2 for t in targets]
            largest = max(t.parameter.numel() for t in targets)
            needed = weights + 8 * (sum(columns) + _MATRICES * max(columns)) + 4 * _COPIES * largest
            if needed > self.memory:
                raise ValueRangeError(
                    message(
                        f"a memory of {self.memory / 2**20:.4g} MiB",
                        f"{needed / 2**20:.4g} MiB or more, for {targets[0].name!r} and what is calibrated with it",
                    )
                )

    # ------------------------------------------------------------------ within

    def _load(self, part: nn.Module) -> None:
        if self._depth.get(part, 0):
            self._depth[part] += 1
            return
        kept: dict[tuple[nn.Module, str], nn.Parameter] = {}
        for module in self._modules[part]:
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                values = self.shards.read(self._names[id(parameter)]).to(self.device, parameter.dtype)
                if values.shape != parameter.shape:
                    stored = self._names[id(parameter)]
                    raise ValueRangeError(
                        message(f"{stored!r} is stored as {tuple(values.shape)}", f"{tuple(parameter.shape)}")
                    )
                kept[module, name] = parameter
                self.held += _bytes(values)
                module._parameters[name] = nn.Parameter(values, requires_grad=False)
        self.most = max(self.most, self.held)
        self._empty[part], self._depth[part] = kept, 1

    def _drop(self, part: nn.Module) -> None:
        if part not in self._depth:
            return
        self._depth[part] -= 1
        if self._depth[part]:
            return
        del self._depth[part]
        for (module, name), parameter in self._empty.pop(part).items():
            self.held -= _bytes(module._parameters[name])
            module._parameters[name] = parameter

    def _write(self, part: nn.Module) -> None:
        kept = self._empty[part]
        tensors = {self._names[id(p)]: module._parameters[name] for (module, name), p in kept.items()}
        found = {key: value for key, value in tensors.items() if value is not None}
        if found:
            self.shards.write(f"part-{self._parts.index(part):05d}", found)


class Spill(Sequence[Tensor]):
    """Tensors in files of a temporary folder, read one at a time."""

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sparta-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        for tensor in tensors:
            self._file(len(self._kinds)).write_bytes(_raw(tensor))
            self._kinds.append((tensor.shape, tensor.dtype, tensor.device))

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, place: Any) -> Any:
        """Return one of the tensors."""
        shape, dtype, device = self._kinds[place]
        data = bytearray(self._file(place % len(self)).read_bytes())
        if not data:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.frombuffer(data, dtype=dtype).reshape(shape).to(device)

    def _file(self, place: int) -> Path:
        return self._folder / f"{place:06d}"


def _raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return np.asarray(flat.numpy()).tobytes()


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _stored_names(model: nn.Module, shards: Shards) -> dict[int, str]:
    """Return under which name each parameter is stored; tied ones have several, of which one is."""
    found: dict[int, str] = {}
    every: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                every.setdefault(id(parameter), []).append(names.canonical(f"{path}.{name}" if path else name))
    for identity, candidates in every.items():
        stored = [name for name in candidates if name in shards]
        if not stored:
            raise ValueRangeError(
                message(f"{candidates[0]!r} is not in the files of {shards.folder}", "all parameters of the model")
            )
        found[identity] = stored[0]
    return found
