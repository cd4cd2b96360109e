"""Switching quantization-aware training on and off in a model, in place, and running it: calibrate, freeze, state.

Nothing about the model's state dict changes. Ranges are kept in :func:`quantization_state` (which the manager saves
with everything else), so a checkpoint of the model from before or after the start loads into a fresh model, quantised
or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparta.create.quantize.fake_quantize import Quantizer
from sparta.create.quantize.fold import conv_norm_pairs, unfreeze_statistics
from sparta.create.quantize.layers import LayerKind, QuantizedLayer, kind_of, switch_off, switch_on
from sparta.create.quantize.scheme import Scheme
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.modules import unwrapped
from sparta.tables import table
from sparta.tesa import names

__all__ = [
    "Prepared",
    "calibrate",
    "freeze_observers",
    "is_quantized",
    "load_quantization_state",
    "named_modules",
    "plan",
    "prepare",
    "quantization_state",
    "quantized_layers",
    "quantizers",
    "restore",
    "synchronize",
]

_VERSION = 1


@dataclass(frozen=True)
class Prepared:
    """What :func:`prepare` did: the scheme of each quantised layer, and why others were left in floating point."""

    layers: dict[str, Scheme]
    left: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {"layers": {name: scheme.to_dict() for name, scheme in self.layers.items()}, "left": dict(self.left)}

    def __str__(self) -> str:
        rows: list[list[object]] = [[name, scheme] for name, scheme in self.layers.items()]
        rows += [[name, f"floating point: {why}"] for name, why in self.left.items()]
        return table(["layer", "scheme"], rows)


def prepare(
    model: nn.Module,
    scheme: Scheme | str | Mapping[str, Any] = "default",
    *,
    include: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str = (),
    overrides: Mapping[str, Scheme | str | Mapping[str, Any] | None] | None = None,
    fold_batch_norms: bool = True,
    strict: bool = True,
) -> Prepared:
    """Switch quantization-aware training on, in place.

    Parameters
    ----------
    model
        Any model, wrapped or not. Linear, convolution (also transposed), embedding and multi-head attention layers
        are quantised; parameters stay the same objects, and the state dict keeps its keys.
    scheme
        A preset (``"default"``, ``"deepsparse"``, ``"tensorrt"``, ``"weights_only"``), a :class:`Scheme`, or a mapping
        of its fields.
    include, ignore
        Names of modules (with all below them), names of classes, globs, or ``re:`` patterns.
    overrides
        A scheme by the same kinds of names; None leaves the layer in floating point. Later entries win.
    fold_batch_norms
        Whether a weight with one scale is rounded as it will be after its batch norm is folded in.
    strict
        Whether an entry that matches nothing is an error.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> before = list(model.state_dict())
    >>> sorted(prepare(model, ignore="2").layers), list(model.state_dict()) == before
    (['0'], True)
    """
    if is_quantized(model):
        raise ValueRangeError(message("the model is already quantised", fix="call `restore(model)` first"))
    chosen, left = _choose(model, Scheme.of(scheme), include, ignore, overrides or {}, strict=strict)
    norms = _norms_to_fold(model, chosen) if fold_batch_norms else {}
    for module, kind, layer_scheme, _ in chosen:
        switch_on(module, kind, layer_scheme, norms.get(module))
    _keep_off_fused_paths(model)
    return Prepared({name: layer_scheme for _, _, layer_scheme, name in chosen}, left)


def plan(
    model: nn.Module,
    scheme: Scheme | str | Mapping[str, Any] = "default",
    *,
    include: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str = (),
    overrides: Mapping[str, Scheme | str | Mapping[str, Any] | None] | None = None,
    strict: bool = True,
) -> Prepared:
    """Return what :func:`prepare` would do, and raise what it would raise, without doing anything."""
    chosen, left = _choose(model, Scheme.of(scheme), include, ignore, overrides or {}, strict=strict)
    return Prepared({name: layer_scheme for _, _, layer_scheme, name in chosen}, left)


def restore(model: nn.Module) -> None:
    """Switch quantization off again: plain classes, no quantizers, batch norms free; the weights stay as they are."""
    for module in list(model.modules()):
        if isinstance(module, QuantizedLayer):
            switch_off(module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _no_fused_path:
                del module._forward_pre_hooks[key]
                if isinstance(module, nn.TransformerEncoder):
                    module.use_nested_tensor = True
    unfreeze_statistics(model)


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer of the model is quantised."""
    return any(isinstance(module, QuantizedLayer) for module in model.modules())


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Return the quantised layers by name, without what wrappers add to names."""
    return {name: module for name, module in named_modules(model).items() if isinstance(module, QuantizedLayer)}


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by name, without what wrappers add to names; the model itself is ``""``."""
    plain = unwrapped(model).named_modules()
    return {names.canonical(f"{name}.x")[:-2] if name else "": module for name, module in plain}


