"""``sparta prune``: zeros into a checkpoint, without code and without data.

Weights are pruned by magnitude, one file and one tensor at a time, so the checkpoint may be larger than memory. The
result is an ordinary dense checkpoint with zeros in it, which anything loads, and a spec that says what was pruned.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparta.cli.console import AsJson, app, user_errors
from sparta.errors import FileFormatError, ValueRangeError, message

if TYPE_CHECKING:
    from sparta.tesa import Pattern, TeSA

_LEFT_OUT = ("embed", "lm_head", "wte", "wpe", "shared.weight", "norm")


@app.command("prune")
def prune_checkpoint(
    source: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder of them as transformers writes it.")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file or folder to write.")],
    pattern: Annotated[str, typer.Option(help="unstructured, 4x1, 16x16, 2:4, channel, ...")] = "2:4",
    sparsity: Annotated[
        float | None, typer.Option(help="Share of zeros, 0 to 1; what the pattern says for N:M.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Only tensors whose name holds this; may be repeated.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="No tensor whose name holds this; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prune the weights of a checkpoint by magnitude; embeddings and heads are left as they are."""
    with user_errors():
        from sparta.tesa import Spec
        from sparta.tesa.patterns.base import parse_pattern

        chosen = parse_pattern(pattern)
        files = _files(source)
        target = _target(source, out)
        specs: dict[str, TeSA] = {}
        for file in files:
            specs.update(
                _pruned(file, target / file.name if source.is_dir() else out, chosen, sparsity, include, ignore)
            )
        if not specs:
            given = f"no weight of {source} is to be pruned"
            raise ValueRangeError(message(given, fix="see the names with sparta inspect, and choose by --include"))
        spec = Spec(specs)
        spec_file = (target if source.is_dir() else out.parent) / f"{out.stem}.spec.safetensors"
        spec.save(spec_file)
        facts: dict[str, Any] = {"tensors": len(specs), "spec": str(spec_file), "out": str(out)}
        live = sum(tesa.count("live") for tesa in specs.values())
        facts["zeros"] = 1 - live / sum(tesa.numel for tesa in specs.values())
        text = f"pruned {len(specs)} tensors to {facts['zeros']:.1%} zeros ({chosen})\nwrote {out} and {spec_file}"
        typer.echo(json.dumps(facts, indent=2) if as_json else text)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    found = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    if not found:
        allowed = "a .safetensors file, or a folder that holds some"
        raise FileFormatError(message(f"{source} has no weights that can be read", allowed, "check the path"))
    return found


def _target(source: Path, out: Path) -> Path:
    """Return the folder that is written to; everything beside the weights is copied."""
    if source.resolve() == out.resolve():
        raise ValueRangeError(message(f"--out {out}", "another place than the checkpoint's own"))
    if not source.is_dir():
        if not out.parent.is_dir():
            raise FileFormatError(message(f"cannot write {out}: its folder does not exist", fix="create it first"))
        return out.parent
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.is_file() and file.suffix not in {".safetensors", ".bin", ".pt", ".pth"}:
                shutil.copyfile(file, out / file.name)
    except OSError as error:
        raise FileFormatError(
            message(f"cannot write {out}: {error}", fix="choose a folder that you may write")
        ) from error
    return out


def _pruned(
    file: Path, out: Path, pattern: Pattern, sparsity: float | None, include: list[str] | None, ignore: list[str] | None
) -> Iterator[tuple[str, TeSA]]:
    """Write a file with its weights pruned; yield what is known of each of them."""
    from safetensors.torch import save

    from sparta.cli.inspect import opened
    from sparta.files import write_atomic
    from sparta.tesa import TeSA

    tensors = {}
    with opened(file) as checkpoint:
        metadata = checkpoint.metadata()
        for name in checkpoint.keys():  # noqa: SIM118 - not a mapping
            tensor = checkpoint.get_tensor(name)
            tensors[name] = tensor
            if tensor.ndim < 2 or not tensor.is_floating_point() or not _chosen(name, include, ignore):
                continue
            mask = _projected(pattern, name, tensor, sparsity)
            tensors[name] = tensor * mask
            yield name, TeSA.from_mask(mask)
    write_atomic(out, save(tensors, metadata=metadata))


def _projected(pattern: Pattern, name: str, tensor: Any, sparsity: float | None) -> Any:
    from sparta.errors import SpartaError

    scores = tensor.float().abs()
    try:
        return pattern.project(scores) if sparsity is None else pattern.project(scores, sparsity)
    except SpartaError as error:
        raise type(error)(f"{name}: {error}") from error


def _chosen(name: str, include: list[str] | None, ignore: list[str] | None) -> bool:
    if any(part in name for part in ignore or ()):
        return False
    return any(part in name for part in include) if include else not any(part in name for part in _LEFT_OUT)
