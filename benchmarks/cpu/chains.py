"""What do sparse layers give one after the other, as in a model? Chains of them against dense, one thread.

Run with ``python benchmarks/cpu/chains.py`` (about 5 minutes on a quiet machine); ``--quick`` takes one cell of each
chain. An MLP, six feed-forward blocks (up, GELU, down) and 1x1 convolutions run as PyTorch eager, ``torch.compile`` and
ONNX Runtime run them dense, and twice as sparse layers with fused activations: packing and unpacking in every call, and
with activations kept in panels from the first layer to the last. ``--deepsparse PYTHON`` times DeepSparse on the same
chains (with ReLU, at 90 %), see ``peers.py``. Panels need one tile width for the whole chain, so the best is found for
the chain and not for each layer.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers import ahead, ask_deepsparse
from rivals import RIVALS, best, dense_calls, onnx_chain
from roofline import Roof, measured_roof

from common import TARGETS, Call, without
from record import save
from sparta.specialize.conv.cpu import conv_tiles
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.spec import ConvGeometry, conv_spec
from sparta.specialize.cpu import Panel, candidates
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, compare

# Widths from the first input to the last output, and the activation behind all layers but the last.
MLP = ((1024, 1024, 1024, 1024, 1024), "relu")
FFN = ((768, *(3072, 768) * 6), "gelu")
CONV = ((256, 64, 256, 64, 256), "relu")
CHAINS = {"mlp": MLP, "ffn": FFN, "conv": CONV}
# Tokens, or the side of an image.
SIZES = {"mlp": (16, 128), "ffn": (1, 16, 128), "conv": (28,)}
SPARSITIES = (0.8, 0.9, 0.95)
_MODULES = {"relu": nn.ReLU, "gelu": nn.GELU}
_GUESSES = 4  # of tiles, for each layer
_MOST_TILES = 4  # tokens in vectors that kernels are made for


@dataclass(frozen=True)
class Chain:
    """One chain to time; ``size`` is the tokens, or the side of an image."""

    kind: str
    size: int
    height: int
    sparsity: float

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels from the first input to the last output."""
        return CHAINS[self.kind][0]

    @property
    def tokens(self) -> int:
        """Tokens, or pixels."""
        return self.size**2 if self.kind == "conv" else self.size

    def activation(self, place: int) -> str | None:
        """Return what follows a layer: in feed-forward blocks only the wide ones have an activation."""
        last = place == len(self.widths) - 2
        between_blocks = self.kind == "ffn" and place % 2 == 1
        return None if last or between_blocks else CHAINS[self.kind][1]


@dataclass(frozen=True)
class Sized:
    """The kind and size of a chain with what all patterns of it share: weights, input and dense rivals."""

    kind: str
    size: int
    model: nn.Sequential
    x: torch.Tensor
    rivals: dict[str, Call]

    def chains(self, *, quick: bool) -> Iterator[Chain]:
        """Yield the patterns and sparsities."""
        for height in (1, 16) if self.size == 1 else (1, 4):
            for sparsity in SPARSITIES[1:2] if quick else SPARSITIES:
                yield Chain(self.kind, self.size, height, sparsity)


def sized_chains(kinds: Sequence[str], without: Sequence[str], *, quick: bool) -> Iterator[Sized]:
    """Yield the chains with their rivals."""
    for kind in kinds:
        for size in SIZES[kind][:1] if quick else SIZES[kind]:
            chain = Chain(kind, size, 1, 0.0)
            x = torch.randn(1, chain.widths[0], size, size) if kind == "conv" else torch.randn(size, chain.widths[0])
            model = dense_model(chain)
            yield Sized(kind, size, model, x, dict(dense_calls(model, x, without)))


