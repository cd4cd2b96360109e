"""Tables of language models that generate."""

from __future__ import annotations

from collections.abc import Sequence

from renderers.registry import Record, markdown, renderer, source


@renderer("generation-decode", "generation_decode")
def generation_decode(found: Sequence[Record]) -> str:
    """Return tokens per second of all rivals, by pattern."""
    return "\n\n".join(_decode(record) for record in found)


@renderer("generation-decode-1b", "generation_decode_1b")
def generation_decode_1b(found: Sequence[Record]) -> str:
    """Return the same for a larger shape."""
    return "\n\n".join(_decode(record) for record in found)


def _decode(record: Record) -> str:
    results = record["results"]
    rows = results["rows"]
    rivals = list(dict.fromkeys(name for row in rows for name in row["rates"]))
    lines = [
        [
            row["pattern"],
            *(f"{row['rates'][name]:.0f}" if name in row["rates"] else None for name in rivals),
            ", ".join(f"{kind}: {said}" for kind, said in row["tokens"].items()),
            " / ".join(f"{size:.0f}" for size in row["mebibytes"].values()),
        ]
        for row in rows
    ]
    said = (
        f"{results['model']}: tokens per second, {results['tokens']} greedy tokens through `generate`, batch 1, "
        f"{results['threads']} threads, medians of interleaved runs; the head is {rows[0].get('head', 'as it is')}. "
        "Tokens are compared with those of the masked dense model. "
    )
    heads = ["pattern", *rivals, "tokens", "packed MiB, fp32 / int8"]
    return f"{said}{source(record)}\n\n{markdown(heads, lines)}"
