"""How do sparse layers compare with other runtimes? ONNX Runtime in the same process; DeepSparse in one of its own.

Run with ``python benchmarks/cpu/peers.py`` (about 6 minutes on a quiet machine, 2 of them DeepSparse's); ``--quick``
takes one layer of each kind. ``--deepsparse PYTHON`` names the interpreter of an environment with deepsparse 1.8.0
(Python 3.11), which is then started with this file on the same models, with ONNX Runtime beside it where that
environment has it: the two processes are compared by their ratios to ONNX Runtime's dense time. One thread everywhere;
our layers are the drop-ins, with token-major or NCHW activations at both ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# (M, K, N) of linear layers; (C, N, kernel, size) of convolutions.
LINEAR = (
    *((m, 768, 768) for m in (1, 16, 128, 1024)),
    *((m, 768, 3072) for m in (1, 16, 128)),
    *((m, 3072, 768) for m in (1, 16, 128)),
)
CONV = ((256, 64, 1, 56), (512, 128, 1, 28), (1024, 256, 1, 14), (64, 64, 3, 56), (128, 128, 3, 28), (256, 256, 3, 14))
SPARSITIES = (0.8, 0.9, 0.95)
ROUNDS = 21


@dataclass(frozen=True)
class Layer:
    """One layer: what it is, its sizes, the height of its blocks, its sparsity."""

    kind: str
    sizes: tuple[int, ...]
    height: int
    sparsity: float

    @property
    def name(self) -> str:
        """A name for files and tables."""
        return f"{self.kind}-{'x'.join(map(str, self.sizes))}-{self.height}x1-{self.sparsity}"


def layers(*, quick: bool) -> Iterator[Layer]:
    """Yield the layers."""
    for kind, sizes in (("linear", LINEAR), ("conv", CONV)):
        for each in sizes[2:3] if quick else sizes:
            for height in (1, 4):
                for sparsity in SPARSITIES[1:2] if quick else SPARSITIES:
                    yield Layer(kind, each, height, sparsity)


def tensors(layer: Layer) -> tuple[Any, Any, Any]:
    """Return the input, the weight with its zeros, and its mask."""
    import torch

    from sparta.testing import block_mask

    if layer.kind == "linear":
        tokens, inputs, outputs = layer.sizes
        x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    else:
        inputs, outputs, kernel, size = layer.sizes
        x, weight = torch.randn(1, inputs, size, size), torch.randn(outputs, inputs, kernel, kernel)
    flat = block_mask((weight.shape[0], weight[0].numel()), (layer.height, 1), layer.sparsity, seed=0)
    mask = flat.view_as(weight)
    return x, weight * mask, mask


def onnx_model(layer: Layer, x: Any, weight: Any) -> bytes:
    """Return the layer as an ONNX model with one input and one output."""
    from onnx import TensorProto, checker, helper, numpy_helper

    if layer.kind == "linear":
        constant = numpy_helper.from_array(weight.t().contiguous().numpy(), "weight")
        node, shape = helper.make_node("MatMul", ["x", "weight"], ["y"]), [len(x), weight.shape[0]]
    else:
        constant = numpy_helper.from_array(weight.numpy(), "weight")
        node = helper.make_node("Conv", ["x", "weight"], ["y"], pads=[weight.shape[-1] // 2] * 4)
        shape = [1, weight.shape[0], *x.shape[2:]]
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s)) for n, s in (("x", tuple(x.shape)), ("y", shape))
    ]
    graph = helper.make_graph([node], "layer", ends[:1], ends[1:], [constant])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    checker.check_model(model)
    return model.SerializeToString()  # type: ignore[no-any-return]


def onnxruntime_call(model: bytes, x: Any) -> Callable[[], Any]:
    """Return a call of ONNX Runtime with one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": x})[0]


def sparse_call(layer: Layer, x: Any, weight: Any, mask: Any) -> Callable[[], Any]:
    """Return a call of the kernel that tuning chooses."""
    import torch

    from sparta.nn import SparseConv2d, SparseLinear

    if layer.kind == "linear":
        dense = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        module: Any = SparseLinear(dense, weight_mask=mask)
    else:
        dense = torch.nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2:], padding=weight.shape[-1] // 2)
        dense.bias = None
        module = SparseConv2d(dense, mask)
    with torch.no_grad():
        module.weight.copy_(weight)
    module.tune((x,), max_trials=None, budget_s=3.0, algo="grid", store=False)
    module.eval()

    def call() -> Any:
        with torch.no_grad():
            return module(x)

    return call


