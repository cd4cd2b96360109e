"""Tables of the CPU kernels: layers, convolutions, integers, chains, and other runtimes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from renderers.registry import Record, markdown, renderer, source

_RIVAL_NAMES = {"eager": "PyTorch eager", "compile": "`torch.compile`", "onnxruntime": "ONNX Runtime"}


def _rivals(results: Record) -> str:
    """Return who stands for dense, in words."""
    names = [_RIVAL_NAMES.get(name, f"PyTorch {name}") for name in results.get("rivals", ["eager"])]
    return names[0] if len(names) == 1 else f"the best of {', '.join(names[:-1])} and {names[-1]}"


def _pattern(height: int) -> str:
    return "unstructured" if height == 1 else f"block {height}×1"


def _by_sparsity(
    rows: Sequence[Record], keys: Sequence[str], cell: Callable[[Record], str]
) -> tuple[list[str], dict[tuple[Any, ...], list[str | None]]]:
    """Return heads and lines with a column and its target for each sparsity, and the share of the roof at the end."""
    sparsities = sorted({row["sparsity"] for row in rows})
    heads = [head for sparsity in sparsities for head in (f"{100 * sparsity:g} %", "target")]
    lines: dict[tuple[Any, ...], list[str | None]] = {}
    for key in dict.fromkeys(tuple(_hashable(row[name]) for name in keys) for row in rows):
        found = [row for row in rows if tuple(_hashable(row[name]) for name in keys) == key]
        by = {row["sparsity"]: row for row in found}
        line: list[str | None] = []
        for sparsity in sparsities:
            row = by.get(sparsity)
            target = None if row is None or row["target"] is None else f"{row['target']:g}"
            line += [None if row is None else cell(row), target]
        shares = [_share(row) for row in found]
        known = [share for share in shares if share is not None]
        lines[key] = [*line, f"{100 * min(known):.0f} to {100 * max(known):.0f} %" if known else None]
    return [*heads, "of the roof"], lines


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _share(row: Record) -> float | None:
    """Return the share of the roof: one number, or the larger of several ways to run a layer."""
    share = row.get("roof_share")
    return max(share.values()) if isinstance(share, dict) else share


def _without_empty(heads: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Return a table without the columns that have nothing in them."""
    kept = [place for place in range(len(heads)) if any(line[place] is not None for line in lines)]
    return markdown([heads[place] for place in kept], [[line[place] for place in kept] for line in lines])


def _roof(lines: dict[tuple[Any, ...], list[str | None]]) -> str:
    """Return what the last column is, where there is one."""
    if all(line[-1] is None for line in lines.values()):
        return ""
    return (
        " The last column is the larger share of what one core can do, in multiply-adds of live weights or in bytes, "
        "measured in the same run."
    )


@renderer("cpu-layers", "cpu_layers")
def cpu_layers(found: Sequence[Record]) -> str:
    """Return linear layers on the CPU: a row for each number of tokens and pattern, a column for each sparsity."""
    parts = []
    for record in found:
        results = record["results"]
        regimes = [regime for row in results["summary"] for regime in _regimes(row)]
        heads, lines = _by_sparsity(regimes, ("tokens", "height", "how"), _cpu_cell)
        title = (
            f"Times faster than {_rivals(results)}, geometric means over the shapes: as a drop-in, and in brackets "
            "with the layout kept between sparse layers, which is what the targets are for. One token: weights come "
            "from memory. Interleaved: rivals are called one after the other and drive each other out of the near "
            "caches. Repeated: each is called several times in a row."
            f"{_roof(lines)} {source(record)}"
        )
        rows = [[tokens, _pattern(height), how, *line] for (tokens, height, how), line in lines.items()]
        parts.append(f"{title}\n\n{_without_empty(['tokens', 'pattern', 'caches', *heads], rows)}")
    return "\n\n".join(parts)


def _regimes(row: Record) -> list[Record]:
    """Return a row of the summary as one for each way in which calls follow one another."""
    if "cold" in row:
        return [{**row, "how": "cold"}]
    found = []
    for how, end in (("interleaved", ""), ("repeated", " repeated")):
        if f"panel{end}" in row:
            shares = {
                name: share for name, share in row["roof_share"].items() if name in (f"panel{end}", f"drop-in{end}")
            }
            means = {"panel": row[f"panel{end}"], "drop-in": row[f"drop-in{end}"], "roof_share": shares}
            found.append({**row, **means, "how": how})
    return found


def _cpu_cell(row: Record) -> str:
    if "cold" in row:
        return f"{row['cold']:.1f}"
    return f"{row['drop-in']:.1f} ({row['panel']:.1f})"


