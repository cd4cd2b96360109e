"""``sparta bench``: how fast a model is, beside what else could run it.

All that are compared take turns call by call in one process, so that what slows one down slows the others down too.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparta.cli.compile import Inputs
from sparta.cli.console import AsJson, app, not_as_asked, user_errors
from sparta.cli.rivals import RIVALS, call_of, rival
from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message

if TYPE_CHECKING:
    from torch import nn

_SECONDS = 5.0
_CALLS = 1000
_TOKENS = 32


@app.command("bench")
def bench_model(  # noqa: PLR0913 - one option each
    source: Annotated[str, typer.Argument(help="A compiled model, package.module:factory, or a transformers folder.")],
    *,
    inputs: Inputs = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, such as 1,16; those of the example by default.")] = "",
    against: Annotated[
        str, typer.Option(help="Of eager, compile, onnxruntime, openvino; needs the model itself.")
    ] = "",
    model: Annotated[
        str | None, typer.Option(help="The model that a compiled file was made of, to compare with.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For each batch size.")] = _SECONDS,
    tokens: Annotated[int, typer.Option(min=2, help="That a language model generates in each run.")] = _TOKENS,
    fail_under: Annotated[float | None, typer.Option(help="Exit status 1 if it is not this many times faster.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time a model: median, 90th and 99th percentile, throughput and spread, beside eager and other runtimes.

    Language models generate: the time to the first token, and tokens per second after it.
    """
    with user_errors():
        rivals = _rivals(against)
        runs, example = _given(source, model, inputs, rivals)
        generates = callable(getattr(runs["sparta"], "generate", None))
        if generates and set(rivals) - {"eager"}:
            raise ValueRangeError(message(f"--against {against} of a language model", "eager"))
        results = [
            _generated(runs, example, size, rivals, seconds, tokens)
            if generates
            else _timed(runs, example, size, rivals, seconds)
            for size in _sizes(batch)
        ]
        facts = {"source": source, "load": list(os.getloadavg()), "results": results}
        typer.echo(json.dumps(facts, indent=2) if as_json else "\n\n".join(map(_text, results)))
        if fail_under is not None:
            ratio = min((row["ratio"] for result in results for row in result["rows"][1:]), default=0.0)
            if ratio < fail_under:
                not_as_asked(f"{ratio:.2f}x is below the {fail_under:g}x asked for")


def _rivals(against: str) -> list[str]:
    names = [name.strip() for name in against.split(",") if name.strip()]
    for name in names:
        if name not in RIVALS:
            raise NameNotFoundError(did_you_mean(name, RIVALS, "runtime to compare with"))
    return names


def _sizes(batch: str) -> list[int | None]:
    try:
        sizes = [int(size) for size in batch.split(",") if size.strip()]
    except ValueError as error:
        raise ValueRangeError(message(f"--batch {batch!r}", "sizes joined by commas", "such as 1,16")) from error
    if any(size < 1 for size in sizes):
        raise ValueRangeError(message(f"--batch {batch!r}", "sizes of 1 and more"))
    return [*sizes] or [None]


def _given(
    source: str, model: str | None, inputs: list[str] | None, rivals: list[str]
) -> tuple[dict[str, nn.Module], Any]:
    """Return what runs by name, ours first, and the example inputs."""
    import sparta
    from sparta.cli.sources import inputs_of, model_of

    compiled = Path(source).is_file()
    named = model if compiled else source
    original, example = (None, None) if named is None else model_of(named)
    fast = sparta.load(source) if compiled else None
    either = fast if original is None else original
    if inputs and either is not None:
        example = inputs_of(inputs, either)
    if example is None:
        raise ValueRangeError(message("no example inputs", fix="pass --input 1x128"))
    if fast is None and original is not None:
        fast = sparta.compile(original, example)
    if rivals and original is None:
        given = f"{source} does not hold the model that it was made of"
        raise ValueRangeError(message(given, fix="name it by --model package.module:factory"))
    runs: dict[str, Any] = {"sparta": fast}
    if original is not None:
        runs["eager"] = original
    return runs, example


