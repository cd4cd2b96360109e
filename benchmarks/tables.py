"""Tables in the documentation, made from the results in ``benchmarks/results``: ``python benchmarks/tables.py``.

A page marks where a table goes with ``<!-- table: NAME -->`` and ``<!-- end table -->``, each on a line of its own;
what stands between them is rewritten. With ``--check`` nothing is written, and a page that no longer agrees with the
results is an error. The one idea to know: a renderer turns all results of one question, one a device, into Markdown,
and a new table is one function with ``@renderer("NAME", "question")``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
REGION = re.compile(
    r"^(?P<begin><!-- table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)^(?P<end><!-- end table -->)$",
    re.MULTILINE | re.DOTALL,
)

Record = dict[str, Any]
Render = Callable[[Sequence[Record]], str]
RENDERERS: dict[str, tuple[str, Render]] = {}


def renderer(name: str, question: str) -> Callable[[Render], Render]:
    """Decorate a function from the results of `question` to Markdown: it makes the table `name`."""

    def register(function: Render) -> Render:
        RENDERERS[name] = (question, function)
        return function

    return register


def records(question: str, folder: Path = RESULTS) -> list[Record]:
    """Return the saved results of one question, in the order of the devices' names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{question}.*.json"))]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; None is an empty cell.

    >>> print(markdown(["layer", "density"], [["fc", 0.25], ["head", None]]))
    | layer | density |
    |---|---|
    | fc | 0.25 |
    | head |  |
    """
    lines = [list(columns), ["---"] * len(columns), *rows]
    texts = [["" if cell is None else str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(
        "|" + "|".join(line) + "|" if place == 1 else "| " + " | ".join(line) + " |" for place, line in enumerate(texts)
    )


def made(name: str, folder: Path = RESULTS) -> str:
    """Return what belongs into the region `name`."""
    if name not in RENDERERS:
        raise SystemExit(f"no renderer makes the table {name!r}; there are: {', '.join(sorted(RENDERERS))}")
    question, render = RENDERERS[name]
    found = records(question, folder)
    return render(found) if found else "Not measured yet."


def rewritten(text: str, folder: Path = RESULTS) -> str:
    """Return the text of a page with all its tables made anew."""

    def region(found: re.Match[str]) -> str:
        return f"{found['begin']}\n{made(found['name'], folder)}\n\n{found['end']}"

    return REGION.sub(region, text)


def pages() -> list[Path]:
    """Return the pages that may have tables: the README and the documentation."""
    built = ROOT / "docs" / "_build"
    return [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if built not in page.parents]


def source(record: Record) -> str:
    """Return one sentence on where and with what a result was measured."""
    environment = record["environment"]
    where = record["device"]
    if "cpu" in where.lower().split():
        where = f"{environment['cpu']['model']}, {environment['torch_threads']} threads"
    return f"{where}, PyTorch {environment['torch']}, {record['date'][:10]}."


# ---------------------------------------------------------------------- the tables

_HEADINGS = {"digits": "digits (8 × 8, 1,797 images)", "mnist": "MNIST", "fashion": "Fashion-MNIST"}
_NETWORKS = {"mlp": "MLP", "cnn": "CNN"}


def _accuracies(found: Sequence[Record]) -> str:
    """Return methods by sparsity: accuracy and its loss beside dense, two columns a network."""
    parts = []
    for record in found:
        results = record["results"]
        networks = list(dict.fromkeys(row["model"] for row in results["rows"]))
        dense = {row["model"]: row for row in results["rows"] if row["method"] == "dense"}
        keys = dict.fromkeys((row["method"], row["asked"]) for row in results["rows"])
        rows = []
        for method, asked in keys:
            cells: list[str] = []
            for network in networks:
                row = next(
                    (r for r in results["rows"] if (r["model"], r["method"], r["asked"]) == (network, method, asked)),
                    None,
                )
                cells += ["", ""] if row is None else [_sparsity(row), _accuracy(row, dense[network])]
            rows.append([method, "" if asked is None else f"{100 * asked:g} %", *cells])
        heads = [head for n in networks for head in (f"{_NETWORKS[n]}: zeros", f"{_NETWORKS[n]}: accuracy")]
        title = f"{_HEADINGS[results['data']]}, mean of {results['seeds']} seeds ± their standard deviation, in percent"
        parts.append(f"{title}. {source(record)}\n\n{markdown(['method', 'asked', *heads], rows)}")
    return "\n\n".join(parts)


def _sparsity(row: Record) -> str:
    mark = {True: "", False: " (not as asked)", None: ""}[row["exact"]]
    return f"{100 * row['sparsity']:.1f} %{mark}"


def _accuracy(row: Record, dense: Record) -> str:
    loss = row["accuracy"] - dense["accuracy"]
    beside = "" if row is dense else f" ({loss:+.2f})"
    return f"{row['accuracy']:.2f} ± {row['spread']:.2f}{beside}"


renderer("training-accuracy-mnist", "training_accuracy_mnist")(_accuracies)
renderer("training-accuracy-digits", "training_accuracy_digits")(_accuracies)


def _created(found: Sequence[Record]) -> str:
    """Return the accuracies of recipes, a row a method, a column a network and sparsity."""
    parts = []
    for record in found:
        results = record["results"]
        cells = {(row["method"], row["model"], row["asked"]): row for row in results["rows"]}
        methods, networks, asked = (dict.fromkeys(key[place] for key in cells) for place in range(3))
        columns = [(network, share) for network in networks for share in asked]
        heads = [f"{_NETWORKS[network]}, {100 * (share or 0):g} %" for network, share in columns]
        rows = [[method, *(_created_cell(cells.get((method, *column))) for column in columns)] for method in methods]
        title = (
            f"{_HEADINGS[results['data']]}, {results['train_images']:,} images to train with and "
            f"{results['test_images']:,} to test: accuracy in percent by network and sparsity, {_seeds(results)}. "
            f"{results['dense_epochs']} epochs dense, then {results['epochs']} of each row."
        )
        parts.append(f"{title} {source(record)}\n\n{markdown(['', *heads], rows)}")
    return "\n\n".join(parts)


def _seeds(results: Record) -> str:
    many = results["seeds"] > 1
    return f"mean of {results['seeds']} seeds ± their standard deviation" if many else "one seed"


def _created_cell(row: Record | None) -> str:
    if row is None:
        return ""
    mark = f" ({100 * row['sparsity']:.1f} % zeros)" if row["exact"] is False else ""
    spread = f" ± {row['spread']:.2f}" if len(row["accuracies"]) > 1 else ""
    return f"{row['accuracy']:.2f}{spread}{mark}"


renderer("create-accuracy-digits", "create_accuracy_digits")(_created)
renderer("create-accuracy-mnist", "create_accuracy_mnist")(_created)
renderer("create-accuracy-fashion", "create_accuracy_fashion")(_created)


@renderer("training-overhead", "training_overhead")
def overheads(found: Sequence[Record]) -> str:
    """Return what holding masks costs: milliseconds of a step, and the share that is added."""
    rows = []
    for record in found:
        results = record["results"]
        for precision in ("fp32", "bf16 autocast"):
            steps = results[precision]
            for kind, step in steps.items():
                added = None if kind == "dense" else f"{100 * step['overhead']:+.1f} %"
                where = f"{record['device']}, batch {results['batch']}"
                rows.append([where, precision, kind, f"{step['median_ms']:.2f}", f"{step['spread_ms']:.2f}", added])
    text = f"{found[0]['results']['network']}, CIFAR-sized images, {100 * found[0]['results']['sparsity']:g} % sparse. "
    text += " ".join(source(record) for record in found)
    columns = ["device", "precision", "step", "median ms", "spread ms", "added"]
    return f"{text}\n\n{markdown(columns, rows)}"


@renderer("cpu-layers", "cpu_layers")
def cpu_layers(found: Sequence[Record]) -> str:
    """Return linear layers on the CPU: a row for each number of tokens and pattern, a column for each sparsity."""
    parts = []
    for record in found:
        cells = {(row["tokens"], row["height"], row["sparsity"]): row for row in record["results"]["summary"]}
        sparsities = sorted({key[2] for key in cells})
        rows = []
        for tokens, height in dict.fromkeys(key[:2] for key in cells):
            line = [cells.get((tokens, height, sparsity)) for sparsity in sparsities]
            rows.append([tokens, "unstructured" if height == 1 else f"block {height}×1", *map(_cpu_cell, line)])
        title = (
            "Times faster than dense, geometric means over the shapes: as a drop-in, and in brackets with the layout "
            f"kept between sparse layers. {source(record)}"
        )
        heads = ["tokens", "pattern", *(f"{100 * sparsity:g} %" for sparsity in sparsities)]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


def _cpu_cell(row: Record | None) -> str | None:
    if row is None:
        return None
    if "cold" in row:
        return f"{row['cold']:.1f}"
    return f"{row['drop-in']:.1f} ({row['panel']:.1f})"


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
        for block, sparsity in dict.fromkeys(sorted(key[:2] for key in cells)):
            line = [cells.get((block, sparsity, count)) for count in tokens]
            means = [None if ratios is None else f"{statistics.geometric_mean(ratios):.2f}" for ratios in line]
            rows.append([f"{block}×{block}", f"{100 * sparsity:g} %", *means])
        title = (
            f"Times faster than the best dense in {results['dtype']}, by the number of tokens: geometric means "
            f"over the shapes measured. Below 1.03, dense is chosen and runs. {source(record)}"
        )
        parts.append(f"{title}\n\n{markdown(['block', 'sparsity', *map(str, tokens)], rows)}")
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
        for shape in dict.fromkeys(key[0] for key in cells):
            line = [cells.get((shape, count)) for count in tokens]
            rows.append(
                [f"{shape[0]}×{shape[1]}", *(None if c is None else f"{c['ratio']:.2f} {c['best']}" for c in line)]
            )
        title = (
            f"Times faster than the best dense in {results['dtype']}, by the number of tokens, and the fastest "
            f"implement for 2:4. Below 1.03, dense is chosen and runs. {source(record)}"
        )
        parts.append(f"{title}\n\n{markdown(['weight', *map(str, tokens)], rows)}")
    return "\n\n".join(parts)


def main() -> int:
    """Rewrite the pages, or say which do not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    options = parser.parse_args()
    stale = []
    for page in pages():
        before = page.read_text()
        after = rewritten(before)
        if before != after:
            stale.append(page)
            if not options.check:
                page.write_text(after)
    for page in stale:
        print(f"{'out of date' if options.check else 'rewritten'}: {page.relative_to(ROOT)}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