@renderer("cpu-conv", "cpu_conv")
def cpu_conv(found: Sequence[Record]) -> str:
    """Return convolutions on the CPU: a row for each kernel size and pattern, a column for each sparsity."""
    parts = []
    for record in found:
        results = record["results"]
        found_rows = [{"how": None, **row} for row in results["summary"]]
        heads, lines = _by_sparsity(found_rows, ("kernel", "height", "how"), lambda row: f"{row['speedup']:.1f}")
        caches = (
            " Interleaved: rivals are called one after the other and drive each other out of the near caches. "
            "Repeated: each is called several times in a row."
        )
        title = (
            f"Times faster than {_rivals(results)}, one image, geometric means over ResNet's layers."
            f"{caches if any(how for _, _, how in lines) else ''}{_roof(lines)} {source(record)}"
        )
        rows = [[f"{kernel}×{kernel}", _pattern(height), how, *line] for (kernel, height, how), line in lines.items()]
        parts.append(f"{title}\n\n{_without_empty(['kernel', 'pattern', 'caches', *heads], rows)}")
    return "\n\n".join(parts)


@renderer("cpu-int8", "cpu_int8")
def cpu_int8(found: Sequence[Record]) -> str:
    """Return int8 layers on the CPU: a row for each number of tokens, block and kind of ends, a column a sparsity."""
    parts = []
    for record in found:
        results = record["results"]
        regimes = [regime for row in results["summary"] for regime in _int8_regimes(row)]
        heads, lines = _by_sparsity(regimes, ("tokens", "block", "ends", "how"), lambda row: row["cell"])
        title = (
            f"Times faster than dense int8 ({_int8_rivals(results)}), geometric means over the shapes. "
            "8 bits: inputs are quantised already and results are requantised in the call, token-major as dense int8 "
            "has them, and in brackets packed at both ends, as between neighbouring sparse layers, which is what the "
            "targets are for. fp32: both round their inputs in the call and return fp32; in brackets, times faster "
            "than dense fp32. Interleaved and repeated are as above."
            f"{_roof(lines)} {source(record)}"
        )
        rows = [[tokens, f"block {h}×{w}", ends, how, *line] for (tokens, (h, w), ends, how), line in lines.items()]
        parts.append(f"{title}\n\n{_without_empty(['tokens', 'pattern', 'ends', 'caches', *heads], rows)}")
    return "\n\n".join(parts)


_INT8_RIVALS = {"torch-int8": "`torch._int_mm`", "onednn-int8": "oneDNN", "onnxruntime": "ONNX Runtime"}


def _int8_rivals(results: Record) -> str:
    """Return the dense rivals in words."""
    names = [_INT8_RIVALS.get(name, "OpenVINO") for name in results.get("rivals", ["onednn-int8", "torch-int8"])]
    return f"the best of {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _int8_regimes(row: Record) -> list[Record]:
    """Return a row of the summary as one for each kind of ends and way in which calls follow one another."""
    found = []
    for how, end in (("interleaved", ""), ("repeated", " repeated")):
        ways = (f"drop-in{end}", f"panel{end}")
        shares = {name: row["roof_share"][name] for name in ways}
        cell = "{:.1f} ({:.1f})".format(*(row[name] for name in ways))
        found.append({**row, "ends": "8 bits", "how": how, "cell": cell, "roof_share": shares})
    cell = f"{row['real repeated']:.1f} ({row['fp32 repeated']:.1f})"
    return [*found, {**row, "ends": "fp32", "how": "repeated", "cell": cell, "roof_share": None, "target": None}]


