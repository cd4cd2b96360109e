"""ONNX: a quantised model as a graph of integer weights, QuantizeLinear and DequantizeLinear.

Runtimes recognise these pairs and replace them and the operator between by one integer kernel. The same quantised
layers are used, with quantizers that write the two ONNX operators in place of rounding.
"""

from __future__ import annotations

import os
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparta.create.quantize.export import ActivationGrid, Exported, IntegerWeight, export
from sparta.create.quantize.layers import LayerKind, kind_of, switch_on
from sparta.create.quantize.scheme import QuantizationArgs, Scheme
from sparta.errors import MissingPackageError, ValueRangeError, message
from sparta.spelling import also

__all__ = ["to_onnx"]

_OPSET = 18
_QDQ_VERSION = 13  # of the two operators; newer ones have attributes that runtimes mix up when they move transposes


class _OnnxWeight(nn.Module):
    """Stands for a weight's quantizer: the weight is read from integers, whatever tensor comes in."""

    def __init__(self, weight: IntegerWeight) -> None:
        super().__init__()
        per_channel = weight.scale.dim() > 0
        self.axis = weight.axis if per_channel else None
        self.register_buffer("integers", weight.integers)
        self.register_buffer("scale", weight.scale.reshape(-1) if per_channel else weight.scale)
        zero_point = weight.zero_point.expand_as(weight.scale).to(weight.integers.dtype)
        self.register_buffer("zero_point", zero_point.reshape(-1).contiguous() if per_channel else zero_point)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the dequantised weight, in the dtype of the one that came in."""
        integers: Any = self.integers
        attributes = {} if self.axis is None else {"axis": self.axis}
        read = torch.onnx.ops.symbolic(
            "DequantizeLinear",
            (integers, self.scale, self.zero_point),  # type: ignore[arg-type]
            attributes,  # type: ignore[arg-type]
            dtype=torch.float32,
            shape=integers.shape,
            version=_QDQ_VERSION,
        )
        return read.to(weight.dtype)


class _OnnxActivation(nn.Module):
    """Stands for an activation's quantizer: rounds by QuantizeLinear and DequantizeLinear."""

    def __init__(self, grid: ActivationGrid) -> None:
        super().__init__()
        args = grid.args
        self.dtype = args.dtype
        # ONNX saturates at the ends of the 8-bit type; a narrower grid has to be cut off before.
        full = (args.quant_min, args.quant_max) == (torch.iinfo(args.dtype).min, torch.iinfo(args.dtype).max)
        ends = [(edge - grid.zero_point) * grid.scale for edge in (args.quant_min, args.quant_max)]
        self.ends = None if full else ends
        self.register_buffer("scale", torch.tensor(grid.scale, dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor(grid.zero_point, dtype=args.dtype))

    def forward(self, values: Tensor) -> Tensor:
        """Return `values` rounded."""
        source = values.float()
        if self.ends is not None:
            source = source.clamp(*self.ends)
        grid: Any = (self.scale, self.zero_point)
        integers = torch.onnx.ops.symbolic(
            "QuantizeLinear", (source, *grid), dtype=self.dtype, shape=values.shape, version=_QDQ_VERSION
        )
        rounded = torch.onnx.ops.symbolic(
            "DequantizeLinear", (integers, *grid), dtype=torch.float32, shape=values.shape, version=_QDQ_VERSION
        )
        return rounded.to(values.dtype)


@also(inputs="example_inputs", sample_inputs="example_inputs", dummy_input="example_inputs")
def to_onnx(
    model: nn.Module | Exported,
    example_inputs: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
) -> None:
    """Write a quantised model as an ONNX file with integer weights and QDQ pairs; needs the extra ``onnx``.

    Parameters
    ----------
    model
        A quantised model, or what :func:`~sparta.create.quantize.export.export` made of it.
    example_inputs
        Arguments of one call of the model's forward.
    path
        The file to write.
    dynamic_shapes, input_names, output_names
        As `torch.onnx.export` takes them.
    """
    _need("onnx", "onnxscript")
    exported = model if isinstance(model, Exported) else export(model)
    floats = [name for name, weight in exported.weights.items() if weight.args.kind == "float"]
    if floats:
        raise ValueRangeError(
            message(f"{floats[0]} in fp8", "integers: runtimes have no kernels of fp8 for the CPU", "train it in int8")
        )
    with_operators = _with_onnx_operators(exported)
    if not Path(path).parent.is_dir():
        raise ValueRangeError(message(f"cannot write {os.fspath(path)}: its folder does not exist", fix="create it"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's exporter about itself
        program = torch.onnx.export(
            with_operators,
            example_inputs,
            dynamo=True,
            opset_version=_OPSET,
            dynamic_shapes=dynamic_shapes,
            input_names=input_names,
            output_names=output_names,
            verbose=False,
        )
    if program is None:
        raise ValueRangeError(message("torch.onnx.export returned no program"))
    program.save(os.fspath(path))


def _with_onnx_operators(exported: Exported) -> nn.Module:
    model = deepcopy(exported.model)
    for name, module in list(model.named_modules()):
        kind = kind_of(module)
        if not isinstance(kind, LayerKind):
            continue
        prefix = f"{name}." if name else ""
        stands: dict[str, nn.Module] = {}
        for weight_name in kind.weights:
            if f"{prefix}{weight_name}" in exported.weights:
                stands[f"{weight_name}_quantizer"] = _OnnxWeight(exported.weights[f"{prefix}{weight_name}"])
        for role in (*kind.inputs, "output"):
            if f"{prefix}{role}" in exported.activations:
                stands[f"{role}_quantizer"] = _OnnxActivation(exported.activations[f"{prefix}{role}"])
        if stands:
            switch_on(module, kind, Scheme(QuantizationArgs()))
            for child in [key for key in module._modules if key.endswith("_quantizer")]:
                del module._modules[child]
            for child, stand in stands.items():
                module.add_module(child, stand)
    return model.eval()


def _need(*packages: str) -> None:
    from importlib.util import find_spec

    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingPackageError(
            message(
                f"ONNX export needs {' and '.join(missing)}", fix="install the extra: pip install 'sparta-torch[onnx]'"
            )
        )
