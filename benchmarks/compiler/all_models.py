"""Models that nobody tuned for: are they compiled, whole or in part, exact, at other sizes, and from files.

Run with ``python benchmarks/compiler/all_models.py --workers 2``; ``--only NAME ...`` takes some models, ``--sources``
some families, ``--quick`` ten; ``--continue`` leaves out models that have a good row. Of each model a fifth of rows and
columns of its weights is set to zero at random. It is compiled by its default call, with every layer that has zeros on
a sparse kernel and nothing timed, so that kernels meet shapes that nobody chose for them; compared with the model on
the example and at another batch size; asked for the same tokens where it generates; saved, and loaded in a new process,
where it is compared again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import sparta
from sparta.compiler import PartialModel
from sparta.errors import ValueRangeError
from walk import Call, Row, Walk, build, called, error, error_at, larger

SHORT = ("lstm tagger", "unet", "transformer", "bert", "deberta-v2", "swin-v2", "vit", "channel shuffle", "mamba", "t5")
_NEW_TOKENS = 6


def how(fast: Any) -> str:
    """Return how much of a model was compiled."""
    if not isinstance(fast, PartialModel):
        return "whole" if isinstance(fast, sparta.compiler.CompiledModel) else "with generate"
    return f"in {len(fast.parts)} parts" if fast.parts else "as given"


@contextmanager
def forced_kernels() -> Iterator[None]:
    """Let every layer that has zeros run a sparse kernel, in language models too."""
    import pytest

    from compiler.conftest import choosing, chosen

    with pytest.MonkeyPatch.context() as patch:
        choosing(patch, chosen)
        patch.setattr("sparta.generation.layers.choose", lambda spec, _store=None: chosen(spec))
        yield


def measure(row: Row, folder: Path) -> None:
    """Compile one model, compare it, save it."""
    row["stage"] = "build"
    model, call = build(row["source"], row["model"])
    row["stage"] = "compile"
    with forced_kernels():
        fast = sparta.compile(model, call[1] or call[0], tune="off")
    print(*fast.report.notes, sep="\n")
    totals = fast.report.totals
    row |= {"compiled": how(fast), "parameters": totals.parameters, "kept": totals.live_parameters / totals.parameters}
    row["kernels"] = sum(layer.sparse for layer in fast.report.plan.layers)
    row["stage"] = "compare"
    expected = called(model, call)
    row["error"] = error(expected, called(fast, call))
    row["stage"] = "another batch size"
    row["any_batch"] = error_at(model, fast, larger(call))
    row["stage"] = "generate"
    tokens = generated(model, call) if hasattr(fast, "generate") else None
    if tokens is not None:
        found = generated(fast, call)
        row["tokens"] = "equal" if found is not None and torch.equal(found, tokens) else "others"
    row["stage"] = "save"
    fast.save(folder / "model.sparta")
    torch.save({"call": call, "expected": expected, "tokens": tokens}, folder / "expected.pt")


def generated(model: nn.Module, call: Call) -> Tensor | None:
    """Return the tokens that a model adds greedily; None where it generates nothing, or not from these inputs."""
    if not hasattr(model, "generate"):
        return None
    given = {name: value for name, value in call[1].items() if not name.startswith("decoder_")}
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            tokens: Tensor = model.generate(**given, max_new_tokens=_NEW_TOKENS, do_sample=False)
    except Exception as failed:  # noqa: BLE001 - a model may need more than its default inputs
        print(f"generate: {failed}")
        return None
    return tokens


def reload(row: Row, folder: Path) -> float:
    """Return the error of a saved model, loaded in this process; a model of parts is made here again."""
    stored = torch.load(folder / "expected.pt", weights_only=True)
    try:
        fast = sparta.load(folder / "model.sparta")
    except ValueRangeError:  # holds parts
        fast = sparta.load(folder / "model.sparta", model=build(row["source"], row["model"])[0])
    if stored["tokens"] is not None and row["tokens"] == "equal":
        found = generated(fast, stored["call"])
        row["tokens"] = "equal" if found is not None and torch.equal(found, stored["tokens"]) else "others from a file"
    return error(stored["expected"], called(fast, stored["call"]))


if __name__ == "__main__":
    Walk("compiler_zoo", measure, reload, SHORT).main(__doc__)
