"""The ``sparta`` command: a thin face on the library, for a person at a terminal.

Each command calls one public function and prints what it returns, as a table or with ``--json`` as data. The
one idea to know: an error the user can cause is one line on stderr and exit status 2, never a traceback.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparta.errors import (
    FileFormatError,
    NameNotFoundError,
    SpartaError,
    ValueRangeError,
    did_you_mean,
    message,
)
from sparta.tables import table
from sparta.version import __version__

if TYPE_CHECKING:
    from sparta.create.recipe.recipe import Recipe

__all__ = ["app", "main"]

app = typer.Typer(
    help="Model sparsity for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

recipes = typer.Typer(
    help="Write, read and check recipes for sparse training.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(recipes, name="recipe")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
RecipeFile = Annotated[Path, typer.Argument(help="A recipe: .yaml, .yml, .json or .md, ours or an older form.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Give a variable another value; may be repeated."),
]
StepsPerEpoch = Annotated[
    int | None, typer.Option(min=1, help="Optimizer steps of an epoch, for recipes that count in steps.")
]


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
    from sparta.specialize.cpu.toolchain import prebuilt_state
    from sparta.testing import environment

    with _user_errors():
        available, reason = prebuilt_state()
        found = environment().with_backend("C++ (came with the package)", available=available, reason=reason)
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


@recipes.command("new")
def new_recipe(
    *,
    pruning: Annotated[
        str, typer.Option(help="magnitude, acdc, movement, obs, mfac, structured, rigl, topkast, constant or none.")
    ] = "magnitude",
    quantization: Annotated[bool, typer.Option(help="Train quantized at the end.")] = True,
    lr: Annotated[
        str, typer.Option(help="linear, cosine, cyclic_linear, constant, stepped or exponential; none leaves it alone.")
    ] = "linear",
    distillation: Annotated[bool, typer.Option(help="Learn from a teacher too.")] = False,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this .yaml file instead of printing it.")] = None,
) -> None:
    """Make the recipe for some choices: the one that sparta.create.initialize would make."""
    from sparta.create import recipe_for

    with _user_errors():
        kind = None if pruning.lower() == "none" else pruning
        rate = None if lr.lower() == "none" else lr
        made = recipe_for(kind, quantization, rate, distillation, _settings(settings))
        made.modifiers()  # values that contradict each other are refused now, not when training starts
        if out is None:
            typer.echo(made.to_yaml(), nl=False)
        else:
            made.save(out)
            typer.echo(f"wrote {out}: {_summary(made, None)}")


@recipes.command("show")
def show_recipe(
    file: RecipeFile,
    *,
    settings: Settings = None,
    steps_per_epoch: StepsPerEpoch = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the recipe itself, in the present form.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the variables of a recipe come to, and when each modifier is at work."""
    with _user_errors():
        if as_yaml and as_json:
            raise ValueRangeError(message("both --yaml and --json", "one of the two"))
        recipe = _recipe_of(file, settings)
        if as_yaml:
            typer.echo(recipe.to_yaml(), nl=False)
            return
        facts = _facts_of(recipe, steps_per_epoch)
        if as_json:
            typer.echo(json.dumps({"file": str(file), **facts}, indent=2))
            return
        if facts["variables"]:
            typer.echo(
                table(["variable", "value"], [[name, _cell(v)] for name, v in facts["variables"].items()]) + "\n"
            )
        columns = ["stage", "modifier", "start", "end"] if recipe.is_staged else ["modifier", "start", "end"]
        rows = [[_moment(one, column) for column in columns] for one in facts["modifiers"]]
        typer.echo(table(columns, rows) + "\n")
        typer.echo(_summary(recipe, steps_per_epoch))


@recipes.command("check")
def check_recipe(file: RecipeFile, *, settings: Settings = None, steps_per_epoch: StepsPerEpoch = None) -> None:
    """Read a recipe and work out all of it, without a model; exit status 2 and the reason if that is not possible."""
    with _user_errors():
        recipe = _recipe_of(file, settings)
        typer.echo(f"{file}: {_summary(recipe, steps_per_epoch)}")


def _settings(given: Sequence[str] | None) -> dict[str, Any]:
    """Return the values of ``--set name=value``, read as a recipe would read them."""
    from sparta.create.recipe.document import parse_scalar

    found: dict[str, Any] = {}
    for entry in given or ():
        name, sign, value = entry.partition("=")
        name = name.strip()
        if not sign or not name:
            raise ValueRangeError(message(f"--set {entry!r}", "--set name=value", "such as --set sparsity=0.9"))
        if name in found:
            raise ValueRangeError(message(f"--set {name} is given twice", "once"))
        found[name] = parse_scalar(value)
    return found


def _recipe_of(file: Path, settings: Sequence[str] | None) -> Recipe:
    from sparta.create import Recipe

    return Recipe.load(file).override(_settings(settings))


def _facts_of(recipe: Recipe, steps_per_epoch: int | None) -> dict[str, Any]:
    """Return variables and modifiers of a recipe, worked out, as plain values."""
    from sparta.create.recipe.recipe import last_epoch

    staged = recipe.staged_modifiers(steps_per_epoch)
    return {
        "max_epochs": last_epoch(one for _, modifiers in staged for one in modifiers),
        "variables": recipe.values(steps_per_epoch),
        "modifiers": [
            {"stage": stage, "modifier": one.name, "kind": one.kind, "start": one.epochs()[0], "end": one.epochs()[1]}
            for stage, modifiers in staged
            for one in modifiers
        ],
    }


def _summary(recipe: Recipe, steps_per_epoch: int | None) -> str:
    facts = _facts_of(recipe, steps_per_epoch)
    count, epochs = len(facts["modifiers"]), facts["max_epochs"]
    lasts = "no end of its own" if epochs < 0 else f"{epochs} epoch{'' if epochs == 1 else 's'}"
    return f"{count} modifier{'' if count == 1 else 's'}, {lasts}"


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _moment(facts: dict[str, Any], column: str) -> str:
    """Return a cell of the table of modifiers; -1 is what it means: at once, never."""
    value = facts[column]
    if value == -1:
        return "at once" if column == "start" else "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn an error the user caused into one line on stderr and exit status 2, and a warning into one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        except SpartaError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error
        finally:
            for entry in caught:
                typer.echo(f"warning: {' '.join(str(entry.message).split())}", err=True)


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
