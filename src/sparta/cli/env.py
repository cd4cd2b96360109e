"""``sparta env``: what this machine can do."""

from __future__ import annotations

import json

import typer

from sparta.cli.console import AsJson, app, user_errors


@app.command("env")
def show_environment(*, as_json: AsJson = False) -> None:
    """Show what this machine can do: hardware, tools, packages, which kernels are available or why not."""
    from sparta.measure import environment
    from sparta.specialize.cpu.toolchain import prebuilt_state

    with user_errors():
        available, reason = prebuilt_state()
        found = environment().with_backend("C++ (came with the package)", available=available, reason=reason)
        typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
