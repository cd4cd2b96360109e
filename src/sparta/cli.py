"""The ``sparta`` command: a thin face on the library, for a person at a terminal.

Each command calls one public function and prints what it returns, as a table or with ``--json`` as data. The
one idea to know: an error the user can cause is one line on stderr and exit status 2, never a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sparta.errors import FileFormatError, NameNotFoundError, SpartaError, did_you_mean, message
from sparta.tables import table
from sparta.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    help="Model sparsity for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(frozen=True)
class Inspection:
    """What ``sparta inspect`` found in a file: its kind, the facts of each tensor, and both as text."""

    kind: str
    tensors: dict[str, dict[str, Any]]
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        return {"kind": self.kind, "tensors": self.tensors}


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


@app.command("env")
def show_environment(*, as_json: AsJson = False) -> None:
    """Show what this machine can do: hardware, tools, packages, which kernels are available or why not."""
    from sparta.testing import environment

    with _user_errors():
        found = environment()
        typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))


@app.command("inspect")
def inspect_file(
    file: Annotated[Path, typer.Argument(help="A .safetensors checkpoint, or a spec saved by sparta.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the shape, density and sparsity pattern of every tensor in a file."""
    with _user_errors():
        kind = _kind_of(file)
        if kind not in _INSPECTORS:
            raise NameNotFoundError(did_you_mean(kind, _INSPECTORS, "kind of file"))
        found = _INSPECTORS[kind](file)
        if as_json:
            typer.echo(json.dumps({"file": str(file), **found.to_dict()}, indent=2))
        else:
            typer.echo(found.text)


@app.command("tune")
def share_tuning(
    *,
    export_to: Annotated[Path | None, typer.Option("--export", help="Write all results of this store to FILE.")] = None,
    import_from: Annotated[Path | None, typer.Option("--import", help="Take the results of FILE into it.")] = None,
) -> None:
    """Share tuning results between machines of one kind; without options, say how many there are and where."""
    from sparta.specialize.store import TuningStore

    with _user_errors():
        store = TuningStore()
        if import_from is not None:
            typer.echo(f"took {store.load(import_from)} results from {import_from}")
        if export_to is not None:
            typer.echo(f"wrote {store.export(export_to)} results to {export_to}")
        if export_to is None and import_from is None:
            typer.echo(f"{len(store)} results in {store.folder}")


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn an error the user caused into one line on stderr and exit status 2."""
    try:
        yield
    except SpartaError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file without reading its tensors."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise FileFormatError(message(f"{path} {problem}", "a safetensors file", "check the path"))
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        fix = "write it with safetensors.torch.save_file or Spec.save"
        raise FileFormatError(message(f"{path} cannot be read: {error}", "a safetensors file", fix)) from error


def _kind_of(path: Path) -> str:
    """Return the kind that the metadata of a file of ours names; anyone else's is a checkpoint."""
    with _opened(path) as opened:
        return str((opened.metadata() or {}).get("sparta", "checkpoint"))


def _inspect_checkpoint(path: Path) -> Inspection:
    """Read the zeros of each tensor, one tensor in memory at a time."""
    from sparta.tesa.attribute import TeSA

    tensors: dict[str, dict[str, Any]] = {}
    elements = live = 0
    with _opened(path) as opened:
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            tensor = opened.get_tensor(name)
            tesa = TeSA.from_zeros(tensor)
            elements += tensor.numel()
            live += tesa.count("live")
            tensors[name] = {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "density": tesa.density,
                "pattern": tesa.describe_pattern(),
            }
    rows = [
        [
            name,
            "\u00d7".join(map(str, facts["shape"])),
            facts["dtype"],
            f"{facts['density']:.4f}",
            facts["pattern"],
        ]
        for name, facts in tensors.items()
    ]
    rows.append([f"{len(tensors)} tensors", "", "", f"{live / elements if elements else 1.0:.4f}", ""])
    return Inspection("checkpoint", tensors, table(["tensor", "shape", "dtype", "density", "pattern"], rows))


def _inspect_spec(path: Path) -> Inspection:
    """Read a saved spec."""
    from sparta.tesa.spec import Spec

    spec = Spec.load(path)
    return Inspection("spec", spec.to_dict(), spec.table())


_INSPECTORS: dict[str, Callable[[Path], Inspection]] = {
    "checkpoint": _inspect_checkpoint,
    "spec": _inspect_spec,
}