@renderer("cpu-bounds", "cpu_bounds")
def cpu_bounds(found: Sequence[Record]) -> str:
    """Return targets beside what is possible: a row for each kind of layer and sparsity."""
    parts = []
    for record in found:
        kinds: dict[tuple[Any, ...], list[Record]] = {}
        for row in record["results"]["rows"]:
            key = (row["kind"], row["tokens"], tuple(row["block"]), row["sparsity"], row["target"])
            kinds.setdefault(key, []).append(row["ms"])
        rows = []
        for (kind, tokens, (height, width), sparsity, target), times in kinds.items():
            gains = [each["dense"] / each["ours"] for each in times]
            most = [each["dense"] / (each["empty"] + each["least"]) for each in times]
            means = [statistics.geometric_mean(each) for each in (gains, most)]
            fixed = statistics.mean(each["empty"] / each["ours"] for each in times)
            least = statistics.mean(each["least"] / each["ours"] for each in times)
            pattern = f"block {height}×{width}" if height * width > 1 else "unstructured"
            held = "one image" if tokens is None else tokens
            line = [held, f"{kind}, {pattern}", f"{100 * sparsity:g} %", f"{target:g}"]
            rows.append([*line, *(f"{mean:.1f}" for mean in means), f"{100 * fixed:.0f} %", f"{100 * least:.0f} %"])
        roof = record["results"]["roof"]
        read = ", ".join(f"{1e-9 * rate:.0f} of {int(size) // 1024} KiB" for size, rate in roof["bytes_read"].items())
        bytewise = roof["byte_multiply_adds"]
        integers = "" if bytewise is None else f", {2e-9 * bytewise:.0f} GOP/s in int8"
        title = (
            "Times faster than the best dense kernel (PyTorch and ONNX Runtime), and at most possible: the time of a "
            "call without any live weight and, after it, the least time that the live ones take at the rates of one "
            f"core, {2e-9 * roof['multiply_adds']:.0f} GFLOP/s in fp32{integers}, and GB/s by what is read over and "
            f"over: {read}. The last columns are the shares of these two in what a call takes. Geometric means over "
            f"the shapes, layouts kept at both ends, weights of one token from memory. {source(record)}"
        )
        heads = ["tokens", "layer", "sparsity", "target", "reached", "at most", "without weights", "live weights"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("cpu-few-bits", "cpu_few_bits")
def cpu_few_bits(found: Sequence[Record]) -> str:
    """Return int8 convolutions and weights of 8 bits for a few tokens: a row for each kind and pattern."""
    parts = []
    for record in found:
        kinds: dict[tuple[Any, ...], list[Record]] = {}
        for row in record["results"]["rows"]:
            kinds.setdefault((row["name"], tuple(row["block"]), row["sparsity"]), []).append(row["median_ms"])
        rivals = sorted({name for each in kinds.values() for times in each for name in times} - {"int8", "ours fp32"})
        rows = []
        for (name, (height, width), sparsity), times in kinds.items():
            dense = [min(each[rival] for rival in rivals if rival in each) / each["int8"] for each in times]
            own = [each["ours fp32"] / each["int8"] for each in times]
            pattern = "unstructured" if (height, width) == (1, 1) else f"block {height}×{width}"
            gains = [f"{statistics.geometric_mean(each):.1f}" for each in (dense, own)]
            rows.append([name, pattern, f"{100 * sparsity:g} %", *gains])
        title = (
            f"Times faster than the best of {', '.join(rivals)}, and than our own kernels in fp32, "
            f"geometric means over the layers. {source(record)}"
        )
        heads = ["layer", "pattern", "sparsity", "over dense", "over ours in fp32"]
        parts.append(f"{title}\n\n{_without_empty(heads, rows)}")
    return "\n\n".join(parts)


@renderer("cpu-bf16", "cpu_bf16")
def cpu_bf16(found: Sequence[Record]) -> str:
    """Return layers and an encoder in bf16: a row for each layer, and one for the encoder."""
    parts = []
    for record in found:
        results = record["results"]
        names = list(results["layers"][0]["median_ms"])
        rows = [
            [
                str(row["tokens"]),
                "×".join(map(str, row["shape"])),
                f"{100 * row['sparsity']:g} %",
                *(f"{row['median_ms'][name]:.3f}" for name in names),
            ]
            for row in results["layers"]
        ]
        units = {"pairs": "AVX-512 BF16", "blocks": "AMX"}
        has = " and ".join(units[name] for name in results["units"]) or "no instructions for bf16"
        encoder = ", ".join(f"{name} {took:.1f}" for name, took in results["model"].items())
        title = (
            f"Milliseconds of a layer; blocks of 4×1; `fp32`, `pairs` and `blocks` are ours. The processor has {has}. "
            f"The encoder, one text of 128 tokens: {encoder} ms. {source(record)}"
        )
        parts.append(f"{title}\n\n{markdown(['tokens', 'shape', 'sparsity', *names], rows)}")
    return "\n\n".join(parts)


_CHAIN_NAMES = {"mlp": "MLP, four layers of 1024", "ffn": "six feed-forward blocks, 768-3072-768", "conv": "four 1×1"}


@renderer("cpu-chains", "cpu_chains")
def cpu_chains(found: Sequence[Record]) -> str:
    """Return chains of layers on the CPU: packed in every call, and with the layout kept."""
    parts = []
    for record in found:
        results = record["results"]
        rows = []
        for cell in results["chains"]:
            size = (
                f"{cell['size']}×{cell['size']} pixels"
                if cell["kind"] == "conv"
                else f"{cell['size']} token{'s' * (cell['size'] > 1)}"
            )
            gains = [cell["speedup"].get(name) for name in ("apart", "kept")]
            share = max(reached["share"] for reached in cell["roof"].values())
            line = [_CHAIN_NAMES[cell["kind"]], size, _pattern(cell["height"]), f"{100 * cell['sparsity']:g} %"]
            line += [None if gain is None else f"{gain:.1f}" for gain in gains]
            ahead = cell.get("ahead")
            line += [cell["target"], f"{100 * share:.0f} %", None if ahead is None else f"{ahead:.1f}"]
            rows.append(line)
        title = (
            "Times faster than the best of PyTorch eager, `torch.compile` and ONNX Runtime, whole chains: with packing "
            f"and unpacking in every layer, and with the layout kept from the first to the last. {source(record)}"
        )
        heads = ["chain", "input", "pattern", "sparsity", "packed in each", "layout kept", "target", "of the roof"]
        parts.append(f"{title}\n\n{_without_empty([*heads, 'times faster than DeepSparse'], rows)}")
    return "\n\n".join(parts)


@renderer("cpu-peers", "cpu_peers")
def cpu_peers(found: Sequence[Record]) -> str:
    """Return layers beside other runtimes: a row for each layer, ours and DeepSparse's speedup over ONNX Runtime."""
    parts = []
    for record in found:
        cells = record["results"]["layers"]
        rows = []
        for cell in cells:
            sizes = "×".join(map(str, cell["sizes"]))
            theirs = cell.get("deepsparse") or {}
            ratio = (
                theirs["onnxruntime"] / theirs["deepsparse"] if {"onnxruntime", "deepsparse"} <= set(theirs) else None
            )
            line = [f"{cell['kind']} {sizes}", _pattern(cell["height"]), f"{100 * cell['sparsity']:g} %"]
            line += [f"{cell['speedup'][name]:.1f}" for name in ("best dense", "onnxruntime")]
            line += [None if number is None else f"{number:.1f}" for number in (ratio, cell.get("ahead"))]
            rows.append(line)
        ahead = [cell["ahead"] for cell in cells if cell.get("ahead") is not None]
        verdict = "" if not ahead else f" Ahead of DeepSparse in {sum(a > 1 for a in ahead)} of {len(ahead)} rows."
        title = (
            "Drop-in layers, times faster than dense: the better of PyTorch eager and ONNX Runtime, and ONNX Runtime "
            "alone. DeepSparse 1.8.0 runs in a process of its own and is compared by its speedup over ONNX Runtime "
            f"there.{verdict}"
        )
        heads = ["layer", "pattern", "sparsity", "over best dense", "over ONNX Runtime"]
        heads += ["DeepSparse over ONNX Runtime", "times faster than DeepSparse"]
        parts.append(f"{title} {source(record)}\n\n{_without_empty(heads, rows)}")
    return "\n\n".join(parts)


@renderer("cpu-selection", "cpu_selection")
def cpu_selection(found: Sequence[Record]) -> str:
    """Return tuned layers that are little pruned: a row for each layer, a column for each pattern and sparsity."""
    parts = []
    for record in found:
        results = record["results"]
        columns = list(dict.fromkeys((case["pattern"], case["sparsity"]) for case in results["cases"]))
        rows: dict[str, dict[tuple[str, float], str]] = {}
        for case in results["cases"]:
            name = f"{case['layer']} {'×'.join(map(str, case['sizes']))}"
            chosen = " dense" if case["chosen"] == "dense" else ""
            rows.setdefault(name, {})[case["pattern"], case["sparsity"]] = f"{case['ratio']:.2f}{chosen}"
        below = sum(case["ratio"] < results["floor"] for case in results["cases"])
        slowest = max(case["tuning_seconds"] for case in results["cases"])
        packing = max(each["ms"] for each in results["packing"])
        title = (
            f"Times faster than the dense module after tuning, and where dense was chosen; {below} of "
            f"{len(results['cases'])} are below {results['floor']}. Tuning took {slowest:.1f} s at most, and "
            f"packing 10 million weights {packing:.0f} ms. {source(record)}"
        )
        heads = ["layer", *(f"{pattern.replace('x', '×')}, {100 * sparsity:g} %" for pattern, sparsity in columns)]
        body = markdown(heads, [[name, *map(row.get, columns)] for name, row in rows.items()])
        parts.append(f"{title}\n\n{body}")
    return "\n\n".join(parts)
