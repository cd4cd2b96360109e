"""Prompts on CUDA, replayed from CUDA graphs: at a few hundred tokens a GPU waits for the host there, too.

A graph is of one length, and prompts are of any. So a prompt is filled up on the right to the next of a few lengths: no
token looks ahead, so what follows the prompt changes nothing before it, and logits are taken where the prompt ends.
What a graph computes lies in memory of its own; keys and values are copied from there into the cache of the call. The
first prompt of a length runs as it is, the second is recorded, and the others are replayed.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparta.generation.graphs import can_read
from sparta.specialize.cuda.graphs import RecordedGraph, recorded

__all__ = ["PromptGraphs", "filled_length"]

_MOST_TOKENS = 2048  # of all sequences together: beyond that the GPU has enough to do
_MOST_GRAPHS = 8
_SHORTEST = 16
_STEPS = 4  # lengths from one power of two to the next
_BEFORE = 1  # prompts of a length before one is recorded
_KNOWN = frozenset(
    {"input_ids", "position_ids", "attention_mask", "cache_position", "past_key_values", "use_cache", "logits_to_keep",
     "return_dict"}
)  # fmt: skip


def filled_length(tokens: int) -> int:
    """Return the length that a prompt is filled up to: at most a quarter more.

    >>> [filled_length(tokens) for tokens in (5, 16, 17, 100, 513)]
    [16, 16, 20, 112, 640]
    """
    if tokens <= _SHORTEST:
        return _SHORTEST
    step = (1 << ((tokens - 1).bit_length() - 1)) // _STEPS
    return -(-tokens // step) * step


@dataclass(frozen=True)
class _Given:
    """What a prompt comes with where some of its tokens are padding; two times None where none is."""

    mask: Tensor | None = None  # (batch or 1, 1, tokens, tokens), True where a token looks
    positions: Tensor | None = None  # (batch or 1, tokens)
    kind: str | None = None  # of the layers that the mask is for, where masks come in a dict

    @property
    def form(self) -> tuple[Any, ...]:
        """What must be the same for a graph to serve."""
        return (self.mask is None, self.positions is None, self.kind)

    def filled(self, batch: int, length: int, device: torch.device) -> _Given:
        """Return it for so many tokens; what is beyond looks at all before it and counts on."""
        mask = positions = None
        if self.mask is not None:
            tokens = self.mask.shape[2]
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril().repeat(batch, 1, 1, 1)
            mask[:, :, :tokens, :tokens] = self.mask
        if self.positions is not None:
            tokens = self.positions.shape[-1]
            positions = torch.arange(1, length + 1, device=device).sub(tokens).repeat(batch, 1)
            positions += self.positions[:, -1:]
            positions[:, :tokens] = self.positions
        return _Given(mask, positions, self.kind)

    def named(self) -> dict[str, Any]:
        """Return it as arguments of the model."""
        mask = (
            {} if self.mask is None else {"attention_mask": self.mask if self.kind is None else {self.kind: self.mask}}
        )
        return mask if self.positions is None else {**mask, "position_ids": self.positions}

    def copy_to(self, other: _Given) -> None:
        """Write it into the memory of a graph."""
        for mine, its in ((self.mask, other.mask), (self.positions, other.positions)):
            if mine is not None and its is not None:
                its.copy_(mine)


@dataclass
class _Prompt:
    """A recorded prompt: the memory that it reads, and what it makes."""

    graph: RecordedGraph
    ids: Tensor  # (batch, length)
    last: Tensor  # (1,), where the prompt ends
    given: _Given
    logits: Tensor  # (batch, 1, vocabulary)
    memory: list[tuple[Tensor, Tensor]]  # keys and values of each layer (batch, heads, length, head_dim)


@dataclass
class PromptGraphs:
    """The recorded prompts of a model, one for each number of sequences and length.

    Attributes
    ----------
    config
        Of the model, for its cache.
    replays
        How many prompts were replayed.
    problem
        Why none can be recorded; empty where none has failed.
    """

    config: Any
    replays: int = 0
    problem: str = ""
    _known: OrderedDict[tuple[Any, ...], _Prompt] = field(default_factory=OrderedDict)
    _seen: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.Lock)
    _done: Any = None  # an event: what was read last from the memory of graphs

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptGraphs:
        return PromptGraphs(self.config)

    def takes(self, batch: int, tokens: int) -> bool:
        """Whether prompts of a size are replayed, once one was recorded."""
        length = filled_length(tokens)
        return batch * length <= _MOST_TOKENS and length <= _most_positions(self.config)

    def prompt(self, forward: Callable[..., Any], named: Mapping[str, Any]) -> tuple[Tensor, Any] | None:
        """Return the logits of the last token and the cache; None for calls that are something else.

        Parameters
        ----------
        forward
            The model's own code, from named inputs to its outputs.
        named
            What the model was called with.
        """
        ids = named.get("input_ids")
        if self.problem or not _asks_little(named) or not isinstance(ids, Tensor) or not can_read(ids):
            return None
        batch, tokens = ids.shape
        length, cache = filled_length(tokens), named.get("past_key_values")
        if cache is None and named.get("use_cache") is None and not getattr(self.config, "use_cache", True):
            return None
        if not self.takes(batch, tokens) or not _is_fresh(cache, tokens):
            return None
        given = _given(named, ids)
        if given is None:
            return None
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            known = self._recorded(forward, ids, length, given)
            return None if known is None else self._replayed(known, ids, given, cache)

    def _recorded(self, forward: Callable[..., Any], ids: Tensor, length: int, given: _Given) -> _Prompt | None:
        """Return the graph of a length, recorded now if it is time for that."""
        key = (len(ids), length, ids.device, given.form)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        self._seen[key] += 1
        if self._seen[key] <= _BEFORE:
            return None
        try:
            known = self._known[key] = _record(forward, ids, length, given, self.config)
        except Exception as error:  # noqa: BLE001 - whatever a model does: its prompts run as they are
            self.problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._known.clear()
            return None
        if len(self._known) > _MOST_GRAPHS:
            old, _ = self._known.popitem(last=False)
            del self._seen[old]
        return known

    def _replayed(self, known: _Prompt, ids: Tensor, given: _Given, cache: Any) -> tuple[Tensor, Any]:
        """Replay a prompt on these tokens; its results are copied out."""
        stream = torch.cuda.current_stream() if ids.is_cuda else None
        if stream is not None and self._done is not None:
            stream.wait_event(self._done)  # another thread's stream may still read
        tokens = ids.shape[1]
        known.ids[:, :tokens].copy_(ids)
        known.last.fill_(tokens - 1)
        given.filled(len(ids), known.ids.shape[1], ids.device).copy_to(known.given)
        known.graph.replay()
        self.replays += 1
        logits = known.logits.clone()
        cache = _new_cache(self.config) if cache is None else cache
        _fill(cache, [(k[:, :, :tokens], v[:, :, :tokens]) for k, v in known.memory])
        if stream is not None:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(stream)
        return logits, cache


def _record(forward: Callable[..., Any], ids: Tensor, length: int, given: _Given, config: Any) -> _Prompt:
    """Record a prompt of a length; raises where a graph cannot hold it or its cache is not a plain one."""
    filled = torch.zeros(len(ids), length, dtype=ids.dtype, device=ids.device)
    filled[:, : ids.shape[1]] = ids
    last = torch.full((1,), ids.shape[1] - 1, dtype=torch.long, device=ids.device)
    given = given.filled(len(ids), length, ids.device)

    def run() -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        cache = _new_cache(config)
        found = forward(input_ids=filled, past_key_values=cache, use_cache=True, logits_to_keep=last, **given.named())
        if not _is_plain(cache, "DynamicLayer"):
            raise RuntimeError("a cache that does not keep every token")
        return found.logits, [(layer.keys, layer.values) for layer in cache.layers]

    graph, (logits, memory) = recorded(run)
    if logits.shape[1] != 1 or any(t.dim() != 4 or t.shape[2] != length for both in memory for t in both):
        raise RuntimeError("a cache or logits of another form")
    return _Prompt(graph, filled, last, given, logits, memory)


def _new_cache(config: Any) -> Any:
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=config)


def _most_positions(config: Any) -> int:
    """Return how many positions a model has, which may be learnt: there is none beyond."""
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    return min((number for number in found if isinstance(number, int) and number > 0), default=_MOST_TOKENS)


def _is_plain(cache: Any, kind: str) -> bool:
    """Whether all layers of a cache are of one class of transformers."""
    wanted = getattr(sys.modules["transformers.cache_utils"], kind)
    return bool(cache.layers) and all(type(layer) is wanted for layer in cache.layers)


def _is_fresh(cache: Any, tokens: int) -> bool:
    """Whether a cache is a plain one that holds nothing yet and has room for a prompt; so is none."""
    if cache is None:
        return True
    loaded = sys.modules.get("transformers.cache_utils")
    if loaded is None or getattr(cache, "offloading", False):
        return False
    if type(cache) is loaded.DynamicCache:
        kinds_fit = not cache.layers or _is_plain(cache, "DynamicLayer")
    elif type(cache) is loaded.StaticCache:
        kinds_fit = _is_plain(cache, "StaticLayer") and all(layer.max_cache_len >= tokens for layer in cache.layers)
    else:
        return False
    return kinds_fit and not any(layer.is_initialized for layer in cache.layers)


def _asks_little(named: Mapping[str, Any]) -> bool:
    """Whether a call is a prompt whose last logits alone are asked for."""
    ids, keep = named.get("input_ids"), named.get("logits_to_keep")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 2 or isinstance(keep, Tensor) or keep != 1:
        return False
    asked = {name for name, value in named.items() if value is not None and value is not False}
    quiet = asked <= _KNOWN and named.get("return_dict") is not False and named.get("use_cache") is not False
    return quiet and not torch.compiler.is_compiling()


def _given(named: Mapping[str, Any], ids: Tensor) -> _Given | None:
    """Return the mask and the positions of a prompt where they say something; None for such as are not understood."""
    batch, tokens = ids.shape
    counted, positions = named.get("cache_position"), named.get("position_ids")
    mask, kind = named.get("attention_mask"), None
    if isinstance(mask, dict):
        if len(mask) != 1:
            return None
        kind, mask = next(iter(mask.items()))
    places = torch.arange(tokens, device=ids.device)
    square = _squared(mask, places)
    known = (
        _fits(counted, ((tokens,),))
        and _fits(positions, ((batch, tokens), (1, tokens)))
        and _fits(square, ((batch, 1, tokens, tokens), (1, 1, tokens, tokens)))
    )
    if not known:
        return None
    if counted is None and positions is None and square is None:
        return _Given()
    yes = torch.ones((), dtype=torch.bool, device=ids.device)
    counts, in_order, open_, closed = torch.stack(
        [
            yes if counted is None else (counted == places).all(),
            yes if positions is None else (positions == places).all(),
            yes if square is None else (square == (places <= places[:, None])).all(),
            yes if mask is None or mask.dim() == 2 else ~mask[..., tokens:].any(),  # there is nothing to look at
        ]
    ).tolist()
    if not counts or not closed:
        return None
    return _Given(None if open_ else square, None if in_order else positions, None if open_ else kind)


def _fits(tensor: Any, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether an argument is not given, or of one of these shapes."""
    return tensor is None or (isinstance(tensor, Tensor) and tuple(tensor.shape) in shapes)


