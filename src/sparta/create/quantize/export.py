"""Export: a quantised model becomes a plain one, its integer weights beside it and their grids in a spec.

Batch norms are folded into the convolutions before them, exactly: integers stay what they were and only scales and
biases change. The weights of the exported model are ``(integer - zero_point) * scale`` to the last bit, so integers,
spec and model are three views of one thing. Which weights are live is known before they are rounded: a small one that
rounds to zero stays live, and with it the block it stands in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from sparta.batch_norms import fold_factor, folded
from sparta.create.quantize.fake_quantize import Quantizer, to_integers
from sparta.create.quantize.fold import conv_norm_pairs
from sparta.create.quantize.layers import QuantizedLayer
from sparta.create.quantize.prepare import is_quantized, quantized_layers, quantizers, restore
from sparta.create.quantize.scheme import QuantizationArgs
from sparta.errors import FileFormatError, ValueRangeError, message
from sparta.files import load_tensors, reading, save_tensors
from sparta.modules import replace_module, unwrapped
from sparta.sparsify.shards import local, whole
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.mask_bits import pack_bits, unpack_bits
from sparta.tesa.spec import Spec

__all__ = ["ActivationGrid", "Exported", "IntegerWeight", "export", "integer_weights", "load_exported"]

_KIND, _VERSION = "quantized-model", 2
_PARTS = ("integers", "scale", "zero_point")


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """A quantised weight: ``(integers - zero_point) * scale``.

    Parameters
    ----------
    integers
        int8 or uint8 (or float8_e4m3fn, for that kind), of the weight's shape.
    scale, zero_point
        float32 and int32; of no dims, or with the weight's dims and size 1 along all but `axis`.
    axis
        The axis of the output channels.
    args
        Bits and symmetry.
    live
        bool, of the weight's shape: which weights are not pruned; None takes those that are not rounded to zero.
    """

    integers: Tensor
    scale: Tensor
    zero_point: Tensor
    axis: int
    args: QuantizationArgs
    live: Tensor | None = None

    def dequantized(self) -> Tensor:
        """Return the weight as float32."""
        if self.args.kind == "float":
            return self.integers.float() * self.scale
        return (self.integers.to(torch.int32) - self.zero_point).float() * self.scale

    def folded(self, factor: Tensor) -> IntegerWeight:
        """Return the weight times `factor`, one number per output channel, on integers that are the same or mirrored.

        A negative factor mirrors the grid, which maps onto itself; a factor of zero leaves zeros.
        """
        live = None if self.live is None else self.live & (factor != 0)
        if self.args.kind == "float":
            turned = self.integers.float() * factor.sign()
            scale = torch.where(factor == 0, 1.0, self.scale * factor.abs())
            return replace(self, integers=turned.to(self.integers.dtype), scale=scale, live=live)
        mirror = self.args.quant_min + self.args.quant_max
        zero_point = torch.where(factor < 0, mirror - self.zero_point, self.zero_point)
        integers = torch.where(factor < 0, mirror - self.integers.to(torch.int32), self.integers.to(torch.int32))
        integers = torch.where(factor == 0, zero_point, integers).to(self.integers.dtype)
        scale = torch.where(factor == 0, 1.0, self.scale * factor.abs())
        return replace(self, integers=integers, scale=scale, zero_point=zero_point.to(torch.int32), live=live)

    def tesa(self, *, zeros: bool = True) -> TeSA:
        """Return what is known of the weight: its bits, its grid, and (unless training may change them) its zeros."""
        kept = self.live if self.live is not None else self.dequantized() != 0
        scale, zero_point = self.scale, self.zero_point.expand_as(self.scale)
        group = None
        if scale.dim():
            group = [1 if dim == self.axis else size for dim, size in enumerate(self.integers.shape)]
        known = TeSA.from_mask(kept) if zeros else TeSA.dense(kept.shape)
        return known.with_format(self.args.format, scale=scale, zero_point=zero_point, group=group)


@dataclass(frozen=True, eq=False)
class ActivationGrid:
    """The grid of an activation: its scale, its zero point, its bits.

    Training knows more formats than kernels run (any number of bits, of either sign), so this holds the arguments
    it was trained with; the compiler reads the 8-bit ones as its own ``Quantization``.
    """

    scale: float
    zero_point: int
    args: QuantizationArgs


@dataclass(frozen=True)
class _WeightEntry:
    axis: int
    args: QuantizationArgs


@dataclass(frozen=True)
class _Contents:
    """What a file holds beside its tensors, as it is checked."""

    weights: dict[str, _WeightEntry]
    activations: dict[str, ActivationGrid]
    folded: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Exported:
    """A quantised model ready to deploy; iterating gives ``model, spec``.

    Parameters
    ----------
    model
        Plain modules, in eval mode, batch norms folded. Weights are on their grids; activations are not rounded.
    spec
        The TeSA of each quantised weight, with bits, scale and zero point, and of other weights that have zeros.
    weights
        The integer weights by parameter name.
    activations
        The grids of activations, by layer and role, such as ``"fc.input"``.
    folded
        Names of the batch norms that were folded away.
    """

    model: nn.Module
    spec: Spec
    weights: dict[str, IntegerWeight]
    activations: dict[str, ActivationGrid]
    folded: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.spec))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save integers, scales and the rest of the model's tensors as one checked safetensors file."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            tensors |= {f"{name}::{part}": getattr(weight, part) for part in _PARTS}
            if weight.live is not None and not torch.equal(weight.live, weight.dequantized() != 0):
                tensors[f"{name}::live"] = pack_bits(weight.live.reshape(1, -1))
        for name, tensor in self.model.state_dict().items():
            if name not in self.weights:
                tensors[f"{name}::float"] = tensor.clone()  # tied tensors must not share memory in the file
        payload = {
            "weights": {name: {"axis": w.axis, "args": asdict(w.args)} for name, w in self.weights.items()},
            "activations": {name: asdict(grid) for name, grid in self.activations.items()},
            "folded": list(self.folded),
        }
        save_tensors(path, _KIND, _VERSION, tensors, payload)


@torch.no_grad()
def export(model: nn.Module, *, spec: Spec | None = None, fold_batch_norms: bool = True) -> Exported:
    """Return a plain copy of a quantised model with integer weights; the model itself is left as it is.

    Parameters
    ----------
    model
        After :func:`~sparta.create.quantize.prepare.prepare`, trained or calibrated.
    spec
        What is pruned, such as ``manager.spec()``; None takes the weights as live that are not zero before rounding.
    fold_batch_norms
        Fold batch norms into the convolutions before them.

    Examples
    --------
    >>> from sparta.create.quantize import prepare
    >>> model = nn.Linear(4, 2)
    >>> _ = prepare(model)
    >>> plain, spec = export(model)
    >>> type(plain).__name__, str(spec["weight"].format)
    ('Linear', 'int8')
    """
    if not is_quantized(model):
        raise ValueRangeError(message("the model is not quantised", fix="call `prepare(model)` and train or calibrate"))
    plain = deepcopy(unwrapped(model)).eval()
    weights = integer_weights(plain)
    for name, tesa in ({} if spec is None else spec.resolve(plain)).items():
        if name in weights:
            weights[name] = replace(weights[name], live=tesa.mask(weights[name].integers.device))
    activations: dict[str, ActivationGrid] = {}
    for name, quantizer in quantizers(plain):
        if quantizer.moving and quantizer.calibrated:
            activations[name.removesuffix("_quantizer")] = _activation_grid(quantizer)
    folded_before = {name for name, layer in quantized_layers(plain).items() if layer.folded_norm}
    if folded_before and not fold_batch_norms:
        raise ValueRangeError(
            message(
                f"{min(folded_before)} was rounded with its batch norm folded in",
                "fold_batch_norms=True",
                "prepare with fold_batch_norms=False to keep the norms apart",
            )
        )
    restore(plain)
    gone = _fold_all(plain, weights, folded_before) if fold_batch_norms else ()
    _write_weights(plain, weights)
    return Exported(plain, _spec_of(plain, weights), weights, activations, gone)


@torch.no_grad()
def integer_weights(model: nn.Module) -> dict[str, IntegerWeight]:
    """Return the integer weights of a quantised model as they are now, by parameter name.

    A weight that is rounded with its batch norm folded in is the folded one.
    """
    found: dict[str, IntegerWeight] = {}
    for layer_name, layer in quantized_layers(model).items():
        for name, quantizer in layer._modules.items():
            target = name.removesuffix("_quantizer")
            if isinstance(quantizer, Quantizer) and target in layer._parameters:
                found[f"{layer_name}.{target}" if layer_name else target] = _integer_weight(layer, target, quantizer)
    return found


def load_exported(path: str | os.PathLike[str], model: nn.Module) -> Exported:
    """Load what :meth:`Exported.save` wrote into a copy of a fresh model of the same architecture."""
    tensors, payload = load_tensors(path, _KIND, _VERSION)
    plain = deepcopy(unwrapped(model)).eval()
    with reading(path, fix="pass the model it was exported from"):
        contents = TypeAdapter(_Contents).validate_python(payload)
        for name in contents.folded:
            replace_module(plain, name, nn.Identity())
        weights = {
            name: IntegerWeight(
                **{part: tensors[f"{name}::{part}"] for part in _PARTS},
                axis=entry.axis,
                args=entry.args,
                live=_live(tensors, name),
            )
            for name, entry in contents.weights.items()
        }
        floats = {key.removesuffix("::float"): t for key, t in tensors.items() if key.endswith("::float")}
        for name, value in floats.items():  # a convolution without a bias has one once its norm is folded in
            owner, _, attribute = name.rpartition(".")
            module = plain.get_submodule(owner)
            if attribute == "bias" and module._parameters.get("bias", 0) is None:
                module._parameters["bias"] = nn.Parameter(torch.empty_like(value))
        values = {name: weight.dequantized() for name, weight in weights.items()}
        plain.load_state_dict({**floats, **values})
    _write_weights(plain, weights)
    return Exported(plain, _spec_of(plain, weights), weights, contents.activations, contents.folded)


# ---------------------------------------------------------------------- parts


def _live(tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return which weights of a file are live, where it says more than their integers do."""
    packed, shape = tensors.get(f"{name}::live"), tensors[f"{name}::integers"].shape
    if packed is None:
        return None
    if packed.dtype != torch.uint8 or tuple(packed.shape) != (1, -(-shape.numel() // 8)):
        raise FileFormatError(message(f"the live weights of {name[:100]!r}", "one bit per weight", "save it again"))
    return unpack_bits(packed, shape.numel()).reshape(shape)


def _integer_weight(layer: QuantizedLayer, name: str, quantizer: Quantizer) -> IntegerWeight:
    weight: Any = layer._parameters[name]
    values = whole(local(weight.detach()), weight).float()
    live = values != 0
    if layer.folded_norm:
        values = values * fold_factor(layer, layer.folded_norm[0], values.dim())
    quantizer(values)  # the range of a weight that is still observed is that of the weight as it is now
    scale, zero_point = quantizer.grid()
    integers = to_integers(values, scale, zero_point, quantizer.args, quantizer.axis)
    if quantizer.axis is not None:
        shape = [-1 if dim == quantizer.axis else 1 for dim in range(values.dim())]
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    axis = layer.layer_kind.channel_axis
    return IntegerWeight(integers, scale.clone(), zero_point.clone(), axis, quantizer.args, live)


def _activation_grid(quantizer: Quantizer) -> ActivationGrid:
    scale, zero_point = quantizer.grid()
    return ActivationGrid(float(scale), int(zero_point), quantizer.args)


def _fold_all(model: nn.Module, weights: dict[str, IntegerWeight], folded_before: set[str]) -> tuple[str, ...]:
    """Fold all batch norms; weights in `folded_before` were rounded with theirs folded in and are final."""
    done = []
    for conv_name, norm_name in conv_norm_pairs(model):
        conv: Any = model.get_submodule(conv_name)
        norm = model.get_submodule(norm_name)
        key = f"{conv_name}.weight"
        weight, bias = folded(conv, norm)
        if key not in weights:
            conv.weight = nn.Parameter(weight)
        elif conv_name not in folded_before:
            weights[key] = weights[key].folded(fold_factor(conv, norm, conv.weight.dim()))
        conv.bias = nn.Parameter(bias)
        replace_module(model, norm_name, nn.Identity())
        done.append(norm_name)
    return tuple(done)


def _write_weights(model: nn.Module, weights: Mapping[str, IntegerWeight]) -> None:
    """Put the dequantised weights into the model; a tied parameter stays tied where all its users agree on it."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    for tied in users.values():
        values = {name: weights[name].dequantized() for name in tied if name in weights}
        if not values:
            continue
        first = next(iter(values.values()))
        agree = len(values) == len(tied) and all(torch.equal(first, other) for other in values.values())
        shared: nn.Parameter | None = None
        for name, value in values.items():
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            old: Any = module._parameters[attribute]
            if shared is None or not agree:
                shared = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
            module._parameters[attribute] = shared


def _spec_of(model: nn.Module, weights: Mapping[str, IntegerWeight]) -> Spec:
    quantized = {name: weight.tesa() for name, weight in weights.items()}
    others = {name: tesa for name, tesa in Spec.from_zeros(model).items() if name not in quantized}
    return Spec({**others, **quantized})
