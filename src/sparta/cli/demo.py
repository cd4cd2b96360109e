"""``sparta demo``: the whole job on a real sentence encoder, from its weights to a faster model, in a few minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sparta.cli.console import AsJson, app, user_errors


@app.command("demo")
def show_demo(
    *,
    weights: Annotated[
        Path | None, typer.Option(help="Folder of a BERT-like encoder; all-MiniLM-L6-v2 if installed.")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help="Folder with sts-train.csv and sts-test.csv; of a package if installed.")
    ] = None,
    sparsity: Annotated[float, typer.Option(help="Share of the weights to prune.")] = 0.5,
    steps: Annotated[int, typer.Option(min=0, help="Of learning back from the dense model.")] = 60,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model and the report.")] = Path(
        "sparta-demo"
    ),
    as_json: AsJson = False,
) -> None:
    """Prune a sentence encoder, win its accuracy back, compile, save, load in a fresh process, and measure."""
    with user_errors():
        from sparta.demo.encoder import whole_job

        facts = whole_job(weights, pairs, sparsity, steps, out, say=typer.echo)
        if as_json:
            typer.echo(json.dumps(facts, indent=2))
