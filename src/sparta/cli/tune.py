"""``sparta tune``: tuning results, from and to other machines of one kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparta.cli.console import AsJson, app, user_errors

if TYPE_CHECKING:
    from sparta.specialize.tuning.store import TuningStore


@app.command("tune")
def share_tuning(
    *,
    export_to: Annotated[Path | None, typer.Option("--export", help="Write all results of this store to FILE.")] = None,
    import_from: Annotated[Path | None, typer.Option("--import", help="Take the results of FILE into it.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print every result.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget all results and decisions: they are measured again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List, clear or share tuning results; without options, say how many there are and where."""
    from sparta.specialize.tuning.store import TuningStore

    with user_errors():
        store = TuningStore()
        if clear:
            from sparta.compiler.choose.decisions import forget

            typer.echo(
                f"forgot {store.clear()} results of layers and {forget()} of whole models in {store.folder.parent}"
            )
        if listed:
            _show(store, as_json=as_json)
        if import_from is not None:
            typer.echo(f"took {store.load(import_from)} results from {import_from}")
        if export_to is not None:
            typer.echo(f"wrote {store.export(export_to)} results to {export_to}")
        if export_to is None and import_from is None and not listed and not clear:
            count = {"results": len(store), "folder": str(store.folder)}
            typer.echo(json.dumps(count) if as_json else f"{len(store)} results in {store.folder}")


def _show(store: TuningStore, *, as_json: bool) -> None:
    from sparta.tables import table

    records = store.records()
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    columns = ["problem", "runs", "ms", "dense ms", "gain"]
    rows = [
        [
            record["key"],
            record["entry"]["implement"],
            record["entry"]["milliseconds"],
            record["entry"]["dense_milliseconds"],
            f"{record['entry']['dense_milliseconds'] / record['entry']['milliseconds']:.2f}x",
        ]
        for record in records
    ]
    typer.echo(table(columns, rows) if rows else f"no results in {store.folder}")