def quantizers(model: nn.Module) -> Iterator[tuple[str, Quantizer]]:
    """Yield every quantizer with its name, such as ``("encoder.0.fc.weight_quantizer", ...)``."""
    for layer_name, layer in quantized_layers(model).items():
        for name, child in layer._modules.items():
            if isinstance(child, Quantizer):
                yield (f"{layer_name}.{name}" if layer_name else name), child


def freeze_observers(model: nn.Module, *, frozen: bool = True) -> None:
    """Keep all ranges, of weights and activations, as they are now; `frozen=False` lets them move again."""
    for _, quantizer in quantizers(model):
        quantizer.observing = not frozen


def calibrate(
    model: nn.Module,
    data: Iterable[Any],
    steps: int | None = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> int:
    """Let the observers see data, without training: no gradient, dropout off, batch norms as they are.

    Parameters
    ----------
    data
        Batches: a tensor, a pair whose first item is the input, or a mapping of keyword arguments.
    steps
        How many batches to use; None: all.
    forward
        How to run the model on a batch, where the above does not fit.

    Returns
    -------
    int
        How many batches were seen.

    Examples
    --------
    >>> model = nn.Linear(4, 2)
    >>> _ = prepare(model)
    >>> calibrate(model, [torch.randn(8, 4) for _ in range(3)], steps=2)
    2
    """
    if steps is not None and steps < 1:
        raise ValueRangeError(message(f"{steps} calibration steps", "1 or more"))
    modes = [(module, module.training) for module in model.modules()]
    watched = [quantizer for _, quantizer in quantizers(model)]
    seen = 0
    model.eval()
    for quantizer in watched:
        quantizer.watch_always = True
    try:
        with torch.no_grad():
            for batch in itertools.islice(data, steps):
                (forward or _forward)(model, batch)
                seen += 1
    finally:
        for quantizer in watched:
            quantizer.watch_always = False
        for module, mode in modes:
            module.training = mode
    if seen == 0:
        raise ValueRangeError(message("no batch to calibrate with", "at least one"))
    return seen


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0]) if isinstance(batch, list | tuple) else model(batch)


def synchronize(model: nn.Module) -> None:
    """Average the ranges of all activations over the processes of a distributed run, in one message."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    moving = [quantizer for _, quantizer in quantizers(model) if quantizer.moving and quantizer.observing]
    if not moving:
        return
    ranges = torch.stack([torch.stack((quantizer.low, quantizer.high)) for quantizer in moving])
    torch.distributed.all_reduce(ranges)
    ranges = ranges / torch.distributed.get_world_size()
    for quantizer, (low, high) in zip(moving, ranges, strict=True):
        known = low.isfinite() & high.isfinite()  # elsewhere a process has seen nothing yet
        quantizer.low.copy_(torch.where(known, low, quantizer.low))
        quantizer.high.copy_(torch.where(known, high, quantizer.high))


def quantization_state(model: nn.Module) -> dict[str, Any]:
    """Return all ranges and whether they are frozen, as tensors and plain values."""
    return {
        "version": _VERSION,
        "ranges": {name: torch.stack((q.low, q.high)).cpu() for name, q in quantizers(model)},
        "observing": {name: q.observing for name, q in quantizers(model)},
    }


def load_quantization_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Take back what :func:`quantization_state` returned, into a model prepared in the same way."""
    if state.get("version") != _VERSION:
        raise ValueRangeError(
            message(f"a quantization state of version {state.get('version')!r}", f"version {_VERSION}")
        )
    found = dict(quantizers(model))
    differ = sorted(found.keys() ^ state["ranges"].keys())
    if differ:
        raise NameNotFoundError(
            message(
                f"the saved ranges and the model's quantizers differ in {', '.join(differ[:5])}",
                fix="prepare the model with the scheme and names it was saved with",
            )
        )
    for name, quantizer in found.items():
        low, high = state["ranges"][name]
        if low.shape != quantizer.low.shape:
            raise ShapeError(message(f"{name} has {tuple(low.shape)} ranges", f"{tuple(quantizer.low.shape)}"))
        quantizer.set_range(low, high)
        quantizer.observing = bool(state["observing"][name])