def dense_model(chain: Chain) -> nn.Sequential:
    """Return the chain as dense layers without biases."""
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(zip(chain.widths, chain.widths[1:], strict=False)):
        conv = chain.kind == "conv"
        layers.append(nn.Conv2d(inputs, outputs, 1, bias=False) if conv else nn.Linear(inputs, outputs, bias=False))
        activation = chain.activation(place)
        layers += [] if activation is None else [_MODULES[activation]()]
    return nn.Sequential(*layers)


def masked_weights(chain: Chain, model: nn.Sequential) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the weight (N, K) and the mask of each layer."""
    weights = [layer.weight.detach().flatten(1) for layer in model if hasattr(layer, "weight")]
    return [
        (weight, block_mask(weight.shape, (chain.height, 1), chain.sparsity, seed=place))
        for place, weight in enumerate(weights)
    ]


def reference(chain: Chain, x: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the result (M, N) in float64."""
    y = _rows(x).double()
    for place, (weight, mask) in enumerate(layers):
        y = y @ torch.where(mask, weight, 0.0).double().t()
        activation = chain.activation(place)
        y = y if activation is None else _MODULES[activation]()(y)
    return y


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return activations token-major: an image's pixels are its tokens."""
    return x if x.dim() == 2 else x.flatten(2)[0].t()


# ---------------------------------------------------------------------- ours


@dataclass(frozen=True)
class Candidate:
    """A way to run the whole chain, the bytes of its packed weights, and its tiles in words."""

    call: Call
    nbytes: int
    tiles: list[str]


def apart(chain: Chain, x: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Candidate]:
    """Return ways with token-major (or NCHW) activations between all layers: each layer's best guesses."""
    if chain.kind == "conv":
        return [_conv_candidate(chain, x, layers, choice) for choice in range(_GUESSES)]
    found = []
    for choice in range(_GUESSES):
        packed = []
        for weight, mask in layers:
            tiles = _tiles(chain, weight)
            packed.append(PackedLinear(weight, mask, **tiles[min(choice, len(tiles) - 1)]))

        def call(packed: list[PackedLinear] = packed) -> torch.Tensor:
            y = x
            for place, layer in enumerate(packed):
                y = layer(y, activation=chain.activation(place), threads=1)
            return y

        found.append(Candidate(call, sum(p.nbytes for p in packed), [str(p.tile) for p in packed]))
    return found


def kept(chain: Chain, x: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Candidate]:
    """Return ways with panels between all layers, one for each width of tiles; packing and unpacking is in the call."""
    found = []
    for mv in range(1, _MOST_TILES + 1):
        tiles = [[t for t in _tiles(chain, w) if t["form"] == "panel" and t["mv"] == mv] for w, _ in layers]
        if not all(tiles):
            continue
        packed = [PackedLinear(w, m, **t[0]) for (w, m), t in zip(layers, tiles, strict=True)]

        def call(packed: list[PackedLinear] = packed, mv: int = mv) -> torch.Tensor:
            width = mv * packed[0].library.lanes
            y = _image_panel(x, width) if chain.kind == "conv" else Panel.pack(x, mv, packed[0].library)
            for place, layer in enumerate(packed[:-1]):
                y = layer.to_panel(y, activation=chain.activation(place), threads=1)
            if chain.kind != "conv":
                return packed[-1](y, threads=1)
            # (tiles, N, T) to an image (N, tiles * T), as it goes on.
            whole = packed[-1].to_panel(y, threads=1).data.transpose(0, 1).flatten(1)
            return whole[:, : chain.tokens]

        found.append(Candidate(call, sum(p.nbytes for p in packed), [str(p.tile) for p in packed]))
    return found


def _image_panel(x: torch.Tensor, width: int) -> Panel:
    """Return an image (1, C, H, W), channel-major already, as a panel with tiles of `width` pixels."""
    planes = x[0].flatten(1)
    missing = -planes.shape[1] % width
    padded = functional.pad(planes, (0, missing)) if missing else planes
    return Panel(padded.unflatten(1, (-1, width)).transpose(0, 1).contiguous(), planes.shape[1])


