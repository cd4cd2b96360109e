"""Package: the combined graph of a compiled model, with kernels as C++ operators, through AOTInductor.

A sub-graph that runs one of our CPU kernels becomes a call of the operator with its packed operands; any other chosen
kernel is a thing of this Python process, so its sub-graph goes back to dense and the caller is told. What is packaged
is checked against the compiled model before it is written.
"""

from __future__ import annotations

import os
import warnings
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from sparta.compiler.aot.layers import DenseLayer, layer_for
from sparta.compiler.aot.library import load_operators
from sparta.errors import ValueRangeError, message
from sparta.modules import replace_module
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.quantized import OP

if TYPE_CHECKING:
    from sparta.compiler.run.compiled_model import CompiledModel
    from sparta.compiler.run.kernel_module import KernelModule

__all__ = ["package"]


def package(
    model: CompiledModel,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    kwargs: dict[str, Any] | None = None,
    dynamic: bool = True,
) -> Path:
    """Write a compiled model as a ``.pt2`` package that C++ programs load with ``AOTIModelPackageLoader``.

    Parameters
    ----------
    model
        What :func:`sparta.compile` returned, on the CPU in float32.
    example_inputs, kwargs
        Arguments of one call. The program passes the tensors among them, in this order.
    path
        Where to; the name ends in ``.pt2``.
    dynamic
        Whether dims that were dynamic when the model was compiled stay so.

    Returns
    -------
    pathlib.Path
        The package. Programs load :func:`sparta.compiler.aot.library_path` before it.
    """
    if isinstance(path, Tensor):  # as in an older order of the arguments
        raise ValueRangeError(message("a tensor as path", "a name", "package(model, example_inputs, path)"))
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
    as_compiled = model.general if dynamic and model.general is not None else model.graph
    graph = _with_operators(as_compiled)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own exporter
        exported = torch.export.export(graph, tuple(leaves), dynamic_shapes=_dynamic(model) if dynamic else None)
        _check(exported.module(), as_compiled, leaves)
        written = torch._inductor.aoti_compile_and_package(exported, package_path=str(target))
    return Path(written)


def _with_operators(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph in which every kernel module is one that C++ can run."""
    from sparta.compiler.run.kernel_module import KernelModule
    from sparta.compiler.run.ops import without_operators

    copy = deepcopy(graph)
    without_operators(copy.graph)
    copy.recompile()
    for name, kernel in [(n, m) for n, m in copy.named_modules() if isinstance(m, KernelModule)]:
        replace_module(copy, name, _layer(name, kernel))
    return copy


def _layer(name: str, kernel: KernelModule) -> nn.Module:
    found = layer_for(kernel)
    if found is not None:
        return found
    choice = next(iter(kernel.choices.values()))[1]
    if kernel.fused.op == OP and Quantization.of_output(kernel.fused.attributes) is not None:
        given = f"{name} runs by {choice.implement} and hands integers to the next layer"
        raise ValueRangeError(message(given, "the kernel cpu-int8", "compile the model without int8 for a package"))
    warnings.warn(f"{name}: {choice.implement} has no C++ operator; it is packaged dense", stacklevel=4)
    return DenseLayer(kernel)


def _dynamic(model: CompiledModel) -> tuple[dict[int, Any], ...]:
    """Return the dims of each input that take any size, for `torch.export`."""
    shapes = [given.shape or () for given in model.signature.inputs]
    return tuple({d: torch.export.Dim.AUTO for d, size in enumerate(shape) if size is None} for shape in shapes)


def _check(exported: Any, graph: fx.GraphModule, leaves: list[Any]) -> None:
    """Raise when what is to be packaged does not compute what the compiled model does."""
    for mine, theirs in zip(exported(*leaves), graph(*leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
