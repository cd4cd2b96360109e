"""Caches of transformers as the decode program writes them: one buffer for all layers, with room for tokens to come.

A dynamic cache holds tensors that grow by concatenation. Here its layers look into one larger buffer, which a step
extends in place: the layers are asked for their tensors only by what reads them, so a step does nothing per layer. A
layer that transformers changed meanwhile (cropped, reordered, repeated) has tensors of its own again, and the next step
takes the cache into a buffer again. So the cache stays transformers' own object and everything that works on it goes on
working.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["CacheViews", "Places"]

_ROOM = 128  # tokens that a new buffer has room for beyond those there are


@dataclass(frozen=True)
class Places:
    """Where keys and values of a step go: arrays of an address per layer, strides, and how many tokens there are."""

    keys: Any
    values: Any
    past: int
    batch_stride: int
    head_stride: int


class _Buffer:
    """The memory (layers, 2, batch, heads, room, head_dim) of one dynamic cache, and how many tokens it holds."""

    def __init__(self, memory: Tensor, length: int) -> None:
        self.memory, self.length = memory, length
        start, size = memory.data_ptr(), memory.element_size()
        keys = [start + i * memory.stride(0) * size for i in range(memory.shape[0])]
        self.keys = _addresses(keys)
        self.values = _addresses([address + memory.stride(1) * size for address in keys])

    def tensor(self, layer: int, which: int) -> Tensor:
        """Return the keys (0) or values (1) of a layer, as far as they are filled."""
        return self.memory[layer, which, :, :, : self.length]

    def begins(self, layer: int, which: int, tensor: Tensor) -> bool:
        """Whether a tensor is the beginning of what the buffer holds of a layer, as a cropped one is."""
        own = self.memory[layer, which]
        same = tensor.shape[:2] == own.shape[:2] and tensor.shape[3] == own.shape[3] and tensor.dtype == own.dtype
        return same and tensor.data_ptr() == own.data_ptr() and tensor.stride() == own.stride()

    def places(self, tokens: int) -> Places:
        """Return where so many more tokens go, which count as filled from now on."""
        past, self.length = self.length, self.length + tokens
        return Places(self.keys, self.values, past, self.memory.stride(2), self.memory.stride(3))


def _addresses(all_: list[int]) -> Any:
    return (ctypes.c_void_p * len(all_))(*all_)


@functools.cache
def _growing() -> Any:
    """Return the class of layers that look into a buffer; transformers is imported where a model of it runs."""
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):
        """A layer of a dynamic cache whose tensors are views that are made when they are asked for."""

        def __init__(self, buffer: _Buffer, at: int) -> None:
            self._buffer: _Buffer | None = None
            self._keys: Any = None
            self._values: Any = None
            super().__init__()  # type: ignore[no-untyped-call]
            self.attach(buffer, at)

        def attach(self, buffer: _Buffer, at: int) -> None:
            """Look into a buffer from now on."""
            self._keys = self._values = None
            self._buffer, self._at = buffer, at
            self.dtype, self.device, self.is_initialized = buffer.memory.dtype, buffer.memory.device, True

        def _leave(self) -> None:
            if self._buffer is not None:
                self._keys, self._values = (self._buffer.tensor(self._at, which) for which in (0, 1))
                self._buffer = None

        @property
        def keys(self) -> Any:
            return self._keys if self._buffer is None else self._buffer.tensor(self._at, 0)

        @keys.setter
        def keys(self, tensor: Any) -> None:
            self._leave()
            self._keys = tensor

        @property
        def values(self) -> Any:
            return self._values if self._buffer is None else self._buffer.tensor(self._at, 1)

        @values.setter
        def values(self, tensor: Any) -> None:
            self._leave()
            self._values = tensor

        def get_seq_length(self) -> int:
            return self._buffer.length if self._buffer is not None else int(super().get_seq_length())

        def reset(self) -> None:
            """Hold nothing, in every version of transformers: older ones fill with zeros and keep the length."""
            self._buffer = self._keys = self._values = None
            self.is_initialized = False

        def __reduce__(self) -> Any:
            return _plain_layer, tuple(None if t is None else t.clone() for t in (self.keys, self.values))

    return GrowingLayer


def _plain_layer(keys: Tensor | None, values: Tensor | None) -> Any:
    """Return a layer of transformers' own with these tensors, which a copy of a growing one is."""
    from transformers.cache_utils import DynamicLayer

    layer = DynamicLayer()  # type: ignore[no-untyped-call]
    if keys is not None and values is not None:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return layer


