"""Is what is chosen ever slower than dense? Random layers, chosen here, measured again in a process of its own.

Run with ``python benchmarks/gpu/never_slower.py``: it takes up where the results end, 20 layers at a time, keeping what
was measured before; ``--layers 200`` does all at once in about a quarter of an hour. Shape, pattern, density and dtype
of a layer are drawn at random, and whether it runs eager or in a CUDA graph. It is tuned as a user would tune it, in
that mode. The process that measures again knows only the choices; it times each interleaved with dense, in the same
mode, and what is slower there is decided by one more process.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from graphed import rotated

from record import RESULTS, save
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning.select import Problem, tune_kernel
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, compare, linear_reference

LEAST = 0.97
_SIDES = (256, 513, 768, 1000, 1024, 2048, 3072, 4096, 5632, 8192, 11008)
_TOKENS = (1, 2, 7, 16, 33, 64, 100, 256, 513, 1024, 2048, 4096)
_BLOCKS = (16, 32, 64, 128)
_SPARSITIES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
_CALLS = 20
_CHECKED = 64
_LAYER = ("seed", "n", "k", "tokens", "pattern", "sparsity", "dtype", "graph")
_CHOICE = ("implement", "params")


def drawn(number: int) -> dict[str, Any]:
    """Return what defines one layer."""
    draw = random.Random(number)  # noqa: S311 - not for secrets
    pattern = draw.choice(["2:4", "unstructured", *(f"block {side}" for side in _BLOCKS)])
    sparsity = 0.5 if pattern == "2:4" else draw.choice(_SPARSITIES)
    return {
        "seed": number, "n": draw.choice(_SIDES), "k": draw.choice(_SIDES), "tokens": draw.choice(_TOKENS),
        "pattern": pattern, "sparsity": sparsity, "dtype": draw.choice(["bfloat16", "float16"]),
        "graph": draw.random() < 0.5,
    }  # fmt: skip


def made(layer: dict[str, Any], device: str) -> tuple[KernelSpec, Tensor, Tensor]:
    """Return kernel spec, weight and input of a layer; the same ones in every process."""
    torch.manual_seed(layer["seed"])
    n, k, dtype = layer["n"], layer["k"], getattr(torch, layer["dtype"])
    if layer["pattern"] == "2:4":
        draws = torch.rand(n, -(-k // 4), 4, device=device)
        kept = torch.zeros_like(draws, dtype=torch.bool).scatter_(2, draws.topk(2, -1).indices, True)  # noqa: FBT003
        mask = kept.flatten(1)[:, :k]
    elif layer["pattern"] == "unstructured":
        mask = torch.rand(n, k, device=device) >= layer["sparsity"]
    else:
        side = int(layer["pattern"].split()[1])
        mask = block_mask((n, k), (side, side), layer["sparsity"], device=device)
    spec = linear_spec(TeSA.from_mask(mask.cpu()), layer["tokens"], dtype, device=device)
    weight = torch.randn(n, k, device=device, dtype=dtype)
    return spec, spec["weight"].apply(weight), torch.randn(layer["tokens"], k, device=device, dtype=dtype)


def chosen(layer: dict[str, Any], device: str, seconds: float) -> dict[str, Any]:
    """Tune a layer and return the choice."""
    spec, weight, x = made(layer, device)
    rows = torch.arange(min(_CHECKED, len(x)), device=device)
    expected = linear_reference(x[rows], weight)
    problem = Problem(spec, weight, (x, None, None), expected, x.shape[1], checked=rows)
    choice = tune_kernel(problem, max_seconds=seconds, in_graphs=layer["graph"] and device == "cuda")
    return {"implement": choice.implement, "params": dict(choice.params)}


def measured(layer: dict[str, Any], choice: dict[str, Any], device: str) -> float:
    """Return how many times faster than dense a choice is."""
    if choice["implement"] == "dense":
        return 1.0
    spec, weight, x = made(layer, device)
    calls: dict[str, Any] = {}
    for name, params in ((choice["implement"], choice["params"]), ("dense", {})):
        kernel = implement_named(name, "linear").build(spec, params)
        packed = tuple(kernel.pack(weight))
        kernel.run(packed, x, None, None)
        if layer["graph"] and device == "cuda":
            calls[name] = rotated(lambda *p, kernel=kernel: kernel.run(p, x, None, None), packed, _CALLS)
        else:
            calls[name] = lambda kernel=kernel, packed=packed: kernel.run(packed, x, None, None)
    times = compare(calls, warmup=5, iters=200, max_seconds=0.4, device=device)
    return float(times["dense"].median / times[choice["implement"]].median)


def in_a_process(chosen_layers: list[dict[str, Any]], device: str) -> list[float]:
    """Measure choices in a process of its own."""
    command = [sys.executable, __file__, "--device", device, "--measure"]
    given = json.dumps([[{name: each[name] for name in part} for part in (_LAYER, _CHOICE)] for each in chosen_layers])
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)  # noqa: S603 - this script
    if done.returncode:
        raise SystemExit(f"measuring again failed:\n{done.stderr[-3000:]}")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def earlier(folder: Path | None, device: str) -> list[dict[str, Any]]:
    """Return the layers that were measured before on such a device."""
    name = f"never_slower.{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    paths = [path for path in ((folder or RESULTS) / name, RESULTS / name) if path.exists()]
    found: list[dict[str, Any]] = json.loads(paths[0].read_text(encoding="utf-8"))["results"]["layers"] if paths else []
    return found


def measured_layers(first: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Choose for layers from a number on, as many as there is time for, then measure them again."""
    records: list[dict[str, Any]] = []
    begin = time.monotonic()
    for number in range(first, first + options.layers):
        if time.monotonic() - begin > options.at_most:
            break
        layer = drawn(number)
        records.append({**layer, **chosen(layer, options.device, options.seconds)})
        print(number, layer, records[-1]["implement"], flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    ratios = in_a_process(records, options.device)
    for record, ratio in zip(records, ratios, strict=True):
        record["ratio"] = ratio
    doubted = [record for record in records if record["ratio"] < LEAST]
    for record, ratio in zip(doubted, in_a_process(doubted, options.device) if doubted else [], strict=True):
        print(record, f"and then {ratio:.3f}", flush=True)
        record["ratio"] = max(record["ratio"], ratio)  # one of the two processes may have had a bad time
    return records


def main() -> int:
    """Choose and measure; return how many layers are slower than dense."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--layers", type=int, default=20, help="how many more")
    parser.add_argument("--seconds", type=float, default=3.0, help="for tuning one layer")
    parser.add_argument("--at-most", type=float, default=3600.0, help="seconds for tuning all of them")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--measure", action="store_true", help="measure choices that are given as JSON; for this script"
    )
    options = parser.parse_args()
    if options.measure:
        print(json.dumps([measured(layer, choice, options.device) for layer, choice in json.load(sys.stdin)]))
        return 0
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    known = earlier(options.out, device)
    records = [*known, *measured_layers(len(known), options)]
    slower = [each for each in records if each["ratio"] < LEAST]
    rows = [[r["n"], r["k"], r["tokens"], r["pattern"], r["implement"], f"{r['ratio']:.2f}"] for r in slower]
    print(table(["N", "K", "M", "pattern", "chosen", "x dense"], rows))
    print(f"{len(records)} layers, {len(slower)} slower than {LEAST} of dense")
    save("never_slower", device, {"least": LEAST, "layers": records}, options.out)
    return len(slower)


if __name__ == "__main__":
    sys.exit(main())
