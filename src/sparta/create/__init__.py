"""Create: one call turns an existing training script into a sparse one.

A recipe (a list of modifiers with windows of epochs) is made from a few arguments, and runs itself from the optimizer's
own steps. :func:`initialize` returns your optimizer (or your gradient scaler); train as before.
"""

from sparta.arguments import front_door
from sparta.create.comparison import MethodComparison, MethodResult, compare
from sparta.create.initialize import initialize
from sparta.create.manager import Manager
from sparta.create.modifiers import Modifier, Run, modifier, modifier_named, modifier_names
from sparta.create.recipe.recipe import Recipe
from sparta.create.template import recipe_for
from sparta.create.variables import RecipeVariables

__all__ = [
    "Manager",
    "MethodComparison",
    "MethodResult",
    "Modifier",
    "Recipe",
    "RecipeVariables",
    "Run",
    "compare",
    "initialize",
    "modifier",
    "modifier_named",
    "modifier_names",
    "recipe_for",
]

front_door(
    globals(),
    [name for name in __all__ if name not in ("Modifier", "RecipeVariables", "modifier")],
    ["Recipe.from_yaml"],
)