class CacheViews:
    """Opens caches for steps of a program.

    Parameters
    ----------
    layers, heads, head_dim
        Of the keys and values.
    """

    def __init__(self, layers: int, heads: int, head_dim: int) -> None:
        self.layers, self.heads, self.head_dim = layers, heads, head_dim
        self._buffers: weakref.WeakKeyDictionary[Any, _Buffer] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheViews:
        return CacheViews(self.layers, self.heads, self.head_dim)

    def fits(self, cache: Any) -> bool:
        """Whether it is a cache that steps can write: dynamic or static, without windows, of as many layers."""
        from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

        if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
            return False
        if not cache.layers:
            return getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
        kinds = {type(layer) for layer in cache.layers}
        return len(cache.layers) == self.layers and (kinds <= {DynamicLayer, _growing()} or kinds == {StaticLayer})

    def past(self, cache: Any) -> int:
        """Return how many tokens a cache holds."""
        return int(cache.get_seq_length()) if cache.layers else 0

    def open(self, cache: Any, batch: int, tokens: int) -> Places | None:
        """Make room for more tokens of each sequence; None where the cache has none, or is of another batch."""
        from transformers.cache_utils import StaticLayer

        if cache.layers and type(cache.layers[0]) is StaticLayer:
            return self._open_static(cache, batch, tokens)
        return self._open_dynamic(cache, batch, tokens)

    # ------------------------------------------------------------------ static

    def _open_static(self, cache: Any, batch: int, tokens: int) -> Places | None:
        like = torch.empty(batch, self.heads, 0, self.head_dim)
        for layer in cache.layers:
            if not layer.is_initialized:
                layer.lazy_initialization(like, like)
        first = cache.layers[0]
        past = int(first.cumulative_length)
        shape = (batch, self.heads, first.max_cache_len, self.head_dim)
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        if past + tokens > first.max_cache_len or any(not _plain(t, shape) for t in tensors):
            return None
        for layer in cache.layers:
            layer.cumulative_length.add_(tokens)
        keys, values = ([getattr(layer, name).data_ptr() for layer in cache.layers] for name in ("keys", "values"))
        return Places(_addresses(keys), _addresses(values), past, first.keys.stride(0), first.keys.stride(1))

    # ------------------------------------------------------------------ dynamic

    def _open_dynamic(self, cache: Any, batch: int, tokens: int) -> Places | None:
        buffer = self._buffers.get(cache)
        if buffer is None or not self._attached(buffer, cache) or not _has_room(buffer, batch, tokens):
            buffer = self._taken(cache, buffer, batch, tokens)
            if buffer is None:
                return None
            self._buffers[cache] = buffer
        return buffer.places(tokens)

    def _attached(self, buffer: _Buffer, cache: Any) -> bool:
        growing = _growing()
        return len(cache.layers) == self.layers and all(
            type(layer) is growing and layer._buffer is buffer for layer in cache.layers
        )

    def _taken(self, cache: Any, old: _Buffer | None, batch: int, tokens: int) -> _Buffer | None:
        """Let all layers look into one buffer with what they hold: into the old one where that begins with it."""
        past = self.past(cache)
        shape = (batch, self.heads, past, self.head_dim)
        if past and any(layer.keys is None or layer.keys.shape != shape for layer in cache.layers):
            return None
        buffer = self._gone_back(cache, old, past) if old is not None and past else None
        if buffer is None or not _has_room(buffer, batch, tokens):
            room = past + tokens + max(_ROOM, past // 2)
            memory = torch.empty(self.layers, 2, batch, self.heads, room, self.head_dim)
            if past:
                for both, layer in zip(memory, cache.layers, strict=True):
                    both[0, :, :, :past] = layer.keys
                    both[1, :, :, :past] = layer.values
            buffer = _Buffer(memory, past)
        growing = _growing()
        for at in range(self.layers):
            if at >= len(cache.layers):
                cache.layers.append(growing(buffer, at))
            elif type(cache.layers[at]) is growing:
                cache.layers[at].attach(buffer, at)
            else:
                cache.layers[at] = growing(buffer, at)
        return buffer

    def _gone_back(self, cache: Any, old: _Buffer, past: int) -> _Buffer | None:
        """Return a buffer with its length set back, if it still begins with all that a cache holds."""
        for at, layer in enumerate(cache.layers):
            if not (old.begins(at, 0, layer.keys) and old.begins(at, 1, layer.values)):
                return None
        old.length = past
        return old


def _has_room(buffer: _Buffer, batch: int, tokens: int) -> bool:
    return buffer.memory.shape[2] == batch and buffer.memory.shape[4] >= buffer.length + tokens


def _plain(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    return tuple(tensor.shape) == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()
