"""Old recipes: files written for SparseML (``!Tag`` modifiers) and for llm-compressor (``*_stage`` mappings).

:func:`modernized` turns either into the form that our own recipes have; everything after it knows one form only. What
has no counterpart here is refused by its name; the few fields that are dropped (how things were computed or logged, not
what) are warned of.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from sparta.create.recipe import variables as variable
from sparta.create.recipe.document import Tagged
from sparta.create.recipe.legacy_quantization import (
    OLD_ONLY,
    anchored,
    mapping,
    quantization_fields,
)
from sparta.create.recipe.legacy_stages import from_stages, holds_modifiers
from sparta.errors import FileFormatError, NameNotFoundError, did_you_mean, message

__all__ = ["modernized"]

Fields = dict[str, Any]

_EVAL = re.compile(r"\s*eval\((.*)\)\s*", re.DOTALL)
_TAGS = {"LegacyGMPruning": "GMPruning"}
_SCORES = {"movement": "MovementPruning", "mfac": "MFACPruning"}
_WITHOUT_EFFECT = frozenset({"log_types"})  # what was logged where
_DROPPED = {
    "grad_sampler_kwargs": "pass data= or loss_closure= to initialize for fresh gradients",
    "num_pages": "gradients lie where grads_device says",
    "available_devices": "gradients lie where grads_device says",
    "available_gpus": "gradients lie where grads_device says",
}


def modernized(data: dict[str, Any]) -> dict[str, Any]:
    r"""Return a recipe's data in the present form, from any form.

    >>> from sparta.create.recipe.document import parse_document
    >>> modernized(parse_document("n: 3\nmodifiers:\n  - !EpochRangeModifier {end_epoch: eval(n * 2)}"))
    {'variables': {'n': 3}, 'modifiers': [{'EpochRange': {'end_epoch': '${n * 2}'}}]}
    """
    if any(_holds_tags(value) for value in data.values()):
        return _from_tags(data)
    if any(key.endswith(("_stage", "_modifiers")) and isinstance(value, dict) for key, value in data.items()):
        return from_stages(data)
    return data


def _holds_tags(value: object) -> bool:
    if isinstance(value, Tagged):
        return True
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(_holds_tags(item) for item in items)


# ---------------------------------------------------------------------- SparseML


def _from_tags(data: dict[str, Any]) -> dict[str, Any]:
    stages = {
        key: value
        for key, value in data.items()
        if isinstance(value, dict) and any(holds_modifiers(inner) for inner in value)
    }
    root = _tagged_part({key: value for key, value in data.items() if key not in stages}, "the recipe", {})
    if not stages:
        return root
    if root.pop("modifiers"):
        raise FileFormatError(message("a recipe with stages and with modifiers outside them", "one of the two"))
    outer = root.get("variables", {})
    return {**root, "stages": {name: _tagged_part(body, f"stage {name!r}", outer) for name, body in stages.items()}}


def _tagged_part(data: dict[str, Any], where: str, outer: Fields) -> dict[str, Any]:
    """Return metadata, variables and modifiers of a recipe without stages, or of one stage inside `outer`."""
    metadata = mapping(data.get("__metadata__"), "__metadata__")
    if "version" in data:  # the old package's, not a variable anyone used
        metadata["version"] = data["version"]
    groups = {key: value for key, value in data.items() if holds_modifiers(key)}
    variables = {
        key: _expressed(value)
        for key, value in data.items()
        if key not in groups and key not in {"__metadata__", "version"}
    }
    for key, value in variables.items():
        if _holds_tags(value):
            raise FileFormatError(
                message(f"modifiers under the key {key!r} of {where}", "keys with `modifiers` in their name")
            )
    modifiers: list[dict[str, Fields]] = []
    for key, value in groups.items():
        if not isinstance(value, list) or not all(isinstance(item, Tagged) for item in value):
            raise FileFormatError(message(f"{key!r} of {where} is {value!r}", "a list of modifiers, each with a !Tag"))
        modifiers += [_tagged_entry(item, variables, outer) for item in value]
    part: dict[str, Any] = {}
    if metadata:
        part["metadata"] = metadata
    if variables:
        part["variables"] = variables
    return {**part, "modifiers": modifiers}


def _tagged_entry(item: Tagged, variables: Fields, outer: Fields) -> dict[str, Fields]:
    fields = {key: _expressed(value) for key, value in item.fields.items() if key not in _WITHOUT_EFFECT}
    name = _known(item.tag)
    for key in fields.keys() & _DROPPED.keys():
        if fields.pop(key):
            warnings.warn(f"{key} of {item.tag} left out: {_DROPPED[key]}", stacklevel=2)
    if name == "GMPruning" and isinstance(fields.get("score_type"), str):
        name = _SCORES.get(fields["score_type"].lower(), name)
        if name != "GMPruning":
            fields.pop("score_type")
    if name == "Quantization":
        # what becomes another field must be known now; the others may stay expressions
        known = {key: _value(value, variables, outer) for key, value in fields.items() if key in OLD_ONLY}
        fields = quantization_fields(fields | known)
    _lower_start(fields, item.tag, variables, outer)
    if name in {"LearningRate", "LearningRateFunction"}:
        fields = _rate_fields(fields)
    for key in ("params", "layers"):
        if key in fields:
            fields[key] = anchored(fields[key])
    if isinstance(fields.get("final_sparsity"), dict):
        fields["final_sparsity"] = {key: anchored(names) for key, names in fields["final_sparsity"].items()}
    return {name: fields}


def _lower_start(fields: Fields, tag: str, variables: Fields, outer: Fields) -> None:
    """Lower an initial sparsity to the final one where it lies above it, with a warning."""
    first, last = (_value(fields.get(key), variables, outer) for key in ("init_sparsity", "final_sparsity"))
    if isinstance(first, int | float) and isinstance(last, int | float) and first > last:
        warnings.warn(f"init_sparsity of {tag} is {first}, above final_sparsity: {last} is taken", stacklevel=2)
        fields["init_sparsity"] = fields["final_sparsity"]


def _value(value: Any, variables: Fields, outer: Fields) -> Any:
    """Return what a value comes to, if it is an expression."""
    if not variable.references(value):
        return value
    variable.check_references(outer)
    variable.check_references(variables, outer)
    return variable.substitute(value, variable.resolve(variables, variable.resolve(outer, {})))


def _rate_fields(fields: Fields) -> Fields:
    """Return learning-rate fields with PyTorch's names for what it names, counted from the start of the window."""
    fields.pop("constant_logging", None)  # what was logged when
    arguments = fields.get("lr_kwargs")
    if not isinstance(arguments, dict):
        return fields
    renamed = {"lr_min": "eta_min", "cycle_epochs": "T_0"}
    arguments = {renamed.get(key, key): value for key, value in arguments.items()}
    start = fields.get("start_epoch", 0)
    if isinstance(arguments.get("milestones"), list) and start not in (0, -1):
        arguments["milestones"] = [_difference(milestone, start) for milestone in arguments["milestones"]]
    return {**fields, "lr_kwargs": arguments}


def _difference(moment: object, start: object) -> object:
    """Return ``moment - start``, as an expression if one of them is."""
    if isinstance(moment, int | float) and isinstance(start, int | float):
        return moment - start
    texts = [str(variable.expression_of(value) or value) for value in (moment, start)]
    return f"${{({texts[0]}) - ({texts[1]})}}"


def _known(tag: str) -> str:
    """Return the present name of a modifier."""
    from sparta.create.modifiers import modifier_names

    name = tag.removesuffix("Modifier")
    name = _TAGS.get(name, name)
    names = modifier_names()
    if name not in names:
        raise NameNotFoundError(did_you_mean(tag, [f"{known}Modifier" for known in names], "modifier"))
    return name


def _expressed(value: Any) -> Any:
    """Return a value with every ``eval(...)`` in it written as ``${...}``."""
    if isinstance(value, Mapping):
        return {key: _expressed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expressed(item) for item in value]
    found = _EVAL.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else f"${{{found[1].strip()}}}"
