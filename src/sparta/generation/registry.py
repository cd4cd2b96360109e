"""Classes of transformers by the names that files give: only what its own registry of auto classes lists.

A file names a model type and a class. Both are looked up in transformers' tables, and what is imported is what the
table says, never what the file says. Settings of a configuration that name code elsewhere are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sparta.errors import FileFormatError, MissingPackageError, did_you_mean, message

__all__ = ["architecture", "config_fields", "config_from", "generation_from", "transformers_module"]

_ELSEWHERE = (
    *("auto_map", "quantization_config", "custom_pipelines", "_name_or_path", "name_or_path"),
    *("_commit_hash", "transformers_version", "architectures", "kernel_config"),
)
_IMPLEMENTATIONS = ("eager", "sdpa", "grouped_mm", "batched_mm")
_MOST_PARTS = 1 << 14  # experts and the like that a configuration may ask for
_COUNTED = ("layer", "block", "expert", "codebook")
_LARGEST_NUMBER = 1 << 31
_MOST_SEQUENCES = 1 << 10  # that a model generates at a time unless the caller says otherwise


def transformers_module() -> Any:
    """Return transformers; raises :class:`MissingPackageError` where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        given = "this file holds a language model with `generate`, which needs transformers"
        raise MissingPackageError(message(given, fix="pip install transformers")) from error
    return transformers


def architecture(model_type: object, name: object) -> tuple[type[Any], type[nn.Module]]:
    """Return the configuration class and the model class that transformers has under these names.

    >>> architecture("llama", "LlamaForCausalLM")[1].__name__
    'LlamaForCausalLM'
    """
    package = transformers_module()
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise FileFormatError(did_you_mean(str(model_type)[:100], list(CONFIG_MAPPING), "model type of transformers"))
    tables = [v for k, v in vars(modeling_auto).items() if k.endswith("_MAPPING_NAMES") and isinstance(v, Mapping)]
    listed = [table[model_type] for table in tables if model_type in table]
    known = {each for entry in listed for each in ([entry] if isinstance(entry, str) else entry)}
    found = next((each for each in known if each == name), None)
    if found is None:
        raise FileFormatError(did_you_mean(str(name)[:100], known, f"class of {model_type} in transformers"))
    return CONFIG_MAPPING[model_type], getattr(package, found)


def config_fields(config: Any) -> dict[str, Any]:
    """Return a configuration as JSON values, without what names code or files elsewhere."""
    fields = config.to_dict()
    attention = getattr(config, "_attn_implementation", None)
    kept = {key: value for key, value in fields.items() if key not in _ELSEWHERE}
    return {**kept, "sparta_attention": attention if attention in _IMPLEMENTATIONS else None}


def config_from(kind: type[Any], fields: Mapping[str, Any], tensors: int = _MOST_PARTS) -> Any:
    """Return the configuration of stored fields; raises for one with more layers than the file has tensors."""
    plain = {str(key): value for key, value in fields.items() if key not in _ELSEWHERE and not str(key).startswith("_")}
    attention = plain.pop("sparta_attention", None)
    for key in [key for key in plain if "implementation" in key]:
        del plain[key]  # it may name a kernel to fetch
    _check_counts(plain, tensors)
    for key, default in kind().to_dict().items():
        given = plain.get(key, default)
        if isinstance(default, bool) and not isinstance(given, bool):
            raise FileFormatError(message(f"{key}={given!r}"[:200], "True or False", "save it again"))
        counts = isinstance(default, int) and default > 0 and not key.endswith("token_id")
        if counts and isinstance(given, int | float) and given < 0:
            raise FileFormatError(message(f"{key}={given!r}"[:200], "0 or more", "save it again"))
    config = kind.from_dict(plain)
    if attention in _IMPLEMENTATIONS:
        config._attn_implementation = attention
    return config


def _check_counts(fields: Mapping[str, Any], tensors: int) -> None:
    """Raise for more layers or experts than there can be: building them would take forever."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            _check_counts(value, tensors)
        most = min(tensors, _MOST_PARTS) if "layer" in str(key) else _MOST_PARTS
        counted = any(part in str(key) for part in _COUNTED) and not str(key).startswith("max_")  # limits build nothing
        if counted and isinstance(value, int) and not isinstance(value, bool) and value > most:
            raise FileFormatError(message(f"{str(key)[:100]}={value}", f"at most {most}", "save it again"))


def generation_from(fields: Mapping[str, Any]) -> Any:
    """Return how a model generates, of stored settings; raises for tokens and counts that no model has."""
    from transformers import GenerationConfig

    for key, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            number = isinstance(each, int | float) and not isinstance(each, bool)
            token = str(key).endswith(("token_id", "tokens")) and each is not None
            most = _MOST_SEQUENCES if "beam" in str(key) or "sequences" in str(key) else _LARGEST_NUMBER
            if (number and not abs(each) < most) or (token and (not number or each != int(each))):
                given = f"{str(key)[:100]}={str(each)[:100]} in how the model generates"
                raise FileFormatError(message(given, f"a number below {most}", "save it again"))
    return GenerationConfig.from_dict(dict(fields))
