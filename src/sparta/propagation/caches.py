"""Caches of keys and values that language models return for the next token, and how to do without them.

Models of transformers return such a cache by default. It would be an output like any other: every key and value would
be observed, no head could ever be cut, and the cache's class is one that torch cannot trace. A graph of one call has no
next token, so it is captured without the cache unless the example asks for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["wants_cache", "without_caches"]

_ASKS = ("use_cache", "past_key_values", "cache_params", "past_key_value")


def wants_cache(kwargs: Mapping[str, Any]) -> bool:
    """Whether the keyword arguments of a call ask for a cache.

    >>> wants_cache({"use_cache": True}), wants_cache({"input_ids": 1, "past_key_values": None})
    (True, False)
    """
    return any(kwargs.get(name) is not None and kwargs.get(name) is not False for name in _ASKS)


@contextmanager
def without_caches(model: nn.Module, *, active: bool = True) -> Iterator[None]:
    """Let a model and its parts return no caches for a while.

    Parameters
    ----------
    active
        False: change nothing, for calls that ask for a cache.
    """
    configs = {id(c): c for m in model.modules() for c in _configs(getattr(m, "config", None))} if active else {}
    changed = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    try:
        for config in changed:
            config.use_cache = False
        yield
    finally:
        for config in changed:
            config.use_cache = True


def _configs(config: Any) -> Iterator[Any]:
    """Yield a configuration and those of the parts of a model that it holds."""
    if config is None or isinstance(config, dict | str) or not hasattr(config, "__dict__"):
        return
    yield config
    for inner in vars(config).values():
        if type(inner).__name__.endswith("Config") and inner is not config:
            yield from _configs(inner)
