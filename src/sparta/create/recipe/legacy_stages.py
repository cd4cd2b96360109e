"""Recipes of llm-compressor: ``*_stage`` mappings of modifiers, most of which work on a trained model at once.

What there is a method for becomes our modifiers, which ``Manager.apply(model, data=...)`` runs: SparseGPT and Wanda by
the one-shot engine, GPTQ as rounding with compensation, SmoothQuant, and quantization by any number of groups. What
there is none for is refused with the reason.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from sparta.create.recipe.legacy_quantization import (
    anchored,
    listed,
    mapping,
    quantization_fields,
    stage_quantization_fields,
)
from sparta.errors import FileFormatError, NameNotFoundError, ValueRangeError, did_you_mean, message

__all__ = ["from_stages", "holds_modifiers"]

Fields = dict[str, Any]

_HEADER = {"version", "args", "metadata"}
_WITHOUT_EFFECT = (  # how things were held or computed there, not what
    "save_masks", "use_hooks", "block_size", "dampening_frac", "percdamp", "sequential_update", "sequential_targets",
    "offload_hessians", "actorder", "static_groups", "preserve_sparsity_mask", "calibration_function",
    "bypass_divisibility_checks",
)  # fmt: skip
_REFUSED = {
    "AWQ": "scales searched per group of weights",
    "AutoRound": "rounding learnt by gradient descent",
    "SpinQuant": "rotations of hidden states",
    "QuIP": "rotations of hidden states",
    "LogarithmicEqualization": "equalization by logarithms",
    "REAP": "removal of experts",
    "TensorNetwork": "tensor networks",
}
"""Modifiers that there is no counterpart for, and what they would need."""


def holds_modifiers(key: str) -> bool:
    """Return whether a key holds modifiers, as ``pruning_modifiers`` does."""
    return "modifiers" in key


def from_stages(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a recipe in the present form."""
    groups = {key: value for key, value in data.items() if holds_modifiers(key)}
    if groups:
        _refuse_keys(data, set(groups) | _HEADER, "the recipe")
        return {"modifiers": _modifiers(groups)}
    stages: dict[str, Any] = {}
    for key, body in data.items():
        if key in _HEADER:
            if key == "args" and body:
                raise FileFormatError(message("a recipe with args", "none: llm-compressor never substituted them"))
            continue
        if not key.endswith("_stage") or not isinstance(body, dict):
            raise NameNotFoundError(did_you_mean(key, ["<name>_stage"], "key of a recipe with stages:"))
        inner = {name: value for name, value in body.items() if holds_modifiers(name)}
        _refuse_keys(body, {*inner, "run_type"}, f"stage {key!r}")
        stages[key.removesuffix("_stage")] = {"modifiers": _modifiers(inner)}
    if len(stages) == 1:
        return dict(next(iter(stages.values())))
    return {"stages": stages}


