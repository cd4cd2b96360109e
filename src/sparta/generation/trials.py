"""Trial calls of a language model: what is compared before a compiled one is handed over, and what is timed.

A trial is a prompt and, where the model keeps a cache, one token after it. Prompts are the example's and random ones of
its size; a decoder also gets two sequences of which one is padded on the left. Logits of padding are not compared, for
nobody reads them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from sparta.compiler.certificate import Certificate
from sparta.compiler.verify import TOLERANCES
from sparta.errors import CheckError, ValueRangeError, message
from sparta.measure.timing import Comparison, compare_own_time
from sparta.propagation.capture import call_arguments

__all__ = [
    "agreement",
    "certified",
    "decode_call",
    "follows_itself",
    "generate_call",
    "named_example",
    "prompt_call",
    "replayed_call",
    "same_logits",
    "some_tokens",
    "timed",
]

_SEEDS = (0, 1)
_ELEMENT = 30.0
_IDS = ("input_ids", "decoder_input_ids")
_SECONDS = 2.0
_UNTIL_RECORDED = 4  # steps over one cache, after which they are replayed
_SIXTEEN_BITS = 10.0  # how much further logits may be apart where layers round their inputs to 16 bits


def named_example(model: nn.Module, example: Any) -> dict[str, Any]:
    """Return example inputs by name; an encoder-decoder's decoder starts with its first token where none is given."""
    args, kwargs = call_arguments(example)
    try:
        named = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise ValueRangeError(message(f"example inputs that do not fit the model: {error}")) from error
    named.update(named.pop("kwargs", {}))
    config: Any = model.config
    takes = inspect.signature(model.forward).parameters
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        first = next((v for v in named.values() if isinstance(v, Tensor)), None)
        if named.get("decoder_input_ids") is None and named.get("decoder_inputs_embeds") is None and first is not None:
            start = getattr(config, "decoder_start_token_id", None) or getattr(config, "bos_token_id", None) or 0
            named["decoder_input_ids"] = torch.full((first.shape[0], 1), int(start), device=first.device)
    return named


# ---------------------------------------------------------------------- what is compared


def certified(
    reference: Callable[[Mapping[str, Any]], list[Tensor]],
    compiled: Callable[[Mapping[str, Any]], list[Tensor]],
    model: Any,
    example: Mapping[str, Any],
    *,
    rounding: bool = False,
) -> Certificate:
    """Compare what two models return for the trials; raises :class:`CheckError` where they do not agree.

    Parameters
    ----------
    reference, compiled
        From named inputs to the tensors to compare, as :func:`outputs` makes them.
    rounding
        Kernels for int8 weights may round what they multiply them with to 16 bits.
    """
    looser = _SIXTEEN_BITS if rounding else 1.0
    error = worst = 0.0
    count, dtype = 0, torch.float32
    for named in [dict(example), *(_fresh(model, example, seed) for seed in _SEEDS), *_padded(model, example)]:
        try:
            right = reference(named)
        except Exception:
            if count:
                continue  # other tokens than the example's, which the model may not take: places of a picture's patches
            raise
        results = compiled(named)
        if len(results) != len(right):
            raise CheckError(message("a compiled model that takes other calls than the original"))
        for expected, actual in zip(right, results, strict=True):
            dtype = expected.dtype
            relative, single = _difference(expected, actual, TOLERANCES.get(dtype, 0.0) * looser)
            error, worst, count = max(error, relative), max(worst, single), count + 1
    name, allowed = str(dtype).removeprefix("torch."), TOLERANCES[dtype] * looser
    return Certificate(_SEEDS, name, allowed, error, worst, count, passed=True)


