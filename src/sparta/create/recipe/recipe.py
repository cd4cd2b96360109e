"""The recipe: named modifiers with their fields, variables, and the expressions between them, kept as written.

A recipe is a value: reading, overriding and composing return new ones, and nothing is worked out until
:meth:`Recipe.modifiers` is asked for. What you read back from :meth:`Recipe.to_yaml` is the same recipe, expressions
and all, so a saved recipe can still be rescaled by changing one variable.
"""

from __future__ import annotations

import copy
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparta.create.recipe import variables as variable
from sparta.create.recipe.document import Size, dump, parse_document, plain_data
from sparta.errors import FileFormatError, NameNotFoundError, SpartaError, ValueRangeError, did_you_mean, message
from sparta.files import write_atomic

if TYPE_CHECKING:
    from torch import nn

    from sparta.create.modifiers import Modifier
    from sparta.create.recipe.dry_run import DryRun

__all__ = ["Entry", "Recipe", "Stage", "make_entry"]

_VERSION = 1
_SUFFIXES = (".yaml", ".yml", ".md", ".json")
_STEPS = re.compile(r"(?:\$\{(?P<expression>[^{}]*)\}|(?P<number>[0-9]+(?:\.[0-9]+)?))\s+steps?")


class Entry(NamedTuple):
    """One modifier of a recipe: its name, and its fields as written."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A part of a recipe with variables of its own.

    Parameters
    ----------
    name
        None in a recipe that has no stages.
    entries
        The modifiers, in the order of the file.
    variables
        They shadow those of the recipe.
    metadata
        Anything; it is kept and has no effect.
    after
        An earlier stage, from whose end this one's epochs count; None: from the beginning of training.
    """

    name: str | None
    entries: tuple[Entry, ...] = ()
    variables: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    after: str | None = None


