"""``sparta inspect``: the tensors of a file, their density and their pattern."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sparta.cli.console import AsJson, app, user_errors
from sparta.errors import FileFormatError, NameNotFoundError, did_you_mean, message
from sparta.tables import table


@dataclass(frozen=True)
class Inspection:
    """What ``sparta inspect`` found in a file: its kind, the facts of each tensor, and both as text."""

    kind: str
    tensors: dict[str, dict[str, Any]]
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        return {"kind": self.kind, "tensors": self.tensors}


@app.command("inspect")
def inspect_file(
    file: Annotated[Path, typer.Argument(help="A .safetensors checkpoint, or a spec saved by sparta.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the shape, density and sparsity pattern of every tensor in a file."""
    with user_errors():
        kind = _kind_of(file)
        if kind not in _INSPECTORS:
            raise NameNotFoundError(did_you_mean(kind, _INSPECTORS, "kind of file"))
        found = _INSPECTORS[kind](file)
        if as_json:
            typer.echo(json.dumps({"file": str(file), **found.to_dict()}, indent=2))
        else:
            typer.echo(found.text)


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
