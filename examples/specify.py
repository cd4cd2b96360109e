"""Specify: prune a model under several patterns, save what is known of it, and pack what is live.

Run it with ``make demo`` or ``python examples/specify.py``. It needs no GPU, no data and a few seconds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import sparta
from sparta.tables import table
from sparta.tesa import BCSR, Bitmap, Packed, Packed24, block_cover


def transformer_block(width: int = 512) -> nn.Module:
    """Return one encoder layer, the kind of model whose linears people prune."""
    return nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width, batch_first=True).eval()


def prune(model: nn.Module) -> sparta.Spec:
    """Return a spec that gives each group of weights the pattern that suits it."""
    return (
        sparta.Spec.from_pattern(model, sparta.NM(2, 4), include="self_attn.*weight")
        | sparta.Spec.from_pattern(model, sparta.Block(32, 32), 0.8, include="linear1.weight")
        | sparta.Spec.from_pattern(model, sparta.Unstructured(), 0.9, include="linear2.weight")
    )


def pack(weight: torch.Tensor, tesa: sparta.TeSA) -> Packed:
    """Return the weight in the format that its pattern calls for."""
    match tesa.pattern.pattern:
        case sparta.NM(n=2, m=4):
            return Packed24.pack(weight, tesa)
        case sparta.Block(h=h, w=w):
            return BCSR.pack(weight, tesa, block=(h, w))
        case _:
            return Bitmap.pack(weight, tesa)


def main() -> None:
    """Run the whole path: model, spec, file, check, packed weights, the same output."""
    torch.manual_seed(0)
    model = transformer_block()
    x = torch.randn(2, 64, 512)

    spec = prune(model)
    spec.apply(model)
    print("1. What we specified\n")
    print(spec)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer.spec.safetensors"
        spec.save(path)
        loaded = sparta.Spec.load(path)
        loaded.check(model)
        print(f"\n2. Saved, loaded and checked: {path.stat().st_size / 1024:.0f} KiB of knowledge, every weight obeys.")

    found = sparta.Spec.from_zeros(model)
    print("\n3. What the zeros alone say, packed\n")
    expected = model(x)
    rows = []
    for name, parameter in model.named_parameters():
        if name not in found:
            continue
        packed = pack(parameter.detach(), found[name])
        dense_bytes = parameter.numel() * parameter.element_size()
        rows.append([name, type(packed).__name__, f"{dense_bytes / 1024:.0f}", f"{packed.nbytes / 1024:.0f}",
                     f"{dense_bytes / packed.nbytes:.1f}x"])  # fmt: skip
        with torch.no_grad():
            parameter.copy_(packed.unpack())
    print(table(["weight", "format", "dense KiB", "packed KiB", "smaller"], rows))
    difference = (model(x) - expected).abs().max().item()
    print(f"\n   Output with the unpacked weights differs by {difference:.1g} from the pruned model's.")

    costs = {(1, 1): 0.01, (32, 32): 1.0, (64, 64): 3.0}
    mixed = found["linear1.weight"].mask() | (torch.rand(2048, 512) < 0.01)
    print("\n4. An irregular mask as a sum of regular ones (blocks of several sizes, each with its cost)\n")
    print(block_cover(mixed, costs))


if __name__ == "__main__":
    main()
