"""The support matrix of the documentation: what stands in the registries, as Markdown, made when the pages are built.

A page has ``:::{support} NAME`` where a table goes; the names are those of :data:`TABLES`. Nothing here is written by
hand, so a kernel, rule, pattern or method that is added is in the documentation, and one that goes is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

__all__ = ["TABLES", "Support"]

_DEVICES = {
    "cuda": "CUDA",
    "cusparselt": "CUDA",
    "triton": "CUDA",
    "cpu": "CPU",
    "onednn": "CPU",
    "torch-int8": "CPU",
    "tvm": "CPU",
}


def _first_sentence(thing: object) -> str:
    text = " ".join((getattr(thing, "__doc__", None) or "").split())
    return text.partition(". ")[0].rstrip(".")


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def kernels() -> str:
    """Return a row per implement: its operation, its name, its device and what it is."""
    from sparta.specialize.builtin import IMPLEMENTS

    def device(cls: Any) -> str:
        name = f"{cls.name} {cls.__module__.rpartition('.')[2]}".lower()
        return next((label for part, label in _DEVICES.items() if part in name), "CPU and CUDA")

    rows, before = [], ""
    for cls in IMPLEMENTS:
        rows.append([f"`{cls.op}`" if cls.op != before else "", f"`{cls.name}`", device(cls), _first_sentence(cls)])
        before = cls.op
    return _markdown(["operation", "implement", "device", "what it is"], rows)


def rules() -> str:
    """Return a row per family of rules: how many ATen overloads it follows, and which ops."""
    import sparta.propagation.rules  # noqa: F401 - fills the registry
    from sparta.propagation import registry

    families: dict[str, set[str]] = {}
    overloads: dict[str, set[str]] = {}
    for direction in registry._rules.values():
        for op, function in direction.items():
            if not str(function.__module__).startswith("sparta."):
                continue  # a rule of somebody else, in this process only
            family = function.__module__.rpartition(".")[2]
            overloads.setdefault(family, set()).add(str(op))
            families.setdefault(family, set()).add(_packet(op))
    rows = [[name, len(overloads[name]), ", ".join(f"`{op}`" for op in sorted(ops))] for name, ops in families.items()]
    return _markdown(["family", "overloads", "ops"], sorted(rows))


def _packet(op: object) -> str:
    return str(op).removeprefix("aten.").removeprefix("sparta.").partition(".")[0]


def patterns() -> str:
    """Return a row per pattern."""
    from sparta.tesa.patterns import base

    return _markdown(
        ["pattern", "class", "what it is"],
        [[f"`{name}`", f"`{cls.__name__}`", _first_sentence(cls)] for name, cls in base._REGISTRY.items()],
    )


def methods() -> str:
    """Return a row per one-shot method."""
    from sparta.oneshot.methods import base

    rows = [
        [f"`{name}`", "yes" if method.needs_data else "no", _first_sentence(method.solve)]
        for name, method in base._METHODS.items()
    ]
    return _markdown(["method", "needs data", "what it does"], rows)


def modifiers() -> str:
    """Return a row per modifier of recipes."""
    from sparta.create.modifiers import modifier_named, modifier_names

    found = [(name, modifier_named(name)) for name in modifier_names()]
    rows = [[f"`{name}`", cls.kind.replace("_", " "), _first_sentence(cls)] for name, cls in found]
    return _markdown(["modifier", "kind", "what it does"], rows)


def lowerings() -> str:
    """Return a row per operation that the compiler replaces in a graph."""
    from sparta.compiler.lower import LOWERINGS

    return _markdown(
        ["operation", "what is replaced"], [[f"`{each.op}`", _first_sentence(type(each))] for each in LOWERINGS]
    )


TABLES: dict[str, Callable[[], str]] = {
    "kernels": kernels,
    "rules": rules,
    "patterns": patterns,
    "methods": methods,
    "modifiers": modifiers,
    "lowerings": lowerings,
}


class Support(SphinxDirective):
    """Put one of the tables into a page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table as nodes."""
        container = nodes.container()
        lines = TABLES[self.arguments[0]]().splitlines()
        self.state.nested_parse(StringList(lines, source="the registries"), self.content_offset, container)
        return container.children


def setup(app: Any) -> dict[str, bool]:
    """Make the directive known to Sphinx."""
    app.add_directive("support", Support)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
