"""Configurations: a dictionary in, a scheduler out, with everything checked before anything happens.

The keys are those of the document: `mask_generator`, `fake_sparse` and `scheduler`, each a `type` with optional
`kwargs`, and beside them `leaf_module`, `fuse_bn` and `sparsity`. Nothing is ignored; a key, a type or a keyword
argument that is not known is an error that names the nearest one that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.scheduler.ampere import AmpereScheduler
from sparta.scheduler.base import BaseScheduler, Setup
from sparta.scheduler.fake_sparse import FakeSparseBase
from sparta.scheduler.generators import MaskGenerator
from sparta.scheduler.registry import FAKE_SPARSES, MASK_GENERATORS, SCHEDULERS, Registry

__all__ = ["build_sparse_scheduler"]

_AFTER_TRAINING = (
    "set_sparsity", "USE_ERK", "target_sparsity", "erk_power_scale", "max_sparsity", "no_prune_layer_list",
    "progressive", "reconstruction", "mask_only", "cali_batchsize", "sparse_analysis",
)  # fmt: skip
_KEYS = ("mask_generator", "fake_sparse", "scheduler", "leaf_module", "fuse_bn", "sparsity")


def build_sparse_scheduler(config: Mapping[str, Any]) -> BaseScheduler | AmpereScheduler:
    """Return the scheduler that `config` describes.

    Parameters
    ----------
    config
        ``scheduler``, ``mask_generator`` and ``fake_sparse``: each a dictionary with ``type`` and optional ``kwargs``;
        by default ``BaseScheduler``, ``NormalMaskGenerator`` and ``FakeSparse``. ``leaf_module``: classes that are not
        traced into. ``fuse_bn``: fold batch norms first. ``sparsity``: for the ADMM scheduler. The dictionary is not
        changed.

    Examples
    --------
    >>> scheduler = build_sparse_scheduler(
    ...     {
    ...         "mask_generator": {"type": "STRMaskGenerator"},
    ...         "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": -5}},
    ...         "scheduler": {"type": "BaseScheduler"},
    ...     }
    ... )
    >>> model = scheduler.prepare_sparse_model(nn.Linear(4, 4))
    """
    if not isinstance(config, Mapping):
        raise ValueRangeError(message(f"the configuration is a {type(config).__name__}", "a dictionary"))
    for key in config:
        if key in _AFTER_TRAINING:
            given = f"{key!r} belongs to a model that is trained already"
            raise ValueRangeError(message(given, ", ".join(_KEYS), "use sparta.recovery.prune_by_config"))
        if key not in _KEYS:
            raise NameNotFoundError(did_you_mean(str(key), _KEYS, "configuration key"))
    scheduler, kwargs = _component(config, "scheduler", "BaseScheduler", SCHEDULERS)
    generator, generator_kwargs = _component(config, "mask_generator", "NormalMaskGenerator", MASK_GENERATORS)
    fake, fake_kwargs = _component(config, "fake_sparse", "FakeSparse", FAKE_SPARSES)
    made: Any = SCHEDULERS.find(scheduler)
    make_fake: Any = FAKE_SPARSES.find(fake)
    _check_pair(generator, make_fake, fake)
    built: MaskGenerator = MASK_GENERATORS.find(generator)(**generator_kwargs)
    parts = Setup(
        mask_generator=built,
        fake_sparse=partial(make_fake, **fake_kwargs),
        leaf_module=_classes(config.get("leaf_module", ())),
        fuse_bn=_flag(config.get("fuse_bn", False), "fuse_bn"),
        sparsity=_sparsity(config.get("sparsity")),
    )
    if parts.sparsity and not getattr(made, "takes_sparsity", False):
        raise ValueRangeError(message(f"'sparsity' with {scheduler}", "ADMMScheduler", "remove the key"))
    result: BaseScheduler | AmpereScheduler = made(parts, **kwargs)
    return result


def _component(config: Mapping[str, Any], key: str, default: str, registry: Registry) -> tuple[str, dict[str, Any]]:
    """Return the type and the checked kwargs of one of the three parts."""
    part = config.get(key, {"type": default})
    if not isinstance(part, Mapping):
        raise ValueRangeError(message(f"{key} is {part!r}", "a dictionary with 'type' and optional 'kwargs'"))
    for name in part:
        if name not in {"type", "kwargs"}:
            raise NameNotFoundError(did_you_mean(str(name), ["type", "kwargs"], f"key of {key}:"))
    chosen, kwargs = part.get("type", default), part.get("kwargs") or {}
    if not isinstance(chosen, str) or not isinstance(kwargs, Mapping):
        raise ValueRangeError(message(f"{key} is {dict(part)!r}", "a text as 'type' and a dictionary as 'kwargs'"))
    return chosen, registry.checked(chosen, kwargs)


def _check_pair(generator: str, fake: type[FakeSparseBase], name: str) -> None:
    """Learnt masks need the generator made for them, and that generator nothing else."""
    special = {"STRMaskGenerator", "ProbMaskGenerator"}
    if (fake.generators and generator not in fake.generators) or (not fake.generators and generator in special):
        allowed = ", ".join(fake.generators) or "a generator that makes masks from a sparsity"
        raise ValueRangeError(message(f"the fake_sparse {name} with the mask_generator {generator}", allowed))


def _classes(given: object) -> tuple[type[nn.Module], ...]:
    found = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for item in found:
        if not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ValueRangeError(message(f"leaf_module has {item!r}", "classes of modules, as [MyBlock]"))
    return found


def _flag(given: object, name: str) -> bool:
    if not isinstance(given, bool):
        raise ValueRangeError(message(f"{name} is {given!r}", "True or False"))
    return given


def _sparsity(given: object) -> Mapping[str, Any]:
    if given is None:
        return {}
    known = ["target_sparsity", "uniform"]
    if not isinstance(given, Mapping):
        raise ValueRangeError(message(f"sparsity is {given!r}", "a dictionary with target_sparsity and uniform"))
    for key in given:
        if key not in known:
            raise NameNotFoundError(did_you_mean(str(key), known, "key of sparsity:"))
    return dict(given)
