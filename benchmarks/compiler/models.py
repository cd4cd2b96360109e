"""How much faster is a whole compiled model on the CPU? Sparse models against dense ones in other runtimes.

Run with ``python benchmarks/compiler/models.py``; ``--quick`` takes small versions of the models, ``--only`` some. For
each model and batch the dense model is compiled by Inductor once, and exported to ONNX Runtime and OpenVINO where they
are installed; in each case these, eager dense and the compiled sparse model take turns, call by call. The bound that
Amdahl's law sets is printed beside: what the speed-up of the eager model would be if the pruned layers took no time.
Results are saved after every case; ``--resume`` goes on where a run ended.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparta
from sparta.compiler import compile_model
from sparta.tables import table
from sparta.testing import compare

sys.path.insert(0, str(Path(__file__).parents[1]))
from networks import SentenceEncoder, encoder, load_minilm, mlp, mobilenet, resnet
from runtimes import rival_calls

from record import RESULTS, save

QUESTION, DEVICE = "compiler_models", f"{platform.machine()} cpu"
WORDS = 30522
HOST_GAIN = 1.03  # what Inductor must bring to the dense model, beyond folding, to compete as the host of sparse ones


@dataclass(frozen=True)
class Case:
    """One measurement: a model, a batch, a pattern and a sparsity; sparsity 0 is the dense model."""

    model: str
    batch: int
    pattern: str
    sparsity: float

    def __str__(self) -> str:
        what = f"{self.pattern} {self.sparsity:.0%}" if self.sparsity else "dense"
        return f"{self.model}, batch {self.batch}, {what}"


@dataclass(frozen=True)
class Options:
    """How to measure, the same for every case."""

    quick: bool
    tune: str
    seconds: float
    budget: float
    inductor: bool
    minilm: Path | None
    runtimes: bool


# Each model in full and in small, and its inputs for a batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "bert-base": (lambda: encoder(12, 768, 12), lambda: encoder(2, 256, 4), lambda b: torch.randn(b, 128, 768)),
    "minilm": (
        lambda: SentenceEncoder(6, 384, 12, WORDS),
        lambda: SentenceEncoder(2, 128, 4, WORDS),
        lambda b: torch.randint(1000, WORDS, (b, 128)),
    ),
    "resnet50": (
        lambda: resnet((3, 4, 6, 3), 64),
        lambda: resnet((1, 1), 16),
        lambda b: torch.randn(b, 3, 224, 224),
    ),
    "mobilenetv2": (lambda: mobilenet(1.0), lambda: mobilenet(0.5), lambda b: torch.randn(b, 3, 224, 224)),
    "mlp": (lambda: mlp(3072, 6), lambda: mlp(256, 3), lambda b: torch.randn(b, 3072)),
}
SMALL_INPUTS: dict[str, Callable[[int], Tensor]] = {
    "bert-base": lambda b: torch.randn(b, 16, 256),
    "minilm": lambda b: torch.randint(1000, WORDS, (b, 16)),
    "resnet50": lambda b: torch.randn(b, 3, 32, 32),
    "mobilenetv2": lambda b: torch.randn(b, 3, 32, 32),
    "mlp": lambda b: torch.randn(b, 256),
}
LEAST_ROUNDS = 7
CLOSE = (0.9, 1.05)  # gains between these are timed for longer
PATTERNS = {"u": sparta.Unstructured(), "4x1": sparta.Block(4, 1), "8x1": sparta.Block(8, 1)}


class Free(nn.Module):
    """Stands for a layer that takes no time: it returns what the layer returned once."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Tensor:
        """Return the kept result."""
        del x
        return self.result


