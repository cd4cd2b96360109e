"""Old quantization fields: what SparseML and llm-compressor called them, as fields of our ``Quantization``.

It is the part of :mod:`sparta.create.recipe.legacy` where names differ most. Whatever changes the numbers is converted
or refused; what only said *how* a model was rewritten (which modules to fuse, to wrap) has no counterpart and is
dropped with a warning.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from sparta.errors import FileFormatError, NameNotFoundError, ValueRangeError, did_you_mean, message

__all__ = ["OLD_ONLY", "anchored", "listed", "mapping", "quantization_fields", "stage_quantization_fields"]

Fields = dict[str, Any]

_SAME = (
    "start_epoch",
    "end_epoch",
    "scheme",
    "scheme_overrides",
    "ignore",
    "submodules",
    "disable_quantization_observer_epoch",
    "freeze_bn_stats_epoch",
    "num_calibration_steps",
    "strict",
)
_REWRITING = ("model_fuse_fn_name", "model_fuse_fn_kwargs", "exclude_batchnorm", "custom_quantizable_module_types")
_OUTPUTS = ("quantize_linear_activations", "quantize_conv_activations", "quantize_embedding_activations")
OLD_ONLY = (
    *_REWRITING,
    *_OUTPUTS,
    "reduce_range",
    "activation_bits",
    "weight_bits",
    "exclude_module_types",
    "activation_qconfig_kwargs",
    "weight_qconfig_kwargs",
    "tensorrt",
    "quantize_embeddings",
)
"""Fields from before there were schemes."""
_QUANTIZED = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "MultiheadAttention")
_CLASS = re.compile(r"[A-Z]\w*")
_ARGUMENTS_WITHOUT_EFFECT = {"observer", "observer_kwargs", "actorder", "block_structure", "scale_dtype", "zp_dtype"}


def quantization_fields(fields: Fields) -> Fields:
    """Return the fields of a ``!QuantizationModifier``, of the old kind or of the newer one.

    >>> quantization_fields({"start_epoch": 2.0, "submodules": ["encoder"], "weight_bits": 4, "tensorrt": False})
    {'start_epoch': 2.0, 'submodules': ['encoder'], 'scheme': {'weights': {'num_bits': 4, ...}, ...}}
    """
    for key in fields:
        if key not in _SAME and key not in OLD_ONLY:
            raise NameNotFoundError(did_you_mean(key, [*_SAME, *OLD_ONLY], "field of QuantizationModifier"))
    result = {key: value for key, value in fields.items() if key in _SAME and value is not None}
    dropped = [key for key in _REWRITING if fields.get(key)]
    if dropped:
        text = "nothing is fused or wrapped while training here; batch norms are folded at export"
        warnings.warn(f"{', '.join(dropped)} of QuantizationModifier left out: {text}", stacklevel=2)
    for key in ("activation_qconfig_kwargs", "weight_qconfig_kwargs", "reduce_range", *_OUTPUTS[:2]):
        if fields.get(key):
            raise ValueRangeError(
                message(f"{key} of QuantizationModifier is {fields[key]!r}", "none", "say it in `scheme`")
            )
    result |= _left_out(fields)
    if not result["ignore"]:
        del result["ignore"]
    if result.get("submodules") == [""]:  # the whole model
        del result["submodules"]
    if isinstance(result.get("scheme_overrides"), Mapping):
        result["scheme_overrides"] = _overrides(result["scheme_overrides"])
    scheme = _old_scheme(fields)
    if scheme is not None:
        if "scheme" in result:
            raise ValueRangeError(message("a QuantizationModifier with `scheme` and with fields from before it", "one"))
        result["scheme"] = scheme
    return result


def _left_out(fields: Fields) -> Fields:
    """Return what is not quantized: names, and classes, which were left out wherever they were, if anywhere."""
    ignored = [
        *listed(fields.get("ignore"), "ignore"),
        *listed(fields.get("exclude_module_types"), "exclude_module_types"),
    ]
    if "quantize_embeddings" in fields and not fields["quantize_embeddings"]:
        ignored.append("Embedding")
    ignored = [name for name in ignored if not _never_quantized(name)]
    lenient = fields.get("strict") is None and any(_CLASS.fullmatch(name) for name in ignored)
    return {"ignore": ignored} | ({"strict": False} if lenient else {})


def _never_quantized(name: str) -> bool:
    """Whether a name is that of a class of PyTorch whose modules are in floating point here in any case."""
    return name not in _QUANTIZED and not name.startswith("ConvTranspose") and isinstance(getattr(nn, name, None), type)


def _overrides(given: Mapping[str, Any]) -> Fields:
    result: Fields = {}
    for name, scheme in given.items():
        is_empty = scheme is None or (isinstance(scheme, Mapping) and not any(scheme.values()))
        if not _never_quantized(name):
            result[name] = None if is_empty else scheme
        elif not is_empty:
            raise ValueRangeError(
                message(f"scheme_overrides quantizes modules of the class {name}", ", ".join(_QUANTIZED))
            )
    return result


def _old_scheme(fields: Fields) -> str | Fields | None:
    bits = {key: fields.get(key) for key in ("weight_bits", "activation_bits")}
    if fields.get("tensorrt"):
        if any(value not in {None, 8} for value in bits.values()):
            raise ValueRangeError(message("tensorrt with other than 8 bits", "8 bits"))
        return "tensorrt"
    if all(value is None for value in bits.values()):
        return None
    return {
        "weights": {"num_bits": bits["weight_bits"] or 8, "symmetric": True, "strategy": "channel"},
        "input_activations": {"num_bits": bits["activation_bits"] or 8, "symmetric": False},
    }


def stage_quantization_fields(fields: Fields) -> Fields:
    """Return the fields of llm-compressor's ``QuantizationModifier``.

    >>> stage_quantization_fields({"targets": ["Linear"], "scheme": "W8A16", "ignore": ["lm_head"]})["scheme"]
    {'weights': {'num_bits': 8, 'strategy': 'channel'}}
    """
    known = {"start_epoch", "end_epoch", "update_frequency", "targets", "ignore", "scheme", "config_groups"}
    if fields.get("kv_cache_scheme"):
        raise ValueRangeError(message("kv_cache_scheme quantizes the cache of keys and values", "weights and inputs"))
    fields.pop("kv_cache_scheme", None)
    if "scheme_overrides" in fields:  # written before there were groups
        return quantization_fields({key: value for key, value in fields.items() if key != "update_frequency"})
    for key in fields:
        if key not in known:
            raise NameNotFoundError(did_you_mean(key, known, "field of QuantizationModifier that is understood:"))
    groups = _groups(fields.pop("config_groups", None), fields.pop("scheme", None), fields.pop("targets", None))
    ignored = listed(fields.pop("ignore", None), "ignore")
    fields.pop("update_frequency", None)
    return {**fields, **_as_scheme(groups), "ignore": [*anchored(ignored), *_other_classes(groups)], "strict": False}


_Groups = list[tuple[list[str], Fields]]
"""Targets and their scheme."""


def _groups(groups: object, scheme: object, targets: object) -> _Groups:
    if (groups is None) == (scheme is None):
        raise ValueRangeError(message("a QuantizationModifier with both or none of scheme and config_groups", "one"))
    usual = listed(targets, "targets") or ["Linear"]
    if isinstance(scheme, Mapping) and not {"weights", "input_activations", "output_activations"} & scheme.keys():
        return [(listed(names, "targets"), _preset(preset)) for preset, names in scheme.items()]
    if isinstance(scheme, Mapping):
        groups = {"scheme": dict(scheme)}
    if groups is None:
        return [(usual, _preset(scheme))]
    if not isinstance(groups, Mapping) or not groups:
        raise ValueRangeError(message(f"config_groups is {groups!r}", "a mapping from groups to their fields"))
    found: _Groups = []
    for name, body in groups.items():
        if isinstance(body, list):  # a preset, and what it is for
            found.append((listed(body, "targets"), _preset(name)))
            continue
        group = mapping(body, "a group of config_groups")
        group.pop("format", None)  # of the file that was written
        wanted = listed(group.pop("targets", None), "targets") or usual
        found.append((wanted, {part: _arguments(mapping(a, part)) for part, a in group.items() if a is not None}))
    return found


def _as_scheme(groups: _Groups) -> Fields:
    """Return one scheme, with overrides for further groups; a class gives way to a pattern, and that to a name."""
    if len(groups) == 1:
        (targets, scheme), *_ = groups
        by_class = all(name in _QUANTIZED for name in targets)
        return {"scheme": scheme} | ({} if by_class else {"submodules": anchored(targets)})
    pairs = [(anchored(name), scheme) for targets, scheme in groups for name in targets]
    order = sorted(pairs, key=lambda pair: (not _CLASS.fullmatch(pair[0]), not pair[0].startswith("re:")))
    return {"scheme": groups[0][1], "submodules": [name for name, _ in pairs], "scheme_overrides": dict(order)}


def _other_classes(groups: _Groups) -> list[str]:
    """Return the classes that are not meant where classes are."""
    named = {name for targets, _ in groups for name in targets}
    return [name for name in _QUANTIZED if name not in named] if named & set(_QUANTIZED) else []


_FLOAT8 = {"num_bits": 8, "kind": "float"}
_PRESETS: dict[str, Fields] = {
    "W8A8": {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8}},
    "W8A16": {"weights": {"num_bits": 8, "strategy": "channel"}},
    "FP8": {"weights": _FLOAT8, "input_activations": _FLOAT8},
    "FP8_DYNAMIC": {"weights": {**_FLOAT8, "strategy": "channel"}, "input_activations": _FLOAT8},
}
_GROUPED = ("W4A16", "W4A16_ASYM", "W4A8", "W4AFP8", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8")


def _preset(scheme: object) -> Fields:
    name = str(scheme).upper()
    name = "W8A8" if name == "INT8" else name
    if name in _GROUPED:
        given = f"the scheme {scheme} has a scale for each group of weights"
        raise ValueRangeError(message(given, f"{', '.join(_PRESETS)}: one scale for each channel or tensor"))
    if not isinstance(scheme, str) or name not in _PRESETS:
        raise NameNotFoundError(did_you_mean(str(scheme), [*_PRESETS, "INT8"], "scheme that is understood:"))
    if name in {"W8A8", "FP8_DYNAMIC"}:
        _warn_tokens()
    return copy.deepcopy(_PRESETS[name])


def _arguments(given: Mapping[str, Any]) -> Fields:
    args = {key: value for key, value in given.items() if key not in _ARGUMENTS_WITHOUT_EFFECT and value is not None}
    kind = args.pop("type", "int")
    if kind == "float" and args.get("num_bits", 8) == 8:
        args["kind"] = "float"
    elif kind != "int":
        given_type = f"the type {kind!r} of {args.get('num_bits')} bits"
        raise ValueRangeError(message(given_type, "int of 2 to 8 bits, or float of 8"))
    if args.get("group_size", -1) not in {-1, None} or args.get("strategy") in {"group", "block", "tensor_group"}:
        raise ValueRangeError(message("a scale for each group of weights", "strategy tensor or channel"))
    args.pop("group_size", None)
    if args.pop("dynamic", False) or args.get("strategy") == "token":
        _warn_tokens()
        args["strategy"] = "tensor"
    for key in args:
        if key not in {"num_bits", "symmetric", "strategy", "kind"}:
            raise NameNotFoundError(did_you_mean(key, ["num_bits", "symmetric", "strategy"], "quantization argument"))
    return args


def _warn_tokens() -> None:
    text = "activations that had a scale for each token get one for each tensor, from the data"
    warnings.warn(text, stacklevel=2)


def anchored(names: Any) -> Any:
    """Return names with ``re:`` patterns for the whole name; the old ones matched a name's beginning.

    >>> anchored(["fc", "re:layer"])
    ['fc', 're:(?:layer).*']
    """
    if isinstance(names, list):
        return [anchored(name) for name in names]
    if not isinstance(names, str) or not names.startswith("re:"):
        return names
    pattern = names.removeprefix("re:")
    if "|" not in pattern and (pattern.endswith("$") or (pattern.endswith(".*") and not pattern.endswith("\\.*"))):
        return names
    return f"re:(?:{pattern}).*"


def listed(given: object, what: str) -> list[str]:
    """Return names as a list, from one, from several, or from null.

    >>> listed("lm_head", "ignore"), listed(None, "ignore")
    (['lm_head'], [])
    """
    names = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FileFormatError(message(f"{what} is {given!r}", "a name or a list of names"))
    return names


def mapping(given: object, what: str) -> Fields:
    """Return a copy of a mapping, an empty one from null; refuses anything else."""
    if given is not None and not isinstance(given, Mapping):
        raise FileFormatError(message(f"{what} is {given!r}", "a mapping"))
    return dict(given or {})