def _tiles(chain: Chain, weight: torch.Tensor) -> list[dict[str, Any]]:
    tiles = candidates(chain.tokens, *weight.shape, 1 - chain.sparsity, (chain.height, 1))
    # A chain is larger than caches, and from memory prefetching always pays.
    return [t for t in tiles if t["prefetch"]] if chain.tokens == 1 else tiles


def _conv_candidate(
    chain: Chain, x: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]], choice: int
) -> Candidate:
    """Return the chain as convolutions on images, each with its best guess, or the next one."""
    geometry, packed = ConvGeometry.make(2), []
    for weight, mask in layers:
        tesa = TeSA.from_mask(mask[..., None, None])
        tiles = conv_tiles(conv_spec(tesa, (1, weight.shape[1], *x.shape[2:]), x.dtype, geometry))
        tile = tiles[min(choice, len(tiles) - 1)].to_dict()
        packed.append(PackedConv(weight[..., None, None], mask[..., None, None], geometry, **tile))

    def call() -> torch.Tensor:
        y = x
        for place, layer in enumerate(packed):
            y = layer(y, activation=chain.activation(place), threads=1)
        return y

    return Candidate(call, sum(p.layout.nbytes for p in packed), [str(p.tile) for p in packed])


def fastest(chain: Chain, found: list[Candidate], truth: torch.Tensor) -> Candidate | None:
    """Return the best of a few calls, each checked first; None where there is none."""
    for candidate in found:
        y = candidate.call()
        rows = y if chain.kind != "conv" else (y.flatten(2)[0] if y.dim() == 4 else y).t()
        # Errors of one layer pass through all that follow.
        check(rows, truth, reduction=sum(chain.widths), what=str(candidate.tiles[:1]))
    if len(found) < 2:
        return found[0] if found else None
    timings = compare({str(i): c.call for i, c in enumerate(found)}, warmup=1, iters=7, max_seconds=1.0)
    return found[int(timings.fastest)]


def measure(chain: Chain, sized: Sized, roof: Roof, deepsparse: str | None) -> dict[str, Any]:
    """Time one chain; returns medians in ms, speedups over the best dense and the share of the roof."""
    x, layers = sized.x, masked_weights(chain, sized.model)
    truth = reference(chain, x, layers)
    ours = {
        "apart": fastest(chain, apart(chain, x, layers), truth),
        "kept": fastest(chain, kept(chain, x, layers), truth),
    }
    runs = {name: candidate for name, candidate in ours.items() if candidate is not None}
    functions = {**sized.rivals, **{name: candidate.call for name, candidate in runs.items()}}
    timings = compare(functions, warmup=2, iters=21, max_seconds=2.5)
    medians = {name: timing.median for name, timing in timings.timings.items()}
    dense = best(medians)
    live = sum(int(mask.sum()) for _, mask in layers)
    reached = {}
    for name, candidate in runs.items():
        ends = 4 * chain.tokens * (chain.widths[0] + chain.widths[-1])
        reached[name] = roof.reached(chain.tokens * live, candidate.nbytes + ends, medians[name])
    cell = {
        **asdict(chain),
        "layers": len(layers),
        "median_ms": medians,
        "best_dense": dense,
        "speedup": {name: medians[dense] / medians[name] for name in runs},
        "roof": reached,
        "tiles": {name: candidate.tiles for name, candidate in runs.items()},
        "target": TARGETS.get((chain.size, chain.height), (None,) * 3)[SPARSITIES.index(chain.sparsity)],
    }
    return cell if deepsparse is None else {**cell, **_beside_deepsparse(cell, sized, layers, deepsparse)}