@dataclass(frozen=True)
class Recipe:
    """What happens when during training.

    Parameters
    ----------
    stages
        One without a name, or several with names.
    variables
        Numbers, texts, lists, null, or expressions over other variables, by name.
    metadata
        Anything; it is kept and has no effect.

    Examples
    --------
    >>> recipe = Recipe.from_yaml('''
    ... variables: {num_epochs: 20}
    ... modifiers:
    ...   - EpochRange: {start_epoch: 0, end_epoch: "${num_epochs}"}
    ... ''')
    >>> recipe.override({"num_epochs": 5}).max_epochs
    5
    >>> print(recipe, end="")
    version: 1
    variables:
      num_epochs: 20
    modifiers:
    - EpochRange:
        start_epoch: 0
        end_epoch: ${num_epochs}
    """

    stages: tuple[Stage, ...]
    variables: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check names and references, so that a recipe that exists can be worked out."""
        for name in self.variables:
            variable.check_name(name)
        variable.check_references(self.variables)
        _check_stage_names(self.stages)
        for stage in self.stages:
            for name in stage.variables:
                variable.check_name(name)
            variable.check_references(stage.variables, self.variables)
            known = {*self.variables, *stage.variables, variable.STEPS_PER_EPOCH}
            for entry in stage.entries:
                for key, value in entry.fields.items():
                    for missing in sorted(variable.references(_in_epochs(value)) - known):
                        raise NameNotFoundError(
                            f"in {key} of {_where(stage, entry)}: {did_you_mean(missing, known, 'variable')}"
                        )

    # ------------------------------------------------------------------ reading

    @classmethod
    def from_yaml(cls, text: str) -> Recipe:
        """Return the recipe a text holds: our own form, or one written for SparseML or llm-compressor.

        Parameters
        ----------
        text
            YAML, or Markdown with YAML front matter.
        """
        return cls._read(text, "the recipe")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Return the recipe in a file, ``.yaml``, ``.yml``, ``.json`` or ``.md``."""
        file = Path(path)
        if file.suffix.lower() not in _SUFFIXES:
            raise FileFormatError(message(f"{file} does not look like a recipe", ", ".join(_SUFFIXES)))
        try:
            text = file.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise FileFormatError(message(f"cannot read {file}: {error}", fix="check the path")) from error
        try:
            return cls._read(text, str(file))
        except SpartaError as error:
            if str(file) in str(error):
                raise
            raise type(error)(f"{file}: {error}") from error

    @classmethod
    def _read(cls, text: str, source: str) -> Recipe:
        data = parse_document(text, source=source)
        if not isinstance(data, dict):
            raise FileFormatError(
                message(f"{source} holds {type(data).__name__}", "a mapping with `modifiers` or `stages`")
            )
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Return the recipe that :meth:`to_dict` wrote, or the same in an old form."""
        from sparta.create.recipe.legacy import modernized

        data = modernized(plain_data(dict(data)))
        version = data.pop("version", _VERSION)
        if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= _VERSION:
            fix = "upgrade sparta to read it" if isinstance(version, int) and version > _VERSION else ""
            raise FileFormatError(message(f"a recipe of version {version!r}", f"1 to {_VERSION}", fix))
        _check_keys(data, ("metadata", "variables", "modifiers", "stages"), "key of a recipe:")
        if ("modifiers" in data) == ("stages" in data):
            given = "both `modifiers` and `stages`" if "stages" in data else "neither `modifiers` nor `stages`"
            raise FileFormatError(message(f"a recipe with {given}", "one of the two"))
        if "modifiers" in data:
            stages = [Stage(None, _entries(data["modifiers"]))]
        else:
            stages = [_stage(name, body) for name, body in _mapping(data["stages"], "stages").items()]
        return cls(
            tuple(stages),
            _mapping(data.get("variables"), "variables"),
            _mapping(data.get("metadata"), "metadata"),
        )

    @classmethod
    def from_modifiers(cls, modifiers: Iterable[Modifier]) -> Recipe:
        """Return the recipe of some modifiers; fields at their defaults are left out.

        >>> from sparta.create.modifiers import modifier_named
        >>> Recipe.from_modifiers([modifier_named("EpochRange")(end_epoch=3)]).max_epochs
        3
        """
        return cls((Stage(None, tuple(make_entry(one.name, one.fields()) for one in modifiers)),))

    # ------------------------------------------------------------------ writing

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain data, expressions kept."""
        data: dict[str, Any] = {"version": _VERSION}
        _put(data, metadata=self.metadata, variables=self.variables)
        if self.is_staged:
            data["stages"] = {str(stage.name): _stage_dict(stage) for stage in self.stages}
        else:
            data["modifiers"] = [{name: fields} for name, fields in self.stages[0].entries]
        return copy.deepcopy(data)

    def to_yaml(self) -> str:
        """Return the recipe as YAML, expressions kept; :meth:`from_yaml` gives an equal recipe back."""
        return dump(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe to a ``.yaml`` file."""
        if Path(path).suffix.lower() not in {".yaml", ".yml"}:
            raise FileFormatError(message(f"cannot save a recipe as {Path(path).name}", "a name that ends in .yaml"))
        write_atomic(path, self.to_yaml().encode())

    def __str__(self) -> str:
        return self.to_yaml()

    # ------------------------------------------------------------------ changing

    def override(self, variables: Mapping[str, Any] | str) -> Recipe:
        """Return the recipe with other values for some of its variables; a name it does not have is an error.

        Parameters
        ----------
        variables
            A mapping, a JSON object or ``"name=value,name=value"``. In a recipe with stages a name changes wherever
            it is defined; ``stage.name`` changes one stage's alone.
        """
        overrides = variable.as_overrides(variables)
        root = dict(self.variables)
        inner = {stage.name: dict(stage.variables) for stage in self.stages}
        known = {*root, *(name for own in inner.values() for name in own)}
        known |= {f"{stage}.{name}" for stage, own in inner.items() if stage for name in own}
        for name, value in overrides.items():
            if name not in known:
                raise NameNotFoundError(did_you_mean(str(name), known, "variable of the recipe"))
            stage_name, _, short = name.rpartition(".")
            targets = [inner[stage_name]] if stage_name else [root, *inner.values()]
            for target in targets:
                if short in target:
                    target[short] = plain_data(value, f"the override of {name!r}")
        stages = tuple(replace(stage, variables=inner[stage.name]) for stage in self.stages)
        return replace(self, stages=stages, variables=root)

    def with_metadata(self, metadata: Mapping[str, Any]) -> Recipe:
        """Return the recipe with more metadata; what is there already stays, with a warning if it differs."""
        for key, value in metadata.items():
            if key in self.metadata and self.metadata[key] != value:
                text = f"the recipe's metadata has {key}={self.metadata[key]!r}, which stays; {value!r} is left out"
                warnings.warn(text, stacklevel=2)
        return replace(self, metadata={**metadata, **self.metadata})

    # ------------------------------------------------------------------ working it out

    @property
    def is_staged(self) -> bool:
        """Whether it has stages with names."""
        return not (len(self.stages) == 1 and self.stages[0].name is None)

    def values(self, steps_per_epoch: int | None = None) -> dict[str, Any]:
        """Return what the variables come to; those of stages as ``stage.name``."""
        outer = {} if steps_per_epoch is None else {variable.STEPS_PER_EPOCH: steps_per_epoch}
        root = variable.resolve(self.variables, outer)
        found = {name: root[name] for name in self.variables}
        for stage in self.stages:
            scope = variable.resolve(stage.variables, root)
            found.update({f"{stage.name}.{name}": scope[name] for name in stage.variables})
        return found

    def modifiers(self, steps_per_epoch: int | None = None) -> list[Modifier]:
        """Return fresh modifiers, worked out and checked, in the order of the file.

        Parameters
        ----------
        steps_per_epoch
            Needed if the recipe counts in steps somewhere.
        """
        return [modifier for _, modifiers in self.staged_modifiers(steps_per_epoch) for modifier in modifiers]

    def staged_modifiers(self, steps_per_epoch: int | None = None) -> list[tuple[str | None, list[Modifier]]]:
        """Return the same as :meth:`modifiers`, by stage, with the names of the stages."""
        from sparta.create.recipe.stages import lined_up

        outer = {} if steps_per_epoch is None else {variable.STEPS_PER_EPOCH: steps_per_epoch}
        root = variable.resolve(self.variables, outer)
        size = Size("the recipe, its variables written out,")
        made = []
        for stage in self.stages:
            scope = variable.resolve(stage.variables, root)
            made.append([_made(entry, scope, stage, size) for entry in stage.entries])
        return list(zip([stage.name for stage in self.stages], lined_up(self.stages, made), strict=True))

    @property
    def max_epochs(self) -> int:
        """How many epochs it lasts: the last moment of any modifier, rounded up; -1 if there is none."""
        return last_epoch(self.modifiers())

    def dry_run(
        self,
        model: nn.Module,
        steps_per_epoch: int | None = None,
        *,
        include: Sequence[str] | str | None = None,
        ignore: Sequence[str] | str | None = None,
    ) -> DryRun:
        """Return what the recipe would do to `model`, without doing it; see :func:`sparta.create.recipe.dry_run`."""
        from sparta.create.recipe.dry_run import dry_run

        return dry_run(self, model, steps_per_epoch, include=include, ignore=ignore)


def make_entry(name: str, fields: Mapping[str, Any] | None) -> Entry:
    """Return an entry under its proper name; refuses a modifier or a field that does not exist.

    >>> make_entry("EpochRangeModifier", {"end_epoch": "${num_epochs}"})
    Entry(name='EpochRange', fields={'end_epoch': '${num_epochs}'})
    """
    from sparta.create.modifiers import modifier_named

    kind = modifier_named(name)
    if fields is not None and not isinstance(fields, Mapping):
        raise FileFormatError(message(f"{name} is given {fields!r}", "its fields: a mapping"))
    for key in fields or {}:
        if key not in kind.model_fields:
            raise NameNotFoundError(did_you_mean(key, kind.model_fields, f"field of {kind.label()}"))
    return Entry(kind.label(), plain_data(fields or {}, name))


def last_epoch(modifiers: Iterable[Modifier]) -> int:
    """Return the last moment of any of the modifiers, rounded up to a whole epoch; -1 if there is none."""
    return max((math.ceil(moment - 1e-6) for one in modifiers for moment in one.epochs()), default=-1)


# ---------------------------------------------------------------------- parts


def _made(entry: Entry, scope: Mapping[str, Any], stage: Stage, size: Size) -> Modifier:
    from sparta.create.modifiers import modifier_named

    kind = modifier_named(entry.name)
    timed = {*kind.epoch_fields, "update_frequency"}
    try:
        fields = {
            key: variable.substitute(_in_epochs(value) if key in timed else value, scope)
            for key, value in entry.fields.items()
        }
        size.add(fields)
        return kind(**fields)
    except SpartaError as error:
        if stage.name is None or f"stage {stage.name!r}" in str(error):
            raise
        raise type(error)(f"stage {stage.name!r}: {error}") from error


def _in_epochs(value: object) -> object:
    """Return ``"100 steps"`` as an expression in epochs, and anything else as it is."""
    found = _STEPS.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return value
    return f"${{({found['expression'] or found['number']}) / {variable.STEPS_PER_EPOCH}}}"


def _where(stage: Stage, entry: Entry) -> str:
    return entry.name if stage.name is None else f"{entry.name} of stage {stage.name!r}"


def _check_stage_names(stages: Sequence[Stage]) -> None:
    names = [stage.name for stage in stages]
    if not names or (None in names and len(names) > 1):
        raise ValueRangeError(message(f"a recipe of the stages {names}", "one without a name, or all with names"))
    for name in names:
        if name is not None and (not name or "." in name):
            raise ValueRangeError(message(f"the stage name {name!r}", "a text without a dot"))
    for name in set(names):
        if names.count(name) > 1:
            raise ValueRangeError(message(f"two stages called {name!r}", "different names", "rename one"))
    for place, stage in enumerate(stages):
        if stage.after is not None and stage.after not in names[:place]:
            earlier = ", ".join(map(repr, names[:place])) or "none: it is the first"
            raise ValueRangeError(
                message(f"stage {stage.name!r} comes after {stage.after!r}", f"stages before it: {earlier}")
            )


def _check_keys(data: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    for key in data:
        if key not in allowed:
            raise NameNotFoundError(did_you_mean(str(key), allowed, what))


def _mapping(given: object, what: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise FileFormatError(message(f"`{what}` of the recipe is {given!r}", "a mapping"))
    return given


def _entries(given: object) -> tuple[Entry, ...]:
    if not isinstance(given, list):
        raise FileFormatError(message(f"`modifiers` is {given!r}", "a list of `- Name: {field: value}`"))
    entries = []
    for item in given:
        if isinstance(item, str):
            entries.append(make_entry(item, None))
        elif isinstance(item, dict) and len(item) == 1:
            entries.append(make_entry(*next(iter(item.items()))))
        else:
            raise FileFormatError(
                message(f"the modifier {item!r}", "`- Name: {field: value}`, one name an item", "check the indentation")
            )
    return tuple(entries)


def _stage(name: str, body: object) -> Stage:
    data = _mapping(body, f"stages.{name}")
    _check_keys(data, ("after", "metadata", "variables", "modifiers"), f"key of stage {name!r}:")
    after = data.get("after")
    if after is not None and not isinstance(after, str):
        raise FileFormatError(message(f"`after` of stage {name!r} is {after!r}", "the name of an earlier stage"))
    return Stage(
        name,
        _entries(data.get("modifiers", [])),
        _mapping(data.get("variables"), f"stages.{name}.variables"),
        _mapping(data.get("metadata"), f"stages.{name}.metadata"),
        after,
    )


def _stage_dict(stage: Stage) -> dict[str, Any]:
    data: dict[str, Any] = {"after": stage.after} if stage.after else {}
    _put(data, metadata=stage.metadata, variables=stage.variables)
    data["modifiers"] = [{name: fields} for name, fields in stage.entries]
    return data


def _put(data: dict[str, Any], **parts: Mapping[str, Any]) -> None:
    """Add the parts that are not empty."""
    data.update({name: dict(part) for name, part in parts.items() if part})
