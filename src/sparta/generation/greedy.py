"""Greedy decoding of a compiled language model: runs of tokens are one call into C++.

That is where `generate` asks for the likeliest token each time and nothing more; C++ then looks up embeddings and finds
the largest logits too. Whatever else is asked for (processors, other criteria, scores, another cache) is left to
transformers, with one call per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparta.generation.program import DecodeProgram, Steps

__all__ = ["Asked", "Run", "greedy_sequences", "plainly_asked"]

_TOGETHER = 16  # tokens of one call: between calls an interrupt is heard
_KNOWN = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"})
_ASKED = ("input_ids", "logits_processor", "stopping_criteria", "generation_config")
_MOVING = ("dynamic", "longrope")  # positions whose angles depend on the length so far


@dataclass
class Run:
    """What is generated: when it ends, and what it goes on with."""

    longest: int  # tokens of a sequence in all, the prompt among them
    ends: list[int]
    padding: int
    streamer: Any


@dataclass
class Asked:
    """What `generate` was asked for, where that is greedy tokens and nothing more."""

    ids: Tensor
    config: Any
    more: dict[str, Any]
    run: Run


def plainly_asked(
    model: Any, sample: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Asked | None:
    """Return what a call of transformers' own `sample` asks for; None where it is more than greedy tokens.

    Parameters
    ----------
    sample
        The method of transformers that decodes greedily or by sampling; `args` and `kwargs` are what it was given.
    """
    try:
        given = inspect.signature(sample).bind(model, *args, **kwargs).arguments
    except TypeError:
        return None
    more = dict(given.get("model_kwargs", {}))
    if any(name not in given for name in _ASKED) or not _ordinary(model, given, more):
        return None
    run = _run_of(given)
    return None if run is None else Asked(given["input_ids"], given["generation_config"], more, run)


def greedy_sequences(model: Any, sample: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the sequences that transformers' own `sample` would return; None where it is asked for more than that.

    Parameters
    ----------
    sample, args, kwargs
        As for :func:`plainly_asked`.
    """
    from transformers.cache_utils import DynamicCache

    program: DecodeProgram | None = model._sparta.program
    asked = None if program is None else plainly_asked(model, sample, args, kwargs)
    if program is None or asked is None or asked.ids.device.type != "cpu":
        return None
    cache = asked.more.get("past_key_values")
    if not isinstance(cache, DynamicCache) or not program.caches.fits(cache):
        return None
    outputs = model._prefill(asked.ids, asked.config, asked.more, is_first_iteration=True)
    first = outputs.logits[:, -1].to(torch.float32).argmax(-1)
    return _decoded(model, program, asked.run, asked.ids, first, outputs.past_key_values, asked.more)


def _ordinary(model: Any, given: Mapping[str, Any], more: Mapping[str, Any]) -> bool:
    """Whether nothing is asked for but tokens, of a model that prepares its inputs as transformers does."""
    from transformers.generation.utils import GenerationMixin

    config: Any = given["generation_config"]
    own = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
    if any(getattr(type(model), name, None) is not getattr(GenerationMixin, name, 0) for name in own):
        return False
    return (
        not config.do_sample
        and not config.return_dict_in_generate
        and not getattr(config, "is_assistant", False)
        and not given.get("synced_gpus", False)
        and len(given["logits_processor"]) == 0
        and set(more) <= _KNOWN
        and bool(more.get("use_cache"))
        and given["input_ids"].dim() == 2
        and given["input_ids"].numel() > 0
    )


def _run_of(given: Mapping[str, Any]) -> Run | None:
    """Return when generation ends, by a length and by tokens; None where it ends by anything else."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    longest, ends = None, []
    for criterion in given["stopping_criteria"]:
        if type(criterion) is MaxLengthCriteria:
            longest = int(criterion.max_length) if longest is None else min(longest, int(criterion.max_length))
        elif type(criterion) is EosTokenCriteria:
            ends += criterion.eos_token_id.flatten().tolist()
        else:
            return None
    padding = getattr(given["generation_config"], "_pad_token_tensor", None)
    if longest is None or (ends and padding is None):
        return None
    return Run(longest, ends, 0 if padding is None else int(padding), given.get("streamer"))


def _decoded(
    model: Any, program: DecodeProgram, run: Run, ids: Tensor, first: Tensor, cache: Any, more: Mapping[str, Any]
) -> Tensor:
    """Return the sequences, from the first token after the prompt on."""
    batch, found, length = len(ids), [ids, first[:, None]], ids.shape[1] + 1
    ended = torch.isin(first, torch.tensor(run.ends, dtype=first.dtype)).to(torch.uint8)
    if run.streamer is not None:
        run.streamer.put(first)
    mask, positions = more.get("attention_mask"), more.get("position_ids")
    last = torch.full((batch, 1), length - 2) if positions is None else positions[:, -1:].expand(batch, 1)
    together = 1 if run.streamer is not None or _moves(model) else _TOGETHER
    while length < run.longest and not bool(ended.all()):
        steps = min(together, run.longest - length)
        step = Steps(found[-1][:, -1], last + torch.arange(1, steps + 1), _longer(mask, steps))
        tokens = program.follow(model, cache, step, run.ends, run.padding, ended)
        if tokens is None:
            tokens = _one_token(model, cache, step, run, ended)
        found.append(tokens)
        taken = tokens.shape[1]
        length, last, mask = length + taken, step.positions[:, taken - 1 : taken], _longer(mask, taken)
        if run.streamer is not None:
            run.streamer.put(tokens[:, -1])
    if run.streamer is not None:
        run.streamer.end()
    return torch.cat(found, 1)


def _one_token(model: Any, cache: Any, step: Steps, run: Run, ended: Tensor) -> Tensor:
    """Return the next token by a call of the model, for what a program does not take."""
    past = cache.get_seq_length()
    mask = None if step.mask is None else step.mask[:, : past + 1]
    where = step.positions[:, :1]
    logits = model(step.first[:, None], past_key_values=cache, attention_mask=mask, position_ids=where).logits
    tokens = torch.where(ended.bool(), run.padding, logits[:, -1].argmax(-1))
    ended |= torch.isin(tokens, torch.tensor(run.ends, dtype=tokens.dtype)).to(torch.uint8)
    return tokens[:, None]


def _moves(model: Any) -> bool:
    """Whether the angles of a position depend on how long the sequence is, so that they come one by one."""
    kind = getattr(getattr(model, model.base_model_prefix).rotary_emb, "rope_type", None)
    return not isinstance(kind, str) or any(word in kind for word in _MOVING)


def _longer(mask: Tensor | None, count: int) -> Tensor | None:
    """Return a padding mask with more keys that are seen."""
    return None if mask is None else torch.cat([mask, mask.new_ones(len(mask), count)], 1)
