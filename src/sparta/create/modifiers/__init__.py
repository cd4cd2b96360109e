"""The modifiers that a recipe is made of, one file a family.

Importing this package makes them all known by name. A new modifier is one class with the
:func:`~sparta.create.modifiers.base.modifier` decorator, in a file named here.
"""

from importlib import import_module

from sparta.create.modifiers.base import KINDS, Modifier, Run, modifier, modifier_named, modifier_names

__all__ = ["KINDS", "Modifier", "Run", "modifier", "modifier_named", "modifier_names"]

_FAMILIES = (
    "epochs",
    "learning_rate",
    "values",
    "pruning",
    "acdc",
    "second_order",
    "constant",
    "structured",
    "dynamic",
    "logging",
    "oneshot",
    "smoothing",
    "quantization",
    "distillation",
    "feature_distillation",
)

for _family in _FAMILIES:
    import_module(f"{__name__}.{_family}")
