"""Stored results hold what is read: by a table of the documentation, or by the script that wrote them.

Renderers are run on results that note every key they are asked for. A script reads what it looks up by name, for the
table that it prints or to take up an earlier run. What neither reads is said here to be about the run itself.
"""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))
MOST_BYTES = 200_000

# How a run went, and on what; a reader of the file wants them, a table does not.
ABOUT_THE_RUN = {
    "batch", "date", "deepsparse_activation", "dtype", "environment", "error", "failed", "form", "goal",
    "inductor_hosts", "limit_s", "load", "note", "notes", "parameters", "roof", "scale", "seams", "seconds", "skipped",
    "steps", "steps_per_epoch", "threads", "unit", "weights",
}  # fmt: skip
# What was measured, where the table shows a ratio or a mean of it.
MEASURED = {
    "accuracies", "bytes", "compact_s", "compile_seconds", "cosine", "first_guess", "inductor_seconds",
    "kept_over_apart", "limit_us", "median_ms", "overhead", "reason", "repeated_ms", "runs", "sparse_layers", "speedup",
    "tb_per_s", "us", "values_ms", "whole_ms",
}  # fmt: skip
# Which row it is: scripts that are run in pieces find by these what they have measured already.
WHICH_ROW = {"inputs", "kernel", "kind", "outputs", "shape", "size"}
# Mappings whose keys are names of what was measured, not of fields; and lists that their script prints whole.
BY_NAME = {
    "eager_us", "host_us", "median_ms", "parameters", "params", "repeated_ms", "roof", "shapes", "speedup", "tiles",
    "timings", "us", "whole_ms",
}  # fmt: skip
PRINTED = {"models", "timings"}


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("benchmark_tables", BENCHMARKS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Noted(dict):
    """A mapping that notes which keys it was asked for."""

    def __init__(self, found, seen):
        super().__init__({name: noted(value, seen) for name, value in found.items()})
        self.seen = seen

    def __getitem__(self, name):
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.seen.add(name)
        return super().get(name, default)

    def items(self):
        self.seen.update(self)
        return super().items()

    def values(self):
        self.seen.update(self)
        return super().values()


def noted(value, seen):
    if isinstance(value, dict):
        return Noted(value, seen)
    return [noted(one, seen) for one in value] if isinstance(value, list) else value


def fields(value):
    """Yield the names of all fields, at every depth."""
    if isinstance(value, list):
        for one in value:
            yield from fields(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name
            if name not in BY_NAME:
                yield from fields(one)


def looked_up(script):
    """Return the names that a script looks up: `row["name"]`, `row.get("name")`, `"name" in row`."""
    found = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            found.add(getattr(node.slice, "value", None))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "get" and node.args:
            found.add(getattr(node.args[0], "value", None))
    return found


def readers(question, tables):
    """Return the names that tables and scripts read of the results of a question."""
    seen = set()
    for asked, render in tables.RENDERERS.values():
        if asked == question:
            render([noted(record, seen) for record in tables.records(question)])
    for script in BENCHMARKS.rglob("*.py"):
        if f'"{question}"' in script.read_text() or script.name == "shipped_table.py":
            seen |= looked_up(script)
    return seen


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_field_of_stored_results_is_read_or_about_the_run(path, tables):
    stored = set(fields(json.loads(path.read_text())["results"]))
    unread = stored - readers(path.name.split(".")[0], tables) - ABOUT_THE_RUN - MEASURED - WHICH_ROW - PRINTED
    assert not unread, f"no table and no script reads {sorted(unread)}: leave them out where {path.name} is written"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_results_are_small(path):
    assert path.stat().st_size < MOST_BYTES


def test_a_field_that_nothing_reads_would_be_noticed(tables):
    seen = readers("compiler_models", tables)
    assert {"speedup", "amdahl_bound", "inductor_helps"} <= seen
    assert not {"report", "diary"} & seen
