"""``sparta compile``: a model into a file that runs, and says how fast."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sparta.cli.console import AsJson, app, not_as_asked, user_errors
from sparta.errors import ValueRangeError, message

Source = Annotated[str, typer.Argument(help="package.module:factory, or a folder that transformers wrote.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input", metavar="SHAPE", help="Shape of an input: 1x128, ids:1x128 or name=1x128; may be repeated."
    ),
]


class Tune(StrEnum):
    """How much compiling measures."""

    QUICK = "quick"
    FULL = "full"
    OFF = "off"


@app.command("compile")
def compile_source(  # noqa: PLR0913 - one option each
    source: Source,
    *,
    inputs: Inputs = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the compiled model here.")] = None,
    tune: Annotated[Tune, typer.Option(help="How much is measured.")] = Tune.QUICK,
    budget_s: Annotated[float | None, typer.Option("--budget", help="Seconds for all of it.")] = None,
    precision: Annotated[str | None, typer.Option(help="int8, bf16, fp8 or auto; as it is by default.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page.")] = None,
    fail_under: Annotated[float | None, typer.Option(help="Exit status 1 below this speed-up.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a model: propagate its zeros, choose a kernel for each layer by measurement, verify, save."""
    with user_errors():
        import sparta
        from sparta.cli.sources import inputs_of, model_of

        model, example = model_of(source)
        example = inputs_of(inputs, model) if inputs else example
        if example is None:
            fix = "pass --input 1x128, or return (model, inputs) from the factory"
            raise ValueRangeError(message("no example inputs", fix=fix))
        options: dict[str, Any] = {"tune": tune.value, "budget_s": budget_s}
        if precision is not None:
            options["precision"] = precision
        fast = sparta.compile(model, example, **options)
        if out is not None:
            fast.save(out)
        if html is not None:
            fast.report.html(html, title=source)
        typer.echo(json.dumps(fast.report.to_dict(), indent=2) if as_json else str(fast.report))
        if out is not None and not as_json:
            typer.echo(f"wrote {out}")
        if fail_under is not None and (fast.report.speedup or 0.0) < fail_under:
            not_as_asked(f"{fast.report.speedup or 'no speed-up'} is below the {fail_under} asked for")
