"""A dry run: what a recipe would do to a model, told before a single step is taken.

Every modifier is worked out and its parameters are matched, so that a typo, a mask that does not fit or a window past
the end shows in a second and not after a day. Sparsities are predicted from the weights as they are now, so those of a
global ranking are a forecast, the others exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparta.create.modifiers import Modifier, Run
from sparta.create.modifiers.masked import MaskedModifier
from sparta.create.modifiers.parameters import parameters_for
from sparta.create.modifiers.quantization import QuantizationModifier
from sparta.create.quantize.prepare import is_quantized, plan
from sparta.create.recipe.recipe import Recipe, last_epoch
from sparta.errors import SpartaError, ValueRangeError, message
from sparta.sparsify.shards import local
from sparta.tables import table
from sparta.tesa import names

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DryRun", "LayerForecast", "ModifierForecast", "dry_run"]


@dataclass(frozen=True)
class ModifierForecast:
    """One modifier: its window, what it matches, and how often it acts.

    Parameters
    ----------
    stage
        None in a recipe without stages.
    start, end
        Epochs; an end of -1 is none.
    updates
        How many regular updates the window has, None if it has no end or the length of an epoch is not known.
    parameters
        Names of the parameters it works on.
    """

    name: str
    stage: str | None
    start: float
    end: float
    updates: int | None
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class LayerForecast:
    """One layer: its shape, how sparse it will be, and the bytes of its weight before and after.

    Parameters
    ----------
    by
        The modifier that decides its sparsity.
    bits
        Of one value in the end: less than now if the recipe quantizes the layer.
    dense_bytes, sparse_bytes
        The weight as it is; and as it will be, all values or the live ones with one bit per element for where they
        are, whichever is less.
    """

    name: str
    shape: tuple[int, ...]
    by: str
    sparsity: float
    bits: int
    dense_bytes: int
    sparse_bytes: int


@dataclass(frozen=True)
class DryRun:
    """What a recipe would do. Prints as tables.

    Parameters
    ----------
    epochs
        How many epochs the recipe lasts.
    modifiers, layers
        The forecasts.
    training_bytes
        What training needs beyond the dense model and its optimizer, by what needs it.
    notes
        What looks wrong without being an error.
    """

    epochs: int
    modifiers: tuple[ModifierForecast, ...]
    layers: tuple[LayerForecast, ...]
    training_bytes: dict[str, int]
    notes: tuple[str, ...]

    @property
    def sparsity(self) -> float:
        """Pruned fraction of all elements of all layers."""
        sizes = [torch.Size(layer.shape).numel() for layer in self.layers]
        pruned = sum(size * layer.sparsity for size, layer in zip(sizes, self.layers, strict=True))
        return pruned / sum(sizes) if sum(sizes) else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "epochs": self.epochs,
            "sparsity": self.sparsity,
            "modifiers": [{**vars(one), "parameters": list(one.parameters)} for one in self.modifiers],
            "layers": [{**vars(one), "shape": list(one.shape)} for one in self.layers],
            "training_bytes": dict(self.training_bytes),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        acting = [
            [one.stage, one.name, one.start, one.end if one.end >= 0 else "", one.updates, _shown(one.parameters)]
            for one in self.modifiers
        ]
        parts = [table(["stage", "modifier", "start", "end", "updates", "parameters"], acting, f"{self.epochs} epochs")]
        if self.layers:
            rows: list[list[object]] = []
            for one in self.layers:
                shape, sparsity = "×".join(map(str, one.shape)), f"{one.sparsity:.1%}"
                rows.append([one.name, shape, one.by, sparsity, one.bits, one.dense_bytes, one.sparse_bytes])
            dense, sparse = (sum(getattr(one, key) for one in self.layers) for key in ("dense_bytes", "sparse_bytes"))
            rows.append(["all", "", "", f"{self.sparsity:.1%}", "", dense, sparse])
            heads = ["layer", "shape", "by", "sparsity", "bits", "bytes now", "bytes then"]
            parts.append(table(heads, rows))
        if self.training_bytes:
            parts.append(table(["needed while training", "bytes"], [[*item] for item in self.training_bytes.items()]))
        parts += [f"note: {note}" for note in self.notes]
        return "\n\n".join(parts)


def dry_run(
    recipe: Recipe,
    model: nn.Module,
    steps_per_epoch: int | None = None,
    *,
    include: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str | None = None,
) -> DryRun:
    """Return what `recipe` would do to `model`; the model is looked at and left as it is.

    Parameters
    ----------
    steps_per_epoch
        Needed if the recipe counts in steps; with it, updates are counted as steps allow.
    include, ignore
        As they will be given to `initialize`.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    >>> recipe = Recipe.from_yaml('''
    ... modifiers:
    ...   - EpochRange: {end_epoch: 4}
    ...   - MagnitudePruning: {final_sparsity: 0.75, end_epoch: 2, update_frequency: 0.5}
    ... ''')
    >>> forecast = dry_run(recipe, model, steps_per_epoch=10)
    >>> forecast.sparsity, [(layer.name, layer.sparsity) for layer in forecast.layers]
    (0.75, [('0.weight', 0.75), ('1.weight', 0.75)])
    """
    if steps_per_epoch is not None and steps_per_epoch < 1:
        raise ValueRangeError(message(f"steps_per_epoch is {steps_per_epoch}", "1 or more"))
    staged = recipe.staged_modifiers(steps_per_epoch)
    every = [(stage, one) for stage, modifiers in staged for one in modifiers]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.0)
    run = Run(model, optimizer, steps_per_epoch or 1, include=include, ignore=ignore)
    acting: list[ModifierForecast] = []
    sparsities: dict[str, tuple[str, float]] = {}
    needs: dict[str, int] = {}
    bits: dict[str, int] = {}
    for stage, one in every:
        found = _preview(one, run)
        matched = tuple(found) or _parameters(one, run)
        if isinstance(one, QuantizationModifier):
            quantized = _quantized(one, run)
            bits |= quantized
            matched = tuple(quantized)
        acting.append(_window(one, stage, matched, steps_per_epoch))
        if _holds(one, last_epoch(modifier for _, modifier in every)):
            for name, sparsity in found.items():
                sparsities[name] = (one.name, max(sparsity, sparsities.get(name, ("", 0.0))[1]))
        needs |= _memory(one, found, model)
    layers = _layers(model, sparsities, bits)
    modifiers = [one for _, one in every]
    return DryRun(last_epoch(modifiers), tuple(acting), layers, needs, tuple(_notes(modifiers, steps_per_epoch)))


def _preview(modifier: Modifier, run: Run) -> dict[str, float]:
    """Return the sparsity that a modifier would give to each layer, with its name in front of any error."""
    try:
        found = modifier.preview(run)
        if not found and isinstance(modifier, MaskedModifier):  # the same sparsity in each layer
            sparsity = modifier.planned(max(modifier.start_epoch, modifier.end_epoch)).get("sparsity", 0.0)
            found = {layer.name: sparsity for layer in modifier.chosen_layers(run)}
    except SpartaError as error:
        raise type(error)(f"{modifier.name}: {error}") from error
    return found


def _parameters(modifier: Modifier, run: Run) -> tuple[str, ...]:
    params = getattr(modifier, "params", None)
    if not params:
        return ()
    try:
        return tuple(parameters_for(run, params))
    except SpartaError as error:
        if getattr(modifier, "params_strict", True):
            raise type(error)(f"{modifier.name}: {error}") from error
        return ()


def _window(
    modifier: Modifier, stage: str | None, matched: tuple[str, ...], steps_per_epoch: int | None
) -> ModifierForecast:
    start, end = modifier.epochs()
    start = max(0.0, start)
    updates = None
    if end >= 0 and modifier.update_frequency > 0:
        updates = int((end - start) / modifier.update_frequency + 1e-6) + 1
        if steps_per_epoch is not None:
            updates = min(updates, round((end - start) * steps_per_epoch) + 1)
    return ModifierForecast(modifier.name, stage, start, end, updates, matched)


def _holds(modifier: Modifier, end: float) -> bool:
    """Whether its masks still hold when the recipe ends."""
    return modifier.end_epoch < 0 or modifier.end_epoch >= end or bool(getattr(modifier, "leave_enabled", True))


def _quantized(modifier: QuantizationModifier, run: Run) -> dict[str, int]:
    """Return the bits of the weights that a modifier would quantize, by the names of their modules."""
    if is_quantized(run.model):
        return {}
    try:
        found = plan(
            run.model,
            modifier.scheme,
            include=modifier.submodules,
            ignore=modifier.ignore,
            overrides=modifier.scheme_overrides,
            strict=modifier.strict,
        ).layers
    except SpartaError as error:
        raise type(error)(f"{modifier.name}: {error}") from error
    return {name: 32 if scheme.weights is None else scheme.weights.num_bits for name, scheme in found.items()}


def _layers(
    model: nn.Module, sparsities: dict[str, tuple[str, float]], bits: dict[str, int]
) -> tuple[LayerForecast, ...]:
    found = []
    for full, parameter in model.named_parameters():
        name = names.canonical(full)
        if name not in sparsities:
            continue
        by, sparsity = sparsities[name]
        count = parameter.numel()
        owner = name.rpartition(".")[0]
        outer = owner.rpartition(".")[0]  # attention is quantized as one, with the projections inside it
        width = min(8 * parameter.element_size(), bits.get(owner, bits.get(outer, 64)))
        whole = -(-count * width // 8)
        live = -(-round(count * (1 - sparsity)) * width // 8) + -(-count // 8)
        shape = tuple(parameter.shape)
        dense = count * parameter.element_size()
        found.append(LayerForecast(name, shape, by, sparsity, width, dense, min(whole, live)))
    return tuple(found)


def _memory(modifier: Modifier, matched: dict[str, float], model: nn.Module) -> dict[str, int]:
    """Return the bytes that a modifier holds while training, by what they are for."""
    every = {names.canonical(name): parameter for name, parameter in model.named_parameters()}
    held = [local(every[name]) for name in matched if name in every]
    elements = sum(parameter.numel() for parameter in held)
    needs = {f"{modifier.name}: masks": elements} if elements else {}
    if getattr(modifier, "_pruned", "forget") != "forget":
        needs[f"{modifier.name}: values of pruned weights"] = sum(p.numel() * p.element_size() for p in held)
    if modifier.name == "MovementPruning":
        needs[f"{modifier.name}: scores"] = 4 * elements
    if modifier.name == "OBSPruning":
        needs[f"{modifier.name}: inverse Fisher blocks"] = 4 * elements * int(getattr(modifier, "fisher_block_size", 1))
    if modifier.name == "MFACPruning" and isinstance(count := getattr(modifier, "num_grads", None), int):
        needs[f"{modifier.name}: gradients"] = 4 * elements * count
    if modifier.kind == "distillation":
        total = sum(p.numel() * p.element_size() for p in model.parameters())
        needs[f"{modifier.name}: a frozen copy, if the model is its own teacher"] = total
    return needs


def _notes(modifiers: Sequence[Modifier], steps_per_epoch: int | None) -> Iterable[str]:
    """Yield what looks wrong without being an error."""
    end = max((one.end_epoch for one in modifiers if one.kind == "epoch"), default=float("inf"))
    for one in modifiers:
        last = max(0.0, *one.epochs())
        if last > end + 1e-6:
            yield f"{one.name} goes on until epoch {last:g}, past the end of the EpochRange at {end:g}"
        if steps_per_epoch and 0 < one.update_frequency < 1 / steps_per_epoch - 1e-9:
            often = f"every {one.update_frequency:g} epochs"
            yield f"{one.name} wants an update {often}, which is less than a step; it gets one each step"
    rates = [one for one in modifiers if one.kind == "learning_rate" and one.end_epoch >= 0]
    for first, second in itertools.combinations(sorted(rates, key=lambda one: one.start_epoch), 2):
        groups = [getattr(one, "param_groups", None) for one in (first, second)]
        apart = None not in groups and not set(groups[0] or ()) & set(groups[1] or ())
        if first.end_epoch > second.start_epoch + 1e-6 and not apart:
            yield f"{first.name} and {second.name} set the learning rate at the same time"


def _shown(parameters: tuple[str, ...]) -> str:
    if len(parameters) <= 3:
        return " ".join(parameters)
    return f"{len(parameters)}: {parameters[0]} ... {parameters[-1]}"