# ---------------------------------------------------------------------- choosing layers

_Chosen = list[tuple[nn.Module, LayerKind, Scheme, str]]


def _choose(
    model: nn.Module,
    scheme: Scheme,
    include: Sequence[str] | str | None,
    ignore: Sequence[str] | str,
    overrides: Mapping[str, Any],
    *,
    strict: bool,
) -> tuple[_Chosen, dict[str, str]]:
    modules = named_modules(model)

    def matched(entries: Sequence[str] | str, what: str) -> set[str]:
        listed = (entries,) if isinstance(entries, str) else entries
        return set().union(*(_matching(entry, modules, what, strict=strict) for entry in listed))

    wanted = set(modules) if include is None else matched(include, "module to quantise")
    unwanted = matched(ignore, "module to ignore")
    special: dict[str, Scheme | None] = {}
    for entry, given in overrides.items():
        for name in matched(entry, "module of an override"):
            special[name] = None if given is None else Scheme.of(given)
    chosen: _Chosen = []
    left: dict[str, str] = {}
    for name, module in modules.items():
        kind = kind_of(module)
        layer_scheme = special.get(name, scheme)
        if kind is None or name not in wanted:
            continue
        if isinstance(kind, str):
            left[name] = kind
        elif name in unwanted or layer_scheme is None:
            left[name] = "as asked"
        elif layer_scheme.weights is None and not kind.inputs:
            left[name] = "the scheme has no weights"
        else:
            chosen.append((module, kind, layer_scheme, name))
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items()) or "it has no such layer"
        raise ValueRangeError(
            message(f"nothing to quantise ({reasons})", "linear, convolution, embedding or attention layers")
        )
    return chosen, left


def _matching(entry: str, modules: Mapping[str, nn.Module], what: str, *, strict: bool) -> set[str]:
    """Return the modules that an entry names: by class, by name (and all below), or by pattern."""
    roots = {name for name, module in modules.items() if type(module).__name__ == entry}
    if not roots and entry in modules:
        roots = {entry}
    elif not roots and names.is_name_pattern(entry):
        try:
            roots = set(names.resolve(entry, [name for name in modules if name]))
        except NameNotFoundError:
            roots = set()
    if not roots and strict:
        known = [name for name in modules if name] + sorted({type(module).__name__ for module in modules.values()})
        raise NameNotFoundError(did_you_mean(entry, known, what))
    return {name for name in modules if any(name == root or name.startswith(f"{root}.") for root in roots)}


def _norms_to_fold(model: nn.Module, chosen: _Chosen) -> dict[nn.Module, nn.Module]:
    """Return the batch norm of each convolution whose weight has one scale; with one per channel folding is exact."""
    one_scale = {m for m, _, s, _ in chosen if s.weights is not None and s.weights.strategy == "tensor"}
    if not one_scale:
        return {}
    plain = unwrapped(model)
    pairs = ((plain.get_submodule(conv), plain.get_submodule(norm)) for conv, norm in conv_norm_pairs(plain))
    return {conv: norm for conv, norm in pairs if conv in one_scale}


def _no_fused_path(module: nn.Module, args: Any) -> None:
    """Do nothing; that there is a hook keeps torch from computing a whole encoder layer without calling its parts."""
    del module, args


def _keep_off_fused_paths(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and is_quantized(module):
            module.register_forward_pre_hook(_no_fused_path)
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            module.register_forward_pre_hook(_no_fused_path)
            module.use_nested_tensor = False
