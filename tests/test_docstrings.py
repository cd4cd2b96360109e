"""What docstrings point to exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import sparta

SOURCE = Path(sparta.__file__).parent
REFERENCE = re.compile(r":(?:mod|func|class|meth|data|attr|exc):`~?(sparta\.[\w.]+)`")


def exists(name):
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            declared = {*getattr(found, "__dataclass_fields__", {}), *getattr(found, "__annotations__", {})}
            if not hasattr(found, part):
                return part in declared
            found = getattr(found, part)
        return True
    return False


def references(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from REFERENCE.findall(ast.get_docstring(node) or "")


@pytest.mark.parametrize("room", sorted(p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()))
def test_references_in_docstrings_lead_somewhere(room):
    found = {name: path for path in sorted((SOURCE / room).rglob("*.py")) for name in references(path)}
    assert [f"{path}: {name}" for name, path in found.items() if not exists(name)] == []


def test_the_check_would_notice_a_name_that_is_not_there():
    assert exists("sparta.tesa.attribute.TeSA.density")
    assert not exists("sparta.tesa.attribute.TeSA.denstiy")
    assert not exists("sparta.nothing.here")
