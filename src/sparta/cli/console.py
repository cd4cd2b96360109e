"""The console: the ``sparta`` command itself, and what its commands share.

Exit status 0 is fine, 1 says that the result is not as asked, 2 that the command was: an error the user can cause is
one line on stderr, never a traceback.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from sparta.errors import SpartaError
from sparta.version import __version__

__all__ = ["AsJson", "app", "main", "not_as_asked", "user_errors"]

app = typer.Typer(
    help="Model sparsity for PyTorch: prune, compile, measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


_INTERRUPTED = 130
_LONGEST = 200  # characters of a path in a message

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """Run the command line; the entry point of the installed ``sparta`` command."""
    app(prog_name="sparta")


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparta {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            is_eager=True,
            callback=lambda value: _print_version(wanted=value),
        ),
    ] = False,
) -> None:
    """Model sparsity for PyTorch."""


def not_as_asked(reason: str) -> NoReturn:
    """End with exit status 1: everything worked, and the result is not what was asked for."""
    typer.echo(f"not as asked: {reason}", err=True)
    raise typer.Exit(1)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error the user caused into one line on stderr and exit status 2, and a warning into one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        except SpartaError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(_INTERRUPTED) from error
        except BrokenPipeError as error:  # the reader of the output has seen enough
            raise typer.Exit(0) from error
        except OSError as error:  # of a path that the user gave: not readable, a folder, too long a name
            if error.filename is None:
                raise
            typer.echo(f"error: {error.strerror}: {str(error.filename)[:_LONGEST]}", err=True)
            raise typer.Exit(2) from error
        finally:
            for entry in caught:
                typer.echo(f"warning: {' '.join(str(entry.message).split())}", err=True)