def _squared(mask: Any, places: Tensor) -> Any:
    """Return which tokens each token looks at: masks of a token each, or of places that a static cache has, as well."""
    if not isinstance(mask, Tensor):
        return mask
    tokens = len(places)
    if mask.dim() == 2 and mask.shape[1] == tokens:
        return (mask != 0)[:, None, None] & (places <= places[:, None])
    if mask.dim() == 4 and mask.dtype == torch.bool and mask.shape[2] == tokens and mask.shape[3] >= tokens:
        return mask[..., :tokens]
    return False  # another form


def _fill(cache: Any, memory: list[tuple[Tensor, Tensor]]) -> None:
    """Put keys and values into a cache that holds nothing."""
    loaded = sys.modules["transformers.cache_utils"]
    if type(cache) is loaded.DynamicCache:
        for at, (keys, values) in enumerate(memory):
            cache.update(keys, values, at)  # a concatenation: the cache gets memory of its own
        return
    targets, sources = [], []
    for layer, (keys, values) in zip(cache.layers, memory, strict=True):
        layer.lazy_initialization(keys, values)
        tokens = keys.shape[2]
        layer.cumulative_length.add_(tokens)
        targets += [layer.keys[:, :, :tokens], layer.values[:, :, :tokens]]
        sources += [keys, values]
    torch._foreach_copy_(targets, sources)
