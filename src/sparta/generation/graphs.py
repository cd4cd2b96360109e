"""Decoding steps on CUDA, replayed from a CUDA graph: one token of a language model starts hundreds of short kernels.

A graph reads and writes fixed memory, so steps run over a static cache of transformers, whose length is a number on the
device. The first steps over a cache run as they are; then one is recorded, and the others replay it. What a step is
called with is copied in, logits are copied out.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparta.specialize.cuda.graphs import RecordedGraph, recorded

__all__ = ["DecodeGraph", "RecordedStep", "can_read", "is_static", "tensors_of", "with_static_cache"]

_BEFORE = 2  # steps over a cache before one is recorded: short answers need none
_LEAST_STEPS = 8
_KNOWN = frozenset(
    {"input_ids", "position_ids", "attention_mask", "cache_position", "use_cache", "logits_to_keep", "return_dict"}
)
_CONSTANTS = (bool, int, float, str, type(None))  # anything else may hold tensors out of sight
_OTHER_WAYS = ("past_key_values", "cache_implementation", "compile_config", "disable_compile", "assistant_model")
_PLAIN = {"use_cache": True, "prompt_lookup_num_tokens": None, "prefill_chunk_size": None}


@dataclass
class RecordedStep:
    """A step over one cache: what it reads, what it makes, and the structure of what it is called with."""

    owner: DecodeGraph
    cache: Any
    graph: RecordedGraph
    buffers: list[Any]
    structure: pytree.TreeSpec
    logits: Tensor
    memory: list[tuple[Tensor, Tensor]]  # keys and values of each layer

    def inputs(self) -> dict[str, Tensor]:
        """Return the memory that the step reads, as :func:`tensors_of` names it."""
        return tensors_of(pytree.tree_unflatten(self.buffers, self.structure))

    def again(self) -> Tensor:
        """Replay the step on what is in its memory; return its logits, which the next replay overwrites."""
        self.graph.replay()
        self.owner.replays += 1
        return self.logits

    def go_back(self, tokens: int) -> None:
        """Take so many tokens off the end of the cache."""
        if tokens:
            for length in _lengths(self.cache):
                length.sub_(tokens)


@dataclass
class DecodeGraph:
    """The recorded step of a model, one at a time.

    Attributes
    ----------
    replays
        How many steps were replayed.
    problem
        Why no step can be recorded; empty where none has failed.
    follows
        Whether greedy tokens may follow each other by replays alone.
    followed
        How many tokens did so.
    """

    replays: int = 0
    problem: str = ""
    follows: bool = True
    followed: int = 0
    _recorded: RecordedStep | None = None
    _seen: tuple[int, int] = (0, 0)  # a cache, and the steps over it

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeGraph:
        return DecodeGraph(follows=self.follows)

    def forget(self) -> None:
        """Let go of the recorded step, and of its cache."""
        self._recorded, self._seen = None, (0, 0)

    def step(self, forward: Callable[..., Any], named: Mapping[str, Any]) -> Tensor | None:
        """Return the logits of one more token for each sequence; None for calls that are something else.

        Parameters
        ----------
        forward
            The model's own code, from named inputs to its outputs.
        named
            What the model was called with.
        """
        cache = named.get("past_key_values")
        others = {name: value for name, value in named.items() if name != "past_key_values"}
        leaves, structure = pytree.tree_flatten(others)
        if self.problem or not _is_step(others, leaves) or not self._takes(cache):
            return None
        known = self._recorded
        if known is None or known.cache is not cache or not _alike(known, leaves, structure) or not _at_home(known):
            self._recorded = None
            steps = self._seen[1] + 1 if self._seen[0] == id(cache) else 1
            self._seen = (id(cache), steps)
            if steps <= _BEFORE:
                return None
            known = self._recorded = self._record(forward, cache, leaves, structure)
            if known is None:
                return None
        for buffer, leaf in zip(known.buffers, leaves, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(leaf)
        return known.again().clone()

    def recorded_over(self, cache: Any) -> RecordedStep | None:
        """Return the recorded step if it is one over this cache."""
        known = self._recorded
        return known if known is not None and known.cache is cache else None

    def _takes(self, cache: Any) -> bool:
        """Whether a cache is a static one all of whose state is on the device."""
        if self.recorded_over(cache) is not None:
            return True
        if not is_static(cache):
            return False
        loaded, layers = sys.modules["transformers.cache_utils"], cache.layers
        lengths = [getattr(layer, "cumulative_length", None) for layer in layers]
        known = all(type(layer) is loaded.StaticLayer and layer.is_initialized for layer in layers)
        held = all(length is None or (isinstance(length, Tensor) and can_read(length)) for length in lengths)
        return known and held

    def _record(
        self, forward: Callable[..., Any], cache: Any, leaves: list[Any], structure: pytree.TreeSpec
    ) -> RecordedStep | None:
        """Record a step; the cache is left as long as it was."""
        lengths = _lengths(cache)
        with torch.inference_mode(mode=False), torch.no_grad():
            buffers = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            before = [length.clone() for length in lengths]

            def run() -> Tensor:
                logits: Tensor = forward(**pytree.tree_unflatten(buffers, structure), past_key_values=cache).logits
                return logits

            try:
                graph, logits = recorded(run)
            except Exception as error:  # noqa: BLE001 - whatever a model does: its steps run as they are
                self.problem = str(error).strip().splitlines()[0] or type(error).__name__
                return None
            finally:  # a step was run before it was recorded
                for length, was in zip(lengths, before, strict=True):
                    length.copy_(was)
        memory = [(layer.keys, layer.values) for layer in cache.layers]
        return RecordedStep(self, cache, graph, buffers, structure, logits, memory)


def _lengths(cache: Any) -> list[Tensor]:
    """Return how long a static cache is, as numbers on the device."""
    held = [getattr(layer, "cumulative_length", None) for layer in cache.layers]
    return [length for length in held if isinstance(length, Tensor)]


def tensors_of(named: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a model is called with, but for its cache, by name and by their place in containers.

    >>> list(tensors_of({"input_ids": torch.ones(1), "attention_mask": {"full_attention": torch.ones(1)}}))
    ['input_ids', "attention_mask['full_attention']"]
    """
    others = {name: value for name, value in named.items() if name != "past_key_values"}
    return {
        f"{name}{pytree.keystr(path)}": leaf
        for name, value in others.items()
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor)
    }


