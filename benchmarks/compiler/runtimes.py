"""Whole models in other runtimes, as calls with so many threads: ONNX Runtime and OpenVINO in fp32, bf16 and int8.

Each takes the dense model, as a user would pick it instead of a sparse one. Int8 is ONNX Runtime's static quantisation
(scales per output channel, ranges from calibration batches) in the form that both runtimes read. TVM is there in fp32,
as its default pipeline compiles a model, without a search for schedules. What is not installed is left out, and the
results say what was there.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TVM_FILE", "Call", "has", "onnxruntime_call", "openvino_call", "rival_calls", "tvm_call"]

Call = Callable[[Tensor], Any]
TVM_FILE = "dense-tvm.so"  # beside it, with another suffix, why TVM is left out
_TOO_SLOW = 10.0  # times eager: who takes longer is no rival, and would take most of the time of a run
_STARTING = 90.0  # seconds in which a process has TVM and its code
_TOLERANCE = 1e-3  # of the largest value


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
    tvm: bool = False,
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
    tvm
        Whether TVM is asked too, which compiles for minutes.
    """
    found: dict[str, Call] = {}
    if tvm and "fp32" in precisions and has("tvm"):
        kept = _kept_tvm(model, x, folder / TVM_FILE, threads)
        found |= {} if kept is None else {"tvm fp32": kept}
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


def tvm_call(path: Path, threads: int) -> Call:
    """Return a call of what :func:`_compiled_by_tvm` wrote."""
    import tvm
    from tvm import relax

    tvm.get_global_func("runtime.config_threadpool")(1, threads)
    main = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())["main"]
    return lambda given: torch.from_dlpack(main(tvm.runtime.from_dlpack(given))[0])


def _compiled_by_tvm(model: nn.Module, x: Tensor, path: Path, threads: int) -> None:
    """Write a model as code for this processor, for inputs like x."""
    import tvm
    from tvm.relax.frontend.torch import from_exported_program

    processor = tvm.target.codegen.llvm_get_system_cpu()
    target = tvm.target.Target({"kind": "llvm", "mcpu": processor, "num-cores": threads})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        module = from_exported_program(torch.export.export(model, (x,)))
    tvm.compile(module, target=target).export_library(str(path))


def _kept_tvm(model: nn.Module, x: Tensor, path: Path, threads: int) -> Call | None:
    """Return TVM's call where it builds, computes the model and is no more than so many times slower than eager.

    Why it is left out is printed and noted in a file, so that the next process does not try again.
    """
    note, fresh = path.with_suffix(".txt"), path.with_name(f"fresh-{path.name}")
    if not path.exists() and not note.exists():
        try:
            _compiled_by_tvm(model, x, fresh, threads)
            why = _why_not(model, x, fresh, threads)
            fresh.rename(path)
        except Exception as failure:  # noqa: BLE001 - whatever a compiler raises, the others are timed
            why = f"it does not build ({type(failure).__name__})"
        if why:
            path.unlink(missing_ok=True)
            note.write_text(f"TVM is left out: {why}", encoding="utf-8")
    if note.exists():
        print(note.read_text(encoding="utf-8"), flush=True)
        return None
    return tvm_call(path, threads)


def _why_not(model: nn.Module, x: Tensor, path: Path, threads: int) -> str:
    """Call what TVM made in a process of its own, which can be ended; return why it is no rival, or nothing."""
    with torch.no_grad():
        expected, eager = _timed(model, x)
    limit = _TOO_SLOW * eager
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "x.pt", Path(folder) / "y.pt"
        torch.save(x, given)
        command = [sys.executable, __file__, path, given, result, str(threads)]
        try:
            done = subprocess.run(  # noqa: S603 - ourselves
                command, capture_output=True, text=True, check=False, timeout=_STARTING + 2 * limit
            )
        except subprocess.TimeoutExpired:
            return f"its default pipeline is more than {_TOO_SLOW:.0f} times slower than eager"
        if done.returncode:
            return f"its code ends with status {done.returncode}"
        error = float((torch.load(result) - expected).abs().max() / expected.abs().max())
    took = float(done.stdout.split()[-1])
    if not error < _TOLERANCE:
        return f"its result is off by {error:.2g} of the largest value"
    return f"its default pipeline is {took / eager:.0f} times slower than eager" if took > limit else ""


def _timed(call: Call, x: Tensor) -> tuple[Tensor, float]:
    """Return the result and the seconds of the second of two calls."""
    call(x)
    begin = time.perf_counter()
    result = call(x)
    return result, time.perf_counter() - begin


def _try_tvm(path: str, given: str, result: str, threads: str) -> None:
    """Call TVM's code, store what it returns, and print the seconds that it took."""
    y, seconds = _timed(tvm_call(Path(path), int(threads)), torch.load(given))
    torch.save(y, result)
    print(seconds)


if __name__ == "__main__":
    _try_tvm(*sys.argv[1:])
