"""What should run before anything is tuned? Make the table that the package ships for machines of this kind.

``python benchmarks/cpu/shipped_table.py`` tunes linear layers of common shapes, patterns and sparsities and writes the
clear wins to ``src/sparta/specialize/tuning/tables``; ``--quick`` takes a few layers. With ``--from-layers`` nothing is
measured: the tiles that ``benchmarks/cpu/layers.py`` found are taken from its results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from sparta import TeSA, testing
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import implement_named
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning.select import DENSE, Problem, tune_kernel
from sparta.specialize.tuning.shipped import ShippedEntry, device_kind, table_key, table_path, write_table

SHAPES = ((768, 768), (768, 3072), (3072, 768), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096))  # (K, N)
TOKENS = (1, 16, 128, 1024)
SPARSITIES = (0.7, 0.8, 0.9, 0.95)
BLOCKS = ((1, 1), (4, 1), (8, 1), (16, 1))


def layers(*, quick: bool) -> Iterator[tuple[int, int, int, tuple[int, int], float]]:
    """Yield M, K, N, block and sparsity of each layer to tune."""
    for tokens in TOKENS[1:2] if quick else TOKENS:
        for inputs, outputs in SHAPES[:1] if quick else SHAPES:
            for block in BLOCKS[:2] if quick else BLOCKS:
                for sparsity in SPARSITIES[2:3] if quick else SPARSITIES:
                    yield tokens, inputs, outputs, block, sparsity


def tuned(seconds: float, *, quick: bool) -> Iterator[ShippedEntry]:
    """Tune each layer and yield what won."""
    for tokens, inputs, outputs, block, sparsity in layers(quick=quick):
        mask = testing.block_mask((outputs, inputs), block, sparsity, seed=0)
        weight, x = torch.randn(outputs, inputs) * mask, torch.randn(tokens, inputs)
        spec = linear_spec(TeSA.from_mask(mask), tokens, torch.float32)
        expected = testing.linear_reference(x, weight, weight_mask=mask)
        choice = tune_kernel(Problem(spec, weight, (x, None, None), expected, inputs), max_seconds=seconds)
        print(f"M={tokens} K={inputs} N={outputs} {block} {sparsity:g}: {choice}", flush=True)
        gain = 1.0 if choice.implement == DENSE or choice.entry is None else choice.entry.speedup
        version = implement_named(choice.implement, "linear").version
        yield ShippedEntry(table_key(spec), choice.implement, version, choice.params, round(gain, 3))


def from_layers(record: dict[str, Any]) -> Iterator[ShippedEntry]:
    """Yield what won in the results of ``benchmarks/cpu/layers.py``."""
    version = implement_named("cpu", "linear").version
    for row in record["results"]["layers"]:
        if "drop-in" not in row["tiles"]:
            continue
        mask = testing.block_mask((row["outputs"], row["inputs"]), (row["height"], 1), row["sparsity"], seed=0)
        spec = linear_spec(TeSA.from_mask(mask), row["tokens"], torch.float32)
        tile = str(Tile(**row["tiles"]["drop-in"]))
        yield ShippedEntry(table_key(spec), "cpu", version, {"tile": tile}, round(row["speedup"]["drop-in"], 3))


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers")
    parser.add_argument("--seconds", type=float, default=3.0, help="the longest search for one layer")
    parser.add_argument("--from-layers", type=Path, metavar="FILE", help="a result of benchmarks/cpu/layers.py")
    parser.add_argument("--kind", help="kind of device the results are from, if not this one")
    parser.add_argument("--out", type=Path, help="where to write it instead of into the package")
    options = parser.parse_args()
    torch.manual_seed(0)
    kind = options.kind or device_kind("cpu")
    if options.from_layers:
        record = json.loads(options.from_layers.read_text())
        source = {"machine": record["environment"]["cpu"]["model"], "date": record["date"]}
        source["torch"], source["threads"] = record["environment"]["torch"], record["environment"]["torch_threads"]
        entries = list(from_layers(record))
    else:
        source = {"machine": testing.environment().cpu.model, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        source["torch"], source["threads"] = torch.__version__, torch.get_num_threads()
        entries = list(tuned(options.seconds, quick=options.quick))
    path = options.out or table_path(kind)
    print(f"{write_table(path, kind, source, entries)} of {len(entries)} layers are clear wins: {path}")


if __name__ == "__main__":
    main()