def _refuse_keys(data: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in data:
        if key not in known:
            raise NameNotFoundError(did_you_mean(key, [*known, "<name>_modifiers"], f"key of {where}:"))


def _modifiers(groups: Mapping[str, Any]) -> list[dict[str, Fields]]:
    entries: list[dict[str, Fields]] = []
    for key, group in groups.items():
        named = list(group.items()) if isinstance(group, dict) else None
        if isinstance(group, list) and all(isinstance(item, dict) for item in group):
            named = [entry for item in group for entry in item.items()]
        if named is None:
            raise FileFormatError(message(f"{key!r} is {group!r}", "a mapping from modifiers to their fields"))
        entries += [_entry(tag, mapping(fields, tag)) for tag, fields in named]
    return _with_one_quantization(entries)


def _entry(tag: str, fields: Fields) -> dict[str, Fields]:
    name = tag.removesuffix("Modifier")
    if name in _REFUSED:
        raise ValueRangeError(message(f"{tag} needs {_REFUSED[name]}", ", ".join(sorted(_CONVERTED)), "take it out"))
    if name not in _CONVERTED:
        known = [f"{each}Modifier" for each in (*_CONVERTED, *_REFUSED)]
        raise NameNotFoundError(did_you_mean(tag, known, "modifier of llm-compressor:"))
    for old, new in (("start", "start_epoch"), ("end", "end_epoch"), ("update", "update_frequency")):
        if fields.get(old) is not None:
            fields[new] = fields[old]
        fields.pop(old, None)
    for key in _WITHOUT_EFFECT:
        fields.pop(key, None)
    present, convert = _CONVERTED[name]
    return {present: convert(fields)}


def _with_one_quantization(entries: list[dict[str, Fields]]) -> list[dict[str, Fields]]:
    """Return the entries with all quantizations as one, where each names the layers it is for."""
    found = [fields for entry in entries for name, fields in entry.items() if name == "Quantization"]
    if len(found) < 2:
        return entries
    first, *others = found
    merged = dict(first)
    overrides = dict(first.get("scheme_overrides", {}))
    for fields in others:
        if fields.get("submodules") is None or first.get("submodules") is None:
            given = "two quantizations of the same layers"
            raise ValueRangeError(message(given, "targets that tell them apart", "write a recipe of your own"))
        overrides |= dict.fromkeys(fields["submodules"], fields["scheme"]) | fields.get("scheme_overrides", {})
        merged["submodules"] = [*merged["submodules"], *fields["submodules"]]
        merged["ignore"] = list(dict.fromkeys([*merged["ignore"], *fields["ignore"]]))
        if fields.get("rounding") == "compensated":
            merged["rounding"] = "compensated"
    merged["scheme_overrides"] = overrides
    place = next(place for place, entry in enumerate(entries) if "Quantization" in entry)
    rest = [entry for entry in entries if "Quantization" not in entry]
    return [*rest[:place], {"Quantization": merged}, *rest[place:]]


# ---------------------------------------------------------------------- pruning


def _constant_fields(fields: Fields) -> Fields:
    fields |= _params(fields)
    return fields


def _magnitude_fields(fields: Fields) -> Fields:
    fields |= _params(fields)
    if fields.pop("apply_globally", False):
        raise ValueRangeError(message("apply_globally is true", "false: llm-compressor never had it"))
    if fields.pop("scheduler_args", None):
        raise ValueRangeError(message("scheduler_args of MagnitudePruningModifier is given", "none"))
    curve = fields.pop("update_scheduler", "cubic")
    fields["inter_func"] = curve.removesuffix("_scheduler") if isinstance(curve, str) else curve
    structure = fields.pop("mask_structure", "unstructured")
    fields["mask_type"] = _kept(structure)
    fields.pop("leave_enabled", None)  # always false there, and without effect after a one-shot run
    fields.setdefault("start_epoch", 0.0)
    fields.setdefault("end_epoch", fields["start_epoch"])
    return fields


def _oneshot_fields(method: str) -> Callable[[Fields], Fields]:
    known = {"sparsity", "mask_structure", "targets", "ignore", "start_epoch", "end_epoch"}

    def convert(fields: Fields) -> Fields:
        if fields.get("sparsity_profile"):
            given = f"sparsity_profile is {fields['sparsity_profile']!r}"
            raise ValueRangeError(message(given, "null", "choose an `allocation` in a recipe of your own"))
        if fields.get("quantize"):
            raise ValueRangeError(message("quantize of SparseGPTModifier is given", "false", "add GPTQModifier"))
        for key in ("sparsity_profile", "owl_m", "owl_lmbda", "quantize", "prunen", "prunem", "update_frequency"):
            fields.pop(key, None)
        for key in fields:
            if key not in known:
                raise NameNotFoundError(did_you_mean(key, known, "field of one-shot pruning that is understood:"))
        structure = _kept(fields.get("mask_structure") or "0:0")
        made: Fields = {"method": method, "mask_type": structure, "params": _modules(fields.get("targets"))}
        ignored = listed(fields.get("ignore"), "ignore")
        if ignored:
            made["ignore"] = ignored
        if structure == "unstructured":
            if not isinstance(fields.get("sparsity"), int | float):
                given = f"sparsity is {fields.get('sparsity')!r}"
                raise ValueRangeError(message(given, "one number", "use `allocation` in a recipe of your own"))
            made["sparsity"] = fields["sparsity"]
        return made | {key: fields[key] for key in ("start_epoch", "end_epoch") if key in fields}

    return convert


def _modules(targets: object) -> list[str] | str:
    """Return targets, which are classes, modules or weights, as names and patterns of weights, and classes."""
    params: list[str] = []
    for name in listed(targets, "targets"):
        if name in {"__ALL__", "__ALL_PRUNABLE__"}:
            params.append("__ALL_PRUNABLE__")
        elif re.fullmatch(r"[A-Z]\w*", name):
            params.append(name)
        elif name.endswith(("weight", "weight$")):
            params.append(anchored(name))
        else:
            params.append(_below(name))
    return params or "__ALL_PRUNABLE__"


def _below(name: str) -> str:
    """Return the pattern of all weights of a module and of what is in it."""
    pattern = name.removeprefix("re:") if name.startswith("re:") else re.escape(name)
    open_end = name.startswith("re:") and not pattern.endswith("$")
    inside = ".*" if open_end else r"(?:\..*)?"
    return rf"re:(?:{pattern.removesuffix('$')}){inside}\.weight"


def _kept(structure: object) -> object:
    """Return a mask type with N kept of M, from one that says how many of M are pruned.

    >>> _kept("1:4"), _kept("0:0")
    ('3:4', 'unstructured')
    """
    found = re.fullmatch(r"\s*(\d+):(\d+)\s*", structure) if isinstance(structure, str) else None
    if found is None:
        return structure
    pruned, group = int(found[1]), int(found[2])
    if pruned == group == 0:
        return "unstructured"
    if not 0 < pruned < group:
        raise ValueRangeError(message(f"mask_structure {structure!r}", "N:M with 0 < N < M, N pruned of M"))
    return f"{group - pruned}:{group}"


def _params(fields: Fields) -> Fields:
    """Take ``targets`` and ``ignore`` out of the fields, and return them as ``params``."""
    targets, ignore = fields.pop("targets", None), fields.pop("ignore", None)
    if ignore:
        raise ValueRangeError(
            message(
                f"ignore is {ignore!r} on a pruning modifier", "targets alone", "pass ignore= to initialize instead"
            )
        )
    if targets is None:
        return {}
    params = []
    for name in listed(targets, "targets"):
        if name in {"__ALL__", "__ALL_PRUNABLE__"}:
            params.append("__ALL_PRUNABLE__")
        elif name == "Linear":
            warnings.warn("the target Linear is read as all linear, convolution and attention layers", stacklevel=2)
            params.append("__ALL_PRUNABLE__")
        elif name.endswith(("weight", "weight$")):  # a parameter, not a module
            params.append(anchored(name))
        elif name.startswith("re:"):
            pattern = name.removeprefix("re:")
            below = r"(?:\..*)?\.weight" if pattern.endswith("$") else r".*\.weight"
            params.append(f"re:(?:{pattern.removesuffix('$')}){below}")
        elif re.fullmatch(r"[A-Z]\w*", name):
            raise ValueRangeError(message(f"the target {name!r} is a class", "Linear, names, re: patterns"))
        else:
            params.append(f"{name}.weight")
    return {"params": params}


# ---------------------------------------------------------------------- quantization and distillation


def _older_quantization_fields(fields: Fields) -> Fields:
    for key in ("post_oneshot_calibration", "update_frequency"):
        fields.pop(key, None)
    return quantization_fields(fields)


def _gptq_fields(fields: Fields) -> Fields:
    return {**stage_quantization_fields(fields), "rounding": "compensated"}


def _smooth_fields(fields: Fields) -> Fields:
    known = {"smoothing_strength", "mappings", "ignore", "num_calibration_steps", "start_epoch", "end_epoch"}
    for key in fields:
        if key not in known:
            raise NameNotFoundError(did_you_mean(key, known, "field of SmoothQuantModifier that is understood:"))
    if fields.get("ignore"):
        raise ValueRangeError(message("ignore of SmoothQuantModifier is given", "none", "use mappings"))
    made = {key: fields[key] for key in ("smoothing_strength", "num_calibration_steps") if fields.get(key) is not None}
    mappings = fields.get("mappings")
    if mappings is not None:
        made["mappings"] = [_mapping(item) for item in mappings]
    return made


def _mapping(item: object) -> list[Any]:
    layers, norm = item if isinstance(item, list | tuple) and len(item) == 2 else (None, None)
    if not isinstance(norm, str):
        raise FileFormatError(message(f"a mapping of SmoothQuantModifier is {item!r}", "[layers, norm]"))
    return [anchored(listed(layers, "layers of a mapping")), anchored(norm)]


def _distillation_fields(fields: Fields) -> Fields:
    known = {"targets", "transforms", "comparison", "orig_scale", "distill_scale", "start_epoch", "end_epoch"}
    for key in fields:
        if key not in known:
            raise NameNotFoundError(did_you_mean(key, known, "field of OutputDistillationModifier:"))
    if fields.get("comparison", "kl_divergence") not in {"kl_divergence", "kl_div"}:
        raise ValueRangeError(message(f"comparison is {fields['comparison']!r}", "kl_divergence"))
    task, teacher = (float(fields.get(key, 1.0)) for key in ("orig_scale", "distill_scale"))
    warnings.warn("OutputDistillationModifier: the outputs of the whole model are distilled", stacklevel=2)
    made = {"hardness": teacher / (task + teacher), "temperature": 1.0}
    return made | {key: fields[key] for key in ("start_epoch", "end_epoch") if key in fields}


_CONVERTED: dict[str, tuple[str, Callable[[Fields], Fields]]] = {
    "ConstantPruning": ("ConstantPruning", _constant_fields),
    "MagnitudePruning": ("MagnitudePruning", _magnitude_fields),
    "SparseGPT": ("OneShotPruning", _oneshot_fields("sparsegpt")),
    "WandaPruning": ("OneShotPruning", _oneshot_fields("wanda")),
    "Quantization": ("Quantization", stage_quantization_fields),
    "LegacyQuantization": ("Quantization", _older_quantization_fields),
    "GPTQ": ("Quantization", _gptq_fields),
    "SmoothQuant": ("SmoothQuant", _smooth_fields),
    "OutputDistillation": ("Distillation", _distillation_fields),
}
"""The modifiers that there is a counterpart for, and how their fields are called here."""
