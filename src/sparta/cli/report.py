"""``sparta report``: what a compiled model gained, as text, data or a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sparta.cli.console import AsJson, app, user_errors


@app.command("report")
def show_report(
    file: Annotated[Path, typer.Argument(help="A model that sparta compiled and saved.")],
    *,
    html: Annotated[Path | None, typer.Option(help="Write it as one self-contained page.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every layer with its times and advice.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the report of a compiled model."""
    with user_errors():
        import sparta
        from sparta.measure import reached

        report = sparta.load(file).report
        if html is not None:
            report.html(html, title=file.name, roof=reached())
        if as_json:
            typer.echo(json.dumps(report.to_dict(), indent=2))
        elif html is not None:
            typer.echo(f"wrote {html}")
        else:
            typer.echo(report.full if full else str(report))
