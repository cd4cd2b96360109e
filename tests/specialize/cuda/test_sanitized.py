"""The groups of cases that run under the sanitizer name tests that are there."""

import importlib.util
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "gpu"


def groups():
    found = importlib.util.spec_from_file_location("sanitize", GPU / "sanitize.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.GROUPS


@pytest.mark.parametrize("group", groups())
def test_a_group_is_a_test(group):
    file, _, name = group.partition("::")
    assert f"\ndef {name}(" in (GPU / file).read_text(encoding="utf-8")
