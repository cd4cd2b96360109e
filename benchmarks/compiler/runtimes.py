"""Whole models in other runtimes, as calls with so many threads: ONNX Runtime and OpenVINO in fp32, bf16 and int8.

Each takes the dense model, as a user would pick it instead of a sparse one. Int8 is ONNX Runtime's static quantisation
(scales per output channel, ranges from calibration batches) in the form that both runtimes read. What is not installed
is left out, and the results say what was there.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Call", "has", "onnxruntime_call", "openvino_call", "rival_calls"]

Call = Callable[[Tensor], Any]


def has(package: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(package) is not None


def rival_calls(
    model: nn.Module,
    x: Tensor,
    folder: Path,
    threads: int,
    *,
    calibration: Sequence[Tensor] = (),
    precisions: Sequence[str] = ("fp32",),
) -> dict[str, Call]:
    """Return calls of the dense model by their names, in the precisions that are asked for.

    Parameters
    ----------
    x
        The input, of the size that is timed.
    folder
        Where files are written; those that are there already are taken as they are.
    calibration
        Batches for int8.
    precisions
        Of ``"fp32"``, ``"bf16"`` and ``"int8"``.
    """
    found: dict[str, Call] = {}
    if not (has("onnxruntime") and has("onnx") and has("onnxscript")):
        return found
    plain, rounded = folder / "dense.onnx", folder / "dense-int8.onnx"
    files = {"fp32": plain, "bf16": plain, "int8": rounded}
    if not plain.exists():
        _exported(model, x, plain)
    if "int8" in precisions and not rounded.exists():
        _quantized(plain, calibration or [x], rounded)
    for precision in precisions:
        if precision != "bf16":
            found[f"onnxruntime {precision}"] = onnxruntime_call(files[precision], threads)
        if has("openvino"):
            found[f"openvino {precision}"] = openvino_call(files[precision], x, threads, precision)
    return found


def _exported(model: nn.Module, x: Tensor, path: Path) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(path), dynamo=True, external_data=False, verbose=False)


def _quantized(plain: Path, batches: Sequence[Tensor], path: Path) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    name = onnx.load(str(plain), load_external_data=False).graph.input[0].name

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """The batches, one after the other."""

        def __init__(self) -> None:
            self._left = iter([{name: batch.numpy()} for batch in batches])

        def get_next(self) -> dict[str, Any] | None:
            """Return the next one, or None."""
            return next(self._left, None)

    ready = plain.with_name("ready.onnx")
    quant_pre_process(str(plain), str(ready), skip_symbolic_shape=True)
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(str(ready), str(path), Reader(), quant_format=QuantFormat.QDQ, per_channel=True, **types)


def onnxruntime_call(path: Path, threads: int) -> Call:
    """Return a call of an ONNX file in ONNX Runtime."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x.numpy()})[0]


def openvino_call(path: Path, x: Tensor, threads: int, precision: str) -> Call:
    """Return a call of an ONNX file in OpenVINO, for inputs like x."""
    import openvino

    graph = openvino.Core().read_model(str(path))
    graph.reshape(list(x.shape))
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    if precision != "int8":  # what is not rounded is then computed in what it takes to be fastest
        settings["INFERENCE_PRECISION_HINT"] = "bf16" if precision == "bf16" else "f32"
    request = openvino.compile_model(graph, "CPU", settings).create_infer_request()
    return lambda given: request.infer([openvino.Tensor(given.numpy(), shared_memory=True)])[0]