def _beside_deepsparse(
    cell: dict[str, Any], sized: Sized, layers: list[tuple[torch.Tensor, torch.Tensor]], python: str
) -> dict[str, Any]:
    """Return DeepSparse's times of the same chain in its own process, and how far we are ahead of it."""
    dense = [layer for layer in sized.model if hasattr(layer, "weight")]
    before = [layer.weight.detach().clone() for layer in dense]
    with torch.no_grad():
        for layer, (_, mask) in zip(dense, layers, strict=True):
            layer.weight.mul_(mask.view_as(layer.weight))
    with tempfile.TemporaryDirectory(prefix="sparta-chains-") as folder:
        # It reads older models only, and has no name for GELU.
        relu = nn.Sequential(*(nn.ReLU() if isinstance(layer, nn.GELU) else layer for layer in sized.model))
        Path(folder, "chain.onnx").write_bytes(onnx_chain(relu, sized.x, opset=13))
        theirs = ask_deepsparse(python, Path(folder))["chain"]
    with torch.no_grad():
        for layer, weight in zip(dense, before, strict=True):
            layer.weight.copy_(weight)
    found = {"deepsparse": theirs, "deepsparse_activation": "relu"}
    fast = max(cell["median_ms"]["onnxruntime"] / cell["median_ms"][name] for name in cell["speedup"])
    compared = ahead({**found, "speedup": {"onnxruntime": fast}}) if "onnxruntime" in cell["median_ms"] else None
    return {**found, "ahead": None if compared is None else compared["ahead"]}


def show(results: list[dict[str, Any]]) -> str:
    """Return the chains as a table."""
    lines = []
    for cell in results:
        pattern = f"{cell['height']}x1" if cell["height"] > 1 else "u"
        gains = [f"{cell['speedup'][name]:.2f}" if name in cell["speedup"] else "" for name in ("apart", "kept")]
        share = max(reached["share"] for reached in cell["roof"].values())
        line = [cell["kind"], cell["size"], pattern, cell["sparsity"], cell["best_dense"], *gains]
        beside = "" if cell.get("ahead") is None else f"{cell['ahead']:.2f}"
        lines.append([*line, cell["target"] or "", f"{share:.0%}", beside])
    heads = ["chain", "size", "pattern", "sparsity", "best dense", "packed in each call", "panels kept", "target"]
    heads += ["share of roof", "x DeepSparse"]
    return table(heads, lines, title="times faster than the best dense")


def main() -> None:
    """Time every chain and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one size and sparsity of each chain")
    parser.add_argument("--kinds", nargs="+", choices=list(CHAINS), default=list(CHAINS))
    parser.add_argument("--without", nargs="*", default=(), choices=RIVALS[1:], help="rivals to leave out")
    parser.add_argument("--deepsparse", metavar="PYTHON", help="interpreter of an environment with deepsparse")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load_before, roof, results = os.getloadavg()[0], measured_roof(), []
    print(roof, flush=True)
    for sized in sized_chains(options.kinds, options.without, quick=options.quick):
        for chain in sized.chains(quick=options.quick):
            # Loading a chain takes DeepSparse longer than running it, so it is asked at one sparsity.
            beside = options.deepsparse if chain.sparsity == SPARSITIES[1] else None
            results.append(measure(chain, sized, roof, beside))
            gains = ", ".join(f"{name} {gain:.2f}x" for name, gain in results[-1]["speedup"].items())
            print(f"{chain}: {gains} (over {results[-1]['best_dense']})", flush=True)
    gained = [cell["speedup"]["kept"] / cell["speedup"]["apart"] for cell in results if "kept" in cell["speedup"]]
    found = {
        "chains": [{**cell, "roof": _shares(cell)} for cell in without(results, "tiles")],
        "kept_over_apart": statistics.geometric_mean(gained) if gained else None,
        "roof": roof.to_dict(),
        "load": [load_before, os.getloadavg()[0]],
    }
    path = save("cpu_chains", f"{platform.machine()} cpu", found, folder=options.out)
    print(show(results))
    print(f"saved {path}")


def _shares(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the shares of the roof alone."""
    return {name: {"share": reached["share"]} for name, reached in cell["roof"].items()}


if __name__ == "__main__":
    main()
