"""Configurations of MSBench for models that are trained already: prune once, reconstruct, no training loop.

:func:`prune_by_config` reads their keys (how the sparsity is spread, how much, in how many steps, what is
reconstructed) and runs them by the one-shot engine and :func:`~sparta.recovery.recover`. What has no counterpart is
refused with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import nn

from sparta.errors import ArgumentError, NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.oneshot import prune
from sparta.oneshot.calibrate import listed
from sparta.oneshot.targets import find_targets
from sparta.recovery.api import recover
from sparta.recovery.log import RecoveryLog
from sparta.sparsify.allocation import ERK, Allocation, Global, Uniform
from sparta.tesa.patterns import NM, Channel, Pattern, Unstructured
from sparta.tesa.spec import Spec

__all__ = ["prune_by_config"]

_KEYS = (
    "mask_generator", "fake_sparse", "scheduler", "leaf_module", "fuse_bn", "sparsity", "set_sparsity", "USE_ERK",
    "target_sparsity", "erk_power_scale", "max_sparsity", "no_prune_layer_list", "progressive", "reconstruction",
    "mask_only", "cali_batchsize", "sparse_analysis",
)  # fmt: skip
_RECONSTRUCTION = (
    "pattern", "weight_lr", "bias_lr", "max_count", "use_dense_inps", "bias_correction", "scale_lr", "warm_up",
    "keep_gpu", "round_mode",
)  # fmt: skip
_BLOCK_STEPS = 200  # of a block; what `max_count` asks for beyond it gains little with batches that repeat


def prune_by_config(
    model: nn.Module, data: Iterable[Any] | None, config: Mapping[str, Any], *, seed: int = 0
) -> tuple[Spec, RecoveryLog]:
    """Prune a trained model, in place, as a configuration for post-training sparsification says.

    Parameters
    ----------
    data
        Batches as the model takes them; None only without ``reconstruction``.
    config
        ``target_sparsity``, or ``progressive: {sparsity_tables: [...]}`` for several steps; ``set_sparsity``:
        ``"Uniform"``, ``"ERK"`` (with ``erk_power_scale``), ``"Magnitude"``, ``"L1Normalized"`` or ``"L2Normalized"``
        for one threshold; ``mask_generator``; ``no_prune_layer_list``; ``max_sparsity`` of any layer;
        ``reconstruction: {pattern: independent | layer | block}``; ``mask_only``.
    seed
        Of the reconstruction.

    Returns
    -------
    tuple of Spec and RecoveryLog
        Where the zeros are, and what each reconstructed block lost before and after.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> config = {"set_sparsity": "ERK", "target_sparsity": 0.5, "reconstruction": {"pattern": "layer"}}
    >>> spec, _ = prune_by_config(model, [torch.randn(64, 16)], config)
    >>> round(1 - spec.density, 3)
    0.5
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(message(f"the model is a {type(model).__name__}", "a torch.nn.Module"))
    _check(config, _KEYS, "key of the configuration")
    batches = None if data is None else listed(data)
    reconstruction = _reconstruction(config)
    if reconstruction is not None and batches is None:
        raise ValueRangeError(message("reconstruction without data", fix="pass batches as the model takes them"))
    pattern, allocation = _pattern(config), _allocation(config)
    ignored = [f"{name}.weight" if not name.endswith("weight") else name for name in _names(config)]
    teacher = deepcopy(model) if reconstruction == "block" else None
    method = "alps" if reconstruction in {"layer", "independent"} else "magnitude"
    spec, log = Spec(), RecoveryLog()
    for sparsity in _steps(config, pattern):
        shares = _shares(model, pattern, allocation, sparsity, config.get("max_sparsity"), ignored)
        spec, _ = prune(model, batches if method == "alps" else None, pattern, shares, method=method,
                        ignore=ignored or None)  # fmt: skip
        if teacher is not None and batches is not None:
            log = recover(model, teacher, batches, spec, steps=0, block_steps=_BLOCK_STEPS, seed=seed)
    return spec, log


def _check(given: object, known: Sequence[str], what: str) -> None:
    if not isinstance(given, Mapping):
        whole = what.rsplit(" of ", maxsplit=1)[-1]
        raise ValueRangeError(message(f"{whole} is a {type(given).__name__}", "a dictionary"))
    for key in given:
        if key not in known:
            raise NameNotFoundError(did_you_mean(str(key), known, what))


