"""Quantised layers: the layer you have, whose forward sees rounded weights and rounded inputs.

Switching on changes a module's class, in place, to a subclass that quantises; switching off changes it back. Parameters
stay the same objects under the same names (an optimizer, a mask, a checkpoint notice nothing), because the rounded
weight exists only while the layer's forward runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sparta.batch_norms import TRANSPOSED, fold_factor
from sparta.create.quantize.fake_quantize import Quantizer
from sparta.create.quantize.scheme import Scheme

__all__ = ["LayerKind", "QuantizedLayer", "kind_of", "switch_off", "switch_on"]

_LINEAR_LIKE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class LayerKind:
    """What there is to quantise in a layer: its weights, the axis of their output channels, its inputs."""

    weights: tuple[str, ...]
    channel_axis: int
    inputs: tuple[str, ...]


def kind_of(module: nn.Module) -> LayerKind | str | None:
    """Return the kind of a layer, or the reason why it cannot be quantised, or None where there is nothing to say.

    >>> kind_of(nn.ConvTranspose1d(2, 4, 3)).channel_axis
    1
    >>> kind_of(nn.LSTM(2, 2))
    'LSTM is not supported'
    """
    found = _kind_of_class(module)
    if isinstance(found, LayerKind):
        base: Any = next(c for c in type(module).__mro__ if _is_known(c))
        if type(module).forward is not base.forward:
            return f"{type(module).__name__} has a forward of its own"
    if found is None and any(p.dim() >= 2 for p in module.parameters(recurse=False)):
        return f"{type(module).__name__} is not supported"
    return found


def _kind_of_class(module: nn.Module) -> LayerKind | str | None:
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return "an Embedding with max_norm writes to its own weight"
        return "an Embedding with sparse gradients" if module.sparse else LayerKind(("weight",), 0, ())
    if isinstance(module, nn.MultiheadAttention):
        present = tuple(name for name in _ATTENTION_WEIGHTS if module._parameters.get(name) is not None)
        return LayerKind(present, 0, ("input", "key", "value"))
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return LayerKind(("weight",), 0, ())  # attention uses its weight and never calls it
    if isinstance(module, _LINEAR_LIKE):
        return LayerKind(("weight",), 1 if isinstance(module, TRANSPOSED) else 0, ("input",))
    return LayerKind(("weight",), 1, ("input",)) if _is_transformers_conv1d(type(module)) else None


def _is_known(cls: type) -> bool:
    return cls in {*_LINEAR_LIKE, nn.Embedding, nn.MultiheadAttention} or _is_transformers_conv1d(cls)


def _is_transformers_conv1d(cls: type) -> bool:
    """Whether it is GPT-2's linear layer, whose weight is stored the other way round."""
    loaded = sys.modules.get("transformers.pytorch_utils")  # a model that has one has imported it
    return loaded is not None and issubclass(cls, loaded.Conv1D)