class Dense:
    """The dense model of one batch, eager and under Inductor: what every case of that batch is compared with."""

    def __init__(self, name: str, batch: int, options: Options) -> None:
        torch.manual_seed(0)
        full, small, inputs = MODELS[name]
        self.name = name
        self.model = (small if options.quick else full)().eval()
        self.weights = "random"
        if isinstance(self.model, SentenceEncoder) and options.minilm is not None and not options.quick:
            self.weights = load_minilm(self.model, options.minilm).name + " of all-MiniLM-L6-v2"
        self.x = (SMALL_INPUTS[name] if options.quick else inputs)(batch)
        self.rivals: dict[str, Callable[[Tensor], Any]] = {"eager": self.model}
        self.inductor_seconds = 0.0
        if options.inductor:
            begin = time.perf_counter()
            torch._dynamo.reset()  # graphs of the batch before
            # Weights of its own, as the sparse model has: what shares them finds them in the caches.
            compiled = torch.compile(copy.deepcopy(self.model), dynamic=False)
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                compiled(self.x)
            self.inductor_seconds = time.perf_counter() - begin
            self.rivals["inductor"] = compiled
        if options.runtimes and self.x.is_floating_point():
            self._folder = tempfile.TemporaryDirectory()
            found = rival_calls(self.model, self.x, Path(self._folder.name), torch.get_num_threads())
            self.rivals |= {name.removesuffix(" fp32"): call for name, call in found.items()}

    @property
    def prunable(self) -> list[str]:
        """The layers that are pruned: all but the first and last one of image models, and narrow ones."""
        layers = [
            name
            for name, module in self.model.named_modules()
            if (isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1))
            and module.weight.shape[0] % 8 == 0
        ]
        return layers if self.name in ("bert-base", "minilm", "mlp") else layers[1:-1]

    def pruned(self, case: Case) -> nn.Module:
        """Return a copy pruned by magnitude."""
        model = copy.deepcopy(self.model)
        if case.sparsity:
            names = [f"{name}.weight" for name in self.prunable]
            sparta.Spec.from_pattern(model, PATTERNS[case.pattern], case.sparsity, include=names).apply(model)
        return model

    def free(self) -> nn.Module:
        """Return a copy whose pruned layers take no time: what is left is what Amdahl's law is about."""
        model, results = copy.deepcopy(self.model), dict[str, Tensor]()
        for name in self.prunable:
            model.get_submodule(name).register_forward_hook(
                lambda _module, _inputs, result, name=name: results.__setitem__(name, result)
            )
        with torch.no_grad():
            model(self.x)
        for name, result in results.items():
            model.set_submodule(name, Free(result))
        return model

    def timed(
        self, rivals: dict[str, Callable[[Tensor], Any]], seconds: float, rounds: int = LEAST_ROUNDS
    ) -> dict[str, float]:
        """Return the medians of some that take turns, in ms; no less than so many rounds."""
        with torch.no_grad():
            self.model(self.x)
            begin = time.perf_counter()
            self.model(self.x)
            least = rounds * len(rivals) * (time.perf_counter() - begin)
            found = compare(rivals, (self.x,), warmup=1, iters=50, max_seconds=max(seconds, least))
        return {name: timing.median for name, timing in found.timings.items()}


def hosts(report: dict[str, Any]) -> bool:
    """Whether Inductor made the dense model faster than its folded graph is: only then can it help sparse ones."""
    whole = report["plan"]["whole"]
    if whole["host"] == "inductor":
        return True
    times = whole["milliseconds"]
    plain = [value for name, value in times.items() if name in ("original graph", "reduced graph")]
    return min(plain, default=0.0) > HOST_GAIN * times.get("original graph, inductor", float("inf"))


def measure(case: Case, dense: Dense, options: Options, *, inductor: bool, again: bool) -> dict[str, Any]:
    """Compile one case and time it against the dense model; `again` compiles it twice, to see what the store saves."""
    model = dense.pruned(case)
    # Nothing is tuned for a dense model. Inductor takes for a sparse one about what it took for the dense one.
    budget = options.budget + 1.5 * inductor * dense.inductor_seconds if case.sparsity else None
    seconds: list[float] = []
    for _ in range(1 + again):
        begin = time.perf_counter()
        fast = compile_model(model, dense.x, tune=options.tune, budget_s=budget, inductor=inductor)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - begin)
    medians = dense.timed({**dense.rivals, "sparta": fast}, options.seconds)
    if CLOSE[0] < min(medians[name] for name in dense.rivals) / medians["sparta"] < CLOSE[1]:  # figures vary as much
        medians = dense.timed({**dense.rivals, "sparta": fast}, 3 * options.seconds, 3 * LEAST_ROUNDS)
    bound = dense.timed({"eager": dense.model, "free": dense.free()}, 0.4 * options.seconds)
    best = min(medians[name] for name in dense.rivals)
    found = {
        **asdict(case),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "weights": dense.weights,
        "median_ms": medians,
        "speedup": best / medians["sparta"],
        "amdahl_bound": bound["eager"] / bound["free"],
        "compile_seconds": seconds,
        "inductor_seconds": dense.inductor_seconds,
        "inductor_hosts": inductor,
        "error": fast.report.certificate.error,
        "sparse_layers": len(fast.report.plan.sparse),
        "runs": fast.report.plan.whole.reason,
        "inductor_helps": hosts(fast.report.to_dict()),
    }
    if case.model == "minilm":
        with torch.no_grad():
            found["cosine"] = float(functional.cosine_similarity(fast(dense.x), model(dense.x)).min())
    return found


