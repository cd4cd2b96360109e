"""Tables of the training methods: accuracy beside dense, and what holding masks costs."""

from __future__ import annotations

from collections.abc import Sequence

from renderers.registry import Record, markdown, renderer, source

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
        many = results.get("train_images")
        images = f", {many:,} images to train with" if many and results["data"] != "digits" else ""
        seeds = f"mean of {results['seeds']} seeds ± their standard deviation, in percent"
        title = f"{_HEADINGS[results['data']]}{images}, {seeds}"
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
renderer("training-accuracy-fashion", "training_accuracy_fashion")(_accuracies)
renderer("training-accuracy-digits", "training_accuracy_digits")(_accuracies)


def _created(found: Sequence[Record]) -> str:
    """Return the accuracies of recipes, a row a method, a column a network and sparsity."""
    parts = []
    for record in found:
        results = record["results"]
        cells = {
            ((row["method"], row.get("allocation", "")), row["model"], row["asked"]): row for row in results["rows"]
        }
        methods, networks, asked = (dict.fromkeys(key[place] for key in cells) for place in range(3))
        columns = [(network, share) for network in networks for share in asked]
        heads = [f"{_NETWORKS[network]}, {100 * (share or 0):g} %" for network, share in columns]
        rows = [[*method, *(_created_cell(cells.get((method, *column))) for column in columns)] for method in methods]
        title = (
            f"{_HEADINGS[results['data']]}, {results['train_images']:,} images to train with and "
            f"{results['test_images']:,} to test: accuracy in percent by network and sparsity, {_seeds(results)}. "
            f"{results['dense_epochs']} epochs dense, then {results['epochs']} of each row."
        )
        parts.append(f"{title} {source(record)}\n\n{markdown(['', 'allocation', *heads], rows)}")
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


@renderer("training-scale", "training_scale")
def scales(found: Sequence[Record]) -> str:
    """Return what pruning adds to a sharded run: milliseconds of a step, and memory of a process."""
    return "\n\n".join(_scale(record) for record in found)


@renderer("training-scale-large", "training_scale_large")
def large_scales(found: Sequence[Record]) -> str:
    """Return the same for a model that no process could hold beside its gradients."""
    return "\n\n".join(_scale(record) for record in found)


def _scale(record: Record) -> str:
    results = record["results"]
    rows = [
        [
            row["kind"],
            str(row["processes"]),
            f"{row['dense_ms']:.0f}",
            f"{row['held_ms']:.0f} ({100 * (row['held_ms'] / row['dense_ms'] - 1):+.0f} %)",
            f"{row['changing_ms']:.0f}",
            f"{row['part_mib']:.0f}",
            f"{row['dense_mib']:.0f}",
            f"+{row['added_mib']:.0f} ({row['allowed_mib']:.0f})",
        ]
        for row in results["rows"]
    ]
    millions = results["rows"][0]["parameters"] / 1e6
    text = (
        f"{millions:.0f} million weights, FSDP2 over gloo, {results['tokens']} tokens for "
        f"each process in a step, medians of {results['steps']} steps; memory is the most that a process had. "
    )
    columns = ["kind", "processes", "dense, ms", "masks held, ms", "masks changing, ms", "weights here, MiB",
               "dense, MiB", "pruning adds, MiB (allowed)"]  # fmt: skip
    return f"{text}{source(record)}\n\n{markdown(columns, rows)}"


@renderer("training-sts", "training_sts")
def sentences(found: Sequence[Record]) -> str:
    """Return an encoder's rank correlation by pattern, beside that of the dense model trained alike."""
    return "\n\n".join(_sentences(record) for record in found)


@renderer("training-sts-allocations", "training_sts_allocations")
def sentences_by_allocation(found: Sequence[Record]) -> str:
    """Return the same for one sparsity that is spread over the layers in several ways."""
    return "\n\n".join(_sentences(record) for record in found)


def _sentences(record: Record) -> str:
    results = record["results"]
    dense = next(row["test"] for row in results["rows"] if row["row"] == "dense, trained")
    rows = [
        [
            row["row"],
            f"{100 * row['sparsity']:.1f} %",
            f"{100 * row['lowest_density']:.1f} %",
            f"{row['dev']:.2f}",
            f"{row['test']:.2f}",
            "" if row["row"].startswith("dense") else f"{row['test'] - dense:+.2f}",
            None if row["compiled"] is None else f"{row['compiled']:.2f}",
        ]
        for row in results["rows"]
    ]
    batch = f"{results['pairs']} pairs" + (
        f" and {results.get('others', 2 * results['pairs'])} other sentences" if results["unscored"] else ""
    )
    text = (
        f"{results['steps']} steps of {batch}, learning rate {results['lr']:g}, the teacher's share of the loss "
        f"{results['hardness']:g}. Spearman's rank correlation, times 100. {source(record)}"
    )
    heads = ["", "zeros", "sparsest layer keeps", "dev", "test", "beside dense, trained", "test, compiled"]
    return f"{text}\n\n{markdown(heads, rows)}"


@renderer("training-recover", "training_recover")
def recoveries(found: Sequence[Record]) -> str:
    """Return the perplexity of a pruned language model as pruned and as learnt back, with its speed."""
    return "\n\n".join(_recoveries(record) for record in found)


def _recoveries(record: Record) -> str:
    results = record["results"]
    rows: list[list[object]] = [["dense", "", f"{results['perplexity_dense']:.2f}", "0.0 %", None]]
    for row in results["rows"]:
        speed = None
        if row["tokens_per_s"] is not None:
            speed = f"{row['tokens_per_s']:.1f} ({row['tokens_per_s'] / row['dense_tokens_per_s']:.2f}x)"
        rows.append([row["pattern"], row["way"], f"{row['perplexity']:.2f}", f"{100 * row['zeros']:.1f} %", speed])
    text = (
        f"Pruned by {results['method']}; {results['steps']} steps of {results['batch']} sequences of "
        f"{results['context']} tokens, adapters of rank {results['rank']}. {source(record)}"
    )
    if "speed_on" in results:
        text += f" Tokens per second compiled, beside the dense model: {results['speed_on']}."
    return f"{text}\n\n{markdown(['pattern', '', 'perplexity', 'zeros', 'tokens/s'], rows)}"
