"""``sparta inspect``: the tensors of a file or a folder, their density and their pattern.

A file may be a checkpoint (safetensors, or ``.pt`` read without running code), a spec, or a compiled model; a folder is
what transformers writes, in one file or many.
"""

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
    file: Annotated[
        Path, typer.Argument(help="A .safetensors or .pt file, a folder of them, a spec, or a compiled model.")
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the shape, density and sparsity pattern of every tensor in a file or folder."""
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
def opened(path: Path) -> Iterator[Any]:
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
    if path.is_dir():
        return "folder"
    if path.suffix in {".pt", ".pth", ".bin"}:
        return "torch"
    with opened(path) as file:
        return str((file.metadata() or {}).get("sparta", "checkpoint"))


def _inspect_checkpoint(path: Path) -> Inspection:
    """Read the zeros of each tensor, one tensor in memory at a time."""
    return _inspection("checkpoint", _tensors_of([path]))


def _inspect_folder(path: Path) -> Inspection:
    """Read all weights of a folder."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        fix = "save the model with safetensors (save_pretrained does), or name a .pt file"
        raise FileFormatError(message(f"{path} is a folder without .safetensors files", "weights to read", fix))
    return _inspection("folder", _tensors_of(files))


def _inspect_torch(path: Path) -> Inspection:
    """Read the tensors of a file of torch.save; nothing but tensors and plain values is read from it."""
    import torch

    if not path.is_file():
        raise FileFormatError(message(f"{path} does not exist", "a file of torch.save", "check the path"))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "save its state_dict with safetensors.torch.save_file"
        raise FileFormatError(message(f"{path} cannot be read: {reason}", "tensors and plain values", fix)) from error
    tensors = _flat(content.get("state_dict", content) if isinstance(content, dict) else content)
    return _inspection("torch", iter(tensors.items()))


def _flat(content: Any, prefix: str = "") -> dict[str, Any]:
    """Return the tensors of nested dicts by dotted names."""
    import torch

    if isinstance(content, torch.Tensor):
        return {prefix or "tensor": content}
    if not isinstance(content, dict):
        return {}
    found: dict[str, Any] = {}
    for name, value in content.items():
        found.update(_flat(value, f"{prefix}.{name}" if prefix else str(name)))
    return found


def _tensors_of(files: list[Path]) -> Iterator[tuple[str, Any]]:
    for path in files:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def _inspection(kind: str, given: Iterator[tuple[str, Any]]) -> Inspection:
    """Read the zeros of tensors; the total counts weights, not the vectors beside them."""
    from sparta.tesa.attribute import TeSA

    tensors: dict[str, dict[str, Any]] = {}
    elements = live = 0
    for name, tensor in given:
        tesa = TeSA.from_zeros(tensor)
        if tensor.ndim > 1:
            elements += tensor.numel()
            live += tesa.count("live")
        tensors[name] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "density": tesa.density,
            "pattern": tesa.describe_pattern() if tensor.ndim > 1 else "",
        }
    rows = [
        [name, "\u00d7".join(map(str, facts["shape"])), facts["dtype"], f"{facts['density']:.4f}", facts["pattern"]]
        for name, facts in tensors.items()
    ]
    weights = live / elements if elements else 1.0
    rows.append([f"{len(tensors)} tensors", "", "", f"{weights:.4f}", "all weights"])
    return Inspection(kind, tensors, table(["tensor", "shape", "dtype", "density", "pattern"], rows))


def _inspect_model(path: Path) -> Inspection:
    """Read a compiled model: its report, and the tensors that its compilation started from."""
    from sparta.compiler import load

    fast = load(path)
    made = fast.provenance
    where = f"{made['model']}, compiled by sparta {made['sparta']} with torch {made['torch']} on {made['machine']}"
    return Inspection("model", fast.spec.to_dict(), f"{where}\n\n{fast.report}")


def _inspect_spec(path: Path) -> Inspection:
    """Read a saved spec."""
    from sparta.tesa.spec import Spec

    spec = Spec.load(path)
    return Inspection("spec", spec.to_dict(), spec.table())


_INSPECTORS: dict[str, Callable[[Path], Inspection]] = {
    "checkpoint": _inspect_checkpoint,
    "folder": _inspect_folder,
    "model": _inspect_model,
    "spec": _inspect_spec,
    "torch": _inspect_torch,
}