class QuantizedLayer(nn.Module):
    """Mixed into a layer's class by :func:`switch_on`; its quantizers are submodules called ``..._quantizer``."""

    plain_class: type[nn.Module]
    scheme: Scheme
    layer_kind: LayerKind
    folded_norm: tuple[nn.Module, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward on rounded inputs with rounded weights."""
        args, kwargs = self._rounded_inputs(args, kwargs)
        users = self._weight_users()
        for user in users:
            user._rounded = {}
        try:
            output = super().forward(*args, **kwargs)
        finally:
            for user in users:
                user._rounded = None
        return self._rounded_output(output)

    def rounded(self, name: str) -> Tensor | None:
        """Return the fake-quantised weight `name`, as the forward sees it."""
        weight: Tensor | None = self._parameters.get(name)
        if weight is None or (quantizer := self._modules.get(f"{name}_quantizer")) is None:
            return weight
        if not self.folded_norm:
            rounded: Tensor = quantizer(weight)
            return rounded
        factor = fold_factor(self, self.folded_norm[0], weight.dim())
        folded: Tensor = quantizer(weight * factor) / factor.where(factor != 0, 1.0)
        # A norm of scale 0 hides its channel, rounded or not; left as it is, the scale can still learn.
        return folded.where(factor != 0, weight).to(weight.dtype)

    def _weight_users(self) -> list[Any]:
        """Return the modules whose weights this forward reads."""
        return [self]

    def _rounded_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        quantizer = self._modules.get("input_quantizer")
        if quantizer is None:
            return args, kwargs
        if args:
            return (quantizer(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: quantizer(kwargs[first])}

    def _rounded_output(self, output: Any) -> Any:
        quantizer = self._modules.get("output_quantizer")
        return output if quantizer is None else quantizer(output)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # The class is made at run time; a copy or a pickle makes it again from the plain one.
        return _instance, (self.plain_class,), self.__dict__.copy()


class QuantizedAttention(QuantizedLayer):
    """The same for multi-head attention: query, key and value are rounded once each, the output projection too."""

    def _weight_users(self) -> list[Any]:
        projection: Any = self._modules["out_proj"]
        return [self, projection] if isinstance(projection, QuantizedLayer) else [self]

    def _rounded_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._modules.get("input_quantizer") is None:
            return args, kwargs
        names = ("query", "key", "value")
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        query, key, value = (given[name] for name in names)
        # What is one tensor stays one tensor: attention looks at that to pick its path.
        rounded_query = self._modules["input_quantizer"](query)  # type: ignore[misc]
        rounded_key = rounded_query if key is query else self._modules["key_quantizer"](key)  # type: ignore[misc]
        if value is query:
            rounded_value = rounded_query
        else:
            rounded_value = rounded_key if value is key else self._modules["value_quantizer"](value)  # type: ignore[misc]
        others = {name: item for name, item in kwargs.items() if name not in names}
        return (rounded_query, rounded_key, rounded_value, *args[3:]), others

    def _rounded_output(self, output: Any) -> Any:
        quantizer = self._modules.get("output_quantizer")
        return output if quantizer is None else (quantizer(output[0]), *output[1:])


def _weight_property(name: str) -> property:
    def read(self: Any) -> Any:
        if name in self.__dict__:  # a replica of nn.DataParallel keeps plain tensors here
            return self.__dict__[name]
        if self._rounded is None:  # outside of the forward pass: the parameter itself
            return self._parameters.get(name)
        if name not in self._rounded:
            self._rounded[name] = self.rounded(name)
        return self._rounded[name]

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return property(read, write)


_CLASSES: dict[type[nn.Module], Any] = {}


def _quantized_class(plain: type[nn.Module]) -> Any:
    if plain not in _CLASSES:
        attention = issubclass(plain, nn.MultiheadAttention)
        mixin, weights = (QuantizedAttention, _ATTENTION_WEIGHTS) if attention else (QuantizedLayer, ("weight",))
        body = {"__module__": __name__, "plain_class": plain, **{name: _weight_property(name) for name in weights}}
        _CLASSES[plain] = type(f"Quantized{plain.__name__}", (mixin, plain), body)
    return _CLASSES[plain]


def _instance(plain: type[nn.Module]) -> Any:
    made = _quantized_class(plain)
    return made.__new__(made)


def switch_on(module: nn.Module, kind: LayerKind, scheme: Scheme, norm: nn.Module | None = None) -> None:
    """Make a layer quantise, in place.

    Parameters
    ----------
    norm
        The batch norm to fold into the weight before it is rounded.
    """
    made: Any = module
    made.__class__ = _quantized_class(type(module))
    made._rounded = None
    made.scheme, made.layer_kind = scheme, kind
    made.__dict__["folded_norm"] = (norm,) if norm is not None else ()  # seen, but not a submodule
    device = next(module.parameters(recurse=False)).device
    if scheme.weights is not None:
        for name in kind.weights:
            axis = kind.channel_axis if scheme.weights.strategy == "channel" else None
            channels = made._parameters[name].shape[kind.channel_axis]
            quantizer = Quantizer(scheme.weights, axis=axis, channels=channels, moving=False, device=device)
            made.add_module(f"{name}_quantizer", quantizer.train(module.training))
    activations = [(f"{name}_quantizer", scheme.input_activations) for name in kind.inputs]
    if kind.inputs:
        activations.append(("output_quantizer", scheme.output_activations))
    for name, args in activations:
        if args is not None:
            made.add_module(name, Quantizer(args, moving=True, device=device).train(module.training))


def switch_off(module: QuantizedLayer) -> None:
    """Make a layer plain again, in place."""
    module.__class__ = module.plain_class  # type: ignore[assignment]
    for name, child in list(module._modules.items()):
        if name.endswith("_quantizer") and isinstance(child, Quantizer):
            del module._modules[name]
    for name in ("_rounded", "scheme", "layer_kind", "folded_norm"):
        module.__dict__.pop(name, None)
