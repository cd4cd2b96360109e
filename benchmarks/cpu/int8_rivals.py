"""Dense int8 layers of other runtimes as calls with one thread: ONNX Runtime, and OpenVINO where it is installed.

One graph serves both: the weight as int8 constants between quantise and dequantise nodes, which both fuse to a product
of integers. With 8-bit ends ONNX Runtime has one node for all of it. Without VNNI, both may add products in 16 bits,
where they can overflow; ours do not, so speeds are compared here, not results.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import Call

__all__ = ["dynamic_layer_call", "quantized_conv_calls", "quantized_layer_calls"]

_OPSET, _IR = 17, 8


def quantized_layer_calls(
    weight: Tensor,
    bias: Tensor,
    grid: tuple[float, int],
    weight_scale: float,
    x: Tensor,
    x_real: Tensor,
    *,
    real: bool,
) -> dict[str, Call]:
    """Return the rivals that are installed: of quantised x with results of 8 bits, or in real numbers at both ends.

    Parameters
    ----------
    weight
        (N, K), int8.
    grid
        Scale and zero point of x, uint8.
    """
    found: dict[str, Call] = {}
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        model = _between_grids(weight, bias, grid, weight_scale) if real else _in_bytes(weight, grid, weight_scale)
        found["onnxruntime"] = _onnxruntime(model, x_real if real else x)
        if real and importlib.util.find_spec("openvino"):
            found["openvino"] = _openvino(model, x_real)
    return found


def quantized_conv_calls(weight: Tensor, grid: tuple[float, int], weight_scale: float, x: Tensor) -> dict[str, Call]:
    """Return the same for a convolution with a weight (N, C, K, K), padded by half its kernel, fp32 at both ends."""
    if not (importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx")):
        return {}
    from onnx import TensorProto, helper

    pad = weight.shape[2] // 2
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["xr"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wr"]),
        helper.make_node("Conv", ["xr", "wr"], ["p"], pads=[pad] * 4),
        helper.make_node("QuantizeLinear", ["p", "ys", "xz"], ["r"]),  # which lets runtimes use integers
        helper.make_node("DequantizeLinear", ["r", "ys", "xz"], ["y"]),
    ]
    constants = _constants(weight, grid, weight_scale) | {"ys": np.float32(1.0)}
    shapes = (list(x.shape), [x.shape[0], weight.shape[0], *x.shape[2:]])
    model = _graph(nodes, constants, shapes, TensorProto.FLOAT, TensorProto.FLOAT)
    found = {"onnxruntime": _onnxruntime(model, x)}
    if importlib.util.find_spec("openvino"):
        found["openvino"] = _openvino(model, x)
    return found


def dynamic_layer_call(weight: Tensor, weight_scale: float, x: Tensor) -> Call:
    """Return ONNX Runtime's linear layer that rounds its input in the call, as its dynamic quantisation writes it."""
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "xs", "xz"]),
        helper.make_node("MatMulInteger", ["q", "w", "xz"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["xs", "ws"], ["s"]),
        helper.make_node("Mul", ["f", "s"], ["y"]),
    ]
    constants = {"w": weight.t().contiguous().numpy(), "ws": np.float32(weight_scale)}
    return _onnxruntime(_model(nodes, constants, weight, TensorProto.FLOAT, TensorProto.FLOAT), x)


def _in_bytes(weight: Tensor, grid: tuple[float, int], weight_scale: float) -> bytes:
    """Return one node from bytes to bytes; a zero point of 0 without a sign is a ReLU."""
    from onnx import TensorProto, helper

    constants = _constants(weight, grid, weight_scale) | {"ys": np.float32(1.0), "yz": np.uint8(0)}
    nodes = [helper.make_node("QLinearMatMul", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"])]
    return _model(nodes, constants, weight, TensorProto.UINT8, TensorProto.UINT8)


def _between_grids(weight: Tensor, bias: Tensor, grid: tuple[float, int], weight_scale: float) -> bytes:
    """Return a graph in real numbers whose product runs in integers."""
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["xr"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wr"]),
        helper.make_node("MatMul", ["xr", "wr"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    constants = _constants(weight, grid, weight_scale) | {"b": bias.float().numpy()}
    return _model(nodes, constants, weight, TensorProto.FLOAT, TensorProto.FLOAT)


def _constants(weight: Tensor, grid: tuple[float, int], weight_scale: float) -> dict[str, Any]:
    return {
        "xs": np.float32(grid[0]),
        "xz": np.uint8(grid[1]),
        "w": (weight if weight.dim() > 2 else weight.t()).contiguous().numpy(),
        "ws": np.float32(weight_scale),
        "wz": np.int8(0),
    }


def _model(nodes: list[Any], constants: dict[str, Any], weight: Tensor, x_type: int, y_type: int) -> bytes:
    """Return a linear layer for any number of tokens."""
    return _graph(nodes, constants, (["M", weight.shape[1]], ["M", weight.shape[0]]), x_type, y_type)


def _graph(
    nodes: list[Any], constants: dict[str, Any], shapes: tuple[list[Any], list[Any]], x_type: int, y_type: int
) -> bytes:
    from onnx import helper, numpy_helper

    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", x_type, shapes[0])],
        [helper.make_tensor_value_info("y", y_type, shapes[1])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
    return bytes(made.SerializeToString())


def _onnxruntime(model: bytes, x: Tensor) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed = {"x": x.numpy()}
    return lambda: session.run(None, feed)[0]


def _openvino(model: bytes, x: Tensor) -> Call:
    import openvino

    graph = openvino.Core().read_model(model)
    graph.reshape(list(x.shape))
    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.compile_model(graph, "CPU", settings).create_infer_request()
    given = [openvino.Tensor(x.numpy(), shared_memory=True)]
    return lambda: torch.from_numpy(request.infer(given)[0])
