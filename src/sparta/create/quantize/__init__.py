"""Quantization-aware training of our own, on torch's core operators alone.

Prepare a model and train on: weights and activations are rounded in the forward pass and learn to live with it; then
export it with integer weights. Pruned weights are exactly zero on every grid, so sparsity and quantization compose.
"""

from sparta.create.quantize.export import ActivationGrid, Exported, IntegerWeight, export, load_exported
from sparta.create.quantize.fake_quantize import Quantizer
from sparta.create.quantize.fold import freeze_statistics, unfreeze_statistics
from sparta.create.quantize.onnx import to_onnx
from sparta.create.quantize.prepare import (
    Prepared,
    calibrate,
    freeze_observers,
    is_quantized,
    load_quantization_state,
    prepare,
    quantization_state,
    restore,
)
from sparta.create.quantize.scheme import PRESETS, QuantizationArgs, Scheme

__all__ = [
    "PRESETS",
    "ActivationGrid",
    "Exported",
    "IntegerWeight",
    "Prepared",
    "QuantizationArgs",
    "Quantizer",
    "Scheme",
    "calibrate",
    "export",
    "freeze_observers",
    "freeze_statistics",
    "is_quantized",
    "load_exported",
    "load_quantization_state",
    "prepare",
    "quantization_state",
    "restore",
    "to_onnx",
    "unfreeze_statistics",
]
