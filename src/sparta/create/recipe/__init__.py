"""The recipe language: YAML with named modifiers, variables, and expressions that are parsed and never run.

:class:`Recipe` reads, prints, overrides and works out recipes, :func:`compose` puts one after another, and
:func:`dry_run` tells what one would do to a model. Everything stays symbolic until the modifiers are asked for, so one
variable rescales a whole recipe.
"""

from sparta.create.recipe.dry_run import DryRun, LayerForecast, ModifierForecast, dry_run
from sparta.create.recipe.expression import Expression, parse
from sparta.create.recipe.recipe import Entry, Recipe, Stage
from sparta.create.recipe.stages import compose

__all__ = [
    "DryRun",
    "Entry",
    "Expression",
    "LayerForecast",
    "ModifierForecast",
    "Recipe",
    "Stage",
    "compose",
    "dry_run",
    "parse",
]