def _is_step(named: Mapping[str, Any], leaves: list[Any]) -> bool:
    """Whether a call is one token more for each sequence, of tensors in sight, and asks for logits alone."""
    ids = named.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != 1:
        return False
    if not all(can_read(leaf) if isinstance(leaf, Tensor) else isinstance(leaf, _CONSTANTS) for leaf in leaves):
        return False
    asked = {name for name, value in named.items() if value is not None and value is not False}
    quiet = asked <= _KNOWN and named.get("return_dict") is not False and named.get("use_cache") is not False
    return quiet and not torch.compiler.is_compiling()


def is_static(cache: Any) -> bool:
    """Whether a cache is transformers' own of fixed size, on the device."""
    loaded = sys.modules.get("transformers.cache_utils")
    return loaded is not None and type(cache) is loaded.StaticCache and not getattr(cache, "offloading", False)


def _at_home(known: RecordedStep) -> bool:
    """Bring keys and values back to the memory that the recorded step reads, which beams are reordered out of.

    Returns False where they are of another size.
    """
    for layer, memory in zip(known.cache.layers, known.memory, strict=True):
        for name, home in zip(("keys", "values"), memory, strict=True):
            held = getattr(layer, name)
            if held is home:
                continue
            if held.shape != home.shape or held.dtype != home.dtype or held.device != home.device:
                return False
            home.copy_(held)
            setattr(layer, name, home)
    return True


def can_read(tensor: Tensor) -> bool:
    """Whether a graph, which belongs to the current device, can read a tensor, and no one else is recording one."""
    if not tensor.is_cuda or tensor.device.index != torch.cuda.current_device():
        return False
    return not torch.cuda.is_current_stream_capturing()


def _alike(known: RecordedStep, leaves: list[Any], structure: pytree.TreeSpec) -> bool:
    """Whether a call differs from the recorded one in the values of its tensors alone."""
    if structure != known.structure:
        return False
    for buffer, leaf in zip(known.buffers, leaves, strict=True):
        if isinstance(buffer, Tensor) != isinstance(leaf, Tensor):
            return False
        if isinstance(buffer, Tensor):
            if buffer.shape != leaf.shape or buffer.dtype != leaf.dtype or buffer.device != leaf.device:
                return False
        elif buffer != leaf:
            return False
    return True


def with_static_cache(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate`, with a static cache where nothing else is asked for and it pays.

    Parameters
    ----------
    config
        The model's own generation config.
    given
        The arguments by name; a generation config among them is copied before it is changed.
    """
    own = given.get("generation_config")
    base = config if own is None else own

    def value(name: str) -> Any:
        return given.get(name, getattr(base, name, None))

    plain = all(value(name) in (wanted, None) for name, wanted in _PLAIN.items())
    other = any(value(name) for name in _OTHER_WAYS) or callable(value("custom_generate"))
    steps = value("max_new_tokens")
    if not plain or other or not isinstance(steps, int) or steps < _LEAST_STEPS:
        return dict(given)
    more = {"cache_implementation": "static", "disable_compile": True}
    if own is None:
        return {**given, **more}
    changed = copy.deepcopy(own)
    for name, wanted in more.items():
        setattr(changed, name, wanted)
    return {**given, "generation_config": changed}
