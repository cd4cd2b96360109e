"""Tables of the CUDA kernels."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from renderers.bounds import (
    SparseRates,
    block_target,
    cache_bound,
    floor_bound,
    linear_bound,
    product_bound,
    rates,
    sparse_rates,
    step_bound,
    two_four_bound,
)
from renderers.registry import Record, markdown, renderer, source

_MANY = 4096  # tokens for which the targets of blocks stand in their table
_BACKWARD_TARGET = 1.2  # over FlexAttention, with gradients
_MANY_24, _STORED_24 = 1024, 0.5625  # tokens from which the target of 2:4 is higher; the share of a weight it stores
_PRODUCT_TARGETS = {("sdd", 128, 0.5): 1.3}


def _dense_us(row: Record) -> float:
    return min(us for name, us in row["us"].items() if name.startswith("dense") and us is not None)


def _dense_products(rows: Sequence[Record]) -> list[tuple[float, float]]:
    return [
        (2.0 * row["tokens"] * row["shape"][0] * row["shape"][1], row["us"]["dense"]) for row in rows if "us" in row
    ]


@renderer("block-linear", "block_linear")
def block_linear(found: Sequence[Record]) -> str:
    """Return block-sparse linear layers on a GPU: a row for each block and sparsity, a column for the tokens."""
    parts = []
    for record in found:
        results = record["results"]
        cells: dict[tuple[int, float, int], list[float]] = {}
        for row in results["linear"]:
            cells.setdefault((row["block"], row["sparsity"], row["tokens"]), []).append(row["ratio"])
        tokens = sorted({key[2] for key in cells})
        rows = []
        limits = rates(results, _dense_products(results["linear"]))
        for block, sparsity in dict.fromkeys(sorted(key[:2] for key in cells)):
            line = [cells.get((block, sparsity, count)) for count in tokens]
            means = [None if ratios is None else f"{statistics.geometric_mean(ratios):.2f}" for ratios in line]
            alike = [row for row in results["linear"] if (row["block"], row["sparsity"]) == (block, sparsity)]
            many = [row for row in alike if row["tokens"] == _MANY and "us" in row]
            bounds = [linear_bound(tuple(row["shape"]), _MANY, 1.0 - sparsity, _dense_us(row), limits) for row in many]
            cached = [cache_bound(row, _dense_us(row), limits) for row in many]
            ends = [f"{statistics.geometric_mean(values):.1f}" if values else None for values in (bounds, cached)]
            beside = [block_target(block, sparsity, _MANY), *ends] if limits.products else []
            rows.append([f"{block}×{block}", f"{100 * sparsity:g} %", *means, *beside])
        title = (
            f"Times faster than the best dense in {results['dtype']}, by the number of tokens: geometric means "
            "over the shapes measured. Below 1.03, dense is chosen and runs. "
        )
        heads = ["block", "sparsity", *map(str, tokens)]
        if limits.products:
            title += (
                f"Target and bounds are those of {_MANY} tokens: what {limits.text} leave room for, and what "
                f"{limits.cache / 1e6:.1f} TB/s from the L2 cache do, from which every kept block reads its columns of "
                "x. "
            )
            heads += ["target", "bound", "bound by the cache"]
        title += source(record)
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("two-four", "two_four")
def two_four(found: Sequence[Record]) -> str:
    """Return linear layers with 2:4 weights on a GPU: a row for each shape, a column for each number of tokens."""
    parts = []
    for record in found:
        results = record["results"]
        cells = {(tuple(row["shape"]), row["tokens"]): row for row in results["linear"]}
        tokens = sorted({key[1] for key in cells})
        rows = []
        limits, parts_alone = rates(results, _dense_products(results["linear"])), sparse_rates(results, "bf16")
        for shape in dict.fromkeys(key[0] for key in cells):
            line = [cells.get((shape, count)) for count in tokens]
            rows.append(
                [f"{shape[0]}×{shape[1]}", *(None if c is None else f"{c['ratio']:.2f} {c['best']}" for c in line)]
            )
            if limits.products:
                bounds = [
                    c
                    and (
                        linear_bound(shape, c["tokens"], 0.5, _dense_us(c), limits, stored=_STORED_24)
                        if parts_alone is None
                        else two_four_bound(shape, c["tokens"], _dense_us(c), parts_alone, 2)
                    )
                    for c in line
                ]
                rows.append([f"{shape[0]}×{shape[1]}, bound", *(bound and f"{bound:.2f}" for bound in bounds)])
        if limits.products:
            rows.append(["target", *(1.4 if count < _MANY_24 else 1.6 for count in tokens)])
        bound = f"Bounds are what {limits.text} of live products leave room for. " if limits.products else ""
        if parts_alone is not None:
            bound = f"The bound is the slower of two kernels: {parts_alone.text}. "
        title = (
            f"Times faster than the best dense in {results['dtype']}, by the number of tokens, and the fastest "
            f"implement for 2:4. Below 1.03, dense is chosen and runs. {bound}{source(record)}"
        )
        parts.append(f"{title}\n\n{markdown(['weight', *map(str, tokens)], rows)}")
    return "\n\n".join(parts)


@renderer("cuda-attention", "attention")
def attention(found: Sequence[Record]) -> str:
    """Return sparse attention on a GPU: a row for each mask, decoding and padded batches below."""
    parts = []
    for record in found:
        results = record["results"]
        rows = []
        for row in results["attention"]:
            sizes = f"{row['queries']}×{row['keys']}×{row['width']}"
            kind = f"{row['pattern']}, forward and backward" if row["backward"] else row["pattern"]
            flex = row["us"].get("FlexAttention")
            ahead = None if flex is None else f"{flex / row['us']['triton-flash']:.2f}"
            target = _BACKWARD_TARGET if row["backward"] else None
            line = [sizes, kind, f"{row['density']:.2f}", f"{row['ratio']:.2f}", f"{1.0 / row['density']:.1f}", ahead]
            rows.append([*line, target, f"{100 * row['of_limit']:.0f} %", f"{row['tflops']:.0f}"])
        for row in results["decode"]:
            share = f"{100 * row['ratio'] * row['density']:.0f} %"
            line = [f"{row['density']:.2f}", f"{row['ratio']:.2f}", f"{1.0 / row['density']:.1f}"]
            rows.append([f"1×{row['keys']}×128", "decode", *line, None, None, share, None])
        lengths = results["lengths"]
        share = f"{100 * lengths['of_limit']:.0f} %"
        line = [f"{lengths['fill']:.2f}", f"{lengths['ratio']:.2f}", f"{1.0 / lengths['fill']:.1f}"]
        rows.append(["16384×16384×128", "lengths", *line, None, None, share, None])
        title = (
            f"`triton-flash` in {results['dtype']}: times faster than the best dense attention (Flash or cuDNN) "
            "and than FlexAttention with the same mask, for which the target is; the bound is that of dense attention "
            f"at its own rate, one over the density (for lengths, of what is not padding). {source(record)}"
        )
        heads = ["queries×keys×width", "mask", "density", "over dense", "bound", "over FlexAttention", "target"]
        heads += ["of the bound", "TFLOP/s"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("cuda-moe", "moe")
def moe(found: Sequence[Record]) -> str:
    """Return experts on a GPU: a row for each layer."""
    parts = []
    for record in found:
        rows = []
        for row in record["results"]["moe"]:
            sizes = f"{row['experts']} experts, {row['inputs']}×{row['outputs']}"
            speed = row["tflops"]
            products = [f"{speed[f'{name} product']:.0f}" for name in ("dense", "grouped_mm", "triton-ragged")]
            layers = [f"{speed[f'{name} layer']:.0f}" for name in ("grouped_mm", "triton-ragged")]
            rows.append([f"{row['tokens']}×{row['visits']}", sizes, *products, *layers])
        title = (
            "TFLOP/s of the product alone, on rows sorted by expert, and of the whole layer from tokens to tokens: one "
            f"dense product of that size, `torch._grouped_mm`, and `triton-ragged`. {source(record)}"
        )
        heads = [
            "tokens×visits",
            "layer",
            "dense",
            "grouped_mm",
            "triton-ragged",
            "grouped_mm layer",
            "triton-ragged layer",
        ]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("cuda-host", "host_cost")
def host(found: Sequence[Record]) -> str:
    """Return what a call costs the host."""
    parts = []
    for record in found:
        costs = record["results"]["host_us"]
        plain = costs["functional.linear"]
        rows = [[name, f"{us:.1f}", f"{us - plain:+.1f}"] for name, us in costs.items()]
        title = f"Microseconds of the host for one call of a small layer. {source(record)}"
        parts.append(f"{title}\n\n{markdown(['call', 'us', 'above functional.linear'], rows)}")
    return "\n\n".join(parts)


@renderer("cuda-products", "batch_matmul")
def products(found: Sequence[Record]) -> str:
    """Return batched products with one sparse matrix, sparse softmax, and attention made of them."""
    parts = []
    for record in found:
        cases, rows = record["results"]["cases"], []
        products_only = [row for row in cases if row["what"] in ("sdd", "dsd", "dds") and not row["backward"]]
        work = [(2.0 * row["batches"] * row["size"] ** 2 * row["depth"], row["us"]["dense"]) for row in products_only]
        limits = rates(record["results"], work)
        for row in cases:
            marks = [name for name in ("compressed", "biased", "backward") if row[name]]
            sizes = f"{row['batches']}×{row['size']}×{row['depth']}"
            block = f"{row['block']}×{row['block']}"
            target = _PRODUCT_TARGETS.get((row["what"], row["block"], row["density"]))
            ratios = [f"{row['ratio']:.2f}", target, f"{product_bound(row, limits):.1f}"]
            rows.append([" ".join([row["what"], *marks]), sizes, block, row["density"], *ratios])
        title = (
            f"Times faster than dense in {record['results']['dtype']}. The bound is what {limits.text} leave room for. "
            f"{source(record)}"
        )
        heads = ["what", "size", "block", "density", "over dense", "target", "bound"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("training-step", "training_step")
def training_step(found: Sequence[Record]) -> str:
    """Return training steps of one layer: a row for each pattern and sparsity."""
    parts = []
    for record in found:
        results = record["results"]
        rows, parts_alone = [], sparse_rates(results, "bf16")
        for row in results["steps"]:
            times = [f"{row[name]:.2f}" for name in ("dense_ms", "ms", "graphed_dense_ms", "graphed_ms")]
            bound = row["bound"]
            if parts_alone is not None and row["pattern"].startswith("2:4"):
                bound = step_bound(row, tuple(results["shape"]), parts_alone, results["ceilings"]["bytes"])
            ratios = [f"{row['ratio']:.2f}", f"{row['graphed_ratio']:.2f}", row["target"], f"{bound:.2f}"]
            rows.append([row["pattern"], f"{100 * row['sparsity']:g} %", row["runs"], *times, *ratios])
        noted = ""
        if parts_alone is not None:
            noted = (
                "The bound of 2:4 is that of sparse products at the rate of a kernel that only multiplies what is in "
                f"shared memory ({parts_alone.products / 1e6:.0f} TFLOP/s, those of zeros counted) and at most twice "
                "as fast as dense, beside the dense products that are left and packing. "
            )
        title = (
            f"Forward and both gradients of one layer, {'×'.join(map(str, results['shape']))} in {results['dtype']}, "
            f"milliseconds, and times faster than dense, eagerly and replayed from CUDA graphs. {noted}{source(record)}"
        )
        heads = ["pattern", "sparsity", "runs", "dense", "sparse", "dense, graph", "sparse, graph"]
        heads += ["over dense", "over dense, graph", "target", "bound"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


def _fp8_bound(row: Record, limits: SparseRates | None) -> float:
    if "floors" in row:
        return floor_bound(row["floors"], row["dense_us"])
    if limits is None or (row["pattern"], row["format"]) != ("2:4", "fp8_e4m3"):
        return float(row["bound"])
    return two_four_bound(tuple(row["shape"]), row["tokens"], row["dense_us"], limits, 1)


@renderer("cuda-fp8", "fp8")
def fp8(found: Sequence[Record]) -> str:
    """Return sparse layers in few bits on a GPU: a row for each pattern, shape and number of tokens."""
    parts = []
    for record in found:
        results = record["results"]
        alone, parts_alone = all("product" in row for row in results["linear"]), sparse_rates(results, "fp8")
        rows = [
            [
                row["pattern"],
                row["format"].removesuffix("_e4m3"),
                f"{row['shape'][0]}×{row['shape'][1]}",
                row["tokens"],
                f"{row['us']:.1f}",
                row["best"],
                f"{row['dense_us']:.1f}",
                f"{row['ratio']:.2f}",
                *([f"{row['product']:.2f}"] if alone else []),
                f"{row['aim']:.1f}",
                f"{_fp8_bound(row, parts_alone):.2f}",
                f"{row['over_bf16']:.2f}",
            ]
            for row in results["linear"]
        ]
        limits = results["ceilings"]
        noted = "" if parts_alone is None else f"That of 2:4 is the slower of two kernels: {parts_alone.text}. "
        title = (
            "Times faster than the dense layer in the same format (fp8: `torch._scaled_mm` with fast sums on an x that "
            "is in fp8 already; int4: PyTorch's own), in CUDA graphs with weights out of the cache. "
            + ("The product alone is that of kernels which round x, from an x in fp8. " if alone else "")
            + "The aim stands "
            f"beside the bound: what {limits['bytes'] / 1e6:.1f} TB/s and {limits['operations'] / 1e6:.0f} TFLOP/s in "
            "fp8, both measured, leave room for; of unstructured weights, what the longest part alone takes (a launch, "
            f"reading the fewest bytes, looking inputs up). {noted}{source(record)}"
        )
        names = [
            "weight",
            "format",
            "shape",
            "tokens",
            "µs",
            "implement",
            "dense µs",
            "× dense",
            *(["product alone"] if alone else []),
            "aim",
            "bound",
            "× bf16",
        ]
        parts.append(f"{title}\n\n{markdown(names, rows)}")
    return "\n\n".join(parts)
