"""Propagation, compaction and structured pruning on models that nobody tuned them for.

Run with ``python benchmarks/propagate/all_models.py --workers 2`` (``make zoo``); ``--only NAME ...`` takes some
models, ``--sources`` some families, ``--quick`` seven; ``--continue`` leaves out models that have a good row. Of each
model a fifth of the rows and columns of its weights is set to zero at random; it is captured by its default call,
propagated, made compact, compared with the masked model on the example and at another batch size, pickled, pruned by
half in groups, and at the end loaded in a new process and compared again.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sparta.propagation import propagate, prune_structured
from walk import Row, Walk, build, called, error, error_at, larger

SHORT = ("lstm tagger", "unet", "transformer", "llama", "swin-v2", "channel shuffle", "t5")


def measure(row: Row, folder: Path) -> None:
    """Propagate through one model, cut it, compare and keep it."""
    row["stage"] = "build"
    model, call = build(row["source"], row["model"])
    example = call[1] or call[0]
    row["stage"] = "captured and propagated"
    result = propagate(model, example)
    counts = result.to_dict()
    row |= {"parameters": counts["parameters"], "kept": counts["parameters_compact"] / counts["parameters"]}
    row["notes"] = sorted({note.split(" (")[0] for note in counts["notes"]})
    row["stage"] = "compact"
    small = result.compact()
    row["error"] = error(called(model, call), called(small, call))
    row["stage"] = "another batch size"
    row["any_batch"] = error_at(model, small, larger(call))
    row["stage"] = "kept in a file"
    (folder / "small.pickle").write_bytes(pickle.dumps((small, call, called(small, call))))
    row["stage"] = "pruned by half"
    _, report = prune_structured(model, example, 0.5)
    row["pruned"] = report.parameters_compact / report.parameters


def reload(_row: Row, folder: Path) -> float:
    """Return the error of a pickled model, loaded in this process."""
    small, call, expected = pickle.loads((folder / "small.pickle").read_bytes())  # noqa: S301 - written by this script
    return error(expected, called(small, call))


if __name__ == "__main__":
    Walk("propagate_zoo", measure, reload, SHORT).main(__doc__)