def outputs(model: Any, named: Mapping[str, Any]) -> list[Tensor]:
    """Return the logits of a prompt and, for a decoder with a cache, of one token after it where it takes that."""
    with torch.no_grad():
        first = model(**named)
        mask: Any = named.get("attention_mask")
        decoder = not getattr(model.config, "is_encoder_decoder", False)
        found = [first.logits[mask.bool()] if decoder and _covers(mask, first.logits) else first.logits]
        cache = getattr(first, "past_key_values", None)
        ids = named.get("input_ids")
        if not decoder or cache is None or not isinstance(ids, Tensor) or ids.dim() != 2:
            return found
        more: dict[str, Any] = {"input_ids": ids[:, -1:], "past_key_values": cache}
        if isinstance(mask, Tensor) and mask.dim() == 2:
            more["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
        try:
            return [*found, model(**more).logits]
        except Exception:  # noqa: BLE001 - a model that needs more, such as places of a picture's patches
            return found


def agreement(expected: list[Tensor], actual: list[Tensor]) -> tuple[float, float]:
    """Return the relative error of logits, and the share of positions whose largest logit is the same.

    >>> agreement([torch.tensor([[1.0, 2.0]])], [torch.tensor([[2.0, 1.0]])])[1]
    0.0
    """
    wide = [(a.double().flatten(0, -2), b.double().flatten(0, -2)) for a, b in zip(expected, actual, strict=True)]
    gap = sum(float((a - b).square().sum()) for a, b in wide) ** 0.5
    norm = sum(float(a.square().sum()) for a, _ in wide) ** 0.5
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in wide])
    return gap / max(norm, 1e-30), float(same.double().mean())


def same_logits(expected: Tensor, actual: Tensor, *, rounding: bool = False) -> None:
    """Raise :class:`CheckError` unless logits agree; `rounding` is as for :func:`certified`."""
    _difference(expected, actual, TOLERANCES.get(expected.dtype, 0.0) * (_SIXTEEN_BITS if rounding else 1.0))


def _difference(expected: Tensor, actual: Tensor, allowed: float) -> tuple[float, float]:
    if actual.shape != expected.shape:
        raise CheckError(message(f"logits of shape {tuple(actual.shape)}", f"{tuple(expected.shape)}"))
    left, right = actual.double(), expected.double()
    if not bool(((left == right) | (left.isfinite() & right.isfinite()) | (left.isnan() & right.isnan())).all()):
        raise CheckError(message("logits that are infinite or NaN on one side only"))
    gap = torch.where(right.isfinite(), left - right, 0.0)
    truth = torch.where(right.isfinite(), right, 0.0)
    relative = float(gap.norm()) / max(float(truth.norm()), 1e-30)
    single = float(gap.abs().max()) / max(float(truth.abs().max()), 1e-30) if gap.numel() else 0.0
    if relative > allowed or single > _ELEMENT * allowed:
        given = f"the compiled model differs from the original by {relative:.3g} (relative), {single:.3g} at most"
        raise CheckError(message(given, f"{allowed:.3g} in {expected.dtype}"))
    return relative, single


def _covers(mask: Any, logits: Tensor) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape == logits.shape[:2]