def measure(layer: Layer, folder: Path) -> dict[str, Any]:
    """Time one layer in this process, and leave its model for others."""
    import torch

    from sparta.testing import check, compare

    x, weight, mask = tensors(layer)
    model = onnx_model(layer, x, weight)
    (folder / f"{layer.name}.onnx").write_bytes(model)
    functions = {"onnxruntime": onnxruntime_call(model, x.numpy())}
    if layer.kind == "linear":
        functions["eager"] = lambda: torch.nn.functional.linear(x, weight)
    else:
        functions["eager"] = lambda: torch.nn.functional.conv2d(x, weight, padding=weight.shape[-1] // 2)
    functions["sparta"] = sparse_call(layer, x, weight, mask)
    truth = torch.from_numpy(functions["onnxruntime"]()).double()
    check(functions["sparta"](), truth, reduction=4 * weight[0].numel(), what=layer.name)
    timings = compare(functions, warmup=3, iters=ROUNDS, max_seconds=1.0)
    medians = {name: timing.median for name, timing in timings.timings.items()}
    best = min(medians["onnxruntime"], medians["eager"])
    speedup = {"best dense": best / medians["sparta"], "onnxruntime": medians["onnxruntime"] / medians["sparta"]}
    return {**asdict(layer), "name": layer.name, "median_ms": medians, "speedup": speedup}


def worker(folder: Path) -> None:
    """Time DeepSparse, and ONNX Runtime if it is there, on every model of a folder; prints JSON."""
    import numpy as np
    import onnx
    from deepsparse import Engine

    found: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob("*.onnx")):
        shape = [d.dim_value for d in onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim]
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        try:
            engine = Engine(model=str(path), batch_size=shape[0], num_cores=1)
        except RuntimeError as error:  # one model it does not take must not cost the others
            print(f"refused {path.stem}: {error}", file=sys.stderr)
            found[path.stem] = {}
            continue
        calls: dict[str, Callable[[], Any]] = {"deepsparse": lambda engine=engine, x=x: engine.run([x])}
        with contextlib.suppress(ImportError):
            calls["onnxruntime"] = onnxruntime_call(path.read_bytes(), x)
        found[path.stem] = interleaved(calls)
    print(json.dumps(found))


def interleaved(calls: dict[str, Callable[[], Any]], seconds: float = 1.5) -> dict[str, float]:
    """Return medians in ms of calls that take turns; fewer rounds where they would take too long."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for round_number in range(ROUNDS + 3):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if round_number >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))
        if round_number >= 7 and time.perf_counter() > end:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def ask_deepsparse(python: str, folder: Path) -> dict[str, dict[str, float]]:
    """Return what the worker prints in another environment."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, str(Path(__file__).resolve()), "--worker", str(folder)]
    done = subprocess.run(  # noqa: S603 - an interpreter that the user names, and no shell
        command, capture_output=True, text=True, check=False, timeout=3600, env=environment
    )
    if done.returncode:
        raise SystemExit(f"DeepSparse's process failed:\n{done.stderr[-2000:]}")
    for line in done.stderr.splitlines():
        if line.startswith("refused "):
            print(f"DeepSparse {line}", flush=True)
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def ahead(cell: dict[str, Any]) -> dict[str, float] | None:
    """Return DeepSparse's speedup over ONNX Runtime in its process, and how many times ours is that; None without."""
    theirs = cell.get("deepsparse") or {}
    if not {"onnxruntime", "deepsparse"} <= theirs.keys():
        return None
    over_dense = theirs["onnxruntime"] / theirs["deepsparse"]
    return {"deepsparse": over_dense, "ahead": cell["speedup"]["onnxruntime"] / over_dense}


def show(results: list[dict[str, Any]]) -> str:
    """Return the layers as a table."""
    from sparta.tables import table

    lines = []
    for cell in results:
        line = [cell["name"], f"{cell['speedup']['best dense']:.2f}", f"{cell['speedup']['onnxruntime']:.2f}"]
        ratio = ahead(cell)
        lines.append([*line, *(("", "") if ratio is None else (f"{r:.2f}" for r in ratio.values()))])
    heads = ["layer", "x best dense", "x ONNX Runtime", "DeepSparse x ONNX Runtime", "ahead of DeepSparse"]
    return table(heads, lines, title="times faster than dense, one thread")


def main() -> None:
    """Time every layer and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one layer of each kind")
    parser.add_argument("--deepsparse", metavar="PYTHON", help="interpreter of an environment with deepsparse")
    here = f"{platform.machine()} cpu"
    parser.add_argument("--machine", default=here, help="a name, for results that stand beside those of other ones")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from record import save

    torch.set_num_threads(1)
    torch.manual_seed(0)
    load_before, results = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory(prefix="sparta-peers-") as name:
        for layer in layers(quick=options.quick):
            results.append(measure(layer, Path(name)))
            shown = ", ".join(f"{speedup:.2f}x {rival}" for rival, speedup in results[-1]["speedup"].items())
            print(f"{layer.name}: {shown}", flush=True)
        if options.deepsparse:
            theirs = ask_deepsparse(options.deepsparse, Path(name))
            results = [{**cell, "deepsparse": theirs.get(cell["name"], {})} for cell in results]
            results = [{**cell, "ahead": (ahead(cell) or {}).get("ahead")} for cell in results]
    found = {"layers": results, "load": [load_before, os.getloadavg()[0]]}
    path = save("cpu_peers", options.machine, found, folder=options.out)
    print(show(results))
    print(f"saved {path}")


if __name__ == "__main__":
    main()
