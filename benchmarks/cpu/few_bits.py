"""Sparse layers in few bits beside dense ones: int8 convolutions, and weights of 8 bits for a few tokens, one thread.

Run with ``python benchmarks/cpu/few_bits.py`` (about 6 minutes on a quiet machine); ``--quick`` takes one layer of each
kind. Every layer is stored as soon as it is measured: ``--limit`` ends a run after so many seconds, the same command
goes on from there, and its status is 3 until all layers are there. Convolutions are ResNet's on one image, fp32 at both
ends: ours of integers, ours in fp32, PyTorch in fp32, and ONNX Runtime and OpenVINO (where it is installed) with int8
weights. One to four tokens: ours with weights of 8 bits and in fp32, PyTorch in fp32, and ONNX Runtime's dynamic int8.
Results are checked first. Rivals are interleaved call by call, so each finds its weight where the others have left it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
from int8_rivals import dynamic_layer_call, quantized_conv_calls

from common import Call, Row, in_pieces, median_ms
from record import RESULTS, path_of
from sparta.specialize.conv.int8 import conv_reference, int8_conv_spec
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.implement import implement_named
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import int8_linear_spec
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.select import build
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, compare

# Input channels, output channels, kernel, size of the image.
CONVOLUTIONS = (
    (64, 256, 1, 56),
    (256, 64, 1, 56),
    (1024, 256, 1, 14),
    (2048, 512, 1, 7),
    (64, 64, 3, 56),
    (128, 128, 3, 28),
    (256, 256, 3, 14),
    (512, 512, 3, 7),
)
LINEAR = ((768, 768), (768, 3072), (3072, 768))  # (K, N)
TOKENS = (1, 4)
PATTERNS = {"conv": ((4, 4), (1, 4)), "tokens": ((1, 1), (16, 1))}
SPARSITIES = {"conv": (0.8, 0.9), "tokens": (0.5, 0.8, 0.9)}
GRID, WEIGHT_SCALE = Quantization(0.02, 128, "uint8"), 5e-3
OURS = ("int8", "ours fp32")
QUESTION, DEVICE = "cpu_few_bits", f"{platform.machine()} cpu"


@dataclass(frozen=True)
class Layer:
    """One layer: a convolution with its kernel and image, or a linear layer with its tokens."""

    kind: str
    inputs: int
    outputs: int
    kernel: int  # 0 for a linear layer
    size: int  # of the image, or tokens
    block: tuple[int, int]
    sparsity: float

    @property
    def name(self) -> str:
        """What rows of the table share."""
        return f"{self.kernel}x{self.kernel}" if self.kind == "conv" else f"{self.size} tokens"

    def mask(self) -> Tensor:
        """Return the mask of the weight; blocks of a convolution are output by input channels."""
        taps = max(self.kernel, 1) ** 2
        flat = block_mask((self.outputs, self.inputs), self.block, self.sparsity, seed=0)
        if self.kind != "conv":
            return flat
        return flat[..., None].expand(-1, -1, taps).reshape(self.outputs, self.inputs, self.kernel, self.kernel)


def layers(*, quick: bool) -> Iterator[Layer]:
    """Yield the layers."""
    for sparsity in SPARSITIES["conv"][:1] if quick else SPARSITIES["conv"]:
        for block in PATTERNS["conv"][:1] if quick else PATTERNS["conv"]:
            for inputs, outputs, kernel, size in CONVOLUTIONS[5:6] if quick else CONVOLUTIONS:
                yield Layer("conv", inputs, outputs, kernel, size, block, sparsity)
    for sparsity in SPARSITIES["tokens"][:1] if quick else SPARSITIES["tokens"]:
        for block in PATTERNS["tokens"][:1] if quick else PATTERNS["tokens"]:
            for tokens in TOKENS[:1] if quick else TOKENS:
                for inputs, outputs in LINEAR[:1] if quick else LINEAR:
                    yield Layer("tokens", inputs, outputs, 0, tokens, block, sparsity)


def fastest(spec: KernelSpec, name: str, weight: Tensor, x: Tensor, truth: Tensor, within: float) -> Call:
    """Return the call of an implement with its best parameters, each checked against the integer reference."""
    implement = implement_named(name, spec.op)
    space = implement.space(spec)
    found: dict[str, Call] = {}
    for tile in space["tile"]._value:
        for image in space["image"]._value if "image" in space else (None,):
            params = {"tile": tile} if image is None else {"tile": tile, "image": image}
            kernel = build(spec, {"_name": name, **params})
            packed = kernel.pack(weight)

            def call(kernel: Any = kernel, packed: Any = packed) -> Tensor:
                result: Tensor = kernel.run(packed, x, None, None)
                return result

            error = float((call() - truth).abs().max())
            if error > within * float(truth.abs().max()):
                raise SystemExit(f"{name} with {params} is off by {error}")
            found[str(params)] = call
    if len(found) == 1:
        return next(iter(found.values()))
    return found[compare(found, warmup=1, iters=5, max_seconds=0.5).fastest]


def calls_of(layer: Layer) -> dict[str, Call]:
    """Return ours and the dense rivals."""
    mask = layer.mask()
    integers = torch.where(mask, torch.randint(-127, 128, mask.shape), 0).to(torch.int8)
    real = integers.float() * WEIGHT_SCALE
    weight = TeSA.from_mask(mask).with_format("int8", scale=WEIGHT_SCALE)
    if layer.kind == "conv":
        geometry = ConvGeometry.make(2, padding=layer.kernel // 2)
        x = GRID.rounded(torch.randn(1, layer.inputs, layer.size, layer.size))
        spec = int8_conv_spec(weight, x.shape, GRID, geometry)
        truth = conv_reference(spec, integers, x, None, None)
        ours = ("cpu-int8", 0.0), ("cpu", 1e-4)
        dense = {"dense fp32": lambda: functional.conv2d(x, real, padding=layer.kernel // 2)}
        rivals = quantized_conv_calls(integers, (GRID.scale, GRID.zero_point), WEIGHT_SCALE, x)
    else:
        x = torch.randn(layer.size, layer.inputs)
        spec = int8_linear_spec(weight, layer.size, Quantization.per_token())
        truth = (x.double() @ real.double().t()).float()
        ours = ("cpu-weight8", 1e-4), ("cpu", 1e-4)
        dense = {"dense fp32": lambda: functional.linear(x, real)}
        has = importlib.util.find_spec("onnxruntime")
        rivals = {"onnxruntime": dynamic_layer_call(integers, WEIGHT_SCALE, x)} if has else {}
    own = {
        name: fastest(spec, implement, integers, x, truth, within)
        for name, (implement, within) in zip(OURS, ours, strict=True)
    }
    return {**own, **dense, **rivals}


def named(layer: Layer) -> Row:
    """Return what tells a layer from the others, as it is stored."""
    return {**asdict(layer), "block": list(layer.block), "name": layer.name}


def measured(layer: Layer) -> Row:
    """Time one layer; returns medians in ms."""
    return {"median_ms": median_ms(calls_of(layer), 1, 1.5)}


def main() -> int:
    """Time every layer that is not stored yet, or as many as there is time for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one layer of each kind")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for this run")
    parser.add_argument("--machine", default=DEVICE, help="a name, for results that stand beside those of other ones")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    wanted = [(named(layer), functools.partial(measured, layer)) for layer in layers(quick=options.quick)]
    path = path_of(QUESTION, options.machine, options.out or RESULTS)
    return in_pieces(wanted, path, options.machine, {}, options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
