"""``sparta tune``: tuning results, from and to other machines of one kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparta.cli.console import app, user_errors


@app.command("tune")
def share_tuning(
    *,
    export_to: Annotated[Path | None, typer.Option("--export", help="Write all results of this store to FILE.")] = None,
    import_from: Annotated[Path | None, typer.Option("--import", help="Take the results of FILE into it.")] = None,
) -> None:
    """Share tuning results between machines of one kind; without options, say how many there are and where."""
    from sparta.specialize.tuning.store import TuningStore

    with user_errors():
        store = TuningStore()
        if import_from is not None:
            typer.echo(f"took {store.load(import_from)} results from {import_from}")
        if export_to is not None:
            typer.echo(f"wrote {store.export(export_to)} results to {export_to}")
        if export_to is None and import_from is None:
            typer.echo(f"{len(store)} results in {store.folder}")
