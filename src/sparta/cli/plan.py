"""``sparta plan``: which layers, how much and in which pattern, for a speed-up that you ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sparta.cli.compile import Inputs, Source
from sparta.cli.console import AsJson, app, user_errors
from sparta.errors import ValueRangeError, message


@app.command("plan")
def plan_source(  # noqa: PLR0913 - one option each
    source: Source,
    *,
    inputs: Inputs = None,
    speedup: Annotated[float | None, typer.Option(help="Times faster than the model as given.")] = None,
    latency_ms: Annotated[float | None, typer.Option(help="Milliseconds per call.")] = None,
    memory_mb: Annotated[float | None, typer.Option(help="Megabytes of weights.")] = None,
    max_loss: Annotated[float | None, typer.Option(help="As fast as possible within this estimated loss.")] = None,
    pattern: Annotated[list[str] | None, typer.Option(help="Patterns to choose from; may be repeated.")] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="What layers may be rounded to: int8, fp8, bf16 (may be repeated); auto for 8 bits, or none."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="How layers are pruned: magnitude, wanda, sparsegpt, alps, ...")
    ] = "wanda",
    budget_s: Annotated[float | None, typer.Option("--budget", help="Seconds for all of it.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the spec of the plan here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find what to prune for a speed-up, by measurement; a factory may also return data to judge losses by."""
    with user_errors():
        import sparta
        from sparta.cli.sources import inputs_of, model_and_data

        model, example, data = model_and_data(source)
        example = inputs_of(inputs, model) if inputs else example
        if example is None:
            fix = "pass --input 1x128, or return (model, inputs) from the factory"
            raise ValueRangeError(message("no example inputs", fix=fix))
        goal: dict[str, Any] = {
            "speedup": speedup,
            "latency_ms": latency_ms,
            "memory_mb": memory_mb,
            "max_loss": max_loss,
        }
        alone: dict[tuple[str, ...], str | None] = {(): "auto", ("auto",): "auto", ("none",): None}
        allowed = alone.get(tuple(precision or ()), precision)
        how: dict[str, Any] = {"patterns": pattern or "auto", "precisions": allowed, "method": method}
        found = sparta.plan(model, example, data, **goal, **how, budget_s=budget_s)
        if out is not None:
            found.spec.save(out)
        typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
        if out is not None and not as_json:
            typer.echo(f"wrote {out}")
