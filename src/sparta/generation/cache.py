"""Caches of transformers as the decode program writes them: one buffer per layer with room for tokens to come.

A dynamic cache holds tensors that grow by concatenation. Here its tensors become views into larger buffers, which a
step extends in place; a cache that transformers changed meanwhile (cropped, reordered, repeated) is taken into buffers
again. So the cache stays transformers' own object and everything that works on it goes on working.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["CacheViews", "Places"]

_ROOM = 128  # tokens that a new buffer has room for beyond those there are


@dataclass(frozen=True)
class Places:
    """Where the keys and values of a step go: an address per layer, the strides, and how many tokens there are."""

    keys: list[int]
    values: list[int]
    past: int
    batch_stride: int
    head_stride: int


@dataclass
class _Buffers:
    """The buffer (layers, 2, batch, heads, room, head_dim) of one dynamic cache, and the views that it was given."""

    memory: Tensor
    views: list[tuple[Tensor, Tensor]]


class CacheViews:
    """Opens caches for steps of a program.

    Parameters
    ----------
    layers, heads, head_dim
        Of the keys and values.
    """

    def __init__(self, layers: int, heads: int, head_dim: int) -> None:
        self.layers, self.heads, self.head_dim = layers, heads, head_dim
        self._buffers: weakref.WeakKeyDictionary[Any, _Buffers] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheViews:
        return CacheViews(self.layers, self.heads, self.head_dim)

    def fits(self, cache: Any) -> bool:
        """Whether it is a cache that steps can write: dynamic or static, without windows, of as many layers."""
        from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

        if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
            return False
        kinds = {type(layer) for layer in cache.layers}
        if not cache.layers:
            return getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
        return len(cache.layers) == self.layers and kinds in ({DynamicLayer}, {StaticLayer})

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
        return Places(keys, values, past, first.keys.stride(0), first.keys.stride(1))

    # ------------------------------------------------------------------ dynamic

    def _open_dynamic(self, cache: Any, batch: int, tokens: int) -> Places | None:
        from transformers.cache_utils import DynamicLayer

        while len(cache.layers) < self.layers:
            cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]
        past = self.past(cache)
        if past and any(
            layer.keys is None or layer.keys.shape != (batch, self.heads, past, self.head_dim) for layer in cache.layers
        ):
            return None
        buffers = self._buffers.get(cache)
        if buffers is None or not self._holds(buffers, cache, batch, past, tokens):
            buffers = self._taken(cache, batch, past, tokens)
            self._buffers[cache] = buffers
        memory, total = buffers.memory, past + tokens
        filled = memory[:, :, :, :, :total].unbind(0)
        buffers.views = [(both[0], both[1]) for both in filled]
        for layer, (keys, values) in zip(cache.layers, buffers.views, strict=True):
            if not layer.is_initialized:
                layer.dtype, layer.device, layer.is_initialized = memory.dtype, memory.device, True
            layer.keys, layer.values = keys, values
        start, size = memory.data_ptr(), memory.element_size()
        keys_at = [start + i * memory.stride(0) * size for i in range(self.layers)]
        values_at = [address + memory.stride(1) * size for address in keys_at]
        return Places(keys_at, values_at, past, memory.stride(2), memory.stride(3))

    def _holds(self, buffers: _Buffers, cache: Any, batch: int, past: int, tokens: int) -> bool:
        """Whether what a cache holds is still in the buffers, with room for more."""
        memory = buffers.memory
        if memory.shape[2] != batch or memory.shape[4] < past + tokens or len(buffers.views) != len(cache.layers):
            return False
        if past == 0:
            return True
        for layer, (keys, values) in zip(cache.layers, buffers.views, strict=True):
            same = layer.keys is keys and layer.values is values
            if not same and not (_begins_as(layer.keys, keys) and _begins_as(layer.values, values)):
                return False
        return True

    def _taken(self, cache: Any, batch: int, past: int, tokens: int) -> _Buffers:
        """Return new buffers with what a cache holds."""
        room = past + tokens + max(_ROOM, past // 2)
        memory = torch.empty(self.layers, 2, batch, self.heads, room, self.head_dim)
        if past:
            for both, layer in zip(memory, cache.layers, strict=True):
                both[0, :, :, :past] = layer.keys
                both[1, :, :, :past] = layer.values
        return _Buffers(memory, [])


def _plain(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    return tuple(tensor.shape) == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()


def _begins_as(tensor: Tensor, view: Tensor) -> bool:
    """Whether a tensor is the beginning of a view, as a cropped one is."""
    return tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride() and tensor.dtype == view.dtype