def _timed(runs: dict[str, Any], example: Any, batch: int | None, rivals: list[str], seconds: float) -> dict[str, Any]:
    """Return the times of all that run, interleaved, at one batch size."""
    import torch

    from sparta.cli.sources import with_batch
    from sparta.measure import compare

    given = example if batch is None else with_batch(example, batch)
    calls = {"sparta": call_of(runs["sparta"], given)}
    calls |= {name: rival(name, runs["eager"], given) for name in rivals}
    with torch.inference_mode():
        found = compare(calls, iters=_CALLS, max_seconds=seconds)
    size = batch or _rows(given)
    rows = []
    for name in calls:
        times = sorted(found[name].samples)
        at = {f"p{p}": times[round(p / 100 * (len(times) - 1))] for p in (50, 90, 99)}
        ratio = statistics.median(b / a for a, b in zip(found["sparta"].samples, found[name].samples, strict=True))
        rows.append({"name": name, **at, "per_second": size / at["p50"] * 1e3, "calls": len(times), "ratio": ratio})
    return {"batch": size, "rows": rows}


def _generated(
    runs: dict[str, Any], example: Any, batch: int | None, rivals: list[str], seconds: float, tokens: int
) -> dict[str, Any]:
    """Return how long language models take to the first token, and how many they give per second after it."""
    import torch

    from sparta.cli.sources import with_batch

    given = example if batch is None else with_batch(example, batch)
    prompt = given["input_ids"] if isinstance(given, dict) else given[0] if isinstance(given, tuple) else given
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("sparta", *rivals)}

    def took(name: str, count: int) -> float:
        start = time.perf_counter()
        runs[name].generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - start

    with torch.inference_mode():
        for name in found:
            took(name, 2)  # the first call loads what it needs
        end = time.perf_counter() + seconds
        while not found["sparta"] or time.perf_counter() < end:
            for name, pairs in found.items():
                pairs.append((took(name, 1), took(name, tokens)))
    size = len(prompt)
    rows = []
    for name, pairs in found.items():
        first = statistics.median(one for one, _ in pairs)
        rest = statistics.median(max(1e-9, many - one) for one, many in pairs)
        both = zip(found["sparta"], pairs, strict=True)
        ratio = statistics.median(theirs / ours for (_, ours), (_, theirs) in both)
        per_second = size * (tokens - 1) / rest
        rows.append(
            {"name": name, "first_ms": 1e3 * first, "per_second": per_second, "calls": len(pairs), "ratio": ratio}
        )
    return {"batch": size, "tokens": tokens, "prompt": int(prompt.shape[-1]), "rows": rows}


def _rows(given: Any) -> int:
    import torch

    leaves = list(given.values()) if isinstance(given, dict) else list(given) if isinstance(given, tuple) else [given]
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)


def _text(result: dict[str, Any]) -> str:
    from sparta.tables import table

    load = f"batch {result['batch']}, load {os.getloadavg()[0]:.3g} on {os.cpu_count()} cores"
    ratios = ["" if row["name"] == "sparta" else f"{row['ratio']:.2f}x" for row in result["rows"]]
    if "tokens" in result:
        cells = [
            [row["name"], f"{row['first_ms']:.4g} ms", f"{row['per_second']:.4g}", row["calls"], ratio]
            for row, ratio in zip(result["rows"], ratios, strict=True)
        ]
        title = f"{result['tokens']} tokens after a prompt of {result['prompt']}, {load}"
        return table(["runs", "first token", "tokens per second", "runs of each", "sparta is"], cells, title=title)
    cells = [
        [
            row["name"],
            *(f"{row[each]:.4g} ms" for each in ("p50", "p90", "p99")),
            f"{row['per_second']:.4g}",
            row["calls"],
            ratio,
        ]
        for row, ratio in zip(result["rows"], ratios, strict=True)
    ]
    return table(["runs", "p50", "p90", "p99", "per second", "calls", "sparta is"], cells, title=load)
