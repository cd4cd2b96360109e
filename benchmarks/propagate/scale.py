"""What does propagation cost on large models? BERT-base with values, and a Llama of 7B parameters without any.

Run with ``python benchmarks/propagate/scale.py``; ``--quick`` takes two layers of each. The Llama stays on the meta
device and gets channel masks for its hidden neurons and heads; nothing of its size is ever allocated, which the peak
of the process's memory shows. Times of torch's own export are kept apart.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from propagation.architectures import plant
from record import save
from sparta import Spec, TeSA
from sparta.propagation import capture, propagate
from sparta.tables import table


def llama(layers: int) -> tuple[nn.Module, Any, Spec]:
    """Return a Llama of 7B's widths on the meta device, an example, and masks for a third of its neurons and heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    neurons = TeSA.from_mask((torch.arange(config.intermediate_size) % 3 > 0).expand(config.hidden_size, -1))
    heads = TeSA.from_mask((torch.arange(config.hidden_size) // 128 % 3 > 0).expand(config.hidden_size, -1))
    spec = Spec({"model.layers.*.mlp.down_proj.weight": neurons, "model.layers.*.self_attn.o_proj.weight": heads})
    return model, {"input_ids": torch.zeros(1, 128, dtype=torch.long, device="meta")}, spec


def bert(layers: int) -> tuple[nn.Module, Any, None]:
    """Return BERT-base with a fifth of rows and columns zero."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=layers)).eval()
    return plant(model), {"input_ids": torch.randint(0, 30000, (1, 128))}, None


def measure(name: str, model: nn.Module, inputs: Any, spec: Spec | None) -> dict[str, Any]:
    """Return the seconds of each step, and the memory that the process took beyond what it had."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    capture(model, inputs)
    exported = time.perf_counter() - start
    start = time.perf_counter()
    result = propagate(model, inputs, spec)
    total = time.perf_counter() - start
    start = time.perf_counter()
    small = result.compact(allow_empty=True)
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_compact": sum(p.numel() for p in small.parameters()),
        "nodes": len(result.captured.graph.nodes),
        "export_s": exported,
        "propagate_s": total - exported,
        "compact_s": time.perf_counter() - start,
        "memory_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def show(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    lines: list[list[object]] = [
        [
            row["model"],
            f"{row['parameters'] / 1e6:.0f} → {row['parameters_compact'] / 1e6:.0f}",
            row["nodes"],
            f"{row['export_s']:.1f}",
            f"{row['propagate_s']:.1f}",
            f"{row['compact_s']:.1f}",
            f"{row['memory_mib']:.0f}",
        ]
        for row in rows
    ]
    return table(["model", "parameters (M)", "nodes", "export", "propagate", "compact (s)", "memory (MiB)"], lines)


def main() -> None:
    """Measure both models and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two layers of each")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    rows = [
        measure("Llama 7B, meta", *llama(2 if options.quick else 32)),
        measure("BERT-base", *bert(2 if options.quick else 12)),
    ]
    found = {"models": rows, "load": [load_before, os.getloadavg()[0]]}
    path = save("propagate_scale", f"{platform.machine()} cpu", found, folder=options.out)
    print(show(rows))
    print(f"saved {path}")


if __name__ == "__main__":
    main()
