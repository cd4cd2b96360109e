"""The dense rivals of the CPU benchmarks: PyTorch eager, ``torch.compile`` and ONNX Runtime, all in this process.

Each is a call without arguments that computes the whole chain of layers on one input with one thread. Dense time does
not depend on zeros, so the rivals of a shape are made once and serve all patterns and sparsities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["RIVALS", "Call", "best", "compiled_call", "dense_calls", "onnx_chain", "onnxruntime_call"]

Call = Callable[[], Tensor]
RIVALS = ("eager", "compile", "onnxruntime")
"""Names of the rivals, as results have them."""

_ACTIVATIONS = {nn.ReLU: "Relu", nn.GELU: "Gelu"}
_OPSET = 20  # the first with Gelu
_IR = 8  # old enough for every runtime that is compared


def dense_calls(model: nn.Sequential, x: Tensor, without: Sequence[str] = ()) -> dict[str, Call]:
    """Return the rivals for a chain of linear layers or convolutions and activations.

    Parameters
    ----------
    without
        Names of rivals to leave out.
    """
    calls: dict[str, Call] = {}
    model = model.eval().requires_grad_(requires_grad=False)
    calls["eager"] = lambda: model(x)
    if "compile" not in without:
        calls["compile"] = compiled_call(model, x)
    if "onnxruntime" not in without:
        calls["onnxruntime"] = onnxruntime_call(onnx_chain(model, x), x)
    return calls


def compiled_call(model: nn.Module, x: Tensor) -> Call:
    """Return a call of the compiled model; compiling takes some seconds the first time and about one later."""
    torch.compiler.reset()
    options = {"freezing": True}
    fast = torch.compile(model, dynamic=False, options=options)  # type: ignore[arg-type]

    def call() -> Tensor:
        with torch.no_grad():
            result: Tensor = fast(x)
            return result

    call()
    return call


def onnx_chain(model: nn.Sequential, x: Tensor, opset: int = _OPSET) -> bytes:
    """Return a chain of layers as an ONNX model with one input and one output."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants, name = [], [], "x"
    for place, layer in enumerate(model):
        out = f"y{place}"
        if type(layer) in _ACTIVATIONS:
            nodes.append(helper.make_node(_ACTIVATIONS[type(layer)], [name], [out]))
            name = out
            continue
        weight = f"w{place}"
        if isinstance(layer, nn.Linear):
            # A product with the transposed weight is what the runtime prepacks.
            constants.append(numpy_helper.from_array(layer.weight.detach().t().contiguous().numpy(), weight))
            nodes.append(helper.make_node("MatMul", [name, weight], [out]))
        else:
            constants.append(numpy_helper.from_array(layer.weight.detach().contiguous().numpy(), weight))
            pads = [size for _ in range(2) for size in layer.padding]
            nodes.append(helper.make_node("Conv", [name, weight], [out], pads=pads))
        if layer.bias is not None:
            raise ValueError("layers without a bias only")
        name = out
    with torch.no_grad():
        shape = tuple(model(x).shape)
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s)) for n, s in (("x", x.shape), (name, shape))]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=_IR)
    return made.SerializeToString()  # type: ignore[no-any-return]


def onnxruntime_call(model: bytes, x: Tensor) -> Callable[[], Any]:
    """Return a call of ONNX Runtime with one thread; it returns a numpy array."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed: dict[str, np.ndarray[Any, Any]] = {"x": x.numpy()}
    return lambda: session.run(None, feed)[0]


def best(medians: dict[str, float]) -> str:
    """Return the name of the fastest rival that was timed."""
    return min((name for name in RIVALS if name in medians), key=medians.__getitem__)
