"""``sparta recipe``: write, read and check recipes for sparse training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparta.cli.console import AsJson, app, user_errors
from sparta.errors import ValueRangeError, message
from sparta.tables import table

if TYPE_CHECKING:
    from sparta.create.recipe.recipe import Recipe


recipes = typer.Typer(
    help="Write, read and check recipes for sparse training.", no_args_is_help=True, rich_markup_mode=None
)


app.add_typer(recipes, name="recipe")


RecipeFile = Annotated[Path, typer.Argument(help="A recipe: .yaml, .yml, .json or .md, ours or an older form.")]


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Give a variable another value; may be repeated."),
]


StepsPerEpoch = Annotated[
    int | None, typer.Option(min=1, help="Optimizer steps of an epoch, for recipes that count in steps.")
]


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

    with user_errors():
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
    with user_errors():
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
    with user_errors():
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