def _fresh(model: Any, example: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return inputs of the example's sizes with random tokens and random floats."""
    generator = torch.Generator().manual_seed(seed)
    named = dict(example)
    for name, value in example.items():
        if not isinstance(value, Tensor):
            continue
        if name in _IDS:
            named[name] = torch.randint(0, _vocabulary(model), value.shape, generator=generator).to(value)
        elif value.is_floating_point() and "mask" not in name:
            named[name] = torch.randn(value.shape, generator=generator).to(value)
    return named


def _padded(model: Any, example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return two random sequences of which one is padded on the left; nothing for models that are no plain decoder."""
    ids = example.get("input_ids")
    if getattr(model.config, "is_encoder_decoder", False) or not isinstance(ids, Tensor) or ids.dim() != 2:
        return []
    if (
        set(example) - {"input_ids", "attention_mask", "use_cache"}
        or "attention_mask" not in inspect.signature(model.forward).parameters
    ):
        return []
    tokens = max(4, ids.shape[1])
    two = torch.randint(0, _vocabulary(model), (2, tokens), generator=torch.Generator().manual_seed(2)).to(ids.device)
    mask = torch.ones_like(two)
    mask[0, : tokens // 2] = 0
    return [{"input_ids": two, "attention_mask": mask}]


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0]) if hasattr(model, "get_input_embeddings") else 2


# ---------------------------------------------------------------------- what is timed


def prompt_call(model: Any, example: Mapping[str, Any]) -> Callable[[], Tensor]:
    """Return a function that runs the example as a prompt, as `generate` does: with logits of the last token alone."""
    named = dict(example)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        named["logits_to_keep"] = 1

    def call() -> Tensor:
        with torch.no_grad():
            return model(**named).logits  # type: ignore[no-any-return]

    return call


def decode_call(model: Any, example: Mapping[str, Any]) -> Callable[[], Tensor] | None:
    """Return a function that runs one token after the example; None where that is not a matter of a cache alone."""
    ids = example.get("input_ids")
    if getattr(model.config, "is_encoder_decoder", False) or not isinstance(ids, Tensor):
        return None
    with torch.no_grad():
        cache = getattr(model(**example), "past_key_values", None)
    if cache is None or not hasattr(cache, "crop"):
        return None
    mask = example.get("attention_mask")
    more: dict[str, Any] = {"input_ids": ids[:, -1:], "past_key_values": cache}
    if isinstance(mask, Tensor) and mask.dim() == 2:
        more["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)

    def call() -> Tensor:
        with torch.no_grad():
            logits = model(**more).logits
            cache.crop(-1)
            return logits  # type: ignore[no-any-return]

    for step in (call, _over_copies(model, example, more)):
        try:
            step()
        except Exception:  # noqa: BLE001, S112 - a window that is full, a state that cannot go back, arguments it misses
            continue
        return step
    return None


def _over_copies(model: Any, example: Mapping[str, Any], more: Mapping[str, Any]) -> Callable[[], Tensor]:
    """Return a function that runs one token after the example, each time over a copy of its cache."""
    kept: list[Any] = []

    def call() -> Tensor:
        with torch.no_grad():
            if not kept:
                kept.append(model(**example).past_key_values)
            return model(**{**more, "past_key_values": deepcopy(kept[0])}).logits  # type: ignore[no-any-return]

    return call


def generate_call(model: Any, example: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that generates two tokens after the example, by what transformers makes of it."""
    named = {name: value for name, value in example.items() if not name.startswith("decoder_")}

    def call() -> Any:
        with _quiet():
            return model.generate(**named, max_new_tokens=2, do_sample=False)

    return call


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what transformers says of calls that are not the user's."""
    from transformers.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        set_verbosity(level)


def replayed_call(model: Any, example: Mapping[str, Any]) -> Callable[[], Tensor] | None:
    """Return a function like that of :func:`decode_call` whose step is replayed from a graph; None where it is not.

    Parameters
    ----------
    model
        A compiled one that replays steps.
    """
    from transformers.cache_utils import StaticCache

    ids, graph = example.get("input_ids"), model._sparta.graph
    if graph is None or not isinstance(ids, Tensor) or getattr(model.config, "is_encoder_decoder", False):
        return None
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=ids.shape[1] + 1)
    layers: list[Any] = list(cache.layers)

    def call() -> Tensor:
        with torch.no_grad():
            logits = model(input_ids=ids[:, -1:], past_key_values=cache).logits
            for layer in layers:
                layer.cumulative_length.sub_(1)
            return logits  # type: ignore[no-any-return]

    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    before = graph.replays
    for _ in range(_UNTIL_RECORDED):
        call()
    return call if graph.replays > before else None


def follows_itself(model: Any, example: Mapping[str, Any] | None = None, tokens: int = 24) -> bool:
    """Whether greedy tokens that follow by replays alone are those of transformers' own loop over the same replays.

    The model's own settings of `generate` are put aside for it, for they may end the trial before anything followed.

    Parameters
    ----------
    model
        A compiled one that replays steps.
    example
        A prompt; some tokens if not given.
    """
    from transformers import GenerationConfig

    graph, found = model._sparta.graph, []
    before, followed, settings = graph.follows, graph.followed, model.generation_config
    try:
        ids = some_tokens(model) if example is None else example["input_ids"]
        given = {"attention_mask": torch.ones_like(ids), **(example or {"input_ids": ids})}
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        for follows in (False, True):
            graph.follows = follows
            with _quiet():
                found.append(model.generate(**given, max_new_tokens=tokens, do_sample=False))
    except Exception:  # noqa: BLE001 - whatever goes wrong: the loop of transformers runs
        return False
    finally:
        graph.follows, model.generation_config = before, settings
    return torch.equal(*found) and graph.followed > followed


def some_tokens(model: Any) -> Tensor:
    """Return a prompt (1, 8) of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, _vocabulary(model), (1, 8), generator=generator).to(next(model.parameters()).device)


def timed(functions: Mapping[str, Callable[[], Tensor]], seconds: float = _SECONDS) -> Comparison:
    """Time functions interleaved, by the time that is their own."""
    return compare_own_time(functions, warmup=2, iters=40, max_seconds=seconds)
