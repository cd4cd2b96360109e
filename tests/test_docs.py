"""Every Python sample of the documentation and of the README runs; `make docs` builds it without a warning."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if "_build" not in p.parts], ids=lambda p: str(p.relative_to(ROOT)))
@pytest.mark.usefixtures("hurried")
def test_the_samples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    samples = SAMPLE.findall(page.read_text())
    exec(compile("\n".join(samples), str(page), "exec"), {})  # noqa: S102 - our own documentation


def test_samples_are_found():
    assert len(SAMPLE.findall((ROOT / "README.md").read_text())) == 4


LONG = {"run_from_cpp.py", "whole_job.py"}  # SPARTA_LONG=1 runs them too


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
@pytest.mark.usefixtures("hurried")
def test_the_examples_run(example, tmp_path, monkeypatch, capsys):
    if example.name in LONG and not os.environ.get("SPARTA_LONG"):
        pytest.skip("takes long: SPARTA_LONG=1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    monkeypatch.setattr(sys, "path", [str(example.parent), *sys.path])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        torch.set_num_threads(threads)  # some examples set it
    assert capsys.readouterr().out


def test_the_support_matrix_names_what_stands_in_the_registries():
    from sparta.oneshot.methods.base import _METHODS
    from sparta.specialize.builtin import IMPLEMENTS

    pytest.importorskip("sphinx")
    tables = runpy.run_path(str(ROOT / "docs" / "support.py"))["TABLES"]
    page = (ROOT / "docs" / "reference" / "support.md").read_text()
    for name, make in tables.items():
        assert f":::{{support}} {name}" in page
        _, _, *rows = make().splitlines()
        assert rows
        assert all(len([cell for cell in row.split(" | ") if cell.strip("| ")]) >= 2 for row in rows), name
    assert all(f"`{cls.name}`" in tables["kernels"]() for cls in IMPLEMENTS)
    assert all(f"`{name}`" in tables["methods"]() for name in _METHODS)
