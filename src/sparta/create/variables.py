"""Recipe variables: the handful of numbers that a generated recipe is made from, each with its help text.

:func:`sparta.create.template.recipe_for` turns them into a recipe. What follows from another value is filled in when
the variables are made, and visible, so ``RecipeVariables(target="tensorrt").mask_type`` is ``"2:4"``; a value that
contradicts another is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sparta.create.modifiers.masked import mask_text, pattern_of
from sparta.create.modifiers.spread import ALLOCATIONS
from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError, did_you_mean, message
from sparta.sparsify.targets import TARGETS
from sparta.tables import table
from sparta.tesa.patterns import Pattern

__all__ = ["TARGETS", "RecipeVariables", "as_variables"]


class RecipeVariables(BaseModel):
    """What a generated recipe is made from. Print ``RecipeVariables.help()`` for the list.

    Examples
    --------
    >>> RecipeVariables(num_epochs=10, sparsity=0.9).sparsity
    0.9
    >>> variables = RecipeVariables(target="tensorrt")
    >>> variables.mask_type, variables.sparsity, variables.global_sparsity
    ('2:4', 0.5, False)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    num_epochs: float = Field(default=20.0, gt=0, description="epochs to train in all; every window scales with it")
    init_lr: float = Field(default=1e-3, ge=0, description="learning rate at the start of the schedule")
    final_lr: float = Field(default=1e-7, ge=0, description="learning rate at the end of the schedule")
    target: str | None = Field(
        default=None, description=f"hardware to deploy on, which decides mask_type: {', '.join(TARGETS)}"
    )
    sparsity: float = Field(
        default=0.8,
        ge=0,
        lt=1,
        description="fraction of the weights that is pruned in the end; N:M masks have their own",
    )
    mask_type: str | list[int] = Field(
        default="unstructured",
        description="where zeros may be: unstructured, N:M (N kept), block4, block:HxW or [H, W], filter, channel",
    )
    global_sparsity: bool = Field(
        default=True, description="rank all layers together, by one threshold if it is given; false: each layer alike"
    )
    allocation: str | None = Field(
        default=None,
        description=f"how the sparsity is spread over layers: {', '.join(ALLOCATIONS)}; none: as the kind does",
    )
    hardness: float = Field(default=0.5, ge=0, le=1, description="weight of the teacher in the loss of distillation")
    temperature: float = Field(default=2.0, gt=0, description="softmax temperature of distillation")

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name not in type(self).model_fields:
                raise NameNotFoundError(did_you_mean(name, type(self).model_fields, "recipe variable"))
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            cause = first.get("ctx", {}).get("error")
            if isinstance(cause, SpartaError):
                raise cause from None
            place = ".".join(str(part) for part in first["loc"][:1])
            text = str(first["msg"])
            given = f"the recipe variable {place} is {values.get(place)!r}: {text[0].lower()}{text[1:]}"
            raise ValueRangeError(message(given, str(type(self).model_fields[place].description))) from error

    @field_validator("target")
    @classmethod
    def _known_target(cls, value: str | None) -> str | None:
        if value is not None and value not in TARGETS:
            raise NameNotFoundError(did_you_mean(value, TARGETS, "target"))
        return value

    @field_validator("allocation")
    @classmethod
    def _known_allocation(cls, value: str | None) -> str | None:
        if value is not None and value not in ALLOCATIONS:
            raise NameNotFoundError(did_you_mean(value, ALLOCATIONS, "allocation"))
        return value

    _as_text = field_validator("mask_type", mode="before")(mask_text)

    @field_validator("mask_type")
    @classmethod
    def _known_mask(cls, value: str | list[int]) -> str | list[int]:
        pattern_of(value)
        return value

    @model_validator(mode="after")
    def _derive(self) -> Self:
        """Fill in what follows from the target and the mask, and refuse what contradicts them."""
        if self.target is not None:
            allowed = TARGETS[self.target]
            if "mask_type" not in self.model_fields_set:
                self._fill("mask_type", allowed[0])
            elif pattern_of(self.mask_type) not in [pattern_of(mask) for mask in allowed]:
                given = f"mask_type {self.mask_type!r} does not pay on the target {self.target!r}"
                raise ValueRangeError(message(given, ", ".join(allowed), "leave mask_type or target out"))
        if self.allocation is not None:
            self._derive_ranking(together=self.allocation == "global")
        pattern = pattern_of(self.mask_type)
        own = pattern.own_sparsity()
        if own is not None:
            self._derive_from(own)
        return self

    def _derive_ranking(self, *, together: bool) -> None:
        if "global_sparsity" not in self.model_fields_set:
            self._fill("global_sparsity", together)
        elif self.global_sparsity != together:
            given = f"global_sparsity is {self.global_sparsity} with allocation {self.allocation!r}"
            raise ValueRangeError(message(given, "one of them", "leave global_sparsity out"))

    def _derive_from(self, own: float) -> None:
        """Fill in what follows from a mask with a sparsity of its own."""
        if "sparsity" not in self.model_fields_set:
            self._fill("sparsity", own)
        elif self.sparsity < own - 1e-6:
            given = f"sparsity {self.sparsity} with mask_type {self.mask_type!r}, which prunes {own:.4g}"
            raise ValueRangeError(message(given, f"{own:.4g} or more", "leave sparsity out, or take another mask"))
        if self.allocation not in {None, "uniform"}:
            given = (
                f"allocation {self.allocation!r} with mask_type {self.mask_type!r}, which says how sparse layers are"
            )
            raise ValueRangeError(message(given, "uniform", "leave allocation out"))
        if "global_sparsity" not in self.model_fields_set:
            self._fill("global_sparsity", value=False)
        elif self.global_sparsity:
            given = f"global_sparsity is true with mask_type {self.mask_type!r}, which says how sparse each layer is"
            raise ValueRangeError(message(given, "false", "leave global_sparsity out"))

    def _fill(self, name: str, value: object) -> None:
        """Set a value that follows from others, without marking it as given."""
        self.__dict__[name] = value

    @property
    def pattern(self) -> Pattern:
        """The pattern that :attr:`mask_type` stands for."""
        return pattern_of(self.mask_type)

    @classmethod
    def help(cls) -> str:
        """Return all variables with their defaults and what they are for, as a table."""
        rows = [[name, str(info.default), info.description] for name, info in cls.model_fields.items()]
        return table(["variable", "default", "meaning"], rows)


def as_variables(given: RecipeVariables | Mapping[str, Any] | None) -> RecipeVariables:
    """Return recipe variables from themselves, from a dictionary, or the defaults from None.

    >>> as_variables({"num_epochs": 3}) == as_variables(RecipeVariables(num_epochs=3))
    True
    """
    if isinstance(given, RecipeVariables):
        return given
    if given is None:
        return RecipeVariables()
    if not isinstance(given, Mapping):
        raise ValueRangeError(
            message(f"recipe_variables is a {type(given).__name__}", "RecipeVariables, a dictionary, or None")
        )
    return RecipeVariables(**{str(name): value for name, value in given.items()})
