"""Greedy decoding from a CUDA graph: each token follows from the one before on the device, without the host in between.

Transformers prepares a few steps, from which it is read how the inputs of a step change: a position that is counted up,
a place of the mask that opens. From then on these changes are made on the device and the recorded step is replayed;
only every sixteenth token is it asked whether all sequences have ended. Whatever changes otherwise is left to
transformers, step by step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparta.generation.graphs import DecodeGraph, can_read, is_static, tensors_of
from sparta.generation.greedy import Asked, Run, plainly_asked

__all__ = ["replayed_sequences"]

_TOGETHER = 16  # tokens between two looks at whether all sequences have ended
_WATCHED = 3  # steps in a row whose inputs are compared; the last of them is the one that is recorded


def replayed_sequences(model: Any, sample: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the sequences that transformers' own `sample` would return; None where it is asked for more than that.

    Parameters
    ----------
    sample, args, kwargs
        As for :func:`~sparta.generation.greedy.plainly_asked`.
    """
    graph: DecodeGraph | None = model._sparta.graph
    if graph is None or graph.problem or not graph.follows:
        return None
    asked = plainly_asked(model, sample, args, kwargs)
    prepare = inspect.signature(model.prepare_inputs_for_generation).parameters
    if asked is None or asked.run.streamer is not None or "next_sequence_length" not in prepare:
        return None
    if not can_read(asked.ids) or not is_static(asked.more.get("past_key_values")):
        return None
    with torch.no_grad():
        return _decoded(model, graph, asked)


def _decoded(model: Any, graph: DecodeGraph, asked: Asked) -> Tensor:
    """Return the sequences, of which the prompt gives the first token."""
    outputs = model._prefill(asked.ids, asked.config, asked.more, is_first_iteration=True)
    tokens = _Tokens(asked.ids, asked.run)
    tokens.add(outputs.logits)
    mode = getattr(model, "_optimize_model_for_decode", nullcontext)  # how transformers decodes, in newer releases
    with mode():
        _follow(model, graph, tokens, outputs, asked.more)
    return tokens.sequences()


def _follow(model: Any, graph: DecodeGraph, tokens: _Tokens, outputs: Any, more: dict[str, Any]) -> None:
    """Add all other tokens: the first steps by transformers' own preparation, the others by replays alone."""
    watched: list[dict[str, Tensor]] = []
    step, changes = None, None
    while not tokens.done():
        if step is None or changes is None:
            more = model._update_model_kwargs_for_generation(outputs, more, is_encoder_decoder=False)
            inputs = model.prepare_inputs_for_generation(tokens.sequences(), next_sequence_length=1, **more)
            if step is None:
                watched.append({name: t.clone() for name, t in tensors_of(inputs).items()})
                del watched[:-_WATCHED]  # another answer may let this one start later
            outputs = model(**inputs, return_dict=True)
            tokens.add(outputs.logits)
            if len(watched) == _WATCHED and step is None:
                step = graph.recorded_over(more["past_key_values"])
                changes = None if step is None else _Changes.seen(step.inputs(), watched)
            continue
        for _ in range(tokens.room(_TOGETHER)):
            changes.advance(tokens.last)
            tokens.add(step.again())
            graph.followed += 1
        step.go_back(tokens.trimmed())


class _Tokens:
    """The tokens of each sequence, on the device."""

    def __init__(self, ids: Tensor, run: Run) -> None:
        self.found, self.run, self.length = [ids], run, ids.shape[1]
        self.ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self.last = ids[:, -1]
        self._ends = torch.tensor(run.ends, dtype=ids.dtype, device=ids.device)
        self._all_ended: list[Tensor] = []  # for each token since the last look

    def add(self, logits: Tensor) -> None:
        """Take the likeliest token of each sequence; one that has ended is padded."""
        token = logits[:, -1].to(torch.float32).argmax(-1)
        if self.run.ends:
            token = torch.where(self.ended, self.run.padding, token)
            self.ended = self.ended | torch.isin(token, self._ends)
            self._all_ended.append(self.ended.all())
        self.last = token
        self.found.append(token[:, None])
        self.length += 1

    def room(self, most: int) -> int:
        """Return how many tokens may be added before the sequences are as long as they may be."""
        return min(most, self.run.longest - self.length)

    def done(self) -> bool:
        """Whether no more tokens follow; this waits for the device."""
        self._all_ended = self._all_ended[-1:]
        return self.length >= self.run.longest or bool(self._all_ended and self._all_ended[-1])

    def trimmed(self) -> int:
        """Take back the tokens that came after all sequences had ended; return how many."""
        flags = torch.stack(self._all_ended[1:]).tolist() if len(self._all_ended) > 1 else []
        beyond = len(flags) - flags.index(True) - 1 if True in flags else 0
        if beyond:
            del self.found[-beyond:]
            self.length -= beyond
        return beyond

    def sequences(self) -> Tensor:
        """Return all tokens (batch, length)."""
        self.found = [torch.cat(self.found, 1)]
        return self.found[0]


@dataclass
class _Changes:
    """What changes from step to step in the memory that a recorded step reads."""

    ids: Tensor
    counted: list[Tensor] = field(default_factory=list)
    masks: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # a mask, its places, the last one opened

    @classmethod
    def seen(cls, inputs: Mapping[str, Tensor], steps: list[dict[str, Tensor]]) -> _Changes | None:
        """Return the changes between consecutive steps; None where one of them is not understood.

        Parameters
        ----------
        inputs
            The memory that the recorded step reads, as :func:`~sparta.generation.graphs.tensors_of` names it.
        steps
            The inputs of three steps; memory holds those of the last.
        """
        if "input_ids" not in inputs or any(step.keys() != inputs.keys() for step in steps):
            return None
        changes = cls(inputs["input_ids"])
        for name, memory in inputs.items():
            one, two, three = (step[name] for step in steps)
            if name == "input_ids" or (one.shape == two.shape == three.shape and _equal(one, two, three)):
                continue
            if not one.shape == two.shape == three.shape == memory.shape:
                return None
            first, second = _opened(one, two), _opened(two, three)
            if first is not None and second == first + 1:
                places = torch.arange(memory.shape[-1], device=memory.device)
                changes.masks.append((memory, places, torch.tensor([second], device=memory.device)))
            elif not one.is_floating_point() and one.dtype != torch.bool and _equal(one + 2, two + 1, three):
                changes.counted.append(memory)
            else:
                return None
        return changes

    def advance(self, token: Tensor) -> None:
        """Make the inputs of the next step, with these tokens (batch,)."""
        self.ids.copy_(token[:, None])
        for each in self.counted:
            each.add_(1)
        for mask, places, at in self.masks:
            at.add_(1)
            mask.logical_or_(places == at)


def _equal(*tensors: Tensor) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


def _opened(before: Tensor, after: Tensor) -> int | None:
    """Return the one place along the last dim that a mask has opened for all sequences; None where it is otherwise."""
    if before.dtype != torch.bool:
        return None
    other = (before != after).flatten(0, -2)
    places = other.any(0).nonzero()
    if len(places) != 1 or not bool(other[:, places[0, 0]].all()) or not bool(after[..., places[0, 0]].all()):
        return None
    return int(places[0, 0])
