"""Stages: one recipe after another.

:func:`compose` puts one recipe after another, and :func:`lined_up` gives the modifiers of stages their place in
time. A stage that comes ``after`` another counts its epochs from where that one ends, so changing the length of the
first stage moves all that come after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sparta.create.recipe.recipe import Recipe, Stage, last_epoch
from sparta.create.recipe.variables import shadow_safe
from sparta.errors import ValueRangeError, message

if TYPE_CHECKING:
    from sparta.create.modifiers import Modifier

__all__ = ["compose", "lined_up"]


def compose(first: Recipe, second: Recipe, *, names: tuple[str, str] | None = None) -> Recipe:
    """Return the recipe that does `first`, and then `second`.

    The epochs of `second` count from where `first` ends, rounded up to a whole epoch. What has no end in `first` ends
    there, except quantization and removed layers, which stay so. Each keeps its own variables.

    Parameters
    ----------
    first, second
        With stages or without. One without becomes a stage: ``stage_0`` and ``stage_1`` if neither has stages,
        ``stage_n`` after a recipe of n stages, ``pre_<name>`` before one whose first stage is called ``<name>``.
    names
        The names to give to recipes that have no stages, in place of these.

    Examples
    --------
    >>> part = Recipe.from_yaml("{variables: {n: 3}, modifiers: [EpochRange: {end_epoch: '${n}'}]}")
    >>> both = compose(part, part)
    >>> [(stage.name, stage.after) for stage in both.stages], both.max_epochs
    ([('stage_0', None), ('stage_1', 'stage_0')], 6)
    >>> both.override({"stage_0.n": 10}).modifiers()[1].epochs()
    (10.0, 13.0)
    """
    second_name = f"stage_{len(first.stages)}"
    first_name = f"pre_{second.stages[0].name}" if second.is_staged else "stage_0"
    if names is not None:
        first_name, second_name = names
    before, after = _pushed_down(first, first_name), _pushed_down(second, second_name)
    last = before.stages[-1].name
    moved = [stage if stage.after else replace(stage, after=last) for stage in after.stages]
    return Recipe((*before.stages, *moved), {}, before.with_metadata(after.metadata).metadata)


def lined_up(stages: Sequence[Stage], modifiers: Sequence[list[Modifier]]) -> list[list[Modifier]]:
    """Return the modifiers of each stage at their place in time.

    Parameters
    ----------
    stages
        Each comes ``after`` nothing, or after an earlier one.
    modifiers
        Those of each stage, at the epochs that the stage says.
    """
    placed: list[list[Modifier]] = []
    names = [stage.name for stage in stages]
    for stage, own in zip(stages, modifiers, strict=True):
        if stage.after is None:
            placed.append(own)
            continue
        earlier = names.index(stage.after) + 1
        end = last_epoch(one for part in placed[:earlier] for one in part)
        if end < 0:
            raise ValueRangeError(
                message(
                    f"stage {stage.name!r} comes after {stage.after!r}, which has no end",
                    "stages with an end",
                    "add an EpochRange to the first",
                )
            )
        for place in range(earlier):
            placed[place] = [_ended(one, end) for one in placed[place]]
        placed.append([one.shifted(end) for one in own])
    return placed


def _ended(modifier: Modifier, end: float) -> Modifier:
    """Return a modifier that would never end with an end; one that cannot have an end stays."""
    if modifier.end_epoch >= 0 or modifier.kind in {"quantization", "structured"}:
        return modifier
    fields = {name: getattr(modifier, name) for name in modifier.model_fields_set}
    return type(modifier)(**{**fields, "end_epoch": end})


def _pushed_down(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe with all variables in its stages; one without stages becomes the stage `name`."""
    return Recipe(
        tuple(
            replace(stage, name=stage.name or name, variables=shadow_safe(recipe.variables, stage.variables))
            for stage in recipe.stages
        ),
        {},
        recipe.metadata,
    )
