"""The table of choices that were made beside busy processes."""

from __future__ import annotations

from collections.abc import Sequence

from renderers.registry import Record, markdown, renderer, source


@renderer("cpu-noise", "cpu_noise")
def cpu_noise(found: Sequence[Record]) -> str:
    """Return what was chosen quietly and beside the noise, a row for each layer."""
    parts = []
    for record in found:
        results = record["results"]
        layers = results["layers"]
        same = sum(each["quiet"] == each["noisy"] for each in layers)
        others = [each["time_ratio"] for each in layers if each["quiet"] != each["noisy"]]
        worst = f"; of the others the slowest takes {max(others):.2f} times as long" if others else ""
        title = (
            f"Linear layers (tokens×inputs×outputs) tuned on a quiet machine, and beside {results['processes']} busy "
            f"processes on {results['cores']} cores: {same} of {len(layers)} run the same implement{worst}. The time "
            f"is that of the second choice over the first, when it is quiet again. {source(record)}"
        )
        heads = ["layer", "pattern", "chosen quietly", "chosen beside the noise", "time", "what was claimed then"]
        rows = [
            [each["layer"], each["pattern"], each["quiet"], each["noisy"], f"{each['time_ratio']:.2f}", each["claim"]]
            for each in layers
        ]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("compiler-claims", "compiler_claims")
def compiler_claims(found: Sequence[Record]) -> str:
    """Return what was claimed beside the noise and what a quiet machine says of the same models."""
    parts = []
    for record in found:
        results = record["results"]
        cases = results["cases"]
        claimed = [case for case in cases if case["claimed"] is not None]
        held = sum(case["holds"] for case in claimed)
        title = (
            f"Models compiled beside {results['processes']} busy processes on {results['cores']} cores, and timed "
            f"again when it was quiet: {len(claimed)} of {len(cases)} reports claim a ratio, and {held} of those are "
            f"within 20 % of what was measured then. {source(record)}"
        )
        rows = [
            [
                case["model"],
                f"{100 * case['sparsity']:g} %",
                "none" if case["claimed"] is None else f"{case['claimed']:.2f}x",
                f"{case['measured']:.2f}x",
            ]
            for case in cases
        ]
        parts.append(f"{title}\n\n{markdown(['model', 'zeros, 4×1', 'claimed', 'measured quietly'], rows)}")
    return "\n\n".join(parts)
