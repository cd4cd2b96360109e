"""Is the same thing chosen every time? A layer is tuned in several fresh processes, and the choices are timed together.

Run with ``python benchmarks/gpu/stability.py`` (four minutes; ``--quick`` for a look). Each process tunes every layer
within a few seconds, as a user would, with nothing stored. One more process then times all choices of a layer
interleaved, in CUDA graphs over rotated weights; how far each is from the fastest of them is what counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from graphed import rotated
from never_slower import chosen, made

from record import save
from sparta.specialize.implement import implement_named
from sparta.tables import table
from sparta.testing import compare

ALLOWED = 1.05
_CALLS = 20
_COMMON = {"seed": 0, "dtype": "bfloat16", "graph": True}
LAYERS: tuple[dict[str, Any], ...] = (
    {"n": 8192, "k": 8192, "tokens": 1, "pattern": "block 64", "sparsity": 0.9, **_COMMON},
    {"n": 14336, "k": 4096, "tokens": 16, "pattern": "block 64", "sparsity": 0.9, **_COMMON},
    {"n": 4096, "k": 4096, "tokens": 2048, "pattern": "block 64", "sparsity": 0.9, **_COMMON},
    {"n": 4096, "k": 14336, "tokens": 1, "pattern": "2:4", "sparsity": 0.5, **_COMMON},
    {"n": 4096, "k": 4096, "tokens": 1024, "pattern": "2:4", "sparsity": 0.5, **_COMMON},
)


def in_a_process(mode: str, given: object, options: argparse.Namespace) -> Any:
    """Run this script in a process of its own and return what it prints last."""
    command = [sys.executable, __file__, mode, "--device", options.device, "--seconds", str(options.seconds)]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)  # noqa: S603 - this script
    if done.returncode:
        raise SystemExit(f"{mode} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def timed(layer: dict[str, Any], choices: list[dict[str, Any]], device: str) -> list[float]:
    """Return the microseconds of each choice of a layer, timed interleaved."""
    spec, weight, x = made(layer, device)
    calls = {}
    for number, choice in enumerate(choices):
        kernel = implement_named(choice["implement"], "linear").build(spec, choice["params"])
        packed = tuple(kernel.pack(weight))
        kernel.run(packed, x, None, None)
        run = lambda *p, kernel=kernel: kernel.run(p, x, None, None)  # noqa: E731
        calls[str(number)] = (
            rotated(run, packed, _CALLS) if device == "cuda" else lambda run=run, packed=packed: run(*packed)
        )
    times = compare(calls, warmup=3, iters=100, max_seconds=0.5, device=device)
    return [times[name].median * 1e3 / (_CALLS if device == "cuda" else 1) for name in calls]


def main() -> int:
    """Tune again and again, time what was chosen; return how many choices are too far from the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", nargs="?", choices=["choose", "time"], help="what one process does; for this script")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--times", type=int, default=10, help="processes that tune")
    parser.add_argument("--seconds", type=float, default=3.0, help="for tuning one layer")
    parser.add_argument("--layers", type=int, default=len(LAYERS), help="how many of the layers")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny layers, to see that all runs")
    options = parser.parse_args()
    if options.mode == "choose":
        print(json.dumps([chosen(layer, options.device, options.seconds) for layer in json.load(sys.stdin)]))
        return 0
    if options.mode == "time":
        print(json.dumps([timed(layer, choices, options.device) for layer, choices in json.load(sys.stdin)]))
        return 0
    tiny = {"n": 256, "k": 256, "tokens": 8} if options.quick else {}
    layers = [{**layer, **tiny} for layer in LAYERS[: options.layers]]
    rounds = [in_a_process("choose", layers, options) for _ in range(options.times)]
    different = [
        [json.loads(text) for text in dict.fromkeys(json.dumps(found[place]) for found in rounds)]
        for place in range(len(layers))
    ]
    times = in_a_process("time", list(zip(layers, different, strict=True)), options)
    records, rows, far = [], [], 0
    for place, layer in enumerate(layers):
        known = {json.dumps(choice): us for choice, us in zip(different[place], times[place], strict=True)}
        best = min(known.values())
        took = [known[json.dumps(found[place])] / best for found in rounds]
        far += sum(ratio > ALLOWED for ratio in took)
        shown = {name: value for name, value in layer.items() if name not in ("seed", "graph")}
        records.append({**shown, "choices": len(known), "best_us": best, "over_best": took})
        what = f"{layer['n']}x{layer['k']} {layer['pattern']} {layer['sparsity']:.0%}"
        rows.append([what, layer["tokens"], len(known), f"{best:.1f}", f"{max(took):.3f}"])
    print(table(["layer", "M", "different choices", "best us", "slowest over best"], rows))
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    save("stability", device, {"allowed": ALLOWED, "layers": records}, options.out)
    return far


if __name__ == "__main__":
    sys.exit(main())
