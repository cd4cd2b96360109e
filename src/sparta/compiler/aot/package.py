"""Package: the combined graph of a compiled model, with kernels as C++ operators, through AOTInductor.

A sub-graph that runs one of our CPU kernels becomes a call of the operator with its packed operands; any other chosen
kernel is a thing of this Python process, so its sub-graph goes back to dense and the caller is told. The one idea to
know: what is packaged is checked against the compiled model before it is written.
"""

from __future__ import annotations

import os
import warnings
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn

from sparta.compiler.aot.library import load_operators
from sparta.errors import ValueRangeError, message
from sparta.specialize.cpu.library import STREAM_FORMS, activation_code
from sparta.specialize.cpu.linear import PackedLinear
from sparta.specialize.linear import apply_epilogue

if TYPE_CHECKING:
    from sparta.compiler.kernels import KernelModule
    from sparta.compiler.module import CompiledModel

__all__ = ["DenseLayer", "PackedLayer", "package"]

_PANEL_ARRAYS = ("starts", "offsets", "rows", "costs", "chunk_columns")
_STREAM_ARRAYS = ("starts", "indices", "step_starts", "step_lanes", "step_advances", "costs")
_PANEL_FORM = -1


class PackedLayer(nn.Module):
    """A linear sub-graph as a call of ``sparta_aot::linear``; its buffers are all that the kernel reads."""

    bias: Tensor | None

    def __init__(self, packed: PackedLinear, values: Tensor, bias: Tensor | None, activation: str | None) -> None:
        super().__init__()
        tile, layout = packed.tile, packed.layout
        panel = tile.form == "panel"
        self._names = _PANEL_ARRAYS if panel else _STREAM_ARRAYS
        for name in self._names:
            array = layout.arrays.get(name, torch.empty(0, dtype=torch.int64))
            # Inductor knows no unsigned words; bytes mean the same to whoever reads an address.
            self.register_buffer(name, array.view(torch.uint8) if array.numel() else array)
        self.register_buffer("values", values)
        self.register_buffer("bias", bias)
        indices = layout.arrays.get("indices")
        self._numbers = [
            _PANEL_FORM if panel else STREAM_FORMS[tile.form], packed.shape[0], packed.shape[1], layout.groups,
            len(layout.arrays["chunk_columns"]) - 1 if panel else 0, tile.block, tile.mv if panel else 0,
            tile.interleave if panel else 0, tile.prefetch, 0 if indices is None else indices.element_size(),
            activation_code(activation),
        ]  # fmt: skip

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(x W^T + bias) + residual`` for x (..., K)."""
        outputs, inputs = self._numbers[1:3]
        arrays = [cast("Tensor", getattr(self, name)) for name in self._names]
        added = None if residual is None else residual.reshape(-1, outputs)
        y = torch.ops.sparta_aot.linear(x.reshape(-1, inputs), self.values, arrays, self._numbers, self.bias, added)
        return cast("Tensor", y).reshape(*x.shape[:-1], outputs)


class DenseLayer(nn.Module):
    """A sub-graph by PyTorch's own operators."""

    bias: Tensor | None

    def __init__(self, kernel: KernelModule) -> None:
        super().__init__()
        self._fused = kernel.fused
        self.register_buffer("weight", kernel.weight())
        self.register_buffer("bias", None if kernel.bias is None else kernel.bias.clone())

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(layer(x) + bias) + residual``."""
        fused = self._fused
        y = fused.lowering.dense(cast("Tensor", self.weight), x, self.bias, fused.attributes)
        return apply_epilogue(y, fused.epilogue, residual)


def package(
    model: CompiledModel,
    path: str | os.PathLike[str],
    example_inputs: Any,  # noqa: ANN401 - as the model takes them
    *,
    kwargs: dict[str, Any] | None = None,
    dynamic: bool = True,
) -> Path:
    """Write a compiled model as a ``.pt2`` package that C++ programs load with ``AOTIModelPackageLoader``.

    Parameters
    ----------
    model
        What :func:`sparta.compile` returned, on the CPU in float32.
    path
        Where to; the name ends in ``.pt2``.
    example_inputs, kwargs
        Arguments of one call. The program passes the tensors among them, in this order.
    dynamic
        Whether dims that were dynamic when the model was compiled stay so.

    Returns
    -------
    pathlib.Path
        The package. Programs load :func:`sparta.compiler.aot.library_path` before it.
    """
    target = Path(path)
    if target.suffix != ".pt2" or not target.parent.is_dir():
        raise ValueRangeError(message(f"the path {target}", "a name that ends in .pt2 in a folder that exists"))
    args = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    leaves = model.signature.flatten(args, kwargs or {})
    if not all(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in leaves):
        raise ValueRangeError(
            message("inputs that are not tensors on the CPU", "tensors on the CPU", "close over others")
        )
    load_operators()
    graph = _with_operators(model.graph)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own exporter
        exported = torch.export.export(graph, tuple(leaves), dynamic_shapes=_dynamic(model) if dynamic else None)
        _check(exported.module(), model, leaves)
        written = torch._inductor.aoti_compile_and_package(exported, package_path=str(target))
    return Path(written)


def _with_operators(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph in which every kernel module is one that C++ can run."""
    from sparta.compiler.kernels import KernelModule

    copy = deepcopy(graph)
    for name, kernel in [(n, m) for n, m in copy.named_modules() if isinstance(m, KernelModule)]:
        parent, _, last = name.rpartition(".")
        setattr(copy.get_submodule(parent), last, _layer(name, kernel))
    return copy


def _layer(name: str, kernel: KernelModule) -> nn.Module:
    if kernel.fused.op == "quantised_linear":
        raise ValueRangeError(
            message(f"{name} runs in int8", "layers in float32", "compile the model without int8 for a package")
        )
    _, built, packed = kernel._built[0]
    inner = getattr(built, "_packed", None)
    if kernel.fused.op == "linear" and isinstance(inner, PackedLinear) and kernel.live.dtype == torch.float32:
        return PackedLayer(inner, packed[0], kernel.bias, kernel.fused.epilogue.activation)
    choice = next(iter(kernel.choices.values()))[1]
    warnings.warn(f"{name}: {choice.implement} has no C++ operator; it is packaged dense", stacklevel=4)
    return DenseLayer(kernel)


def _dynamic(model: CompiledModel) -> tuple[dict[int, Any], ...]:
    """Return the dims of each input that take any size, for `torch.export`."""
    shapes = [given.shape or () for given in model.signature.inputs]
    return tuple({d: torch.export.Dim.AUTO for d, size in enumerate(shape) if size is None} for shape in shapes)


def _check(exported: Any, model: CompiledModel, leaves: list[Any]) -> None:  # noqa: ANN401 - a module
    """Raise when what is to be packaged does not compute what the compiled model does."""
    for mine, theirs in zip(exported(*leaves), model.graph(*leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
