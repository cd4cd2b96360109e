"""What should run on a GPU before anything is tuned? Make the table that the package ships for this kind of GPU.

``python benchmarks/gpu/shipped_table.py`` measures nothing: it takes the fastest parameters that
``benchmarks/gpu/block_linear.py`` and ``two_four.py`` found, from their results, and writes the clear wins to
``src/sparta/specialize/tuning/tables``. It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from two_four import two_four

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import RESULTS
from sparta.specialize.implement import implement_named
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning.shipped import ShippedEntry, table_key, table_path, write_table
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask


def entry(mask: torch.Tensor, tokens: int, implement: str, params: Mapping[str, Any], gain: float) -> ShippedEntry:
    """Return the table's entry for one measured layer in bf16."""
    key = table_key(linear_spec(TeSA.from_mask(mask), tokens, torch.bfloat16, device="cuda"))
    return ShippedEntry(key, implement, implement_named(implement, "linear").version, params, round(gain, 3))


def entries(blocks: Mapping[str, Any], halves: Mapping[str, Any]) -> Iterator[ShippedEntry]:
    """Yield what won in the results of the two scripts."""
    for row in blocks["results"]["linear"]:
        block = (row["block"], row["block"])
        mask = block_mask(tuple(row["shape"]), block, row["sparsity"], seed=0)
        yield entry(mask, row["tokens"], "triton-block", {"tile": row["tile"]}, row["ratio"])
    for row in halves["results"]["linear"]:
        best = row["best"]
        yield entry(two_four(tuple(row["shape"])), row["tokens"], best, row["params"][best], row["ratio"])


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="nvidia-h200", help="kind of GPU in the names of the results")
    options = parser.parse_args()
    blocks, halves = (
        json.loads((RESULTS / f"{name}.{options.device}.json").read_text()) for name in ("block_linear", "two_four")
    )
    kind = blocks["device"]
    found = list(entries(blocks, halves))
    source = {"machine": kind, "torch": blocks["environment"]["torch"], "date": max(blocks["date"], halves["date"])}
    print(f"{write_table(table_path(kind), kind, source, found)} buckets of {len(found)} layers: {table_path(kind)}")


if __name__ == "__main__":
    main()
