"""The template: from "prune and quantize this" to a recipe that can be read, changed and saved.

:func:`recipe_for` is what `initialize` calls when no recipe is given. Windows are written as expressions over
``num_epochs``, so overriding that one variable of a generated recipe rescales everything in it.

With E epochs, Q of them with quantization, a generated recipe prunes for the first half of the E - Q epochs, trains
with fixed masks for the second half, and quantizes in the last Q, during whose second half observers and batch-norm
statistics are frozen. Q is 5 from 15 epochs on and 2 below, and never more than two thirds of E.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparta.create.modifiers.masked import pattern_of
from sparta.create.recipe.recipe import Recipe, Stage, make_entry
from sparta.create.variables import TARGETS, RecipeVariables, as_variables
from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.sparsify import along_inputs, find_layers
from sparta.tesa.patterns import Channel, Unstructured

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LR_KINDS", "PRUNING_KINDS", "as_switch", "pruning_kind", "recipe_for"]

LR_KINDS = ("linear", "cosine", "cyclic_linear", "constant", "stepped", "exponential")
"""The learning-rate schedules that a recipe can be generated with."""

PRUNING_KINDS = {
    "magnitude": "gradual, by magnitude, all layers ranked together by LAMP (the default)",
    "acdc": "phases of dense and of pruned training by turns",
    "movement": "gradual, what moves away from zero stays; small layers stay denser",
    "obs": "gradual, by second-order saliency, the survivors updated; needs a loss closure or data",
    "mfac": "gradual, by a matrix-free second-order saliency, from fresh gradients or those of the training itself",
    "structured": "gradual, whole filters or channels",
    "rigl": "dynamic: sparse from the start, the smallest weights dropped and others grown by gradient",
    "topkast": "dynamic: a sparse forward pass and a denser backward pass",
    "constant": "the zeros that are there stay zero: sparse transfer learning",
    "none": "no pruning",
}
"""What ``pruning=`` may be, besides True (magnitude) and False or None (none)."""

_ALIASES = {
    "true": "magnitude",
    "gmp": "magnitude",
    "transfer": "constant",
    "sparse-transfer": "constant",
    "false": "none",
    "top-kast": "topkast",
    "m-fac": "mfac",
    "ac/dc": "acdc",
}
_ALL = "__ALL_PRUNABLE__"


def recipe_for(
    pruning: str | bool | None = True,  # noqa: FBT001, FBT002 - True is the documented default
    quantization: str | bool = True,  # noqa: FBT001, FBT002
    lr: str | None = "linear",
    distillation: str | bool = False,  # noqa: FBT001, FBT002
    variables: RecipeVariables | Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    *,
    include: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str | None = None,
) -> Recipe:
    """Return the recipe for some choices.

    Parameters
    ----------
    pruning
        True, False, None or a key of :data:`PRUNING_KINDS`; ``"transfer"`` and ``"sparse-transfer"`` are
        ``"constant"``, ``"gmp"`` is ``"magnitude"``. All linear, convolution and attention weights are pruned, the
        first and the last layer too, but small layers stay denser than others and none is emptied (see
        `allocation` of the variables and ``layer_floor``); `include` and `ignore` of `initialize` leave layers out.
    quantization
        Whether to train with fake quantization at the end; zeros that are there stay zero in any case.
    lr
        One of :data:`LR_KINDS`, or None to leave the learning rate alone.
    distillation
        Whether a teacher has a say in the loss.
    variables
        Numbers to make the recipe with; see :class:`~sparta.create.variables.RecipeVariables`.
    model
        If given, the mask is checked against the shapes of its layers.
    include, ignore
        Which layers of `model` that check is about; see :func:`sparta.sparsify.find_layers`.

    Examples
    --------
    >>> recipe = recipe_for(quantization=False, variables={"num_epochs": 10, "sparsity": 0.9})
    >>> [modifier.name for modifier in recipe.modifiers()]
    ['EpochRange', 'LearningRateFunction', 'GlobalMagnitudePruning']
    >>> recipe.modifiers()[2].epochs(), recipe.override({"num_epochs": 4}).modifiers()[2].epochs()
    ((0.0, 5.0), (0.0, 2.0))
    """
    kind = pruning_kind(pruning)
    quantize = as_switch(quantization, "quantization")
    distil = as_switch(distillation, "distillation")
    given = as_variables(variables)
    if kind == "none" and quantize:
        kind = "constant"  # quantization must not wake zeros that are there
    parts = [_training(lr, given)]
    if kind in {"constant", "none"}:
        parts.append(({}, {"ConstantPruning": {"params": _ALL}} if kind == "constant" else {}))
        start: object = 0.0
    else:
        parts.append(_pruning(kind, given, quantize=quantize))
        start = "${num_pruning_active_epochs + num_pruning_finetuning_epochs}"
    if quantize:
        parts.append(_quantization(start, given))
    if distil:
        parts.append(_distillation(given))
    _warn_without_effect(kind, lr, given, quantize=quantize, distil=distil)
    if model is not None and kind not in {"constant", "none"}:
        pattern = pattern_of(_mask_type(kind, given))
        found = find_layers(model, include, ignore)
        for layer in found if given.target is None else ():  # a target's pattern leaves out what is too small
            along_inputs(pattern, layer)
    merged = {name: value for values, _ in parts for name, value in values.items()}
    entries = tuple(make_entry(name, fields) for _, made in parts for name, fields in made.items())
    return Recipe((Stage(None, entries),), merged)


def pruning_kind(pruning: str | bool | None) -> str:  # noqa: FBT001
    """Return the key of :data:`PRUNING_KINDS` that an argument means.

    >>> pruning_kind(True), pruning_kind("sparse_transfer"), pruning_kind(None)
    ('magnitude', 'constant', 'none')
    """
    name = "false" if pruning is None else str(pruning).strip().lower().replace("_", "-")
    name = _ALIASES.get(name, name)
    if name not in PRUNING_KINDS or not isinstance(pruning, str | bool | None):
        raise NameNotFoundError(did_you_mean(str(pruning), [*PRUNING_KINDS, *_ALIASES], "kind of pruning"))
    return name


def as_switch(given: object, what: str) -> bool:
    """Return a bool from one, or from ``"true"`` and ``"false"`` in any case.

    >>> as_switch("True", "quantization"), as_switch(False, "quantization")
    (True, False)
    """
    if isinstance(given, bool):
        return given
    text = given.strip().lower() if isinstance(given, str) else ""
    if text not in {"true", "false"}:
        raise ValueRangeError(message(f"{what} is {given!r}", "True or False"))
    return text == "true"


_Part = tuple[dict[str, Any], dict[str, dict[str, Any]]]
"""Some variables, and the modifiers that use them."""


def _training(lr: str | None, given: RecipeVariables) -> _Part:
    variables: dict[str, Any] = {"num_epochs": given.num_epochs}
    modifiers: dict[str, dict[str, Any]] = {"EpochRange": {"start_epoch": 0.0, "end_epoch": "${num_epochs}"}}
    if lr is not None:
        if lr not in LR_KINDS:
            raise NameNotFoundError(
                did_you_mean(str(lr), LR_KINDS, "learning-rate schedule") + " None leaves it alone."
            )
        variables |= {"lr_func": lr, "init_lr": given.init_lr, "final_lr": given.final_lr}
        modifiers["LearningRateFunction"] = {
            "lr_func": "${lr_func}",
            "init_lr": "${init_lr}",
            "final_lr": "${final_lr}",
            "start_epoch": 0.0,
            "end_epoch": "${num_epochs}",
        }
    return variables, modifiers


def _pruning(kind: str, given: RecipeVariables, *, quantize: bool) -> _Part:
    until = "(num_epochs - num_qat_epochs)" if quantize else "num_epochs"
    active = f"{until} / 2"
    frequency = "${min(1, num_pruning_active_epochs / 20)}"
    if kind == "acdc":  # phases of whole epochs, or a single one where there is not even one epoch
        active = f"max(min(1, {active}), floor({active}))"
        frequency = "${max(min(1, num_pruning_active_epochs), floor(num_pruning_active_epochs / 8))}"
    variables: dict[str, Any] = {"num_pruning_active_epochs": f"${{{active}}}"}
    if kind == "acdc":
        variables["num_dense_warmup_epochs"] = f"${{floor({until} / 10)}}"
    if quantize:
        variables["num_pruning_finetuning_epochs"] = "${num_epochs - num_qat_epochs - num_pruning_active_epochs}"
    variables |= {
        "pruning_update_frequency": frequency,
        "pruning_final_sparsity": given.sparsity,
        "mask_type": _mask_type(kind, given),
    }
    fields: dict[str, Any] = {
        "start_epoch": "${num_dense_warmup_epochs}" if kind == "acdc" else 0.0,
        "end_epoch": "${num_pruning_active_epochs}",
        "update_frequency": "${pruning_update_frequency}",
        "params": _ALL,
        "mask_type": "${mask_type}",
    }
    name, more = _method(kind, given)
    fields |= more
    allocation = given.allocation or _own_allocation(kind, given)
    if allocation is not None and (name, allocation) != ("GlobalMagnitudePruning", "global"):
        fields.pop("global_sparsity", None)
        fields["allocation"], variables["allocation"] = "${allocation}", allocation
    if "init_sparsity" in fields:
        variables["pruning_init_sparsity"] = "${min(0.05, pruning_final_sparsity)}"
    return variables, {name: fields}


def _own_allocation(kind: str, given: RecipeVariables) -> str | None:
    """Return the allocation of a kind whose modifier does better with another one than its default.

    One threshold for plain magnitudes starves layers whose weights are small, in transformers above all: magnitude
    ranks by LAMP, relative to what a layer would have left. AC/DC cuts to the full sparsity at once, where ERK keeps
    more. Movement and Top-KAST prune every layer alike by themselves, which costs a small stem most of what it has.
    """
    asked = kind in {"magnitude", "acdc"} and "global_sparsity" in given.model_fields_set
    if asked or given.pattern.own_sparsity() is not None:
        return None
    return {"magnitude": "lamp", "acdc": "erk", "movement": "erk", "topkast": "erk"}.get(kind)


def _method(kind: str, given: RecipeVariables) -> tuple[str, dict[str, Any]]:
    """Return the modifier of a kind of pruning, and the fields that not all kinds share."""
    gradual = {"init_sparsity": "${pruning_init_sparsity}", "final_sparsity": "${pruning_final_sparsity}"}
    ranked = {"global_sparsity": given.global_sparsity}
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "magnitude": ("GlobalMagnitudePruning" if given.global_sparsity else "MagnitudePruning", gradual),
        "movement": ("MovementPruning", gradual),
        "obs": ("OBSPruning", {**gradual, **ranked}),
        "mfac": ("MFACPruning", {**gradual, **ranked}),
        "structured": ("StructuredPruning", gradual),
        "acdc": (
            "ACDCPruning",
            {"compression_sparsity": "${pruning_final_sparsity}", "long_last_dense_phase": True, **ranked},
        ),
        "rigl": ("RigLPruning", {"final_sparsity": "${pruning_final_sparsity}"}),
        "topkast": (
            "TopKASTPruning",
            {
                "forward_sparsity": "${pruning_final_sparsity}",
                "backward_sparsity": "${max(0, 1 - 2.5 * (1 - pruning_final_sparsity))}",
            },
        ),
    }
    return methods[kind]


def _mask_type(kind: str, given: RecipeVariables) -> str | list[int]:
    """Return the mask of a kind of pruning; refuses one that the kind cannot make."""
    pattern = given.pattern
    is_given = "mask_type" in given.model_fields_set and not isinstance(pattern, Unstructured)
    if kind == "structured":
        if not is_given and (given.target is None or Channel(0) in map(pattern_of, TARGETS[given.target])):
            return "filter"
        if isinstance(pattern, Channel) and pattern.axis in {0, 1}:
            return ("filter", "channel")[pattern.axis]
    elif kind != "rigl" or isinstance(pattern, Unstructured):
        return given.mask_type
    where = f" for the target {given.target!r}" if given.target else ""
    allowed = "filter or channel" if kind == "structured" else "unstructured"
    fix = "leave mask_type and target out, or choose another kind of pruning"
    raise ValueRangeError(message(f"pruning={kind!r} with mask_type {given.mask_type!r}{where}", allowed, fix))


def _quantization(start: object, given: RecipeVariables) -> _Part:
    freeze = "${qat_start_epoch + num_qat_epochs - num_qat_finetuning_epochs}"
    variables = {
        # 5 from 15 epochs on and 2 below; the cap leaves a third of a very short run to pruning
        "num_qat_epochs": "${min(2 + 3 * min(1, num_epochs // 15), 2 * num_epochs / 3)}",
        "num_qat_finetuning_epochs": "${num_qat_epochs / 2}",
        "qat_start_epoch": start,
    }
    fields = {
        "start_epoch": "${qat_start_epoch}",
        "disable_quantization_observer_epoch": freeze,
        "freeze_bn_stats_epoch": freeze,
    }
    if given.target == "tensorrt":
        fields["scheme"] = "tensorrt"
    return variables, {"Quantization": fields}


def _distillation(given: RecipeVariables) -> _Part:
    return (
        {"distillation_hardness": given.hardness, "distillation_temperature": given.temperature},
        {
            "Distillation": {
                "start_epoch": 0.0,
                "end_epoch": "${num_epochs}",
                "hardness": "${distillation_hardness}",
                "temperature": "${distillation_temperature}",
            }
        },
    )


def _warn_without_effect(kind: str, lr: str | None, given: RecipeVariables, *, quantize: bool, distil: bool) -> None:
    """Warn of variables that were given, other than at their defaults, and change nothing."""
    idle: dict[str, str] = {}
    if kind in {"constant", "none"}:
        idle |= dict.fromkeys(("sparsity", "mask_type", "global_sparsity", "allocation"), "without pruning")
        if not (quantize and given.target == "tensorrt"):
            idle["target"] = "without pruning"
    elif kind not in {"magnitude", "acdc", "obs", "mfac"}:
        idle["global_sparsity"] = f"with pruning={kind!r}; allocation has"
    if not distil:
        idle |= dict.fromkeys(("hardness", "temperature"), "without distillation")
    if lr in {None, "constant"}:
        idle["final_lr"] = f"with lr={lr!r}"
    if lr is None:
        idle["init_lr"] = "with lr=None"
    for name in sorted(given.model_fields_set & idle.keys()):
        value = getattr(given, name)
        if value != RecipeVariables.model_fields[name].default or (name == "global_sparsity" and value):
            warnings.warn(f"the recipe variable {name} has no effect {idle[name]}.", stacklevel=3)