def cases(names: list[str], batches: list[int], sparsities: list[float], *, quick: bool) -> list[Case]:
    """Return what to measure: the dense model, and each pattern at each sparsity."""
    found = []
    for name in names:
        for batch in batches:
            found.append(Case(name, batch, "u", 0.0))
            for pattern in ("4x1",) if quick else ("u", "4x1"):
                found += [Case(name, batch, pattern, sparsity) for sparsity in ((0.9,) if quick else sparsities)]
    return found


def measured_before(folder: Path | None) -> list[dict[str, Any]]:
    """Return the cases of the last run, or none."""
    name = DEVICE.lower().replace("_", "-").replace(" ", "-")
    path = (folder or RESULTS) / f"{QUESTION}.{name}.json"
    return list(json.loads(path.read_text(encoding="utf-8"))["results"]["cases"]) if path.exists() else []


def run(todo: list[Case], results: list[dict[str, Any]], options: Options, keep: Callable[[], Path]) -> None:
    """Measure cases, adding to `results` and keeping them after each."""
    dense: Dense | None = None
    at: tuple[str, int] | None = None
    known = {Case(r["model"], r["batch"], r["pattern"], r["sparsity"]): r for r in results}
    compiled_twice: set[tuple[str, int]] = set()
    for case in todo:
        if case in known:
            print(f"{case}: measured before", flush=True)
            continue
        if dense is None or at != (case.model, case.batch):
            dense = None  # its memory first
            gc.collect()
            dense, at = Dense(case.model, case.batch, options), (case.model, case.batch)
        plain = known.get(Case(case.model, case.batch, "u", 0.0))
        inductor = options.inductor and (plain is None or plain["inductor_helps"])
        again = case.sparsity > 0 and at not in compiled_twice
        found = measure(case, dense, options, inductor=inductor, again=again)
        compiled_twice |= {at} if again else set()
        known[case] = found
        results.append(found)
        print(f"{case}: {found['speedup']:.2f}x, {found['compile_seconds'][0]:.0f} s; {found['runs']}", flush=True)
        keep()


def show(results: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    rows = [
        [
            r["model"],
            r["batch"],
            r["pattern"] if r["sparsity"] else "dense",
            r["sparsity"],
            *(r["median_ms"].get(name) for name in ("eager", "inductor", "onnxruntime", "openvino", "sparta")),
            f"{r['speedup']:.2f}x",
            "" if r["amdahl_bound"] is None else f"{r['amdahl_bound']:.2f}x",
            " / ".join(f"{s:.0f}" for s in r["compile_seconds"]),
            f"{r['cosine']:.6f}" if "cosine" in r else "",
        ]
        for r in results
    ]
    times = ["eager ms", "inductor ms", "onnxruntime ms", "openvino ms", "sparta ms"]
    columns = ["model", "batch", "pattern", "sparsity", *times, "speed-up", "bound"]
    return table([*columns, "compile s", "cosine"], rows, title="times faster than the best dense")


def main() -> None:
    """Measure every case and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, one sparsity")
    parser.add_argument("--only", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    parser.add_argument("--tune", choices=("quick", "full"), default="quick")
    parser.add_argument("--seconds", type=float, default=5.0, help="for the last timing of each case")
    parser.add_argument("--budget", type=float, default=35.0, help="seconds for compiling each case")
    parser.add_argument(
        "--no-inductor", action="store_true", help="leave torch.compile out, which takes most of the time"
    )
    parser.add_argument("--no-runtimes", action="store_true", help="leave ONNX Runtime and OpenVINO out")
    parser.add_argument("--minilm", type=Path, help="folder with the weights of all-MiniLM-L6-v2; random ones without")
    parser.add_argument("--resume", action="store_true", help="keep the cases of the last run and measure the rest")
    parser.add_argument("--threads", type=int, help="as many as torch takes by default")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    options = Options(
        given.quick, given.tune, given.seconds, given.budget, not given.no_inductor, given.minilm, not given.no_runtimes
    )
    load_before = os.getloadavg()[0]
    results = measured_before(given.out) if given.resume else []

    def keep() -> Path:
        note = "weights are random but for those of minilm, where its file is given: times depend on shapes and masks"
        record = {"cases": results, "note": note, "threads": torch.get_num_threads()}
        record["load"] = [load_before, os.getloadavg()[0]]
        return save(QUESTION, DEVICE, record, folder=given.out)

    run(cases(given.only, given.batch, given.sparsity, quick=given.quick), results, options, keep)
    print(show(results))
    print(f"saved {keep()}")


if __name__ == "__main__":
    main()