def _pattern(config: Mapping[str, Any]) -> Pattern:
    part = config.get("mask_generator", {})
    _check(part, ("type", "kwargs"), "key of mask_generator")
    kind, kwargs = part.get("type", "NormalMaskGenerator"), dict(part.get("kwargs") or {})
    kwargs.pop("sparsity", None)  # overwritten by what set_sparsity decides, there as here
    structured = kwargs.pop("structured", kind in {"FPGMMaskGenerator", "NuclearMaskGenerator"})
    if kind == "NMMaskGenerator":
        return NM(kwargs.pop("n", 2), kwargs.pop("m", 4))
    if kind == "FCPTSMaskGenerator":
        given = "FCPTSMaskGenerator learns a threshold per layer"
        raise ValueRangeError(message(given, "a generator with a sparsity", "take set_sparsity: ERK and block-wise "
                                      "reconstruction"))  # fmt: skip
    if kind != "NormalMaskGenerator":
        given = f"the mask_generator {kind} after training"
        raise ValueRangeError(message(given, "NormalMaskGenerator, NMMaskGenerator", "train with a scheduler"))
    return Channel(0) if structured else Unstructured()


def _allocation(config: Mapping[str, Any]) -> Allocation:
    chosen = config.get("set_sparsity", "ERK" if config.get("USE_ERK") else "Uniform")
    known: dict[str, Allocation] = {
        "uniform": Uniform(),
        "erk": ERK(power=float(config.get("erk_power_scale", 1.0))),
        "magnitude": Global(),
        "l1normalized": Global(normalize="l1"),
        "l2normalized": Global(normalize="l2"),
    }
    name = str(chosen).lower().replace("_", "")
    if name not in known:
        names = ["Uniform", "ERK", "Magnitude", "L1Normalized", "L2Normalized"]
        raise NameNotFoundError(did_you_mean(str(chosen), names, "value of set_sparsity"))
    return known[name]


def _steps(config: Mapping[str, Any], pattern: Pattern) -> list[float | None]:
    """Return the sparsities to prune to, one after the other; None for a pattern's own."""
    if pattern.own_sparsity() is not None:
        return [None]
    progressive = config.get("progressive")
    nested = config.get("sparsity") or {}
    _check(nested, ("target_sparsity", "uniform"), "key of sparsity")
    target = config.get("target_sparsity", nested.get("target_sparsity"))
    if progressive:
        _check(progressive, ("sparsity_tables",), "key of progressive")
        table = list(progressive.get("sparsity_tables") or ())
        if table != sorted(table) or not table:
            raise ValueRangeError(message(f"sparsity_tables is {table}", "one sparsity or more, rising"))
        return [_share(value) for value in table]
    if target is None:
        raise ValueRangeError(message("no target_sparsity", "a number from 0 to 1", "add target_sparsity: 0.5"))
    return [_share(target)]


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueRangeError(message(f"a sparsity of {value!r}", "a number in [0, 1)"))
    return float(value)


def _shares(
    model: nn.Module, pattern: Pattern, allocation: Allocation, sparsity: float | None, most: Any, ignored: list[str]
) -> dict[str, float] | None:
    """Return the sparsity of each layer, none of them beyond `most`; the others make up for those that are capped."""
    from sparta.sparsify.allocation import Candidate

    if sparsity is None:
        return None
    limit = 1.0 if most is None else _share(most)
    candidates = []
    for target in find_targets(model, None, ignored or None):
        shape, scores = target.layout.shape, target.seen(target.parameter.detach()).abs()
        candidates.append(
            Candidate(target.name, shape, pattern.unit_count(shape), pattern.unit_scores(scores), limit=limit)
        )
    counts = allocation.counts(candidates, sparsity)
    return {one.name: count / max(1, one.units) for one, count in zip(candidates, counts, strict=True)}


def _names(config: Mapping[str, Any]) -> list[str]:
    found = config.get("no_prune_layer_list") or []
    scheduler = config.get("scheduler") or {}
    more = (scheduler.get("kwargs") or {}).get("no_prune_layer", "") if isinstance(scheduler, Mapping) else ""
    both = [*(found.split(",") if isinstance(found, str) else found), *more.split(",")]
    return [name.strip().removeprefix("module.") for name in both if name.strip()]


def _reconstruction(config: Mapping[str, Any]) -> str | None:
    """Return what is reconstructed: nothing, layers or blocks."""
    part = config.get("reconstruction")
    if config.get("mask_only") or not part:
        return None
    _check(part, _RECONSTRUCTION, "key of reconstruction")
    pattern = part.get("pattern", "block")
    if pattern not in {"independent", "layer", "block"}:
        raise NameNotFoundError(did_you_mean(str(pattern), ["independent", "layer", "block"], "reconstruction"))
    tuned = [key for key in ("weight_lr", "bias_lr", "max_count") if key in part]
    if tuned:
        warnings.warn(f"{', '.join(tuned)} of reconstruction left out: steps and rates are chosen here", stacklevel=4)
    return str(pattern)
