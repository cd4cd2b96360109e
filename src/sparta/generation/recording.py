"""What of a language model is replayed on CUDA: tried when it is compiled or loaded, compared, and told.

Steps of one token and prompts are recorded once and replayed where what they then compute is what the model's own code
computes. Where it is not, or where a graph cannot hold them, they run as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparta.compiler.session import Session, in_words
from sparta.generation.fp8_files import is_fp8
from sparta.generation.graphs import DecodeGraph
from sparta.generation.layers import SparseLayer
from sparta.generation.prompts import PromptGraphs, filled_length
from sparta.generation.trials import decode_call, follows_itself, replayed_call, same_logits, some_tokens

__all__ = ["let_replay", "prompts_agree"]

_UNTIL_REPLAYED = 2  # prompts of a length, of which the last is replayed


def let_replay(fast: Any, example: Mapping[str, Any], session: Session, *, check: bool) -> None:
    """Let calls be replayed from CUDA graphs, where they then compute what the model's own code does.

    Parameters
    ----------
    fast
        A compiled model on CUDA, which is changed.
    example
        What it is called with, by name.
    session
        Is told what was found.
    check
        Whether results are compared.
    """
    plain = {name: value for name, value in example.items() if name == "input_ids"}
    why = _let_steps(fast, plain, check=check)
    follows = fast._sparta.graph is not None and fast._sparta.graph.follows
    followed = ", and greedy tokens follow each other on the device" if follows else ""
    how = "not replayed from a CUDA graph" if why else f"replayed from a CUDA graph, over a static cache{followed}"
    session.note(f"steps of one token are {how}" + (f": {why}" if why else ""))
    if not why:
        why = _let_prompts(fast, plain, check=check)
        how = "not replayed from CUDA graphs" if why else "replayed from CUDA graphs, filled up to one of a few lengths"
        session.note(f"prompts are {how}" + (f": {why}" if why else ""))


def _let_steps(fast: Any, plain: Mapping[str, Any], *, check: bool) -> str:
    """Return why steps are not replayed; nothing where they are."""
    fast._sparta.graph = graph = DecodeGraph(follows=False)  # until it was tried
    why = ""
    try:
        own, replayed = decode_call(fast, plain), replayed_call(fast, plain)
        if own is None or replayed is None:
            why = graph.problem or "its cache is not one of fixed size"
        elif check:
            same_logits(own(), replayed())
            graph.follows = follows_itself(fast, plain)
    except Exception as error:  # noqa: BLE001 - whatever a model does with such a cache: steps run as they are
        why = in_words(error)
    graph.forget()
    if why:
        fast._sparta.graph = None
    return why


def _let_prompts(fast: Any, plain: Mapping[str, Any], *, check: bool) -> str:
    """Return why prompts are not replayed; nothing where they are."""
    why = ""
    try:
        if check and not prompts_agree(fast, plain.get("input_ids")):
            why = "a prompt of this model is something else"
    except Exception as error:  # noqa: BLE001 - whatever a model does with such a prompt: prompts run as they are
        why = in_words(error)
    fast._sparta.prompts = None if why else PromptGraphs(fast.config)
    return why


def prompts_agree(fast: Any, ids: Tensor | None = None) -> bool:
    """Compare prompts that are replayed, and a token after each, with the model's own code; raises where they differ.

    Returns whether any was replayed. The prompts are such as are filled up, one of them padded on the left.

    Parameters
    ----------
    fast
        A compiled model on CUDA.
    ids
        A prompt; some tokens if not given.
    """
    held, prompts = fast._sparta.prompts, PromptGraphs(fast.config)
    if ids is None or not prompts.takes(*ids.shape):
        ids = some_tokens(fast)
    if ids.shape[1] > 2 and filled_length(ids.shape[1]) == ids.shape[1]:
        ids = ids[:, :-1]
    rounding = any(isinstance(layer, SparseLayer) and is_fp8(layer) for layer in fast.modules())
    padded = torch.ones_like(ids)
    padded[0, : ids.shape[1] // 2] = 0
    replays = 0
    try:
        for mask in (None, padded):
            found = []
            for fast._sparta.prompts in (None, prompts):
                found.append(_prompt_and_token(fast, ids, mask))
            if prompts.problem:
                raise RuntimeError(prompts.problem)
            for own, replayed in zip(*found, strict=True):
                same_logits(own, replayed, rounding=rounding)
            if prompts.replays == replays:
                return False
            replays = prompts.replays
    finally:
        fast._sparta.prompts = held
    return True


def _prompt_and_token(fast: Any, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the last logits of a prompt, at the call at which it is replayed, and those of a token after it."""
    from transformers.cache_utils import DynamicCache

    more = {} if mask is None else {"attention_mask": mask}
    longer = {} if mask is None else {"attention_mask": torch.cat([mask, mask[:, -1:]], 1)}
    for _ in range(_UNTIL_REPLAYED):
        cache = DynamicCache(config=fast.config)
        first = fast(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **more).logits
    return first, fast(input_ids=ids[:, -1:], past_key_values=cache, **longer).logits
